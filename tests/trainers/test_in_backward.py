"""optimizer_in_bwd: the bits of the ordinary update, gradients that come and go, what is not finite, refusals."""

import logging

import numpy as np
import pytest

from cukit import SFTConfig
from cukit.autograd import Parameter, Tensor, backward, recompute, record, when_done
from cukit.engine.memory import plan_memory
from cukit.engine.shapes import ModelUse, adapted, parameter_counts
from cukit.models.adapter_config import TARGETS, AdapterConfig
from cukit.models.config import LEVELS, ModelConfig
from cukit.models.decoder import Decoder
from cukit.models.logprobs import target_logprobs
from cukit.optim import AdamW
from cukit.trainers import trainer as loop
from cukit.trainers.in_backward import UpdateInBackward

from ..engine.shapes import SHAPE, bytes_of, card, cpu
from .conftest import assert_equal_weights, logged, rows_without_times, weights_of
from .test_lora import LORA, assert_equal_factors

ROWS = [[5, 9, 10, 7, 3], [8, 2], list(range(3, 40))]
FREE = dict(max_grad_norm=0.0, max_tokens_per_batch=4096)


def small(tied=True, dtype="float32", layers=3):
    raw = dict(
        architectures=["Qwen3ForCausalLM"], vocab_size=64, hidden_size=32, intermediate_size=48,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        max_position_embeddings=64, rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=tied,
    )  # fmt: skip
    model = Decoder(ModelConfig.from_json(raw), cpu, dtype)
    model.init_weights(0)
    return model


def loss_of(model):
    logprobs, _ = target_logprobs(model, ROWS, [np.arange(len(row)) > 0 for row in ROWS])
    return logprobs.sum() * -0.1


def bits(model):
    return {name: np.array(view).tobytes() for name, view in model.parts().items()}


def states(optimizer):
    return {name: np.asarray(array).tobytes() for name, array in optimizer.state_dict().items()}


# ---- the bits ----


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", LEVELS)
def test_the_bits_are_those_of_the_ordinary_update(checkpointing, dtype, tied, form):
    found = []
    for in_backward in (False, True):
        model = small(tied, dtype)
        model.gradient_checkpointing = checkpointing
        optimizer, ends = AdamW(model.store, 1e-2, weight_decay=0.1, state_form=form, seed=5), []
        for _ in range(3):
            loss = loss_of(model)
            if in_backward:
                update = UpdateInBackward([(optimizer, 1e-2)])
                with update.updating():
                    loss.backward()
                ends += update.end().values()
            else:
                loss.backward()
                ends.append(optimizer.step())
        assert all(bucket.grad is None for bucket in model.store.buckets)
        found.append((bits(model), states(optimizer), ends, optimizer.step_count, optimizer.skipped))
    assert found[0] == found[1] and found[0][3] == 3


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("frozen", ["embed_tokens", "layers.1", "mlp", "norm"])
def test_frozen_parts_stay(frozen, level):
    found = []
    for in_backward in (False, True):
        model = small()
        model.gradient_checkpointing = level
        for parameter in model.store.parameters:
            parameter.requires_grad = frozen not in parameter.name
        optimizer = AdamW(model.store, 1e-2)
        update = UpdateInBackward([(optimizer, 1e-2)])
        if in_backward:
            with update.updating():
                loss_of(model).backward()
            update.end()
        else:
            loss_of(model).backward()
            optimizer.step()
        found.append(bits(model))
    assert found[0] == found[1]


@pytest.mark.parametrize("level", LEVELS)
def test_two_layers_and_the_embedding_hold_gradients_at_the_most(level):
    model, most, order = small(layers=6), 0, []
    model.gradient_checkpointing = level
    optimizer = AdamW(model.store, 1e-2)
    step_layer = optimizer.step_layer

    def noted(buckets, rate):
        nonlocal most
        held = {bucket.layer for bucket in model.store.buckets if bucket.grad is not None}
        most = max(most, len(held - {"embed_tokens", "norm"}))
        order.append(buckets[0].layer)
        step_layer(buckets, rate)
        assert all(bucket.grad is None for bucket in buckets)

    optimizer.step_layer = noted
    update = UpdateInBackward([(optimizer, 1e-2)])
    with update.updating():
        loss_of(model).backward()
    assert most == 2
    assert order == ["norm", *(f"layers.{index}" for index in reversed(range(6))), "embed_tokens"]


def test_two_models_of_one_pass():
    found = []
    for in_backward in (False, True):
        models = small(), small()
        optimizers = [AdamW(model.store, rate) for model, rate in zip(models, (1e-2, 1e-3))]
        loss = loss_of(models[0]) + loss_of(models[1])
        update = UpdateInBackward([(optimizer, optimizer.lr) for optimizer in optimizers])
        if in_backward:
            with update.updating():
                loss.backward()
            ends = list(update.end().values())
        else:
            loss.backward()
            ends = [optimizer.step() for optimizer in optimizers]
        found.append((bits(models[0]), bits(models[1]), ends))
    assert found[0] == found[1]


# ---- what is not finite ----


def test_a_layer_that_is_not_finite_is_skipped_and_counted():
    model = small(layers=3)
    optimizer = AdamW(model.store, 1e-2)
    before = bits(model)
    step_layer = optimizer.step_layer

    def spoilt(buckets, rate):
        if buckets[0].layer == "layers.1":
            buckets[0].grad[0] = np.nan
        step_layer(buckets, rate)

    optimizer.step_layer = spoilt
    update = UpdateInBackward([(optimizer, 1e-2)])
    with update.updating():
        loss_of(model).backward()
    ((norm, updated),) = update.end().values()
    assert np.isnan(norm) and updated and (optimizer.step_count, optimizer.skipped) == (1, 1)
    for name, part in bits(model).items():
        assert (part == before[name]) == ("layers.1." in name), name


def test_nothing_finite_changes_nothing():
    model = small()
    optimizer = AdamW(model.store, 1e-2)
    model.norm.weight.data[...] = np.nan
    before, held = bits(model), states(optimizer)
    update = UpdateInBackward([(optimizer, 1e-2)])
    with update.updating(), np.errstate(invalid="ignore"):
        loss_of(model).backward()
    ((norm, updated),) = update.end().values()
    assert not np.isfinite(norm) and not updated and (optimizer.step_count, optimizer.skipped) == (0, 1)
    assert bits(model) == before
    assert {name for name, array in states(optimizer).items() if array != held[name]} == {"optimizer.counters"}


# ---- autograd's hook ----


def scaled(x, w):
    """x · w, a weight of one element."""

    def rule(dy):
        w.grad_buffer()[...] += (dy * x.data).sum()
        return dy * w.data, None

    return record(x.data * w.data, (x, w), rule)


def test_a_parameter_is_told_after_the_last_rule_that_names_it():
    a, b = Parameter(np.array([2.0])), Parameter(np.array([3.0]))
    told = []
    x = Tensor(np.array([1.0]), requires_grad=True)
    y = scaled(scaled(scaled(x, a), b), a)
    with when_done(lambda parameter: told.append((parameter, float(parameter.grad[0])))):
        backward([y], [np.array([1.0])])
        assert [(p is a, g) for p, g in told] == [(False, 4.0), (True, 12.0)], "b first, though a stands above it too"
        backward([scaled(x, a)], [np.array([1.0])])
        assert len(told) == 2, "one pass alone"


def test_a_pass_within_a_rule_tells_nothing_of_its_own():
    a, told = Parameter(np.array([2.0])), []
    x = Tensor(np.array([1.0]), requires_grad=True)
    (y,) = recompute(lambda x: (scaled(scaled(x, a), a),), [a], x)
    with when_done(told.append):
        backward([y], [np.array([1.0])])
    assert told == [a] and a.grad == [4.0]


# ---- the trainers ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_has_the_same_bits(make_sft, dtype, make_model):
    runs = [make_sft(model=make_model(dtype), **FREE, optimizer_in_bwd=on) for on in (False, True)]
    for run in runs:
        run.train()
    assert_equal_weights(*runs)
    assert rows_without_times(runs[0].run_folder) == rows_without_times(runs[1].run_folder)
    assert logged(runs[1], "grad_norm")[0] > 0


def test_grpo_and_lora_have_the_same_bits(make_grpo):
    runs = []
    for on in (False, True):
        trainer = make_grpo(**LORA, **FREE, lora_way="merged", optimizer_in_bwd=on, max_steps=3)
        trainer.train()
        runs.append(trainer)
    assert_equal_factors(*runs)
    assert rows_without_times(runs[0].run_folder) == rows_without_times(runs[1].run_folder)


def test_a_run_resumes_bit_for_bit(make_sft, tmp_path):
    options, folder = FREE | dict(optimizer_in_bwd=True, lr_scheduler_type="constant"), tmp_path / "cut"
    make_sft(**options, max_steps=2, output_dir=str(folder)).train()
    again = make_sft(**options, max_steps=4, output_dir=str(folder))
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    straight = make_sft(**options, max_steps=4)
    straight.train()
    assert_equal_weights(again, straight)


def test_several_passes_are_the_ordinary_update_and_are_said_once(make_sft, caplog, monkeypatch):
    monkeypatch.setattr("cukit.options._said", set())
    with caplog.at_level(logging.WARNING):
        runs = [make_sft(max_grad_norm=0.0, max_tokens_per_batch=16, optimizer_in_bwd=on) for on in (False, True)]
        for run in runs:
            run.train()
    assert_equal_weights(*runs)
    lines = {record.message for record in caplog.records if "keeps its gradients" in record.message}
    assert lines and all("max_tokens_per_batch" in line for line in lines)


def test_what_an_error_leaves_half_done_is_not_saved(make_sft, monkeypatch):
    trainer = make_sft(**FREE, optimizer_in_bwd=True, save_steps=100)
    steps, original = [], AdamW.step_layer

    def fails(self, buckets, rate):
        if trainer.global_step == 1 and buckets[0].layer == "layers.0":
            raise RuntimeError("in the middle")
        steps.append(buckets[0].layer)
        original(self, buckets, rate)

    monkeypatch.setattr(AdamW, "step_layer", fails)
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer.train()
    assert not list(trainer.run_folder.glob("checkpoint-*")) and "layers.0" in steps


def test_clipping_and_float16_are_refused(make_sft, make_model):
    with pytest.raises(ValueError, match=r"max_grad_norm=1 cannot clip it: give max_grad_norm=0 too"):
        SFTConfig(optimizer_in_bwd=True)
    trainer = make_sft(model=make_model("float16"), **FREE, optimizer_in_bwd=True)
    before = weights_of(trainer.model)
    with pytest.raises(ValueError, match="goes without a loss scale, which float16 needs"):
        trainer.train()
    assert all(np.array_equal(view, before[name]) for name, view in weights_of(trainer.model).items())


# ---- the plan ----


def test_the_plan_counts_two_layers_and_a_vocabulary():
    numbers, vocabulary = sum(parameter_counts(SHAPE)), SHAPE.vocab_size * SHAPE.hidden_size
    layer = -(-(numbers - vocabulary) // 28)

    def gradients(use, **more):
        plan = plan_memory([use], None, card(), max_tokens_per_batch=64, **{"micro_batches": 1} | more)
        return bytes_of(plan, "weights' gradients")

    use = ModelUse("policy", SHAPE, "bfloat16", True, updated_in_backward=True)
    assert gradients(use) == 4 * (vocabulary + 2 * layer) < gradients(ModelUse("policy", SHAPE, "bfloat16", True))
    assert gradients(use, micro_batches=2) == 4 * numbers
    lora = adapted(use, AdapterConfig(32, 64, TARGETS), "beside")
    assert gradients(lora) == pytest.approx(4 * 2 * lora.adapter_parameters / 28, abs=4)


def test_the_trainers_plan_knows(make_sft, monkeypatch):
    seen = []

    def planned(uses, *more, **sizes):
        seen.extend(uses)
        return plan_memory(uses, *more, **sizes)

    monkeypatch.setattr(loop, "plan_memory", planned)
    for on in (True, False):
        make_sft(**FREE, optimizer_in_bwd=on)
    assert [use.updated_in_backward for use in seen] == [True, False]
