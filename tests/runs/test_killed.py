"""Runs in processes of their own: killed at random moments, stopped from outside, without room, without a reader."""

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cukit.runs.checkpoint import latest_checkpoint, list_checkpoints, newest_model, why_not_whole
from cukit.runs.metrics import read_jsonl

ROOT = Path(__file__).parents[2]
# A run of 20 steps of a tiny model that says each step: `python -c WORKER FOLDER [OPTIONS as JSON
# [FUNCTION TIMES]]`: killed at the TIMES-th call of this function.
WORKER = """
import importlib, json, os, signal, sys
from pathlib import Path
from cukit import GRPOConfig, GRPOTrainer
from cukit.backend import backend_for
from cukit.models.config import ModelConfig
from cukit.models.decoder import Decoder
from cukit.runs.checkpoint import latest_checkpoint
from cukit.tokenizer import Tokenizer

class Say:
    def on_step_end(self, trainer, metrics):
        print("done", trainer.global_step, flush=True)

def ones(completions, **_):
    return [str(completion).count("1") / 9 for completion in completions]

folder = Path("data/tiny-qwen3")
shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
             num_key_value_heads=1, head_dim=16, max_position_embeddings=96)
config = ModelConfig.from_json(json.loads((folder / "config.json").read_text()) | shape)
model = Decoder(config, backend_for("cpu"), "float32")
model.init_weights(0)
rows = [{"prompt": "1" * (i + 1) + "="} for i in range(10)]
options = json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}")
if "environment" in options:
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
def killed(what, times):
    # kill this process at the times-th call of module.function
    module, name = what.rsplit(".", 1)
    module, left = importlib.import_module(module), [times]
    function = getattr(module, name)
    def counted(*arguments, **more):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **more)
    setattr(module, name, counted)

if len(sys.argv) > 3:
    killed(sys.argv[3], int(sys.argv[4]))
args = GRPOConfig(output_dir=sys.argv[1], learning_rate=1e-2, max_steps=20, logging_steps=2, save_steps=3,
                  save_total_limit=2, per_device_train_batch_size=16, steps_per_generation=2, num_generations=4,
                  eval_steps=4, lr_scheduler_type="cosine", warmup_steps=2,
                  **({"max_completion_length": 6} | options))
trainer = GRPOTrainer(model, [ones], args, rows, rows[:3], Tokenizer.from_folder(folder), callbacks=[Say()])
trainer.train(resume_from_checkpoint="latest" if latest_checkpoint(sys.argv[1]) else None)
"""

# An evaluation that says when it scores; its reward grows to step 14 and then falls.
EVALUATED = """
def growing(completions, **_):
    print("evaluating", flush=True)
    return [min(trainer.global_step, 28 - trainer.global_step) / 30] * len(completions)

class Evaluated:
    def on_evaluate(self, trainer, metrics):
        print("evaluated", trainer.global_step, flush=True)

"""


def start(code_or_arguments, *arguments, **more):
    words = ["-c", code_or_arguments] if isinstance(code_or_arguments, str) else code_or_arguments
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *words, *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def rows_of(run):
    timed = ("time/", "step_time", "tokens_per_second", "eval/runtime", "eps")
    return [
        {name: value for name, value in row.items() if not name.startswith(timed)}
        for row in read_jsonl(run / "metrics.jsonl")
    ]


DYNAMIC = {"dynamic_sampling": True, "max_num_gen_batches": 3, "curriculum": "both", "curriculum_patience": 3}
# an environment that asks for more, up to three times
TURNS = DYNAMIC | {
    "environment": "tests/trainers/playing.py:Asking",
    "stop": ["1", "2", "+"],
    "max_completion_length": 40,
}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param(DYNAMIC, id="dynamic", marks=pytest.mark.slow),
        pytest.param(TURNS, id="environment", marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_at_random_moments_ends_as_if_nothing_had_happened(tmp_path, options):
    """kill -9 three times, a random time after a random step; then the run goes on: equal bits, nothing left over."""
    straight, cut, moments = tmp_path / "straight", tmp_path / "cut", random.Random(20261128)
    first = start(WORKER, straight, json.dumps(options))
    for _ in range(3):
        process = start(WORKER, cut, json.dumps(options))
        steps = moments.randint(4, 6)  # of this life: the first checkpoint comes after three
        for line in process.stdout:
            steps -= line.startswith("done")
            if not steps:
                break
        time.sleep(moments.random() * 0.03)
        process.kill()
        _, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL and latest_checkpoint(cut) is not None, errors
    _, errors = start(WORKER, cut, json.dumps(options)).communicate(timeout=60)
    assert newest_model(cut) == cut, errors
    assert first.wait(60) == 0
    assert rows_of(cut) == rows_of(straight)
    logged = {name for row in rows_of(cut) for name in row}
    assert ("dynamic_sampling/num_gen_batches" in logged) == bool(options)
    assert ("completions/mean_turns" in logged) == ("environment" in options)
    assert (cut / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()
    assert [path.name for path in list_checkpoints(cut)] == ["checkpoint-18", "checkpoint-20"]
    assert all(why_not_whole(path) is None for path in list_checkpoints(cut)) and not list(cut.glob(".checkpoint*"))


MOMENTS = {
    "a checkpoint's weights are written": ("cukit.runs.checkpoint.save_file", 3),
    "a checkpoint is written and not yet renamed": ("cukit.runs.checkpoint._flush_to_disk", 2),
    "an evaluation has its answers": ("cukit.trainers.evaluation.evaluation_metrics", 3),
    "a generation batch is packed": ("cukit.trainers.group_generation.pack_samples", 9),
    "the log is written": ("cukit.runs.metrics.plain_value", 400),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_at_a_bad_moment_ends_as_if_nothing_had_happened(tmp_path, moment, straight_run):
    cut = tmp_path / "cut"
    process = start(WORKER, cut, json.dumps(DYNAMIC), *MOMENTS[moment])
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, errors
    _, errors = start(WORKER, cut, json.dumps(DYNAMIC)).communicate(timeout=60)
    assert newest_model(cut) == cut, errors
    assert rows_of(cut) == rows_of(straight_run)
    assert (cut / "model.safetensors").read_bytes() == (straight_run / "model.safetensors").read_bytes()
    assert not list(cut.glob(".checkpoint*"))


@pytest.fixture(scope="module")
def straight_run(tmp_path_factory):
    """A run of WORKER with dynamic sampling that nothing interrupts."""
    run = tmp_path_factory.mktemp("runs") / "straight"
    assert start(WORKER, run, json.dumps(DYNAMIC)).wait(60) == 0
    return run


PPO_WORKER = (
    WORKER.replace("GRPO", "PPO")
    .replace("steps_per_generation=2, num_generations=4", "num_mini_batches=2, num_ppo_epochs=2")
    .replace("per_device_train_batch_size=16", "per_device_train_batch_size=5")
)
PPO_OPTIONS = dict(kl_coef=0.1, kl_target=0.01, kl_horizon=30, normalize_rewards=True, critic_learning_rate=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_a_run_of_ppo_killed_at_random_moments_ends_as_if_nothing_had_happened(tmp_path, critic):
    """kill -9 three times: the critic, the KL's coefficient and the running moments of rewards go on as they were."""
    options, moments = json.dumps(PPO_OPTIONS | {"critic": critic}), random.Random(10)
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    first = start(PPO_WORKER, straight, options)
    for _ in range(3):
        process, steps = start(PPO_WORKER, cut, options), moments.randint(4, 6)
        for line in process.stdout:
            steps -= line.startswith("done")
            if not steps:
                break
        time.sleep(moments.random() * 0.03)
        process.kill()
        _, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL and latest_checkpoint(cut) is not None, errors
    _, errors = start(PPO_WORKER, cut, options).communicate(timeout=60)
    assert newest_model(cut) == cut, errors
    assert first.wait(60) == 0
    assert rows_of(cut) == rows_of(straight) and len({row["kl_coef"] for row in rows_of(cut) if "kl_coef" in row}) > 3
    for name in (
        "model.safetensors",
        "checkpoint-20/critic/model.safetensors",
        "checkpoint-20/trainer_state.safetensors",
    ):
        assert (cut / name).read_bytes() == (straight / name).read_bytes(), name
    assert all(why_not_whole(path) is None for path in list_checkpoints(cut)) and not list(cut.glob(".checkpoint*"))


@pytest.mark.slow
def test_a_run_killed_in_its_evaluations_keeps_the_best_model(tmp_path):
    """kill -9 once in an evaluation, once between its end and the checkpoint of a new best, once in a step."""
    worker = WORKER.replace(
        "eval_steps=4,",
        "eval_steps=2, num_generations_eval=2, load_best_model_at_end=True,",
    ).replace("folder = Path", EVALUATED + "folder = Path")
    worker = worker.replace("callbacks=[Say()])", "callbacks=[Say(), Evaluated()], eval_reward_funcs=[growing])")
    assert worker.count("growing") == 2
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    first = start(worker, straight)
    for said in (["evaluating"] * 5, ["done 9", "evaluating"], ["evaluated 14"]):
        process = start(worker, cut)
        for line in process.stdout:
            if said and line.startswith(said[0]):
                said = said[1:]
            if not said:
                break
        process.kill()
        _, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL and latest_checkpoint(cut) is not None and not said, errors
    _, errors = start(worker, cut).communicate(timeout=60)
    assert newest_model(cut) == cut, errors
    assert first.wait(60) == 0
    assert rows_of(cut) == rows_of(straight)
    states = [json.loads((run / "checkpoint-20/trainer_state.json").read_text()) for run in (cut, straight)]
    for state in states:
        for _, metrics in state["evaluations"]:
            del metrics["eval/runtime"]
        state.pop("window")
    assert states[0] == states[1] and states[0]["best"]["step"] == 14 and len(states[0]["evaluations"]) == 11
    kept = [path.name for path in list_checkpoints(cut)]
    assert kept == [path.name for path in list_checkpoints(straight)] == ["checkpoint-14", "checkpoint-20"]
    for name in ["model.safetensors", *(f"evaluations/step-{step}.jsonl" for step in range(0, 21, 2))]:
        assert (cut / name).read_bytes() == (straight / name).read_bytes(), name
    assert (cut / "model.safetensors").read_bytes() == (cut / "checkpoint-14/model.safetensors").read_bytes()


@pytest.mark.slow
def test_c7_two_runs_in_one_folder_and_the_lock_of_a_killed_run(tmp_path):
    run = tmp_path / "run"
    process = start(WORKER, run)
    assert process.stdout.readline()
    os.kill(process.pid, signal.SIGSTOP)
    try:
        _, errors = start(WORKER, run).communicate(timeout=60)
        assert "already holds a run" in errors or f"is in use by another run (process {process.pid})" in errors
        assert f"{process.pid}" == (run / ".lock").read_text().strip()
    finally:
        process.kill()
        process.communicate()
    for path in run.iterdir():
        if path.name != ".lock":
            subprocess.run(["rm", "-r", path], check=True)
    assert start(WORKER, run).wait(60) == 0  # the lock of a killed run locks nothing
    assert newest_model(run) == run and not (run / ".lock").exists()


def sft(*options):
    return ["cukit_cli.py", "sft", "--logging_steps", "1", "--device", "cpu", *map(str, options)]


@pytest.mark.slow
def test_c5_the_advice_of_a_stopped_command_works_as_printed(tmp_path):
    run = tmp_path / "a run"  # with a space: the advice must be quoted
    process = start(sft("--output_dir", run, "--max_steps", "90", "--per_device_train_batch_size", "2"))
    while "step 3/" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    advice = re.search(r"stopped at step (\d+) of 90; go on with (--.*)", output)
    assert process.returncode == 130 and latest_checkpoint(run).name == f"checkpoint-{advice[1]}"
    more = start(["cukit_cli.py", "sft", *shlex.split(advice[2]), "--max_steps", str(int(advice[1]) + 2)])
    assert more.wait(60) == 0
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == list(range(1, int(advice[1]) + 3))


@pytest.mark.slow
def test_c8_a_display_without_a_reader_does_not_lose_the_run(tmp_path):
    run = tmp_path / "run"
    process = start(sft("--output_dir", run, "--max_steps", "4", "--per_device_train_batch_size", "2"))
    process.stdout.readline()
    process.stdout.close()  # `| head -1`
    process.wait(60)
    assert newest_model(run) == run and len(read_jsonl(run / "metrics.jsonl")) == 4


def limit_file_size():
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))  # the model has 1.8 MB


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="resource limits are POSIX")
def test_c8_no_room_for_a_checkpoint(tmp_path):
    """The system's own refusal: periodic saves are lines, the last one is an error after the metrics."""
    run = tmp_path / "run"
    options = ("--output_dir", run, "--max_steps", "3", "--per_device_train_batch_size", "2", "--save_steps", "1")
    process = start(sft(*options), preexec_fn=limit_file_size)
    _, errors = process.communicate(timeout=60)
    assert errors.count("training goes on") == 2 and f"{run / 'checkpoint-1'} could not be saved: " in errors
    assert f"{run / 'checkpoint-3'} could not be saved: " in errors.splitlines()[-1]
    assert process.returncode == 1
    assert len(read_jsonl(run / "metrics.jsonl")) == 3
    left = ["config.yaml", "metrics.jsonl", "report.html", "run.json"]
    assert sorted(path.name for path in run.iterdir()) == left
