"""Every option that changes numbers reaches them: a run with it differs from a run without it, and where a number can
be had by hand the run's is that one.
"""

import math
from itertools import pairwise

import numpy as np
import pytest

from cukit.models.logprobs import token_logprobs
from cukit.optim import AdamW

from .conftest import logged, share_of_ones, weights_of

# ---- the loss of one optimizer batch ----


def noisy(trainer, size=0.4):
    """The sampler's log-probs are off by noise, so that ratios differ from 1; returns where its samples are kept."""
    generate, kept = trainer.rollout.generate, []

    def broken(*arguments):
        samples, rng = generate(*arguments), np.random.default_rng(0)
        samples.logprobs = [x + np.float32(size) * rng.normal(size=len(x)).astype(np.float32) for x in samples.logprobs]
        kept.append(samples)
        return samples

    trainer.rollout.generate = broken
    return kept


def first_loss(trainer):
    """(the trainer's loss of its first batch, its samples); the reference is another model than the policy."""
    kept = noisy(trainer)
    if trainer.reference is not None:
        rng = np.random.default_rng(1)
        for parameter in trainer.reference.parameters():
            parameter.data[...] += 0.1 * rng.normal(size=parameter.shape)
    parts, _ = trainer.make_batch(0)
    return sum(trainer.compute_loss(part)[0].item() for part in parts), kept[0]


def advantages_by_hand(args, rewards):
    groups = rewards.reshape(-1, args.num_generations)
    centred = groups - groups.mean(axis=1, keepdims=True)
    if args.scale_rewards == "group":
        centred = centred / (groups.std(axis=1, ddof=1, keepdims=True) + 1e-4)
    elif args.scale_rewards == "batch":
        centred = centred / (rewards.std(ddof=1) + 1e-4)
    return centred.ravel()


def loss_by_hand(trainer, samples, rewards):
    """The formulas of TRL's documentation, a row at a time."""
    args, total, tokens, row_means = trainer.args, 0.0, 0, []
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high

    def logprobs_of(model, ids, length):
        return token_logprobs(model, [ids], args.temperature, trainer.tokenizer.vocab_size)[0][length - 1 :]

    for row, advantage in enumerate(advantages_by_hand(args, rewards)):
        if args.mask_truncated_completions and samples.finish_reasons[row] != "stop":
            row_means.append(0.0)
            continue
        ids, length = samples.token_ids[row], samples.prompt_lengths[row]
        new, old = logprobs_of(trainer.model, ids, length), samples.logprobs[row].astype(np.float64)
        log_ratio = new - old
        if args.importance_sampling_level == "sequence":
            log_ratio = np.full_like(log_ratio, log_ratio.mean())
        ratio = np.exp(log_ratio)
        if args.loss_type == "cispo":
            loss = -np.minimum(ratio, high) * advantage * new
        else:
            first = np.minimum(ratio, math.inf if args.delta is None else args.delta) * advantage
            loss = -np.minimum(first, np.clip(ratio, 1 - args.epsilon, 1 + high) * advantage)
        if args.beta:
            x = logprobs_of(trainer.reference, ids, length) - new
            kl = np.exp(x) - x - 1
            loss = loss + args.beta * (kl * ratio if args.use_bias_correction_kl else kl)
        total, tokens = total + loss.sum(), tokens + len(loss)
        row_means.append(loss.mean())
    if args.loss_type == "grpo":
        return np.mean(row_means)
    return total / (len(row_means) * args.max_completion_length if args.loss_type == "dr_grpo" else tokens)


LONG = dict(max_completion_length=40)  # so that some completions stop and others are cut
LOSS_OPTIONS = [  # (options, what they are compared with)
    (dict(epsilon=0.05), {}),
    (dict(epsilon_high=0.6), {}),
    (dict(delta=1.05), {}),
    (dict(beta=0.3), {}),
    (dict(beta=0.3, use_bias_correction_kl=True), dict(beta=0.3)),
    (dict(importance_sampling_level="sequence"), {}),
    (dict(importance_sampling_level="sequence", beta=0.3, use_bias_correction_kl=True), dict(beta=0.3)),
    (dict(loss_type="grpo") | LONG, LONG),
    (dict(loss_type="dr_grpo") | LONG, LONG),
    (dict(loss_type="dr_grpo", max_completion_length=41), dict(loss_type="dr_grpo") | LONG),
    (dict(loss_type="cispo", epsilon_high=1.1), {}),
    (dict(loss_type="cispo", epsilon_high=1.5), dict(loss_type="cispo", epsilon_high=1.1)),
    (dict(loss_type="bnpo", scale_rewards="none"), dict(loss_type="bnpo")),
    (dict(scale_rewards="batch"), {}),
    (dict(scale_rewards="none"), {}),
    (dict(scale_rewards=False), {}),
    (dict(mask_truncated_completions=True) | LONG, LONG),
    (dict(mask_truncated_completions=True, loss_type="grpo") | LONG, dict(loss_type="grpo") | LONG),
    (dict(temperature=0.7, beta=0.3), dict(beta=0.3)),
    (dict(num_generations=8), {}),
]


def name_of(value):
    return ",".join(f"{name}={x}" for name, x in value.items()) or "default"


@pytest.mark.parametrize("options, without", LOSS_OPTIONS, ids=name_of)
def test_options_of_the_loss(make_grpo, options, without):
    trainer = make_grpo(dtype="float64", **options)
    loss, samples = first_loss(trainer)
    rewards = np.array(share_of_ones(samples.texts))
    assert loss == pytest.approx(loss_by_hand(trainer, samples, rewards), rel=1e-9, abs=1e-12)
    other, _ = first_loss(make_grpo(dtype="float64", **without))
    assert abs(loss - other) > 1e-6


def test_reward_weights(make_grpo):
    def length(completion_ids, **_):
        return [len(ids) / 6 for ids in completion_ids]

    losses = []
    for weights in (None, [1.0, 1.0], [0.3, 2.0]):
        trainer = make_grpo([share_of_ones, length], "float64", reward_weights=weights)
        loss, samples = first_loss(trainer)
        ones, lengths = np.array(share_of_ones(samples.texts)), samples.lengths / 6
        rewards = ones * (weights or [1, 1])[0] + lengths * (weights or [1, 1])[1]
        assert loss == pytest.approx(loss_by_hand(trainer, samples, rewards), rel=1e-9)
        losses.append(loss)
    assert losses[0] == losses[1] != losses[2]


# ---- what is drawn ----

SAMPLING_OPTIONS = [
    dict(temperature=0.3),
    dict(top_p=0.3),
    dict(top_k=3),
    dict(min_p=0.5),
    dict(repetition_penalty=3.0),
    dict(max_completion_length=3),
    dict(seed=7),
    dict(shuffle_dataset=False),
    dict(num_generations=8),
]


@pytest.mark.parametrize("options", SAMPLING_OPTIONS, ids=name_of)
def test_options_of_sampling(make_grpo, options):
    drawn = []
    for given in ({}, options):
        trainer = make_grpo(**given)
        kept = noisy(trainer, 0.0)
        trainer.make_batch(0)
        drawn.append(kept[0].completion_ids)
    assert drawn[0] != drawn[1]


# ---- the update ----


@pytest.fixture
def recorded(monkeypatch):
    """[(gradients, loss scale)] of every update from now on, as the optimizer got them: {parameter: array}."""
    found, step = [], AdamW.step

    def spy(self, *arguments, **keywords):
        found.append(({name: p.grad.copy() for name, p in spy.model.named_parameters().items()}, self.loss_scale))
        return step(self, *arguments, **keywords)

    monkeypatch.setattr(AdamW, "step", spy)
    found_spy = spy
    found.clear()
    return found, lambda model: setattr(found_spy, "model", model)


def rate_by_hand(args, step, total):
    """The learning rate of update `step`, from 0."""
    warmup = args.warmup_steps or math.ceil(args.warmup_ratio * total)
    kind, progress = args.lr_scheduler_type, (step - warmup) / max(1, total - warmup)
    if kind != "constant" and step < warmup:
        return args.learning_rate * (step + 1) / warmup
    shapes = {"linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return args.learning_rate * shapes.get(kind, 1.0)


def adamw_by_hand(args, weights, gradients):
    """Weights after AdamW (Loshchilov & Hutter 2019) with clipping as torch does; decay on matrices only."""
    weights = {name: value.astype(np.float64) for name, value in weights.items()}
    first = {name: np.zeros_like(value) for name, value in weights.items()}
    second = {name: np.zeros_like(value) for name, value in weights.items()}
    for step, (grads, scale) in enumerate(gradients):
        grads = {name: grad.astype(np.float64) / scale for name, grad in grads.items()}
        norm = math.sqrt(sum((grad**2).sum() for grad in grads.values()))
        clip = min(1.0, args.max_grad_norm / (norm + 1e-6)) if args.max_grad_norm else 1.0
        rate = rate_by_hand(args, step, len(gradients))
        for name, grad in grads.items():
            first[name] = args.adam_beta1 * first[name] + (1 - args.adam_beta1) * clip * grad
            second[name] = args.adam_beta2 * second[name] + (1 - args.adam_beta2) * (clip * grad) ** 2
            mean, square = (
                first[name] / (1 - args.adam_beta1 ** (step + 1)),
                second[name] / (1 - args.adam_beta2 ** (step + 1)),
            )
            decay = args.weight_decay if weights[name].ndim > 1 else 0.0
            weights[name] = weights[name] - rate * (
                mean / (np.sqrt(square) + args.adam_epsilon) + decay * weights[name]
            )
    return weights


UPDATE_OPTIONS = [  # (options, what they are compared with)
    (dict(learning_rate=3e-3), {}),
    (dict(max_grad_norm=1e-3, adam_epsilon=1e-2), dict(adam_epsilon=1e-2)),
    (dict(max_grad_norm=0.0, adam_epsilon=1e-2), dict(max_grad_norm=1e-3, adam_epsilon=1e-2)),
    (dict(adam_beta1=0.5), {}),
    (dict(adam_beta2=0.5), {}),
    (dict(adam_epsilon=1e-2), {}),
    (dict(weight_decay=0.5), {}),
    (dict(lr_scheduler_type="linear"), {}),
    (dict(lr_scheduler_type="cosine"), {}),
    (dict(lr_scheduler_type="linear", warmup_steps=3), dict(lr_scheduler_type="linear")),
    (dict(lr_scheduler_type="constant_with_warmup", warmup_steps=4), {}),
    (dict(lr_scheduler_type="cosine", warmup_ratio=0.5), dict(lr_scheduler_type="cosine")),
    (dict(gradient_accumulation_steps=2), {}),
    (dict(num_iterations=2), {}),
    (dict(steps_per_generation=2), {}),
    (dict(per_device_train_batch_size=8), {}),
]


def biased_model(make_model, dtype="float64"):
    """With biases that are not 0, so that a decay on them shows."""
    model = make_model(dtype, architectures=["Qwen2ForCausalLM"], model_type="qwen2")  # its q, k, v have biases
    rng = np.random.default_rng(2)
    for name, parameter in model.named_parameters().items():
        if name.endswith("bias"):
            parameter.data[...] = rng.normal(size=parameter.shape)
    return model


def dense(completion_ids, **_):
    """A reward that hardly ever is the same twice, so that each update has something to learn."""
    return [sum(ids) % 101 / 101 for ids in completion_ids]


@pytest.mark.parametrize("options, without", UPDATE_OPTIONS, ids=name_of)
def test_options_of_the_update(make_grpo, make_model, recorded, options, without):
    """Four updates; the weights are those of AdamW by hand on the gradients that the optimizer got."""
    gradients, watch = recorded
    ends = []
    for given in (options, without):
        trainer = make_grpo(dense, model=biased_model(make_model), max_steps=4, **given)
        gradients.clear()
        watch(trainer.model)
        before = weights_of(trainer.model)
        trainer.train()
        expected = adamw_by_hand(trainer.args, before, gradients)
        assert len(gradients) == 4 and any(name.endswith("bias") for name in before)
        after = weights_of(trainer.model)
        for name, value in expected.items():
            np.testing.assert_allclose(after[name], value, rtol=0, atol=1e-10, err_msg=name)
        rates = [rate_by_hand(trainer.args, step, 4) for step in range(4)]
        assert logged(trainer, "learning_rate") == pytest.approx(rates)
        ends.append(after)
    assert max(np.abs(value - ends[1][name]).max() for name, value in ends[0].items()) > 1e-6


def test_how_often_a_generation_is_drawn(make_grpo):
    """4 updates: one generation each, or one for num_iterations × (steps_per_generation / accumulation) of them."""
    for options, expected in (
        (dict(), 4),
        (dict(num_iterations=2), 2),
        (dict(steps_per_generation=4), 1),
        (dict(steps_per_generation=4, gradient_accumulation_steps=2), 2),
        (dict(generation_batch_size=32), 2),
    ):
        trainer = make_grpo(max_steps=4, **options)
        kept = noisy(trainer, 0.0)
        trainer.train()
        assert len(kept) == expected, options


def test_the_loss_scale_of_float16(make_grpo, make_model, recorded):
    """The backward pass gets the scaled loss, the update the gradient without the scale."""
    gradients, watch = recorded
    options = dict(max_steps=1, max_grad_norm=0.0, adam_epsilon=1e-3)
    found = {}
    for dtype in ("float16", "float32"):
        trainer = make_grpo(dense, model=biased_model(make_model, dtype), **options)
        gradients.clear()
        watch(trainer.model)
        samples = noisy(trainer, 0.0)
        if found:  # the same completions, as float16 drew them
            trainer.rollout.generate = lambda *arguments, kept=found["samples"]: kept
        before = weights_of(trainer.model)
        trainer.train()
        (grads, scale), after = gradients[0], weights_of(trainer.model)
        assert scale == (65536 if dtype == "float16" else 1)
        expected = adamw_by_hand(trainer.args, before, gradients)
        for name, value in expected.items():
            np.testing.assert_allclose(after[name].astype(np.float64), value, rtol=1e-3, atol=1e-5, err_msg=name)
        unscaled = np.concatenate([grads[name].ravel().astype(np.float64) / scale for name in sorted(grads)])
        found |= {dtype: unscaled} | ({"samples": samples[0]} if samples else {})
        assert logged(trainer, "grad_norm")[0] == pytest.approx(np.linalg.norm(unscaled), rel=1e-3)
    half, single = found["float16"], found["float32"]
    assert np.linalg.norm(half - single) < 0.05 * np.linalg.norm(single)


def test_the_reference_moves_towards_the_policy(make_grpo):
    """Every second step: reference = 0.7 · policy + 0.3 · reference."""
    trainer = make_grpo(
        dtype="float64", beta=0.1, sync_ref_model=True, ref_model_mixup_alpha=0.7, ref_model_sync_steps=2, max_steps=4
    )
    seen = [(weights_of(trainer.model), weights_of(trainer.reference))]
    trainer.callbacks.append(
        type(
            "Watch",
            (),
            {"on_step_end": lambda *_: seen.append((weights_of(trainer.model), weights_of(trainer.reference)))},
        )()
    )
    trainer.train()
    for step, ((_, before), (policy, after)) in enumerate(pairwise(seen), 1):
        for name, value in after.items():
            expected = 0.7 * policy[name] + 0.3 * before[name] if step % 2 == 0 else before[name]
            np.testing.assert_allclose(value, expected, rtol=0, atol=1e-12, err_msg=f"{step} {name}")
