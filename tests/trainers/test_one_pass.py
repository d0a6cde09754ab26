"""Runs with the head's loss in one pass and in two: weights and metrics are the same bits, and each loss takes the way
that is its own.
"""

import numpy as np
import pytest

from cukit.models import heads
from cukit.trainers.grpo import GRPOTrainer
from cukit.trainers.sft import SFTTrainer

from .conftest import logged, rows_without_times, weights_of
from .test_custom_loss import FILE
from .test_lora import LORA
from .test_wires import dense, name_of, noisy

CHUNK = 7  # rows of logits at a time, so that a pass has many chunks


@pytest.fixture
def ways(monkeypatch):
    """[which pass each loss with a gradient took]; ways.forced = True: all of them take two."""

    class Ways(list):
        forced = False

    found, original = Ways(), heads.lm_head_loss

    def noted(hidden, weight, targets, loss_of, upstream=None, *options, **more):
        if hidden.requires_grad:
            found.append("two" if upstream is None else "one")
        given = None if found.forced else upstream
        return original(hidden, weight, targets, loss_of, given, *options, chunk_rows=CHUNK, **more)

    monkeypatch.setattr(heads, "lm_head_loss", noted)
    return found


def states(trainer):
    """Every weight and moment at the end."""
    arrays = {}
    for name, one in trainer.models.items():
        arrays |= {f"{name}.{key}": value for key, value in weights_of(one.model).items()}
        arrays |= {f"{name}.{key}": np.array(value) for key, value in one.optimizer.state_dict().items()}
    if trainer.model.adapter is not None:
        arrays |= {f"adapter.{key}": np.array(value) for key, value in trainer.model.adapter.parts().items()}
    return arrays


def check_same(make, ways, expected="one"):
    """make() -> a trainer. Its run is the same bits in one pass as in two; `expected`: the way of its own."""
    ends = []
    for ways.forced in (False, True):
        ways.clear()
        trainer = make()
        before = states_of_weights(trainer)
        trainer.train()
        assert set(ways) == {expected}
        moved = any(not np.array_equal(x, before[name]) for name, x in states_of_weights(trainer).items())
        assert moved, "otherwise the test sees nothing"
        ends.append((states(trainer), rows_without_times(trainer.run_folder)))
    (first, metrics), (second, other) = ends
    assert first.keys() == second.keys()
    for name, x in first.items():
        assert x.tobytes() == second[name].tobytes(), name
    assert repr(metrics) == repr(other)  # NaN too


def states_of_weights(trainer):
    model = trainer.model
    parts = weights_of(model) if model.adapter is None else model.adapter.parts()
    return {name: np.array(x) for name, x in parts.items()}


def noisy_grpo(make_grpo, make_model, dtype="float32", reward=dense, **options):
    trainer = make_grpo(reward, model=make_model(dtype), **options)
    noisy(trainer)
    if trainer.reference is not None:
        for parameter in trainer.reference.parameters():
            parameter.data[...] *= 1.1
    return trainer


GRPO = [
    dict(),
    dict(epsilon=0.05, epsilon_high=0.3, delta=1.1),
    dict(loss_type="grpo", beta=0.3, kl_estimator="k1"),
    dict(loss_type="dr_grpo", beta=0.3, kl_estimator="k2", use_bias_correction_kl=True),
    dict(loss_type="bnpo", beta=0.3),
    dict(loss_type="cispo", epsilon_high=1.2, temperature=0.7),
    dict(loss_type="sapo", max_tokens_per_batch=60),
    dict(entropy_coef=0.1, beta=0.1),
    dict(use_adaptive_entropy=True, entropy_coef=0.1, entropy_target=9.0, max_steps=3),
    dict(top_entropy_quantile=0.3, entropy_coef=0.1, max_tokens_per_batch=60),
    dict(vllm_importance_sampling_correction=True, vllm_importance_sampling_mode="sequence_truncate"),
    dict(num_iterations=2, steps_per_generation=2, max_steps=4),
    dict(gradient_accumulation_steps=2, gradient_checkpointing=True),
    dict(mask_truncated_completions=True, max_completion_length=40),
]


@pytest.mark.parametrize("options", GRPO, ids=name_of)
def test_grpo(make_grpo, make_model, ways, options):
    check_same(lambda: noisy_grpo(make_grpo, make_model, **options), ways)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("options", [GRPO[0], GRPO[7]], ids=name_of)
def test_grpo_in_other_types(make_grpo, make_model, ways, options, dtype):
    """float16 scales its loss by 65,536."""
    check_same(lambda: noisy_grpo(make_grpo, make_model, dtype, **options), ways)


TWO = [
    dict(importance_sampling_level="sequence", loss_type="grpo"),
    dict(importance_sampling_level="sequence_token"),
    dict(loss_type="vespo"),
    dict(off_policy_mask_threshold=0.02),
    dict(loss=f"{FILE}:policy_loss"),
]


@pytest.mark.parametrize("options", TWO, ids=name_of)
def test_what_needs_sequences_or_is_a_users_takes_two_passes(make_grpo, make_model, ways, options):
    trainer = noisy_grpo(make_grpo, make_model, **options)
    trainer.train()
    assert set(ways) == {"two"}


class Own(GRPOTrainer):
    """A loss in which each token's term depends on all others."""

    def policy_loss(self, logprobs, rows):
        total = (logprobs * rows.weights).sum()
        return total * total, {}


def test_a_subclass_with_a_loss_of_its_own_takes_two_passes(make_grpo, ways):
    trainer = make_grpo(dense)
    trainer.__class__ = Own
    trainer.train()
    assert set(ways) == {"two"}


def test_a_loss_that_is_put_in_place_takes_two_passes(make_grpo, ways):
    by_method, by_function = make_grpo(dense), make_grpo(dense)
    by_method.policy_loss = lambda logprobs, rows: Own.policy_loss(by_method, logprobs, rows)
    by_function.loss_function = lambda logprobs, rows, args: Own.policy_loss(by_function, logprobs, rows)
    by_method.train()
    by_function.train()
    assert set(ways) == {"two"}


def test_outside_of_a_step_a_loss_takes_two_passes(make_grpo, ways):
    """A caller of compute_loss may multiply what comes back."""
    trainer = make_grpo(dense)
    for part in trainer.make_batch(0)[0]:
        trainer.compute_loss(part)[0].backward()
    assert set(ways) == {"two"} and trainer.upstream is None
    trainer.train()
    assert "one" in ways and trainer.upstream is None


class Doubled(SFTTrainer):
    def compute_loss(self, rows):
        loss, extra = super().compute_loss(rows)
        return loss * 2.0, extra


def test_a_compute_loss_of_a_users_own_takes_two_passes(make_sft, make_model, ways):
    """It may multiply the loss, or leave it."""
    norms = []
    for cls in (SFTTrainer, Doubled):
        ways.clear()
        trainer = make_sft(cls=cls, model=make_model("float64"), max_steps=1)
        trainer.train()
        assert set(ways) == {"two" if cls is Doubled else "one"}
        norms += logged(trainer, "grad_norm")
    assert norms[1] == pytest.approx(2 * norms[0])
    spied = make_sft(max_steps=1)
    spied.compute_loss = lambda rows: SFTTrainer.compute_loss(spied, rows)
    ways.clear()
    spied.train()
    assert set(ways) == {"two"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("tied", [True, False])
def test_sft(make_sft, make_model, ways, dtype, tied):
    """Tied: the head's gradient goes into the embedding's, before the embedding's own."""
    make = lambda: make_sft(model=make_model(dtype, tie_word_embeddings=tied), max_tokens_per_batch=40)  # noqa: E731
    check_same(make, ways)


def test_sft_evaluates_as_before(make_sft, ways):
    rows = [{"prompt": "1=", "completion": "1"}, {"prompt": "2+2=", "completion": "4"}]
    check_same(lambda: make_sft(evaluate=rows, eval_strategy="steps", eval_steps=2), ways)


@pytest.mark.parametrize("way", ["beside", "merged"])
def test_an_adapter_under_a_frozen_head(make_sft, make_model, ways, way):
    check_same(lambda: make_sft(model=make_model("bfloat16"), **LORA | dict(lora_way=way)), ways)


PPO = [
    dict(critic="shared"),
    dict(critic="separate"),
    dict(critic="shared", kl_coef=0.4, beta=0.2, entropy_coef=0.1, vf_coef=2.0, max_tokens_per_batch=60),
    dict(critic="separate", beta=0.2, entropy_coef=0.1, dual_clip=1.1, cliprange_value=0.02, temperature=0.7),
    dict(critic="shared", critic_warmup_steps=1, num_mini_batches=2, num_ppo_epochs=2, max_steps=4),
    dict(critic="separate", critic_warmup_steps=1, max_steps=3, gradient_checkpointing=True),
]


@pytest.mark.parametrize("options", PPO, ids=name_of)
def test_ppo(make_ppo, make_model, ways, options):
    def make():
        trainer = make_ppo(dense, model=make_model("float32"), **options)
        noisy(trainer)
        return trainer

    check_same(make, ways)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_ppo_in_other_types(make_ppo, make_model, ways, dtype):
    check_same(lambda: make_ppo(dense, model=make_model(dtype), critic="shared", entropy_coef=0.1), ways)


def test_a_policy_that_waits_for_its_critic_gets_no_gradient(make_ppo, ways):
    trainer = make_ppo(dense, critic="shared", critic_warmup_steps=9)
    before = weights_of(trainer.model)
    trainer._accumulate(trainer.make_batch(0)[0])
    assert not ways and trainer.model.lm_head.weight.grad is None
    trainer.train()
    assert all(np.array_equal(x, before[name]) for name, x in weights_of(trainer.model).items())


def test_a_run_makes_the_logits_of_a_step_once(make_sft, monkeypatch, ways):
    """Two passes make them twice. The accuracy of sft looks at the logits that are there."""
    rows = []  # that were multiplied with the head, in one pass and in two
    for ways.forced in (False, True):
        trainer = make_sft(max_steps=1)
        backend, head = trainer.model.backend, trainer.model.lm_head.weight.data
        forward, learnt = backend.linear_forward, []

        def counted(x, w, *more, forward=forward, head=head, learnt=learnt):
            learnt.append(len(x) if w is head else 0)
            return forward(x, w, *more)

        with monkeypatch.context() as patch:
            patch.setattr(backend, "linear_forward", counted)
            trainer.train()
        rows.append(sum(learnt))
    whole = trainer._pack([example for row in trainer.train_rows for example in row])
    assert rows == [rows[0], 2 * rows[0]] and 0 < rows[0] < len(whole.targets)


@pytest.mark.parametrize("forced", [False, True])
def test_a_loss_that_is_not_finite_skips_the_update(make_sft, ways, monkeypatch, forced):
    """Although its gradient would be finite."""
    ways.forced, trainer, noted = forced, make_sft(), heads.lm_head_loss
    before = weights_of(trainer.model)

    def infinite(*arguments, **more):
        loss, *rest = noted(*arguments, **more)
        return loss + float("inf"), *rest

    monkeypatch.setattr(heads, "lm_head_loss", infinite)
    with pytest.raises(ValueError, match="every update of this run .* was skipped"):
        trainer.train()
    assert set(ways) == {"one"} and logged(trainer, "grad_norm") == [None] * 4
    assert all(np.array_equal(x, before[name]) for name, x in weights_of(trainer.model).items())
