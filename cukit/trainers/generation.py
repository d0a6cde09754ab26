"""The generation batches of a run: completions are drawn, rewarded, given their advantages and packed."""

from __future__ import annotations

import math

import numpy as np

from ..autograd import no_grad
from ..models.logprobs import batches_by_tokens, packed_logprobs, target_logprobs
from .advantage import estimate, group_advantages
from .batch import PackedBatch, Rows
from .correction import importance_correction
from .dynamic_sampling import Replacements
from .rewarding import completion_rows, nan_mean, sample_metrics
from .rollout import Samples, pack_samples, prompt_seed
from .shaping import kl_of_rows, shaped

SILENT_BATCHES = 10  # generation batches without any reward after which the user is told


class Generation:
    """What a GRPOTrainer trains on, a generation batch at a time."""

    def __init__(self, trainer):
        self.trainer = trainer
        self._warned_cut, self._silent_batches = False, 0

    def batch(self, number: int) -> tuple[PackedBatch, dict]:
        """Draw and reward the generation batch of this number; returns it, on the device, and its metrics."""
        trainer, args = self.trainer, self.trainer.args
        data_rows, samples, rewards, by_function, kept, metrics = self._draw(number)
        rows = [trainer.train_rows[data_rows[group]][0] for group in samples.groups]
        _, mean, std = group_advantages(rewards, np.bincount(samples.groups), args.scale_rewards)
        metrics |= sample_metrics(samples) | trainer.scorer.metrics(by_function, rewards, mean, std)
        if args.curriculum != "none":
            for place, row in enumerate(data_rows):
                trainer.sampler.observe(row, mean[place], std[place])
            metrics |= trainer.sampler.metrics()
        trainer.num_tokens += sum(map(len, samples.token_ids))
        self._warn(samples, rewards)
        if kept is not None:
            chosen = np.flatnonzero(np.isin(samples.groups, kept))
            rows, samples = [rows[place] for place in chosen], samples.rows(chosen)
            rewards, by_function = rewards[chosen], by_function[chosen]
        sizes = np.unique(samples.groups, return_counts=True)[1]
        advantages, rewards = self._advantages(samples, rewards, by_function, sizes, metrics)
        batch = pack_samples(samples, rewards, advantages, args, args.num_slices, number, trainer.model.dtype)
        batch = batch.to(trainer.model.backend)
        if args.loss_options.kl_in_loss:
            with trainer.timer("reference"):
                batch.ref_logprobs = self._logprobs_by(trainer.reference, batch)
        if args.vllm_importance_sampling_correction:
            with trainer.timer("old_logprobs"):
                self._correct(batch)
        self._show(rows[: sizes[0]], samples, rewards, by_function, advantages)
        return batch, metrics

    def _draw(self, number: int) -> tuple:
        """(data row of each group, samples, rewards, rewards by function, groups to train on or None, metrics)."""
        trainer, args = self.trainer, self.trainer.args
        data_rows = trainer.sampler.take(args.prompts_a_generation)

        def score(places, samples):
            rows = [trainer.train_rows[data_rows[places[group]]][0] for group in samples.groups]
            with trainer.timer("reward"), trainer.interruptible():
                return trainer.scorer(rows, samples, trainer.tokenizer)

        def one_more():
            data_rows.extend(trainer.sampler.take(1))
            return trainer.train_rows[data_rows[-1]][1], prompt_seed(args.seed, number, len(data_rows) - 1)

        most = len(data_rows) * args.max_num_gen_batches
        replacements = Replacements(len(data_rows), most, score, one_more) if args.dynamic_sampling else None
        with trainer.timer("generate"):
            samples = trainer.rollout.generate(
                [trainer.train_rows[row][1] for row in data_rows],
                args.sampling_params(n=args.num_generations),
                [prompt_seed(args.seed, number, place) for place in range(len(data_rows))],
                trainer.raise_if_stopped,
                replacements,
                lambda place: trainer.train_rows[data_rows[place]][0],
            )
        if replacements is None:
            return data_rows, samples, *score(range(len(data_rows)), samples), None, {}
        samples.recorded = replacements.recorded()
        return data_rows, samples, *replacements.scores(), replacements.kept(), replacements.metrics(samples)

    def _advantages(self, samples: Samples, rewards, by_function, sizes, metrics: dict):
        """(advantages, rewards with every penalty), (rows,) each; adds to the metrics what the penalties were."""
        args = self.trainer.args
        kl = self._kl_of_rows(samples, metrics) if args.use_kl_in_reward else None
        values, weights = shaped(by_function, self.trainer.scorer.weights, samples, args, kl)
        advantages, penalised = estimate(values, weights, sizes, samples.lengths, args.advantage_options)
        if values is not by_function:
            metrics["reward_penalty"] = nan_mean(penalised - rewards)
        return advantages, penalised

    def _logprobs_by(self, model, batch: PackedBatch):
        """A model's log-probabilities of the learnt tokens, on the device."""
        args = self.trainer.args
        found = model.backend.empty(batch.targets.shape, batch.logprobs.dtype)
        with no_grad():
            for first, last in batch.cut(args.max_tokens_per_batch):
                rows = Rows(batch, first, last)
                logprobs, _ = packed_logprobs(model, rows.tokens, args.temperature)
                rows.of(found)[...] = logprobs.data
        return found

    def _correct(self, batch: PackedBatch):
        """Make the trainer's log-probabilities the old ones, and weigh each token by their ratio to the sampler's."""
        args, backend = self.trainer.args, self.trainer.model.backend
        batch.sampled = batch.logprobs
        batch.logprobs = self._logprobs_by(self.trainer.model, batch)
        old, sampled = (backend.to_numpy(x).astype(np.float64) for x in (batch.logprobs, batch.sampled))
        corrections = importance_correction(
            old - sampled,
            batch.cu_learnt,
            args.vllm_importance_sampling_mode,
            args.vllm_importance_sampling_clip_min,
            args.vllm_importance_sampling_clip_max,
        )
        batch.corrections = backend.array(corrections.astype(batch.weights.dtype))

    def _kl_of_rows(self, samples: Samples, metrics: dict) -> np.ndarray:
        """(rows,): each completion's KL to the reference; its mean over the tokens goes into the metrics."""
        trainer, args = self.trainer, self.trainer.args
        reference, found = trainer.reference, []
        with trainer.timer("reference"), no_grad():
            for part in batches_by_tokens(list(map(len, samples.token_ids)), args.max_tokens_per_batch):
                rows = samples.rows(part)
                wanted = [np.arange(len(ids)) >= n for ids, n in zip(rows.token_ids, rows.prompt_lengths, strict=True)]
                logprobs, _ = target_logprobs(reference, rows.token_ids, wanted, args.temperature)
                found += np.split(reference.backend.to_numpy(logprobs.data), np.cumsum(rows.lengths)[:-1])
        kl = kl_of_rows(samples, found, args.loss_options.estimates_kl_by)
        metrics["kl"] = float(kl[~samples.failed].sum() / max(samples.lengths[~samples.failed].sum(), 1))
        return kl

    def _show(self, rows: list[dict], samples: Samples, rewards, by_function, advantages):
        """The first group into completions.jsonl, and its first completion on the screen if that is wanted."""
        trainer, step = self.trainer, self.trainer.global_step + 1
        if trainer.logger is not None:
            shown = completion_rows(rows, samples, trainer.scorer.names, by_function, advantages, trainer.tokenizer)
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
