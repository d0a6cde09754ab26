"""The generation batches of GRPO: groups of completions, their advantages, and which of them are trained on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..autograd import no_grad
from ..models.logprobs import batches_by_tokens, target_logprobs
from .advantage import estimate, group_advantages, token_weights
from .batch import PackedBatch
from .correction import importance_correction
from .dynamic_sampling import Replacements
from .generation import Drawn, Generation
from .rewarding import nan_mean, sample_metrics
from .rollout import Samples, pack_samples, prompt_seed, shuffled_slices
from .shaping import kl_of_rows, shaped
from .shared_rollouts import joined


class GroupGeneration(Generation):
    """What a GRPOTrainer trains on, a generation batch at a time."""

    def batch(self, number: int) -> tuple[PackedBatch | None, dict]:
        trainer, args = self.trainer, self.trainer.args
        data_rows, drawn, kept, metrics = self._draw_groups(number)
        samples, rewards = drawn.samples, drawn.rewards
        _, mean, std = group_advantages(rewards, np.bincount(samples.groups), args.scale_rewards)
        metrics |= sample_metrics(samples) | trainer.scorer.metrics(drawn.by_function, rewards, mean, std)
        if args.curriculum != "none":
            for place, row in enumerate(data_rows):
                trainer.sampler.observe(row, mean[place], std[place])
            metrics |= trainer.sampler.metrics()
        if not trainer.ranks.trains:
            return None, metrics
        if kept is not None:
            drawn = drawn.chosen(np.flatnonzero(np.isin(samples.groups, kept)))
        sizes = np.unique(drawn.samples.groups, return_counts=True)[1]
        advantages, drawn.rewards = self._advantages(drawn, sizes, metrics)
        batch = pack_groups(drawn.samples, drawn.rewards, advantages, args, number, trainer.model.dtype)
        batch = batch.to(trainer.model.backend)
        if args.loss_options.kl_in_loss:
            with trainer.timer("reference"):
                batch.ref_logprobs = self.logprobs_by(trainer.reference, batch)
        if args.vllm_importance_sampling_correction:
            with trainer.timer("old_logprobs"):
                self._correct(batch)
        self.show(drawn, sizes[0], advantages)
        return batch, metrics

    def _draw_groups(self, number: int) -> tuple[list[int], Drawn, np.ndarray | None, dict]:
        """(data row of each group, completions, groups to train on or None, metrics)."""
        trainer, args = self.trainer, self.trainer.args
        data_rows = trainer.sampler.take(args.prompts_a_generation)
        if not args.dynamic_sampling:
            found = self.answered(number, data_rows, range(len(data_rows)))
            return data_rows, self.rewarded(data_rows, *found), None, {}

        def score(places, samples):
            return self.score([data_rows[place] for place in places], samples)

        def one_more():
            data_rows.extend(trainer.sampler.take(1))
            return trainer.train_rows[data_rows[-1]][1], prompt_seed(args.seed, number, len(data_rows) - 1)

        most = len(data_rows) * args.max_num_gen_batches
        replacements = Replacements(len(data_rows), most, score, one_more)
        if trainer.ranks.several:
            samples = self._draw_in_rounds(number, data_rows, replacements)
        else:
            samples = self.complete(number, data_rows, range(len(data_rows)), replacements)
        samples.recorded = replacements.recorded()
        drawn = self.rewarded(data_rows, samples, *replacements.scores())
        return data_rows, drawn, replacements.kept(), replacements.metrics(samples)

    def _draw_in_rounds(self, number: int, data_rows: list[int], replacements: Replacements) -> Samples:
        """Several ranks replace groups after all of a round have ended, so that they agree on what is drawn next. The
        prompts, and so the completions, are those that one rank draws.
        """
        drawn, first = [], 0
        while first < len(data_rows):
            places = range(first, len(data_rows))
            samples, *found = self.answered(number, data_rows, places)
            replacements.score = lambda *_, found=found: found
            replacements(places, samples)  # adds to data_rows
            drawn.append(replace(samples, groups=samples.groups + first))
            first = places.stop
        return joined(drawn)

    def _advantages(self, drawn: Drawn, sizes, metrics: dict) -> tuple[np.ndarray, np.ndarray]:
        """(advantages, rewards with every penalty), (rows,) each; adds to the metrics what the penalties were."""
        args, samples = self.trainer.args, drawn.samples
        kl = self._kl_of_rows(samples, metrics) if args.use_kl_in_reward else None
        values, weights = shaped(drawn.by_function, self.trainer.scorer.weights, samples, args, kl)
        advantages, penalised = estimate(values, weights, sizes, samples.lengths, args.advantage_options)
        if values is not drawn.by_function:
            metrics["reward_penalty"] = nan_mean(penalised - drawn.rewards)
        return advantages, penalised

    def _correct(self, batch: PackedBatch) -> None:
        """Make the trainer's log-probabilities the old ones, and weigh each token by their ratio to the sampler's."""
        args, backend = self.trainer.args, self.trainer.model.backend
        batch.sampled = batch.logprobs
        batch.logprobs = self.logprobs_by(self.trainer.model, batch)
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
        lengths = list(map(len, samples.token_ids))
        own = samples.rows(np.arange(*trainer.ranks.training.share(lengths)))
        with trainer.timer("reference"):
            parts = trainer.ranks.training.each(lambda: self._reference_logprobs(own), "reference")
        found = [logprobs for part in parts for logprobs in part]
        kl = kl_of_rows(samples, found, args.loss_options.estimates_kl_by)
        metrics["kl"] = float(kl[~samples.failed].sum() / max(samples.lengths[~samples.failed].sum(), 1))
        return kl

    def _reference_logprobs(self, samples: Samples) -> list[np.ndarray]:
        """Of the tokens of each completion, without those that an environment wrote."""
        reference, args, found = self.trainer.reference, self.trainer.args, []
        with no_grad():
            for part in batches_by_tokens(list(map(len, samples.token_ids)), args.max_tokens_per_batch):
                rows = samples.rows(part)
                wanted = np.split(rows.drawn, np.cumsum(list(map(len, rows.token_ids)))[:-1])
                logprobs, _ = target_logprobs(reference, rows.token_ids, wanted, args.temperature)
                found += np.split(reference.backend.to_numpy(logprobs.data), np.cumsum(rows.lengths)[:-1])
        return found


def pack_groups(samples: Samples, rewards, advantages, args, generation: int, dtype) -> PackedBatch:
    """The generation batch as training takes it; args: GRPOConfig.

    Rows that failed, and cut ones if mask_truncated_completions says so, are no part of it: nothing computes with them,
    and the loss counts them as empty rows.
    """
    counted = ~samples.failed & ~(samples.truncated & args.mask_truncated_completions)
    dtype = np.float64 if dtype == np.float64 else np.float32
    has_gradient = (advantages.astype(dtype) != 0) | args.loss_options.all_rows_learn
    lengths, weights = samples.lengths, np.zeros(len(samples))
    slices = shuffled_slices(len(samples), args.num_slices, args.seed, generation)
    for part in slices:
        if len(part):
            learnt = np.where(counted, lengths, 0)[part]
            weights[part] = token_weights(args.loss_type, learnt, args.loss_scale_factor or args.max_completion_length)
    slices = [part[counted[part]] for part in slices]
    columns = {"weights": weights, "advantages": advantages}
    return pack_samples(samples, slices, rewards, has_gradient, dtype, columns)
