"""The benchmarks' named sizes, their options of memory, and the driver's meter."""

import json
import time
from types import SimpleNamespace

import pytest

import cukit_cli
from cukit.bench import GRPOBench, TrainBench, grpo, train
from cukit.bench.measure import INTERVAL, DriverPeak
from cukit.bench.presets import GRPO, TRAIN
from cukit.bench.subject import SHAPES, choose_subject
from cukit.engine.shapes import parameter_counts
from cukit.models.config import ModelConfig


def report_of(tmp_path, *argv):
    output = tmp_path / "report.json"
    assert cukit_cli.main(["bench", *argv, "--device", "cpu", "--output", str(output)]) == 0
    return json.loads(output.read_text())


def test_a_preset_gives_the_sizes_that_are_not_given():
    bench = GRPOBench(preset="16x8x1024")
    assert (bench.prompts, bench.num_generations, bench.prompt_length, bench.max_completion_length) == (
        16,
        8,
        512,
        1024,
    )
    bench = GRPOBench(preset="16x8x1024", prompts=2)
    assert (bench.prompts, bench.prompt_length) == (2, 512)
    t1, t2 = (TrainBench(preset=name) for name in ("T1", "T2"))
    assert (
        (t1.rows, t1.tokens_per_row, t1.completion)
        == (32, 712, 512)
        == (train.ROWS, train.TOKENS_PER_ROW, train.COMPLETION)
    )
    assert (t2.rows, t2.tokens_per_row, t2.completion) == (16, 2048, 2047)
    large = GRPOBench(preset="64x8x512")
    assert (large.prompts, large.prompt_length, large.max_completion_length) == (
        grpo.PROMPTS,
        grpo.PROMPT,
        grpo.COMPLETION,
    )
    with pytest.raises(ValueError, match="preset must be one of T1, T2, got 'T3'"):
        TrainBench(preset="T3")
    assert set(TRAIN) == {"T1", "T2"} and len(GRPO) == 2


def test_a_preset_makes_the_step(monkeypatch):
    """On a model of few positions; the sizes themselves are a card's work."""
    monkeypatch.setitem(TRAIN, "T2", {"rows": 3, "tokens_per_row": 20, "completion": 19})
    options = TrainBench(preset="T2", model="tiny", device="cpu")
    step = train.make_step(options, choose_subject(options), 1.0)
    assert (step.tokens, step.completion_tokens) == (60, 57)


@pytest.mark.parametrize(
    "name, billions", [("qwen3-0.6b", 0.596), ("qwen3-1.7b", 1.72), ("qwen3-4b", 4.02), ("qwen3-8b", 8.19)]
)
def test_shapes_have_their_sizes(name, billions):
    config = ModelConfig.from_json(SHAPES[name])
    assert sum(parameter_counts(config)) / 1e9 == pytest.approx(billions, abs=0.005)
    assert config.tie_word_embeddings == (name != "qwen3-8b") and config.num_key_value_heads == 8


SIZES = ["--prompts", "2", "--num_generations", "2", "--prompt_length", "5", "--max_completion_length", "6"]


def test_steps_count_the_warm_up(tmp_path):
    assert len(report_of(tmp_path, "grpo", *SIZES, "--steps", "5")["rows"]) == 3
    with pytest.raises(ValueError, match="steps must be at least 3, got 2"):
        GRPOBench(steps=2)


def test_options_of_memory_reach_the_trainer(tmp_path, monkeypatch):
    seen, build = [], grpo._trainer
    monkeypatch.setattr(grpo, "_trainer", lambda *given: seen.append(build(*given)) or seen[0])
    more = ["--optimizer_state", "int8", "--offload_optimizer", "true", "--memory_limit", "3GB"]
    report_of(tmp_path, "grpo", *SIZES, "--steps", "3", *more, "--gradient_checkpointing", "false", "--use_peft")
    args = seen[0].args
    assert (args.optimizer_state, args.offload_optimizer, args.memory.nbytes) == ("int8", True, 3 * 10**9)
    assert args.gradient_checkpointing == "none" and seen[0].model.adapter is not None
    assert seen[0].optimizer.state_form == "int8" and seen[0].plan.limit == 3 * 10**9
    seen[0].model.backend.limit_memory(None)


def test_options_of_memory_reach_the_training_step(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(train, "AdamW", lambda *given, **more: made.append(more) or AdamW(*given, **more))
    from cukit.optim import AdamW

    sizes = ["--rows", "2", "--tokens_per_row", "8", "--completion", "4", "--repeats", "1"]
    report = report_of(tmp_path, "train", *sizes, "--optimizer_state", "bfloat16", "--gradient_checkpointing", "true")
    assert made == [{"state_form": "bfloat16", "offload": False}]
    assert [row["gradient_checkpointing"] for row in report["rows"]] == [None, "full"]
    assert all(row["driver_gb"] is None for row in report["rows"]), "a CPU has no driver"


def test_the_drivers_peak_is_the_highest_that_was_seen():
    takes = iter([5, 9, 7])
    backend = SimpleNamespace(name="cuda", memory_taken=lambda: next(takes, 4) * 10**9)
    with DriverPeak(backend) as driver:
        deadline = time.monotonic() + 10
        while driver._highest < 9 * 10**9 and time.monotonic() < deadline:
            time.sleep(INTERVAL)
    assert driver.gb == 9.0 and not driver._thread.is_alive()
    with DriverPeak(SimpleNamespace(name="cpu")) as none:
        pass
    assert none.gb is None
