"""Training with an engine that rounds its weights or its cache: correction is on, the mismatch is logged."""

import logging

import numpy as np
import pytest

from cukit import GRPOConfig, PPOConfig
from cukit.options import changed, given_values
from cukit.runs.metrics import read_jsonl


def logged(trainer, name):
    rows = read_jsonl(trainer.run_folder / "metrics.jsonl")
    return [row[name] for row in rows if name in row]


@pytest.mark.parametrize(
    "options, mismatch", [({}, 1e-4), ({"quantization": "int8"}, 0.0), ({"quantization": "fp8"}, 0.0)]
)
def test_the_mismatch_is_measured_and_updates_reach_the_engine(make_grpo, options, mismatch):
    """Weights move by a lot in a step; if the engine kept old copies, the difference would grow with them."""
    trainer = make_grpo(max_steps=6, learning_rate=3e-2, **options)
    trainer.train()
    found = logged(trainer, "sampling/sampling_logp_difference/mean")
    assert len(found) == 6
    if not options:
        assert max(found) < mismatch
        return
    assert min(found) > 1e-4
    limit = {"int8": 0.02, "fp8": 0.1}[options["quantization"]]
    assert max(found) < limit
    assert trainer.args.vllm_importance_sampling_correction


def test_old_copies_would_be_seen(make_grpo, monkeypatch):
    """The test above, broken: an engine that does not follow updates is further away than its rounding."""
    from cukit.models.quantized import QuantizedWeights

    trainer = make_grpo(max_steps=6, learning_rate=3e-2, quantization="int8")
    trainer.rollout.llm.generate([[1, 2]])  # the copies are made now
    monkeypatch.setattr(QuantizedWeights, "refresh", lambda self: None)
    trainer.train()
    assert max(logged(trainer, "sampling/sampling_logp_difference/mean")) > 0.3


def test_an_adapter_trains_with_rounded_rollouts(make_grpo):
    for way in ("beside", "merged"):
        trainer = make_grpo(
            max_steps=4, learning_rate=3e-2, quantization="int8", use_peft=True, lora_r=4, lora_way=way,
            lora_target_modules=["all-linear"],
        )  # fmt: skip
        trainer.train()
        assert 1e-4 < max(logged(trainer, "sampling/sampling_logp_difference/mean")) < 0.05
        factors = trainer.model.adapter.parts()
        assert any(np.abs(view).max() > 0 for name, view in factors.items() if ".lora_B." in name)


def test_correction_is_on_unless_it_was_given(caplog, monkeypatch):
    monkeypatch.setattr("cukit.options._said", set())
    caplog.set_level(logging.WARNING)
    name = "vllm_importance_sampling_correction"
    assert not getattr(GRPOConfig(), name)
    args = GRPOConfig(quantization="int8")
    assert getattr(args, name) and name not in args.given
    line = (
        "quantization=int8: completions come from other numbers than training's, so vllm_importance_sampling_correction"
    )
    assert line in caplog.text
    assert not getattr(GRPOConfig(quantization="int8", **{name: False}), name)
    assert not getattr(GRPOConfig(quantization="int8", loss_type="vespo"), name), "vespo weighs by that ratio itself"
    assert not getattr(changed(args, quantization=None), name)
    assert type(args)(**given_values(args)) == args
    with pytest.raises(ValueError, match="needs a bound"):
        GRPOConfig(quantization="int8", vllm_importance_sampling_clip_max=None)


def test_a_rounded_cache_counts_as_rounding(make_grpo):
    trainer = make_grpo(kv_cache_dtype="fp8")
    trainer.train()
    assert trainer.args.vllm_importance_sampling_correction
    assert 1e-4 < max(logged(trainer, "sampling/sampling_logp_difference/mean")) < 0.1


@pytest.mark.parametrize("config", [GRPOConfig, PPOConfig])
def test_exact_refuses_rounding(config):
    with pytest.raises(ValueError, match="exact=true cannot be kept with quantization=int8"):
        config(quantization="int8", exact="true")
    with pytest.raises(ValueError, match="exact=true cannot be kept with kv_cache_dtype=fp8"):
        config(kv_cache_dtype="fp8", exact="true")
