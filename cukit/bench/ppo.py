"""bench ppo: one PPO update of policy and critic (log-probs, values, PPO's loss, backward, AdamW) on random tokens.

What a trainer does once for each mini-batch and epoch of a rollout. Old log-probs and values are the model's own with
noise, so that some ratios leave the clip range; advantages and returns are random.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np

from ..autograd import Tensor, no_grad
from ..models.decoder import Decoder
from ..models.logprobs import predicting_states
from ..models.value_head import ValueHead
from ..ops import ppo_loss
from ..optim import AdamW
from ..trainers.batch import PackedBatch, Rows
from ..trainers.loss import backward, first_gradient
from . import PPOBench
from .levels import level_for
from .measure import memory_in_use, peak_memory, seconds_of
from .report import new_report
from .subject import Subject, build_model, check_length, choose_subject, scale_of, scaled

ROWS, TOKENS_PER_ROW, COMPLETION = 64, 2048, 1536
WARM_UP = 2  # updates: kernels are compiled, products compared, pools filled
LEARNING_RATE, LARGEST_NORM, NOISE = 1e-6, 1.0, 0.1
LOSS = dict(eps_low=0.2, eps_high=0.2, vf_coef=0.1, cliprange_value=0.2, entropy_coef=0.01)


class Learners:
    """Policy and critic, and an optimizer each. A separate critic has passes of its own, as in PPOTrainer."""

    def __init__(self, options: PPOBench, subject: Subject):
        self.policy = policy = build_model(subject, options.seed)
        if options.critic == "separate":
            self.critic = Decoder(subject.config, subject.backend, subject.dtype, head="score")
            self.critic.init_weights(options.seed + 1)
        else:
            self.critic = ValueHead(policy.backend, policy.dtype, policy.config.hidden_size)
            self.critic.score.init_weights(options.seed + 1)  # zeros would give the policy's trunk no gradient of it
        decoders = [model for model in (policy, self.critic) if isinstance(model, Decoder)]
        level = level_for(options.gradient_checkpointing, decoders, options.max_tokens_per_batch, 2)
        for model in decoders:
            model.gradient_checkpointing = level
        stores = policy.store, self.critic.store
        self.optimizers = [AdamW(store, LEARNING_RATE, max_grad_norm=LARGEST_NORM) for store in stores]

    def forward(self, rows: Rows):
        """(log-probs, entropies, values) of the learnt tokens, Tensors (N,)."""
        tokens = rows.tokens
        hidden = predicting_states(self.policy, tokens)
        logprobs, entropies = self.policy.lm_head.logprobs(hidden, tokens.targets)
        if isinstance(self.critic, Decoder):
            hidden = predicting_states(self.critic, tokens)
        return logprobs, entropies, self.critic.scores(hidden)

    def _policy_loss(self, rows: Rows, upstream):
        """With the value loss of a shared critic."""
        hidden, shared = predicting_states(self.policy, rows.tokens), not isinstance(self.critic, Decoder)
        values = self.critic.scores(hidden) if shared else Tensor(rows.values)
        settings = LOSS if shared else LOSS | {"vf_coef": 0.0}

        def loss_of(logprobs, entropies, part):
            own = rows.part(part)
            old = own.logprobs, own.values, None, own.advantages, own.returns, own.weights
            known = values if part is None else Tensor(values.data[part])
            return ppo_loss(logprobs, known, entropies, *old, **settings)

        return self.policy.lm_head.loss(hidden, rows.targets, loss_of, upstream)[0]

    def _critic_loss(self, rows: Rows, upstream):
        values, known = self.critic.scores(predicting_states(self.critic, rows.tokens)), Tensor(rows.logprobs)
        old = rows.logprobs, rows.values, None, rows.advantages * 0, rows.returns, rows.weights
        return ppo_loss(known, values, known, *old, **LOSS | {"entropy_coef": 0.0})[0]

    def update(self, parts: list[Rows]) -> None:
        policy, critic = self.optimizers
        critic.loss_scale = policy.loss_scale  # float16: one backward pass has one scale
        passes = [self._policy_loss, self._critic_loss] if isinstance(self.critic, Decoder) else [self._policy_loss]
        for loss_of in passes:
            for rows in parts:
                upstream = first_gradient(self.policy, policy.loss_scale)
                backward(loss_of(rows, upstream), upstream)
        for optimizer in self.optimizers:
            optimizer.step()


def make_parts(options: PPOBench, subject: Subject, scale: float, forward: Callable) -> list[Rows]:
    """The micro-batches of random rows, with every column that the loss reads. forward: as Learners has it."""
    rows = options.rows or scaled(ROWS, scale)
    length = options.tokens_per_row or max(2, scaled(TOKENS_PER_ROW, scale))
    completion = options.completion or scaled(COMPLETION, scale)
    if completion >= length:
        raise ValueError(
            f"completion={completion} must be below tokens_per_row={length}: nothing precedes a row's first token"
        )
    check_length(subject, length, "lower --tokens_per_row or --scale")
    generator, backend = np.random.default_rng(options.seed), subject.backend
    tokens = generator.integers(0, subject.config.vocab_size, (rows, length))
    batch = PackedBatch.build(list(tokens), np.tile(np.arange(length) >= length - completion, rows)).to(backend)
    parts = batch.micro_batches(0, options.max_tokens_per_batch)
    with no_grad():
        own = [[backend.to_numpy(column.data) for column in forward(rows)] for rows in parts]
    logprobs, _, values = (np.concatenate(columns) for columns in zip(*own))
    noise = generator.standard_normal((4, len(values)), values.dtype)
    values += NOISE * noise[1]
    batch.logprobs, batch.values = backend.array(logprobs + NOISE * noise[0]), backend.array(values)
    batch.advantages, batch.returns = backend.array(noise[2]), backend.array(values + noise[3])
    batch.weights = backend.array(np.full(len(values), 1 / len(values), values.dtype))
    return parts


def run(options: PPOBench) -> dict:
    """The report: one row. Two updates before are not timed, nor is the last, which gives the peak of memory."""
    subject = choose_subject(options)
    before = memory_in_use(subject.backend)
    scale = scale_of(options, subject)
    learners = Learners(options, subject)
    parts = make_parts(options, subject, scale, learners.forward)
    report = new_report("ppo", subject, options) | {"scale": scale}
    row = {
        "critic": options.critic,
        "gradient_checkpointing": learners.policy.gradient_checkpointing,
        "tokens": parts[0].batch.num_tokens,
        "completion_tokens": sum(rows.num_learnt for rows in parts),
        "micro_batches": len(parts),
    }
    report["rows"].append(row | _measure(options, subject, row["tokens"], before, lambda: learners.update(parts)))
    if skipped := sum(optimizer.skipped for optimizer in learners.optimizers):  # such an update took less time
        report["rows"][0]["note"] = f"{skipped} updates skipped: gradient not finite"
    return report


def _measure(options: PPOBench, subject: Subject, tokens: int, before: int, update: Callable[[], None]) -> dict:
    for _ in range(WARM_UP):
        update()
    samples = [seconds_of(subject.backend, update) for _ in range(options.repeats)]
    seconds = statistics.median(samples)
    return {
        "seconds": seconds,
        "least_seconds": min(samples),
        "most_seconds": max(samples),
        "all_seconds": samples,
        "tokens_per_s": tokens / seconds,
        "peak_gb": peak_memory(subject.backend, update, before) / 1e9,
        "note": "peak of the process" if subject.backend.name == "cpu" else "",
    }
