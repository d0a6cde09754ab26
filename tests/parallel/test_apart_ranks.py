"""Ranks apart do what one rank does with the same batch, under mpirun: the last N draw, the others train."""

import numpy as np
import pytest

from cukit.runs.metrics import read_jsonl

from .launch import needs_mpi, run
from .test_ranks import CASES, SIZES, close, compared, norm_of

pytestmark = [pytest.mark.mpi, needs_mpi]

NAMES = (
    "grpo dapo",
    "grpo",
    "grpo bnpo",
    "grpo lora",
    "grpo curriculum",
    "grpo turns",
    "ppo",
    "ppo shared",
    "ppo zero",
    "grpo zero 3",
)
LONGER = ("grpo dapo", "grpo zero 3", "ppo", "ppo zero")  # four updates a generation batch, and one of the next
PLACES = {  # (ranks, those that draw): what they run
    (2, 1): (*NAMES[:-1], "stale"),
    (3, 1): ("grpo dapo", "grpo", "grpo zero 3", "ppo zero", "stale"),
    (3, 2): ("grpo curriculum", "grpo lora", "ppo", "stale"),
}
STALE = dict(method="grpo", max_staleness=1, steps_per_generation=2, max_steps=6, beta=0.1)
OWN = ("time/", "weights/", "learning_rate", "loss", "eval/runtime")  # metrics that one rank, or one that draws, lacks


def cases_of(ranks, rollout_gpus, names):
    """{name: case}; per_device_train_batch_size is divided among the ranks that train."""
    found = {}
    for name in names:
        case = STALE if name == "stale" else CASES[name] | ({"max_steps": 5} if name in LONGER else {})
        if name == "grpo zero 3":  # without an evaluation at its end, which would gather the weights
            case |= {"eval_on_start": False}
        size = case.get("per_device_train_batch_size", SIZES[case["method"]]) // (ranks - rollout_gpus)
        more = {"rollout_gpus": rollout_gpus} if rollout_gpus else {}
        found[f"{name} {rollout_gpus}"] = case | {"per_device_train_batch_size": size} | more
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return run(1, tmp_path_factory.mktemp("one"), cases_of(1, 0, NAMES))[0]


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """(folder, what was left) of two and of three ranks, these with one and with two that draw."""
    found = {}
    for ranks in (2, 3):
        folder, cases = tmp_path_factory.mktemp(f"apart-{ranks}"), {}
        for place, names in PLACES.items():
            cases |= cases_of(*place, names) if place[0] == ranks else {}
        found[ranks] = folder, run(ranks, folder, cases)[0]
    return found


@pytest.mark.parametrize(
    ("ranks", "rollout_gpus", "name"), [(*place, name) for place, names in PLACES.items() for name in names]
)
def test_ranks_apart_do_what_one_rank_does(ranks, rollout_gpus, name, one, apart):
    """As in test_ranks; stale runs, which one rank cannot make, are compared with each other."""
    truth, columns = apart[2][1]["stale 1"][0] if name == "stale" else one[f"{name} 0"][0]
    folder, found = apart[ranks]
    left = found[f"{name} {rollout_gpus}"]
    for rank, (told, arrays) in enumerate(left):
        trains = rank < ranks - rollout_gpus
        assert told["step"] == truth["step"]
        ours = {key: value for key, value in told["last"].items() if not key.startswith(OWN)}
        theirs = {key: value for key, value in truth["last"].items() if not key.startswith(OWN)}
        close(ours, theirs if trains else {key: theirs[key] for key in ours}, name)
        for mine, others in zip(told["evaluations"], truth["evaluations"], strict=True):
            close(mine, others, name)
        if not trains:
            assert {key.split("/")[0] for key in arrays} == {"weights"}
            continue
        assert told["last"]["loss"] == pytest.approx(truth["last"]["loss"], abs=1e-8)
        assert compared(arrays, name) == compared(columns, name)
        for key in compared(columns, name):
            array, (kind, step) = columns[key], key.split("/")[:2]
            scale = norm_of(columns, step) if kind == "gradient" else np.abs(array).max(initial=1e-30)
            tolerance = (1e-12 if step == "0" else 1e-9) * (10 if key.endswith("advantages") else 1)
            assert np.abs(arrays[key] - array).max(initial=0) <= tolerance * scale, key
    for _, arrays in left[1:]:  # the final weights are everywhere
        for key, array in arrays.items():
            if key.startswith("weights/"):
                np.testing.assert_array_equal(array, left[0][1][key], err_msg=key)
    rows = read_jsonl(folder / f"{name} {rollout_gpus}" / "run" / "metrics.jsonl")
    assert sum(row.get("weights/bytes", 0) for row in rows) > 0


def test_saved_apart_resumed_together_and_apart_otherwise(tmp_path):
    """In the middle of a generation batch; in float32, since checkpoints hold no float64."""
    cases = {name: CASES[name] | {"dtype": "float32", "adam_epsilon": 1e-3} for name in ("grpo dapo", "ppo zero")}
    sizes = {"grpo dapo": 24, "ppo zero": 6}

    def of(name, trains, **more):
        return cases[name] | {"per_device_train_batch_size": sizes[name] // trains} | more

    through, _ = run(1, tmp_path / "through", cases)
    run(3, tmp_path, {name: of(name, 2, rollout_gpus=1, max_steps=1) for name in cases})
    for ranks, rollout_gpus in ((1, 0), (3, 2)):
        rest = {}
        for name in cases:
            where = {"output_dir": str(tmp_path / f"{ranks} {name}")}
            where["resume"] = str(tmp_path / name / "run" / "checkpoint-1")
            rest[name] = of(name, 1, **where) | ({"rollout_gpus": rollout_gpus} if rollout_gpus else {})
        found, _ = run(ranks, tmp_path / f"resumed-{ranks}", rest)
        for name in cases:
            for told, arrays in found[name]:
                assert told["step"] == 3
                for key, array in arrays.items():
                    if key.startswith("weights/"):
                        np.testing.assert_allclose(through[name][0][1][key], array, atol=1e-5, err_msg=f"{name} {key}")
