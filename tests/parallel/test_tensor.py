"""Processes that share a model do what one does: gradients, weights, metrics, files; also with data parallelism."""

import json
import subprocess

import numpy as np
import pytest

from cukit.runs.metrics import read_jsonl

from .launch import command, environment, needs_mpi, run
from .run_trainer import TINY
from .test_ranks import close, norm_of, sized

pytestmark = [pytest.mark.mpi, needs_mpi]

SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 67}  # 67 ids do not divide
SHARED = {"shape": SHAPE, "max_grad_norm": 0.1}
CASES = {
    "sft": dict(method="sft", max_steps=4, eval_steps=2, eval_strategy="steps"),
    "sft invariant": dict(method="sft", tensor_parallel_invariant=True, gradient_checkpointing="full"),
    "reward": dict(method="reward"),
    "grpo": dict(method="grpo", beta=0.1, steps_per_generation=2, num_iterations=2, sync_ref_model=True,
                 ref_model_sync_steps=2, eval_steps=2, eval_strategy="steps", gradient_checkpointing="selective"),
    "grpo curriculum": dict(method="grpo", dynamic_sampling=True, max_num_gen_batches=3, curriculum="both",
                            curriculum_patience=1, per_device_train_batch_size=12, num_generations=2,
                            top_entropy_quantile=0.5),
    "ppo": dict(method="ppo", num_mini_batches=2, kl_coef=0.1, normalize_rewards=True, per_device_train_batch_size=6),
    "ppo shared": dict(method="ppo", critic="shared", bootstrap_truncated=True),
}  # fmt: skip
CASES = {name: SHARED | case for name, case in CASES.items()}
SAVED = {  # run through by one, to step 1 by two, and then on
    f"{name} saved": CASES[name] | {"dtype": "float32", "adam_epsilon": 1e-3} for name in ("grpo", "ppo")
}
SQUARE = ("sft", "grpo", "ppo")  # also as 2 × 2


def shared(case, data_ranks=1):
    """The case with two ranks a model, and so many such pairs."""
    return sized(case, data_ranks) | {"tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return folder, run(1, folder, CASES | SAVED)[0]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    saved = {name: shared(case) | {"max_steps": 1} for name, case in SAVED.items()}
    return folder, run(2, folder, {name: shared(case) for name, case in CASES.items()} | saved)[0]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    return folder, run(4, folder, {name: shared(CASES[name], 2) for name in SQUARE})[0]


def check(case, truth, found):
    """The first rank has all of every part, the others what each rank holds whole."""
    told, columns = truth[case][0]
    assert found[case][0][1].keys() == columns.keys()
    for other, arrays in found[case]:
        assert {name for name in columns if name.startswith("batch/")} <= arrays.keys()
        for name, array in arrays.items():
            kind, step = name.split("/")[:2]
            scale = norm_of(columns, step) if kind == "gradient" else np.abs(columns[name]).max(initial=1e-30)
            tolerance = (1e-12 if step == "0" else 1e-9) * (10 if name.endswith("advantages") else 1)
            assert np.abs(array - columns[name]).max(initial=0) <= tolerance * scale, name
        close(other["last"], told["last"], case)
        for ours, theirs in zip(other["evaluations"], told["evaluations"], strict=True):
            close(ours, theirs, case)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_that_share_a_model_do_what_one_does(case, one, two):
    check(case, one[1], two[1])


@pytest.mark.parametrize("case", SQUARE)
def test_two_pairs_that_share_the_work_do_what_one_does(case, one, four):
    check(case, one[1], four[1])


@pytest.mark.parametrize("case", CASES)
def test_what_every_rank_holds_has_the_same_bits(case, two, four):
    for found in (two[1], four[1]):
        if case in found:
            (_, first), *others = found[case]
            for _, other in others:
                for name in first.keys() & other.keys():
                    np.testing.assert_array_equal(first[name], other[name], err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_the_run_folder_is_that_of_one_process(case, one, two):
    alone, shared_one = one[0] / case / "run", two[0] / case / "run"
    names = {path.relative_to(alone) for path in alone.rglob("*")}
    assert names == {path.relative_to(shared_one) for path in shared_one.rglob("*")}
    for row, other in zip(*(read_jsonl(folder / "metrics.jsonl") for folder in (shared_one, alone)), strict=True):
        close(row, other, case)
    ours, theirs = (json.loads((folder / "run.json").read_text())["starts"][0] for folder in (shared_one, alone))
    assert (ours["parameters"], ours["processes"], theirs["processes"]) == (theirs["parameters"], 2, 1)


def test_saved_by_two_resumed_by_one_and_by_two_again(one, two, tmp_path):
    """The end is that of a run that went through; float32, since checkpoints hold no float64."""
    for ranks in (1, 2):
        rest = {}
        for name, case in SAVED.items():
            rest[name] = (shared(case) if ranks == 2 else case) | {"output_dir": str(tmp_path / f"{ranks} {name}")}
            rest[name]["resume"] = str(two[0] / name / "run" / "checkpoint-1")
        found, _ = run(ranks, tmp_path / f"resumed-{ranks}", rest)
        for name in SAVED:
            (told, arrays), (truth, columns) = found[name][0], one[1][name][0]
            assert told["step"] == truth["step"] == 3
            for key, array in columns.items():
                if key.startswith("weights/"):
                    np.testing.assert_allclose(arrays[key], array, atol=1e-5, err_msg=f"{ranks} {name} {key}")


def test_generate_prints_once():
    given = f"-m cukit_cli generate --model {TINY} --prompt 1+1= --temperature 0 --max_tokens 8".split()
    outputs = [
        subprocess.run(command(ranks, *given, *more), capture_output=True, text=True, env=environment(), timeout=100)
        for ranks, more in ((1, ()), (2, ("--tensor_parallel_size=2",)))
    ]
    assert [one.returncode for one in outputs] == [0, 0], outputs[1].stderr
    assert outputs[0].stdout == outputs[1].stdout != ""
