"""--memory_limit: how sizes are read, what the planner makes of one, what a CPU says.

The pool's limit without a card: tests/backend/test_pool.py. On a card: tests/gpu/test_memory_limit.py.
"""

import logging
import random

import numpy as np
import pytest

import cukit_cli
from cukit.backend.card import CONTEXT_BYTES, Card
from cukit.engine.config import EngineConfig, MemoryOptions, bytes_of
from cukit.engine.llm import LLM
from cukit.engine.memory import hold_memory, plan_memory
from cukit.engine.shapes import ModelUse
from cukit.trainers.config import SFTConfig

from .shapes import GB, SHAPE, bucket_of_a_card, card, cpu

POLICY = [ModelUse("policy", SHAPE, "bfloat16", trained=True)]
ALONE = [ModelUse("model", SHAPE, "bfloat16")]


@pytest.fixture(autouse=True)
def no_limit_after():
    yield
    cpu.limit_memory(None)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GB", 24 * 10**9),
        ("22GiB", 22 * 2**30),
        ("24e9", 24 * 10**9),
        ("24E+9", 24 * 10**9),
        (" 1.5 gb ", 1_500_000_000),
        (".5kB", 500),
        ("7", 7),
        ("1TiB", 2**40),
        (24_000_000_000, 24 * 10**9),
        (1e9, 10**9),
    ],
)
def test_sizes(text, nbytes):
    assert bytes_of(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GB", "24XB", "-1GB", "0", "0.2B", "24 G B", "24G", "nan", "inf", "1e99", "24GB!", "2 4GB"]
)
def test_what_is_no_size_is_refused_in_one_line(text):
    with pytest.raises(ValueError, match="memory_limit must be bytes, with a unit or without") as caught:
        bytes_of(text, "memory_limit")
    assert repr(text) in str(caught.value) and "\n" not in str(caught.value)


def test_random_texts_are_a_size_or_an_error():
    generator = random.Random(0)
    for _ in range(3000):
        text = "".join(generator.choice("0123456789.eE+-kKMGiIbB ") for _ in range(generator.randint(0, 7)))
        try:
            found = bytes_of(text)
        except ValueError as error:
            assert "\n" not in str(error)
        else:
            assert isinstance(found, int) and found >= 1


def test_a_number_of_yaml_and_a_text_are_the_same_option():
    assert MemoryOptions(memory_limit=24_000_000_000).nbytes == MemoryOptions(memory_limit="24GB").nbytes == 24 * GB
    assert SFTConfig(memory_limit=24e9).memory.nbytes == 24 * GB and SFTConfig().memory.nbytes is None
    with pytest.raises(ValueError, match="memory_limit must be text, got True"):
        SFTConfig(memory_limit=True)
    with pytest.raises(ValueError, match="memory_limit must be bytes"):
        SFTConfig(memory_limit="many")


def test_the_smaller_of_limit_and_share_rules():
    def plan(limit, share):
        engine = EngineConfig(gpu_memory_utilization=share)
        return plan_memory(POLICY, engine, card(), max_tokens_per_batch=16_384, memory_limit=limit)

    limited = plan(30 * GB, 0.9)
    assert limited.limit == 30 * GB and limited.table().splitlines()[-1].endswith("of 30.00 GB (memory_limit)")
    assert plan(None, 0.5).kv_bytes > limited.kv_bytes > 0 and limited.peak_bytes <= limited.limit
    shared = plan(60 * GB, 0.5)
    assert shared.limit == 40 * GB and "gpu_memory_utilization 0.5 of 80.00 GB" in shared.table()
    assert plan_memory(POLICY, None, card(), max_tokens_per_batch=4096, memory_limit=30 * GB).limit == 30 * GB


def test_what_the_limit_refuses_names_it():
    with pytest.raises(ValueError, match=r"may take 9\.00 GB; .*raise memory_limit"):
        plan_memory(POLICY, None, card(), max_tokens_per_batch=16_384, memory_limit=9 * GB)
    with pytest.raises(ValueError, match="raise num_kv_blocks or memory_limit"):
        plan_memory(ALONE, EngineConfig(max_model_len=40_000), card(), memory_limit=4 * GB)


def test_a_card_that_is_not_here_is_planned_as_one_that_is():
    here = plan_memory(POLICY, EngineConfig(), card(), max_tokens_per_batch=16_384, memory_limit=30 * GB)
    there = plan_memory(POLICY, EngineConfig(), Card(30 * GB), max_tokens_per_batch=16_384)
    assert here == there
    assert Card(1).dtype_of("auto").name == "bfloat16" and Card(1).dtype_of("float16") == np.float16
    assert [Card(1).row_bucket(rows) for rows in range(5000)] == [bucket_of_a_card(rows) for rows in range(5000)]
    with pytest.raises(ValueError, match="not supported on cuda"):
        Card(1).dtype_of("int4")


def test_a_cpu_bounds_its_plan_and_says_so_once(caplog, monkeypatch):
    monkeypatch.setattr("cukit.options._said", set())
    with caplog.at_level(logging.WARNING):
        for nbytes in (8 * GB, 8 * GB, None):
            hold_memory(cpu, nbytes)
            assert cpu.memory_limit() == nbytes
    assert [record.message for record in caplog.records if "memory_limit" in record.message] == [
        "memory_limit bounds the plan alone on a CPU: the system may give this process more"
    ]
    hold_memory(cpu, 5 * GB)
    free = {"total_bytes": 64 * GB, "free_bytes": 60 * GB}
    assert plan_memory(ALONE, EngineConfig(max_model_len=64), cpu, **free).limit == 5 * GB


def test_an_engine_takes_it_by_name():
    llm = LLM("data/tiny-qwen3", device="cpu", memory_limit="2GB", max_model_len=64)
    assert llm.core.plan.limit == 2 * GB and "memory_limit" in llm.core.plan.table()
    with pytest.raises(ValueError, match="memory_limit must be bytes"):
        LLM("data/tiny-qwen3", device="cpu", memory_limit="2 gigs")
    with pytest.raises(ValueError, match="options are device, dtype, memory_limit, max_model_len"):
        LLM("data/tiny-qwen3", device="cpu", memory_limits="2GB")


@pytest.mark.parametrize("command", ["grpo", "ppo", "sft", "reward", "chat", "generate", "eval"])
def test_a_dry_run_plans_for_a_card_that_is_not_here(command, capsys):
    assert cukit_cli.main([command, "--memory_limit", "24GB", "--dry_run"]) == 0
    shown = capsys.readouterr().out
    assert "memory_limit: 24GB" in shown and "of 24.00 GB (memory_limit)" in shown
    assert "# memory on a GPU that is not here, with weights in bfloat16:" in shown and "CUDA context" in shown
    assert cukit_cli.main([command, "--memory_limit", "2GB", "--dry_run", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "CUDA context" not in shown and "of 2.00 GB (memory_limit)" in shown
    assert cpu.memory_limit() is None


def test_training_holds_the_process_to_it(make_limited):
    trainer = make_limited("3GB")
    assert cpu.memory_limit() == trainer.plan.limit == 3 * GB
    make_limited(None)
    assert cpu.memory_limit() is None, "a limit is the run's own"


@pytest.fixture
def make_limited(tmp_path):
    from cukit import SFTConfig, SFTTrainer

    def make(limit):
        args = SFTConfig(output_dir=str(tmp_path / str(limit)), memory_limit=limit, max_steps=1, device="cpu")
        return SFTTrainer(model="data/tiny-qwen3", args=args, train_dataset=[{"text": "1+2=3"}] * 8)

    return make


def test_what_does_not_fit_a_cpu_is_said_once(caplog):
    with caplog.at_level(logging.WARNING):
        plan_memory(ALONE, EngineConfig(), cpu, memory_limit=10**6)
    assert sum("this run needs at least" in record.getMessage() for record in caplog.records) == 1
    assert "KV cache" in caplog.text


def test_a_run_that_draws_completions_and_does_not_fit_says_so_once(tmp_path, caplog):
    from cukit import GRPOConfig, GRPOTrainer
    from cukit.engine.llm import LLM

    args = GRPOConfig(output_dir=str(tmp_path / "run"), memory_limit="1MB", max_steps=1, device="cpu", num_kv_blocks=64)
    with caplog.at_level(logging.WARNING):
        trainer = GRPOTrainer("data/tiny-qwen3", "format", args, [{"prompt": "1+2="}] * 8)
    assert sum("this run needs at least" in record.getMessage() for record in caplog.records) == 1
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        LLM.from_model(trainer.model, num_kv_blocks=64)
    assert "this run needs at least" in caplog.text, "an engine alone says it itself"


def test_a_benchmark_holds_the_process_to_it(tmp_path):
    sizes = ["--rows", "2", "--tokens_per_row", "8", "--completion", "4", "--repeats", "1", "--device", "cpu"]
    assert cukit_cli.main(["bench", "train", *sizes, "--memory_limit", "3GB"]) == 0
    assert cpu.memory_limit() == 3 * GB


def test_the_evaluation_holds_the_process_to_it(monkeypatch):
    from cukit.commands import evaluate

    def end(*_, **__):
        raise ValueError("far enough")

    monkeypatch.setattr("cukit.models.weights.load_model", end)
    assert cukit_cli.main(["eval", "--memory_limit", "3GB", "--device", "cpu"]) == 2
    assert evaluate and cpu.memory_limit() == 3 * GB


def test_context_bytes_are_one_number():
    from cukit.engine import shapes

    assert shapes.CONTEXT_BYTES == CONTEXT_BYTES
