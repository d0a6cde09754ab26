"""lora_base_on_host: what it reaches, that no bit of a run differs, what the planner makes of it."""

import numpy as np
import pytest

from cukit import SFTConfig
from cukit.engine.shapes import ModelUse, adapted, training_items, weight_bytes
from cukit.models.adapter_config import TARGETS, AdapterConfig
from cukit.models.adapters import WithoutAdapter

from ..engine.shapes import GB, SHAPE, bytes_of, card
from .conftest import logged, rows_without_times
from .test_lora import LORA, assert_equal_factors, scores

MERGED = LORA | dict(lora_way="merged", lora_base_on_host=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_bit_of_a_run_differs(make_grpo, dtype):
    """With a reference model, for which the base comes back, and an engine that samples from the merged copies."""
    runs = []
    for on_host in (False, True):
        trainer = make_grpo(**MERGED | dict(lora_base_on_host=on_host), beta=0.1, max_steps=3, dtype=dtype)
        trainer.train()
        runs.append(trainer)
    there = runs[1].model.adapter
    assert there.base is not None and runs[0].model.adapter.base is None
    assert_equal_factors(*runs)
    assert [rows_without_times(run.run_folder) for run in runs][0] == rows_without_times(runs[1].run_folder)
    assert logged(runs[1], "kl")[0] < 1e-6 < logged(runs[1], "kl")[-1]


def test_the_reference_is_the_base(make_grpo, make_model):
    trainer = make_grpo(**MERGED, beta=0.1, max_steps=2)
    trainer.train()
    assert isinstance(trainer.reference, WithoutAdapter)
    assert all(map(np.array_equal, scores(trainer.reference), scores(make_model())))


def test_a_run_resumes_bit_for_bit(make_sft, tmp_path):
    options, folder = MERGED | dict(lr_scheduler_type="constant"), tmp_path / "cut"
    make_sft(**options, max_steps=2, output_dir=str(folder)).train()
    again = make_sft(**options, max_steps=4, output_dir=str(folder))
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    straight = make_sft(**options, max_steps=4)
    straight.train()
    assert_equal_factors(again, straight)


def test_beside_is_refused():
    with pytest.raises(ValueError, match="lora_base_on_host=true needs lora_way=merged"):
        SFTConfig(use_peft=True, lora_base_on_host=True)
    with pytest.raises(ValueError, match="without use_peft there is no use for lora_base_on_host, lora_way"):
        SFTConfig(lora_way="merged", lora_base_on_host=True)


def test_the_plan_holds_each_weight_once():
    config = AdapterConfig(32, 64, TARGETS)
    use = ModelUse("policy", SHAPE, "bfloat16", trained=True)
    beside, merged = adapted(use, config, "beside"), adapted(use, config, "merged")
    outside = adapted(use, config, "merged", True)
    layers = sum(outs * ins for outs, ins in ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))) * 28
    be = card()
    assert weight_bytes(merged, be) - weight_bytes(outside, be) == 2 * layers
    assert weight_bytes(outside, be) == weight_bytes(beside, be)
    assert outside.base_on_host and training_items([outside], be, 1024, "full", 2, 1)


def test_the_plan_counts_what_a_pass_without_the_adapter_takes(make_sft, monkeypatch):
    from cukit.engine.memory import plan_memory

    use = adapted(ModelUse("policy", SHAPE, "bfloat16", True), AdapterConfig(32, 64, TARGETS), "merged", True)
    plan = plan_memory([use], None, card(80 * GB), max_tokens_per_batch=4096)
    assert bytes_of(plan, "two weights of the base, from the host") == 2 * 2 * 6144 * 1024


def test_the_trainers_plan_knows(make_sft):
    once, twice = (make_sft(**MERGED | dict(lora_base_on_host=on_host)).plan for on_host in (True, False))
    assert bytes_of(once, "weights in") < bytes_of(twice, "weights in")
