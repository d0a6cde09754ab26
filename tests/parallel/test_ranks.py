"""N ranks do what one rank does with the same global batch: gradients, advantages, metrics, evaluations, checkpoints.

Samples are the same because draws depend on a prompt's place; in float64 rounding does not flip them.
"""

import json

import numpy as np
import pytest

from cukit.runs.metrics import read_jsonl

from .launch import needs_mpi, run

pytestmark = [pytest.mark.mpi, needs_mpi]

# groups move from a rank that is slow
BALANCED = dict(balance_rollouts="true", max_completion_length=24, max_num_seqs=8, max_steps=1)
# case -> options of one rank; per_device_train_batch_size is divided among ranks
CASES = {
    "sft": dict(method="sft"),
    "sft float32": dict(method="sft", dtype="float32"),
    "sft odd": dict(method="sft", max_steps=4, eval_steps=2, eval_strategy="steps"),  # an epoch ends with 2 of 14 rows
    "sft zero": dict(method="sft", zero_stage=1),
    "reward": dict(method="reward", center_rewards_coefficient=0.1, eval_steps=2, eval_strategy="steps"),
    "lora": dict(method="sft", use_peft=True, lora_r=4, lora_alpha=8),
    "grpo dapo": dict(method="grpo", loss_type="dapo", beta=0.1, steps_per_generation=2, num_iterations=2),
    "grpo float32": dict(method="grpo", dtype="float32", max_steps=1),
    "grpo bnpo": dict(method="grpo", loss_type="bnpo", scale_rewards="batch", top_entropy_quantile=0.5),
    "grpo dr_grpo": dict(method="grpo", loss_type="dr_grpo", scale_rewards="none", entropy_coef=0.01,
                         vllm_importance_sampling_correction=True),
    "grpo": dict(method="grpo", loss_type="grpo", beta=0.1, use_kl_in_reward=True, use_adaptive_entropy=True,
                 entropy_coef=0.01, entropy_target=3.0),
    "grpo lora": dict(method="grpo", use_peft=True, lora_r=4, lora_alpha=8, beta=0.1),
    "grpo curriculum": dict(method="grpo", dynamic_sampling=True, max_num_gen_batches=3, curriculum="both",
                            curriculum_patience=1, per_device_train_batch_size=12, num_generations=2),
    "grpo turns": dict(method="grpo", plays=True, max_completion_length=20),
    "grpo sampled evaluation": dict(method="grpo", num_generations_eval=2, max_steps=1,
                                    advantage_estimator="reinforce_plus_plus"),
    "grpo balanced": dict(method="grpo", slow=1, **BALANCED | {"max_steps": 2}),
    "grpo balanced running": dict(method="grpo", slow=0, **BALANCED | {"max_num_seqs": 64}),
    "grpo balanced rounds": dict(method="grpo", slow=1, dynamic_sampling=True, max_num_gen_batches=3, num_generations=2,
                                 **BALANCED, per_device_train_batch_size=12),
    "ppo balanced": dict(method="ppo", slow=1, **BALANCED),
    "ppo": dict(method="ppo", num_mini_batches=2, kl_coef=0.1, whiten_rewards=True, normalize_rewards=True,
                per_device_train_batch_size=6),
    "ppo shared": dict(method="ppo", critic="shared", beta=0.05, kl_target=0.5, bootstrap_truncated=True,
                       missing_eos_penalty=0.5, entropy_coef=0.01),
    "ppo zero": dict(method="ppo", num_mini_batches=2, critic_warmup_steps=1, zero_stage=1, max_grad_norm=0.1,
                     per_device_train_batch_size=6),
    "ppo warm-up": dict(method="ppo", critic_warmup_steps=2),
    "sft zero 2": dict(method="sft", zero_stage=2, max_tokens_per_batch=16, gradient_checkpointing="full"),
    "ppo zero 2 lora": dict(method="ppo", zero_stage=2, use_peft=True, lora_r=4, lora_alpha=8, critic="shared"),
    "grpo zero 3": dict(method="grpo", zero_stage=3, beta=0.1, steps_per_generation=2, num_iterations=2, eval_steps=2,
                        eval_strategy="steps", gradient_checkpointing="selective"),
    "ppo zero 3": dict(method="ppo", zero_stage=3, num_mini_batches=2, critic_warmup_steps=1, max_grad_norm=0.1,
                       per_device_train_batch_size=6),
}  # fmt: skip
TIMED = ("time/", "step_time", "tokens_per_second", "eval/runtime", "eps", "balance/")
# rows of a batch, which 1, 2 and 3 ranks divide
SIZES = {"sft": 6, "reward": 6, "grpo": 24, "ppo": 12}


def sized(case, ranks):
    size = case.get("per_device_train_batch_size", SIZES[case["method"]])
    return case | {"per_device_train_batch_size": size // ranks}


def cases_of(ranks):
    return {name: sized(case, ranks) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return folder, run(1, folder, cases_of(1))[0]


@pytest.fixture(scope="module", params=[2, 3])
def several(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"ranks-{request.param}")
    return folder, run(request.param, folder, cases_of(request.param))[0]


@pytest.mark.parametrize("case", CASES)
def test_ranks_do_what_one_rank_does(case, one, several):
    """Gradients to 1e-12 (float32: 1e-6) of the whole gradient's norm, each column of the batch, all weights.

    After an update, differences are those of before it, which Adam's division has made larger.
    """
    (truth, columns), float32 = one[1][case][0], "float32" in case
    for told, arrays in several[1][case]:
        assert compared(arrays, case) == compared(columns, case)
        for name in compared(columns, case):
            array, (kind, step) = columns[name], name.split("/")[:2]
            scale = norm_of(columns, step) if kind == "gradient" else np.abs(array).max(initial=1e-30)
            tolerance = 1e-6 if float32 else 1e-12 if step == "0" else 1e-9
            tolerance *= 10 if name.endswith("advantages") else 1  # divided by a small spread
            if not float32 or step == "0":
                assert np.abs(arrays[name] - array).max(initial=0) <= tolerance * scale, name
        close(told["last"], truth["last"], case)
        for ours, theirs in zip(told["evaluations"], truth["evaluations"], strict=True):
            close(ours, theirs, case)
        assert told["step"] == truth["step"]


def compared(arrays, case):
    """With ZeRO a rank has its share of the gradients' sum alone, from stage 2 on not as a gradient."""
    return {name for name in arrays if not ("zero" in case and name.startswith("gradient/"))}


def norm_of(arrays, step):
    """Of all models' gradients of a step."""
    return np.sqrt(sum(np.square(x).sum() for name, x in arrays.items() if name.startswith(f"gradient/{step}/")))


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_hold_the_same_bits(case, several):
    (_, first), *others = several[1][case]
    for _, other in others:
        for name in compared(first, case):
            np.testing.assert_array_equal(first[name], other[name], err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_the_run_folder_is_one_runs(case, one, several):
    """metrics.jsonl has a row a step, completions.jsonl each completion once, and files are the same as one rank's."""
    alone, shared = one[0] / case / "run", several[0] / case / "run"
    names = {path.relative_to(alone) for path in alone.rglob("*")}
    assert names == {path.relative_to(shared) for path in shared.rglob("*")}
    ours, theirs = (read_jsonl(folder / "metrics.jsonl") for folder in (shared, alone))
    assert len(ours) == len(theirs)
    for row, other in zip(ours, theirs):
        close(row, other, case)
    if (alone / "completions.jsonl").exists() and "float32" not in case:
        ours, theirs = (read_jsonl(folder / "completions.jsonl") for folder in (shared, alone))
        for row, other in zip(ours, theirs, strict=True):
            close(row, other, case)
            assert (row["completion"], row["ones"]) == (other["completion"], other["ones"])


def close(ours, theirs, case):
    """Equal metrics but for times, of which a rank without prompts has fewer."""
    ours, theirs = ({name: x for name, x in row.items() if not name.startswith(TIMED)} for row in (ours, theirs))
    assert ours.keys() == theirs.keys()
    tolerance = 1e-4 if "float32" in case else 1e-8
    for name, value in theirs.items():
        if isinstance(value, float | int):
            assert ours[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


@pytest.mark.parametrize("case", [case for case in CASES if "balanced" in case])
def test_groups_have_moved(case, several):
    rows = read_jsonl(several[0] / case / "run" / "metrics.jsonl")
    assert sum(row.get("balance/moved_groups", 0) for row in rows) > 0
    assert all(row["time/rollout_wait"] >= 0 for row in rows if "balance/moved_groups" in row)


def test_a_run_repeats_bit_for_bit(several, tmp_path):
    folder, found = several
    ranks = len(found["sft"])
    again = run(ranks, tmp_path, {"sft": cases_of(ranks)["sft"]})[0]["sft"]
    for (_, before), (_, after) in zip(found["sft"], again):
        for name, array in before.items():
            np.testing.assert_array_equal(array, after[name], err_msg=name)


def test_saved_on_two_ranks_resumed_on_one_and_three(tmp_path):
    """In the middle of a generation batch, and of PPO's mini-batches; the end is that of a run that went through.

    In float32, since checkpoints hold no float64. The large epsilon keeps Adam from making rounding as large as the
    learning rate.
    """
    cases = {
        name: CASES[name] | {"dtype": "float32", "adam_epsilon": 1e-3}
        for name in ("grpo dapo", "ppo", "lora", "ppo zero", "ppo zero 3")
    }
    run(2, tmp_path, {name: sized(case, 2) | {"max_steps": 1} for name, case in cases.items()})
    truth, _ = run(1, tmp_path / "through", cases)
    for ranks in (1, 3):
        rest = {}
        for name, case in cases.items():
            rest[name] = sized(case, ranks) | {"output_dir": str(tmp_path / f"{ranks} {name}")}
            rest[name]["resume"] = str(tmp_path / name / "run" / "checkpoint-1")
        found, _ = run(ranks, tmp_path / f"resumed-{ranks}", rest)
        for name in cases:
            for told, arrays in found[name]:
                assert told["step"] == 3
                for key, array in truth[name][0][1].items():
                    if key.startswith("weights/"):
                        np.testing.assert_allclose(arrays[key], array, atol=1e-5, err_msg=f"{ranks} {name} {key}")


def test_config_yaml_and_run_json_say_how_many(several):
    folder, found = several
    record = json.loads((folder / "sft" / "run" / "run.json").read_text())
    assert [start["processes"] for start in record["starts"]] == [len(found["sft"])]
