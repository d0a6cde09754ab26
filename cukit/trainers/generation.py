"""The generation batches of a run: completions are drawn, rewarded, given their advantages and packed."""

from __future__ import annotations

import math

import numpy as np

from ..autograd import no_grad
from ..models.logprobs import packed_logprobs
from .advantage import group_advantages
from .batch import PackedBatch, Rows
from .rewarding import completion_rows, sample_metrics
from .rollout import Samples, pack_samples, prompt_seed

SILENT_BATCHES = 10  # generation batches without any reward after which the user is told


class Generation:
    """What a GRPOTrainer trains on, a generation batch at a time."""

    def __init__(self, trainer):
        self.trainer = trainer
        self._warned_cut, self._silent_batches = False, 0

    def batch(self, number: int) -> tuple[PackedBatch, dict]:
        """Draw and reward the generation batch of this number; returns it, on the device, and its metrics."""
        trainer, args = self.trainer, self.trainer.args
        picked = [trainer.train_rows[i] for i in trainer.sampler.take(args.generation_size // args.num_generations)]
        with trainer.timer("generate"):
            samples = trainer.rollout.generate(
                [ids for _, ids in picked],
                args.sampling_params(n=args.num_generations),
                [prompt_seed(args.seed, number, place) for place in range(len(picked))],
                trainer.raise_if_stopped,
            )
        rows = [picked[group][0] for group in samples.groups]
        with trainer.timer("reward"), trainer.interruptible():
            rewards, by_function = trainer.scorer(rows, samples, trainer.tokenizer)
        sizes = np.bincount(samples.groups, minlength=len(picked))
        advantages, mean, std = group_advantages(rewards, sizes, args.scale_rewards)
        batch = pack_samples(samples, rewards, advantages, args, args.num_slices, number, trainer.model.dtype)
        batch = batch.to(trainer.model.backend)
        if trainer.reference is not None:
            with trainer.timer("reference"):
                batch.ref_logprobs = self._reference_logprobs(batch)
        trainer.num_tokens += sum(map(len, samples.token_ids))
        metrics = sample_metrics(samples) | trainer.scorer.metrics(by_function, rewards, mean, std)
        self._show(rows[: sizes[0]], samples, rewards, by_function, advantages)
        self._warn(samples, rewards)
        return batch, metrics

    def _reference_logprobs(self, batch: PackedBatch):
        """The reference's log-probabilities of the learnt tokens, on the device."""
        reference, args = self.trainer.reference, self.trainer.args
        found = reference.backend.empty(batch.targets.shape, batch.logprobs.dtype)
        with no_grad():
            for first, last in batch.cut(args.max_tokens_per_batch):
                rows = Rows(batch, first, last)
                logprobs, _ = packed_logprobs(reference, rows.tokens, args.temperature)
                rows.of(found)[...] = logprobs.data
        return found

    def _show(self, rows: list[dict], samples: Samples, rewards, by_function, advantages):
        """The first group into completions.jsonl, and its first completion on the screen if that is wanted."""
        trainer, step = self.trainer, self.trainer.global_step + 1
        if trainer.logger is not None:
            shown = completion_rows(rows, samples, trainer.scorer.names, by_function, advantages)
            trainer.logger.log_completions(step, shown)
        if trainer.args.log_completions and step % trainer.args.logging_steps == 0:
            trainer.say(f"prompt {rows[0]['prompt']!r}\ncompletion {samples.texts[0]!r} reward {rewards[0]:g}")

    def _warn(self, samples: Samples, rewards: np.ndarray):
        """Say once what most often makes a run learn nothing: cut-off completions, and a reward that is never given."""
        trainer = self.trainer
        if failed := int(samples.failed.sum()):
            trainer.say(
                f"step {trainer.global_step + 1}: {failed} of {len(samples)} completions failed, since the model's "
                "log-probabilities are not finite; left out"
            )
        if not self._warned_cut and samples.truncated.mean() > 0.5:
            self._warned_cut = True
            trainer.say(
                f"warning: {samples.truncated.mean():.0%} of the completions were cut off at max_completion_length="
                f"{trainer.args.max_completion_length}; raise it unless that is what you want"
            )
        self._silent_batches = self._silent_batches + 1 if not np.any(np.nan_to_num(rewards) != 0) else -math.inf
        if self._silent_batches == SILENT_BATCHES:
            trainer.say(
                f"warning: every reward of the first {SILENT_BATCHES} generation batches was 0; "
                "look at completions.jsonl"
            )
