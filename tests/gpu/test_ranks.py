"""Two GPUs do what one does with the same global batch, through NCCL. Run by pytest itself: it starts mpirun."""

from pathlib import Path

import numpy as np
import pytest

from cukit.runs.metrics import read_jsonl

from ..parallel.launch import needs_mpi, run

pytestmark = [pytest.mark.gpu, needs_mpi]
DIFFERENCE = "sampling/sampling_logp_difference/max"
ROWS = {"sft": 6, "grpo": 24, "ppo": 12}
CASES = {
    "sft": dict(method="sft", dtype="float32", device="cuda"),
    "sft fast": dict(method="sft", dtype="float32", device="cuda", fast_reduction=True),
    "lora": dict(method="sft", dtype="bfloat16", device="cuda", use_peft=True, lora_r=4, lora_alpha=8),
    "grpo": dict(method="grpo", dtype="bfloat16", device="cuda", beta=0.1, steps_per_generation=2, num_iterations=2),
    "ppo": dict(method="ppo", dtype="float32", device="cuda", num_mini_batches=2, kl_coef=0.1),
    "sft zero 2": dict(method="sft", dtype="float32", device="cuda", zero_stage=2),
    "sft zero 3": dict(method="sft", dtype="float32", device="cuda", zero_stage=3, gradient_checkpointing="full"),
    "grpo zero 3": dict(method="grpo", dtype="bfloat16", device="cuda", beta=0.1, steps_per_generation=2,
                        num_iterations=2, zero_stage=3),
    "ppo zero 3": dict(method="ppo", dtype="float32", device="cuda", num_mini_batches=2, zero_stage=3),
} | {
    f"one pass, stage {stage}": dict(method="sft", dtype="bfloat16", device="cuda", max_tokens_per_batch=4096,
                                     zero_stage=stage)
    for stage in range(4)
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def two_gpus():
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")


def cases_of(ranks):
    return {name: case | {"per_device_train_batch_size": ROWS[case["method"]] // ranks} for name, case in CASES.items()}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return run(1, tmp_path_factory.mktemp("one"), cases_of(1))[0]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run(2, tmp_path_factory.mktemp("two"), cases_of(2))[0]


@pytest.mark.parametrize("case", ["sft", "sft fast"])
def test_the_first_gradient_is_that_of_one_gpu(case, one, two):
    """float32 products add in order whatever the rows, so only the order of sums over rows differs."""
    (_, truth), (_, found) = one[case][0], two[case][0]
    first = {name: x for name, x in truth.items() if name.startswith("gradient/0/")}
    norm = np.sqrt(sum(np.square(x.astype(np.float64)).sum() for x in first.values()))
    for name, array in first.items():
        assert np.abs(found[name] - array).max() <= 1e-6 * norm, name


@pytest.mark.parametrize("case", CASES)
def test_both_gpus_hold_the_same_bits(case, two):
    (_, first), (_, second) = two[case]
    assert first.keys() == second.keys()
    for name, array in first.items():
        if case == "one pass, stage 1" and name.startswith("gradient/"):
            continue  # a rank has its share of the sum alone
        np.testing.assert_array_equal(array, second[name], err_msg=name)


def test_a_stage_changes_no_bit_of_one_pass(two):
    """So sums and gathers beside what is computed come after what they read, and before what reads them."""
    truth = two["one pass, stage 0"][0][1]
    for stage in (1, 2, 3):
        for _, arrays in two[f"one pass, stage {stage}"]:
            for name, array in arrays.items():
                if name.startswith("weights/"):
                    np.testing.assert_array_equal(array, truth[name], err_msg=f"{stage} {name}")


@pytest.mark.parametrize("case", ["grpo", "grpo zero 3"])
def test_sampler_and_trainer_agree_in_every_bit(case, two):
    """The first step after each rollout; a rank samples a prompt, and another may train on it."""
    rows = read_jsonl(Path(two[case][0][0]["run"]) / "metrics.jsonl")
    found = [row[DIFFERENCE] for row in rows if DIFFERENCE in row]
    assert found and not any(found)


def test_first_rollouts_are_those_of_one_gpu(one, two):
    for case in ("grpo", "ppo"):
        for column in ("ids", "logprobs", "advantages"):
            key = f"batch/0/{column}"
            np.testing.assert_array_equal(two[case][0][1][key], one[case][0][1][key], err_msg=f"{case} {column}")


def test_a_run_repeats_bit_for_bit(two, tmp_path):
    names = ("sft", "grpo", "sft zero 2", "sft zero 3", "grpo zero 3")
    again, _ = run(2, tmp_path, {name: cases_of(2)[name] for name in names})
    for name in names:
        for key, array in two[name][0][1].items():
            np.testing.assert_array_equal(array, again[name][0][1][key], err_msg=f"{name} {key}")
