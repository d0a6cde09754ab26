"""PPO by hand: from the samples of a rollout, their scores and the models alone to a mini-batch's loss and gradients, a
row and a token at a time.
"""

from dataclasses import dataclass

import numpy as np

from cukit.autograd import no_grad
from cukit.models.attend import PackedCausal
from cukit.models.logprobs import positions_in
from cukit.ops import index_rows, lm_head_logprobs

from .by_hand import order_of
from .test_wires import noisy


def shake(model, seed, size=0.1):
    rng = np.random.default_rng(seed)
    for parameter in model.parameters():
        parameter.data[...] += size * rng.normal(size=parameter.shape)


def hidden_states(model, ids):
    borders = np.array([0, len(ids)], np.int32)
    return model.forward(ids, positions_in(borders), PackedCausal(borders))


@dataclass
class Row:
    """What is known of a completion before the first update; each array has a number for each token the model drew."""

    ids: np.ndarray
    drawn: np.ndarray  # their places in ids
    score: float
    old: np.ndarray
    ref: np.ndarray | None
    values: np.ndarray
    after: float  # the value that the row goes on with
    rewards: np.ndarray | None = None
    advantages: np.ndarray | None = None
    returns: np.ndarray | None = None


def logprobs_and_values(trainer, model, ids, drawn):
    """Tensors (log-probs, entropies, values) of the drawn tokens by the models as they are now."""
    states = hidden_states(model, ids)
    before = index_rows(states, (drawn - 1).astype(np.int32))
    now, entropy = lm_head_logprobs(before, model.lm_head.weight, ids[drawn], trainer.args.temperature,
                                    trainer.tokenizer.vocab_size)  # fmt: skip
    if trainer.args.critic == "separate":
        before = index_rows(hidden_states(trainer.critic, ids), (drawn - 1).astype(np.int32))
    return now, entropy, trainer.critic.scores(before)


def rows_of(trainer, samples, scores, kl_coef=None):
    """{place: Row} of the samples that have a score, with rewards, advantages and returns."""
    args, found = trainer.args, {}
    kl_coef = args.kl_coef if kl_coef is None else kl_coef
    with no_grad():
        for place, ids in enumerate(samples.token_ids):
            length = samples.prompt_lengths[place]
            drawn = length + (
                np.flatnonzero(samples.masks[place]) if samples.masks is not None else np.arange(len(ids) - length)
            )
            if np.isnan(scores[place]) or not len(drawn):
                continue
            _, _, values = logprobs_and_values(trainer, trainer.model, ids, drawn)
            ref = None
            if trainer.reference is not None:
                ref = logprobs_and_values(trainer, trainer.reference, ids, drawn)[0].data
            after = 0.0
            if args.bootstrap_truncated and samples.finish_reasons[place] == "length":
                trunk = trainer.critic if args.critic == "separate" else trainer.model
                after = trainer.critic.scores(hidden_states(trunk, ids)).data[-1]
            old = samples.logprobs[place].astype(np.float64)
            found[place] = Row(ids, drawn, scores[place], old, ref, values.data, after)
    rows = list(found.values())
    for row in rows:
        row.rewards = np.zeros(len(row.old))
        if row.ref is not None:
            x = row.ref - row.old
            row.rewards = -kl_coef * {"k1": -x, "k3": np.exp(x) - x - 1}[args.kl_estimator]
        row.rewards[-1] += row.score
    if args.whiten_rewards:
        whiten(rows, "rewards", shift_mean=False)
    for row in rows:
        following, advantage, row.advantages = row.after, 0.0, np.zeros(len(row.old))
        for t in reversed(range(len(row.old))):
            advantage = row.rewards[t] + args.gamma * following - row.values[t] + args.gamma * args.lam * advantage
            row.advantages[t], following = advantage, row.values[t]
        row.returns = row.advantages + row.values
    if args.whiten_advantages:
        whiten(rows, "advantages", shift_mean=True)
    return found


def whiten(rows, name, shift_mean):
    every = np.concatenate([getattr(row, name) for row in rows])
    mean, deviation = every.mean(), np.sqrt(every.var(ddof=1) + 1e-8)
    for row in rows:
        setattr(row, name, (getattr(row, name) - mean) / deviation + (0 if shift_mean else mean))


def token_loss(args, row, now, entropy, value):
    """(losses, d/dlogprob, d/dvalue) of a row's tokens, not yet weighted."""
    losses, dlogps, dvalues = (np.zeros(len(now)) for _ in range(3))
    high = args.cliprange if args.cliprange_high is None else args.cliprange_high
    for t, advantage in enumerate(row.advantages):
        ratio = np.exp(now[t] - row.old[t])
        plain, clipped = -advantage * ratio, -advantage * min(max(ratio, 1 - args.cliprange), 1 + high)
        loss, dlogps[t] = (plain, plain) if plain >= clipped else (clipped, 0.0)
        if args.dual_clip is not None and advantage < 0 and loss > -args.dual_clip * advantage:
            loss, dlogps[t] = -args.dual_clip * advantage, 0.0
        if args.beta:
            x = row.ref[t] - now[t]
            loss += args.beta * (np.exp(x) - x - 1)
            dlogps[t] += args.beta * (1 - np.exp(x))
        error, bound = value[t] - row.returns[t], args.cliprange_value
        worst, dvalues[t] = error**2 / 2, args.vf_coef * error
        if bound is not None:
            held = row.values[t] + min(max(value[t] - row.values[t], -bound), bound)
            if (held - row.returns[t]) ** 2 / 2 > worst:
                worst, dvalues[t] = (held - row.returns[t]) ** 2 / 2, 0.0
        losses[t] = loss + args.vf_coef * worst - args.entropy_coef * entropy[t]
    return losses, dlogps, dvalues


def gradients(trainer):
    """{model/parameter: gradient}, which are then cleared."""
    found = {}
    for name, trained in trainer.models.items():
        for key, parameter in trained.model.named_parameters().items():
            found[f"{name}/{key}"] = np.zeros(parameter.shape) if parameter.grad is None else parameter.grad.copy()
            parameter.zero_grad()
    return found


def loss_by_hand(trainer, rows):
    """(loss, gradients) of a mini-batch of these Rows by the models as they are now."""
    args, total, tokens = trainer.args, 0.0, sum(len(row.old) for row in rows)
    for row in rows:
        now, entropy, value = logprobs_and_values(trainer, trainer.model, row.ids, row.drawn)
        losses, dlogps, dvalues = token_loss(args, row, now.data, entropy.data, value.data)
        total += losses.sum() / tokens
        bonus = entropy * np.full(len(losses), -args.entropy_coef / tokens)
        ((now * (dlogps / tokens)).sum() + (value * (dvalues / tokens)).sum() + bonus.sum()).backward()
    return total, gradients(trainer)


def first_rollout(trainer):
    """(samples, micro-batches, metrics) of the first optimizer batch; sampler, reference, critic are off by noise."""
    kept = noisy(trainer)
    shake(trainer.critic, 1)
    if trainer.reference is not None:
        shake(trainer.reference, 2)
    parts, metrics = trainer.make_batch(0)
    return kept[0], parts, metrics


def loss_of_run(trainer, parts):
    """(loss, gradients) by the trainer."""
    total = 0.0
    for part in parts:
        loss, _ = trainer.compute_loss(part)
        total += loss.item()
        loss.backward()
    return total, gradients(trainer)


def both(trainer, score):
    """((loss, gradients) of the run, the same by hand) of its first mini-batch, after the models have moved.

    score(args, samples) -> (rows,)
    """
    samples, parts, _ = first_rollout(trainer)
    rows = rows_of(trainer, samples, score(trainer.args, samples))
    batch = parts[0].batch
    chosen = order_of(samples, batch)[: batch.slices[1]]
    shake(trainer.model, 3, 0.02)
    shake(trainer.critic, 4)
    return loss_of_run(trainer, parts), loss_by_hand(trainer, [rows[place] for place in chosen])
