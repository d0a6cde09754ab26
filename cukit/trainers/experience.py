"""The rollouts of PPO: completions, their scores, each token's reward and value, advantages and returns.

After the batch is on its device nothing a token crosses to the host: rewards, advantages and returns are columns there.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np

from ..autograd import no_grad
from .advantage import group_advantages
from .batch import FINISH_REASONS, PackedBatch, Rows
from .generation import Drawn, Generation
from .rewarding import sample_metrics
from .rollout import Samples, pack_samples

SHOWN = 8  # completions of a rollout in completions.jsonl


class Experience(Generation):
    """What a PPOTrainer trains on, a rollout at a time."""

    def __init__(self, trainer):
        super().__init__(trainer)
        self.kl_coef = trainer.args.kl_coef
        self.episodes = 0  # completions drawn so far
        self.scores = RunningMoments()
        self._begun: tuple[float, int] | None = None  # when this process drew its first rollout, and episodes till then

    def batch(self, number: int) -> tuple[PackedBatch | None, dict]:
        trainer, args = self.trainer, self.trainer.args
        self._begun = self._begun or (time.perf_counter(), self.episodes)
        drawn = self.draw(number)
        samples, rewards = drawn.samples, drawn.rewards
        self.episodes += len(samples)
        _, mean, std = group_advantages(rewards, len(rewards), "none")
        metrics = sample_metrics(samples) | trainer.scorer.metrics(drawn.by_function, rewards, mean, std)
        metrics |= {"val/num_eos_tokens": int((~samples.truncated).sum())}
        if not trainer.ranks.trains:
            return None, metrics
        scores = self._scores(drawn)
        batch = pack_rollout(samples, scores, args, number, trainer.model.dtype).to(trainer.model.backend)
        if trainer.needs_reference:
            with trainer.timer("reference"):
                batch.ref_logprobs = self.logprobs_by(trainer.reference, batch)
        with trainer.timer("values"):
            bootstrap = self._value(batch)
        metrics |= self._estimate(batch, bootstrap)
        self._move_kl_coef(metrics.get("objective/kl"), len(batch))
        self.show(drawn, SHOWN)
        return batch, metrics

    def _scores(self, drawn: Drawn) -> np.ndarray:
        """(rows,): what the last token of each completion gets; NaN where the completion is left out: one
        without a reward, or that failed.
        """
        args, samples, scores = self.trainer.args, drawn.samples, drawn.rewards
        if args.normalize_rewards:
            self.scores.add(scores[~np.isnan(scores)])
            scores = self.scores.normalized(scores)
        if args.reward_clip is not None:
            scores = np.clip(scores, -args.reward_clip, args.reward_clip)
        if args.missing_eos_penalty is not None:
            scores = scores - args.missing_eos_penalty * samples.truncated
        return scores

    def _value(self, batch: PackedBatch):
        """Fill batch.values; returns the value after the last token of each row (B,): 0 for a row that ended, and for
        all without bootstrap_truncated.
        """
        trainer, args, backend = self.trainer, self.trainer.args, self.trainer.model.backend
        batch.values = backend.empty(batch.targets.shape, batch.weights.dtype)
        after = backend.zeros((len(batch),), batch.weights.dtype)
        cut_off = batch.finish_reasons == FINISH_REASONS.index("length")
        ranks, borders = trainer.ranks.training, trainer.ranks.training.borders(batch.lengths)
        with no_grad():
            for first, last in batch.cut(args.max_tokens_per_batch, *borders[ranks.rank : ranks.rank + 2]):
                rows = Rows(batch, first, last)
                tokens, count = rows.tokens, rows.num_learnt
                if args.bootstrap_truncated:
                    tokens = replace(tokens, predictors=backend.array(_with_ends(batch, first, last)))
                values = trainer.values(tokens).data
                rows.of(batch.values)[...] = values[:count]
                if args.bootstrap_truncated:
                    after[first:last] = values[count:] * backend.array(cut_off[first:last].astype(after.dtype))
        ranks.fill(batch.values, batch.cu_learnt[borders], backend)
        ranks.fill(after, borders, backend)
        return after

    def _estimate(self, batch: PackedBatch, bootstrap) -> dict:
        """Fill batch.advantages and batch.returns; metrics of the rollout."""
        args, backend = self.trainer.args, self.trainer.model.backend
        borders = Rows(batch, 0, len(batch)).cu_learnt
        scores = backend.array(batch.rewards.astype(batch.weights.dtype))
        columns = batch.logprobs, batch.ref_logprobs
        kl = -backend.token_rewards(*columns, scores * 0, borders, 1.0, args.kl_estimator).sum()
        rewards = backend.token_rewards(*columns, scores, borders, self.kl_coef, args.kl_estimator)
        if args.whiten_rewards:
            rewards = backend.whiten(rewards, shift_mean=False)
        advantages, batch.returns = backend.gae(rewards, batch.values, bootstrap, borders, args.gamma, args.lam)
        batch.advantages = backend.whiten(advantages) if args.whiten_advantages else advantages
        if not len(batch):
            return {"kl_coef": self.kl_coef}
        found = {"kl": kl, "logprobs": batch.logprobs.sum(), "values": batch.values.mean()}
        found |= {"unexplained": (batch.returns - batch.values).var(), "returns": batch.returns.var()}
        sums = {name: float(backend.to_numpy(value)) for name, value in found.items()}
        score, penalty = float(batch.rewards.mean()), -self.kl_coef * sums["kl"] / len(batch)
        metrics = {
            "objective/scores": score,
            "objective/non_score_reward": penalty,
            "objective/rlhf_reward": score + penalty,
            "objective/entropy": -sums["logprobs"] / len(batch),
            "critic/values": sums["values"],
            "critic/explained_variance": 1 - sums["unexplained"] / sums["returns"] if sums["returns"] else math.nan,
            "kl_coef": self.kl_coef,
        }
        return metrics | ({"objective/kl": sums["kl"] / len(batch)} if batch.ref_logprobs is not None else {})

    def _move_kl_coef(self, kl: float | None, count: int) -> None:
        """The adaptive controller of Ziegler et al. 2019, section 2.2."""
        args = self.trainer.args
        if args.kl_target is not None and kl is not None and math.isfinite(kl):
            error = min(max(kl / args.kl_target - 1, -0.2), 0.2)
            self.kl_coef *= 1 + error * count / args.kl_horizon

    def progress(self) -> dict:
        """TRL's episode (completions drawn so far) and eps (of them a second, in this process)."""
        begun, before = self._begun or (0.0, 0)
        return {"episode": self.episodes, "eps": (self.episodes - before) / (time.perf_counter() - begun)}

    def state(self) -> dict:
        """What a checkpoint needs, as JSON values."""
        return {"kl_coef": self.kl_coef, "episodes": self.episodes, "scores": self.scores.state()}

    def load(self, state: dict) -> None:
        """Take back what state() gave."""
        self.kl_coef, self.episodes = state["kl_coef"], state["episodes"]
        self.scores = RunningMoments(*state["scores"])


class RunningMoments:
    """Mean and variance of all numbers so far, a batch at a time (Chan et al. 1979)."""

    def __init__(self, count: int = 0, mean: float = 0.0, squares: float = 0.0):
        self.count, self.mean, self.squares = count, mean, squares

    def add(self, values: np.ndarray) -> None:
        """values (n,), all finite."""
        if not len(values):
            return
        mean, total = float(values.mean()), self.count + len(values)
        distance = mean - self.mean
        self.squares += float(np.square(values - mean).sum()) + distance**2 * self.count * len(values) / total
        self.mean += distance * len(values) / total
        self.count = total

    def normalized(self, values: np.ndarray) -> np.ndarray:
        """(values − mean) / standard deviation (with n − 1); equal numbers become 0."""
        deviation = math.sqrt(self.squares / max(self.count - 1, 1))
        return (values - self.mean) / deviation if deviation else values * 0

    def state(self) -> list:
        return [self.count, self.mean, self.squares]


def pack_rollout(samples: Samples, scores: np.ndarray, args, rollout: int, dtype) -> PackedBatch:
    """The rollout as training takes it; args: PPOConfig. Rows without a score are no part of it.

    Mini-batches have about as many tokens each; a token's weight is 1 / (learnt tokens of its mini-batch).
    """
    dtype = np.float64 if dtype == np.float64 else np.float32
    lengths = samples.lengths
    order = np.flatnonzero(~np.isnan(scores) & (lengths > 0))
    if args.num_mini_batches > 1:
        order = np.random.default_rng([args.seed, rollout]).permutation(order)
    slices = token_slices(order, lengths, args.num_mini_batches)
    weights = np.zeros(len(samples))
    for part in slices:
        weights[part] = 1 / max(lengths[part].sum(), 1)
    everywhere = np.ones(len(samples), bool)
    return pack_samples(samples, slices, scores, everywhere, dtype, {"weights": weights})


def token_slices(order: np.ndarray, lengths: np.ndarray, count: int) -> list[np.ndarray]:
    """The rows of `order` in `count` runs of about as many tokens; none is empty if there are `count` rows."""
    ends = np.cumsum(lengths[order])
    total = ends[-1] if len(ends) else 0
    wanted = total * np.arange(1, count) / count
    borders = np.searchsorted(ends - lengths[order] / 2, wanted)
    places = np.arange(1, count)
    if len(order) >= count:
        borders = np.clip(borders, places, len(order) - count + places)
        borders = np.maximum.accumulate(borders - places) + places
    return np.split(order, borders)


def _with_ends(batch: PackedBatch, first: int, last: int) -> np.ndarray:
    """The places, within these rows, that come before a learnt token, then the last place of each row."""
    start, stop = batch.cu_seqlens[[first, last]].tolist()
    before = np.flatnonzero(batch.mask[start:stop]) - 1
    return np.concatenate([before, batch.cu_seqlens[first + 1 : last + 1] - 1 - start]).astype(np.int32)
