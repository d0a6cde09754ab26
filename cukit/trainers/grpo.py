"""Group relative policy optimisation: draw n completions of a prompt, reward them, raise those above the group's mean.

GRPO: Shao et al. 2024 ("DeepSeekMath"); DAPO: Yu et al. 2025; Dr. GRPO: Liu et al. 2025. Names and formulas are TRL's.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext

import numpy as np

from ..autograd import no_grad
from ..datasets.demonstrations import encode_prompts, fit_prompts
from ..datasets.sampler import batches_an_epoch
from ..datasets.sources import prompt_rows
from ..engine.shapes import ModelUse
from ..models.decoder import Decoder
from ..models.logprobs import packed_logprobs
from ..ops import policy_loss
from ..ops.policy_loss import MAX_LOG_RATIO, STATS
from ..options import flat_values
from .advantage import POLICY_KINDS, group_advantages
from .batch import PackedBatch, Rows
from .config import GRPOConfig
from .rewarding import RewardScorer, completion_rows, evaluation_metrics, sample_metrics
from .rollout import Rollout, Samples, pack_samples, prompt_seed
from .trainer import Trainer

SILENT_BATCHES = 10  # generation batches without any reward after which the user is told
EVALUATION = 2**63  # the "step" in the seeds of sampled evaluations: one that no training step has


class GRPOTrainer(Trainer):
    """GRPOTrainer(model="folder", reward_funcs=[f], args=GRPOConfig(…), train_dataset=rows).train()

    Also .evaluate() and .save_model(folder). A reward is a callable, "exact", "boxed", "gsm8k" or
    "path/file.py:function"; see cukit.rewards. Where this differs from TRL:

    * The old log-probabilities are the engine's own, of the tokens it drew, so the ratio is exactly that of the trained
      policy to the one that sampled, in every iteration and every slice of a generation batch. TRL takes its trainer's
      and corrects for vLLM's.
    * A step in which no completion has a gradient (all rewards of each group equal and beta = 0, or all completions cut
      off and mask_truncated_completions) changes no weight; with TRL the optimizer's momentum still moves them.
    * bnpo averages over the whole optimizer batch, so that max_tokens_per_batch changes nothing; with one device it
      equals dapo.
    * An epoch is each prompt once: its last generation batch is smaller if the prompts do not divide.

    A loss of your own is one method, policy_loss: see docs/examples/custom_loss.py.
    """

    label = "grpo"

    def __init__(
        self,
        model,
        reward_funcs=None,
        args=None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        callbacks=(),
        device="auto",
        dtype="auto",
    ):
        args = args or GRPOConfig()
        reward_funcs = reward_funcs if reward_funcs is not None else args.reward_funcs
        if train_dataset is None:
            raise ValueError("GRPOTrainer needs train_dataset: rows with a prompt, a file, or a name of the hub")
        self.scorer = RewardScorer(reward_funcs, args.reward_weights)
        super().__init__(model, args, train_dataset, eval_dataset, processing_class, callbacks, device, dtype)
        engine = flat_values(args.engine) | {
            "num_kv_blocks": self.plan.num_kv_blocks,
            "max_model_len": self.plan.max_model_len,
        }
        self.rollout = Rollout(self.model, self.tokenizer, self.plan.sleeps_cache, **engine)
        self.reference = self.model.frozen_copy() if args.beta else None
        self._batch: PackedBatch | None = None
        self._warned_cut, self._silent_batches = False, 0

    # ---- rows and steps ----

    def prepare_rows(self, rows, name):
        """[(row, prompt ids)]. A prompt beyond max_prompt_length, or that leaves no room for a completion, is refused,
        skipped or cut, as overlong_prompts says.
        """
        limit = min(
            self.args.max_model_len or self.model.config.max_position_embeddings,
            self.model.config.max_position_embeddings,
        )
        rows, model_rows = prompt_rows(rows), self.model.config.vocab_size
        try:
            prompts = encode_prompts(rows, self.tokenizer, self.args.chat_template_kwargs, model_rows)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        try:
            rows, prompts, said = fit_prompts(rows, prompts, self.args.prompts, limit)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
        if said:
            self.say(f"{name}: {said}")
        return list(zip(rows, prompts, strict=True))

    def plan_memory(self, *more, **sizes):
        args, use = self.args, self.model
        reference = [ModelUse("reference", use.config, use.dtype)] if args.beta else []
        longest = max(len(ids) for _, ids in self.train_rows) + args.max_completion_length
        tokens = args.generation_size * longest
        sizes = {"packed_tokens": tokens, "longest_sequence": longest, "step_tokens": tokens // self._slices} | sizes
        return super().plan_memory(*reference, *more, engine=args.engine, **sizes)

    @property
    def _slices(self):
        """Optimizer batches in a generation batch."""
        return self.args.num_slices

    @property
    def _updates_a_generation(self):
        return self._slices * self.args.num_iterations

    @property
    def _prompts_a_generation(self):
        return self.args.generation_size // self.args.num_generations

    def count_steps(self):
        args = self.args
        if args.max_steps > 0:
            return args.max_steps
        generations = args.num_train_epochs * batches_an_epoch(len(self.train_rows), self._prompts_a_generation)
        return max(1, math.ceil(generations)) * self._updates_a_generation

    def make_batch(self, step):
        metrics = {}
        place = step % self._updates_a_generation
        if place == 0:
            self._batch, metrics = self._generate(step // self._updates_a_generation)
        micro_batches = self._batch.micro_batches(place % self._slices, self.args.max_tokens_per_batch)
        self._on_policy = place == 0
        return micro_batches, metrics | {"step_tokens": sum(rows.num_learnt for rows in micro_batches)}

    # ---- generation ----

    def _generate(self, generation: int):
        """Draw and reward the generation batch number `generation`; returns it and its metrics."""
        args = self.args
        picked = [self.train_rows[i] for i in self.sampler.take(self._prompts_a_generation)]
        with self.timer("generate"):
            samples = self.rollout.generate(
                [ids for _, ids in picked],
                args.sampling_params(n=args.num_generations),
                [prompt_seed(args.seed, generation, place) for place in range(len(picked))],
                self.raise_if_stopped,
            )
        rows = [picked[group][0] for group in samples.groups]
        with self.timer("reward"), self.interruptible():
            rewards, by_function = self.scorer(rows, samples, self.tokenizer)
        sizes = np.bincount(samples.groups, minlength=len(picked))
        advantages, mean, std = group_advantages(rewards, sizes, args.scale_rewards)
        batch = pack_samples(samples, rewards, advantages, args, self._slices, generation, self.model.dtype)
        batch = batch.to(self.model.backend)
        if self.reference is not None:
            with self.timer("reference"):
                batch.ref_logprobs = self._reference_logprobs(batch)
        self.num_tokens += sum(map(len, samples.token_ids))
        metrics = sample_metrics(samples) | self.scorer.metrics(by_function, rewards, mean, std)
        self._show(rows[: sizes[0]], samples, rewards, by_function, advantages)
        self._warn(samples, rewards)
        return batch, metrics

    def _show(self, rows: list[dict], samples: Samples, rewards, by_function, advantages):
        """The first group into completions.jsonl, and its first completion on the screen if that is wanted."""
        if self.logger is not None:
            self.logger.log_completions(
                self.global_step + 1, completion_rows(rows, samples, self.scorer.names, by_function, advantages)
            )
        if self.args.log_completions and (self.global_step + 1) % self.args.logging_steps == 0:
            self.say(f"prompt {rows[0]['prompt']!r}\ncompletion {samples.texts[0]!r} reward {rewards[0]:g}")

    def _warn(self, samples: Samples, rewards: np.ndarray):
        """Say once what most often makes a run learn nothing: cut-off completions, and a reward that is never given."""
        if failed := int(samples.failed.sum()):
            self.say(
                f"step {self.global_step + 1}: {failed} of {len(samples)} completions failed, since the model's "
                "log-probabilities are not finite; left out"
            )
        if not self._warned_cut and samples.truncated.mean() > 0.5:
            self._warned_cut = True
            self.say(
                f"warning: {samples.truncated.mean():.0%} of the completions were cut off at max_completion_length="
                f"{self.args.max_completion_length}; raise it unless that is what you want"
            )
        self._silent_batches = self._silent_batches + 1 if not np.any(np.nan_to_num(rewards) != 0) else -math.inf
        if self._silent_batches == SILENT_BATCHES:
            self.say(
                f"warning: every reward of the first {SILENT_BATCHES} generation batches was 0; "
                "look at completions.jsonl"
            )

    def _reference_logprobs(self, batch: PackedBatch):
        """The reference's log-probabilities of the learnt tokens, on the device."""
        found = self.model.backend.empty(batch.targets.shape, batch.logprobs.dtype)
        with no_grad():
            for first, last in batch.cut(self.args.max_tokens_per_batch):
                rows = Rows(batch, first, last)
                logprobs, _ = packed_logprobs(self.reference, rows.tokens, self.args.temperature)
                rows.of(found)[...] = logprobs.data
        return found

    # ---- the loss ----

    def compute_loss(self, rows: Rows):
        with nullcontext() if rows.has_gradient else no_grad():
            logprobs, entropy = packed_logprobs(self.model, rows.tokens, self.args.temperature)
            loss, extra = self.policy_loss(logprobs, rows)
        extra = extra | {"tokens": np.asarray(rows.num_learnt), "entropy": entropy.data.sum()}
        if self._on_policy:
            log_ratio = logprobs.data - rows.logprobs
            extra |= {
                "difference": abs(log_ratio).sum(),
                "ratio": np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)).sum(),
                "max/difference": abs(log_ratio).max(),
                "max/log_ratio": log_ratio.max(),
                "max/-log_ratio": (-log_ratio).max(),
            }
        return loss, extra

    def policy_loss(self, logprobs, rows: Rows):
        """The loss of some rows of an optimizer batch, a scalar Tensor, and {name: array} for step_metrics.

        logprobs: Tensor (N,), of the learnt tokens as the policy is now. rows has as arrays (N,) what belongs to them:
        advantages, weights (how loss_type averages; they sum over all passes of the batch), logprobs (the sampler's),
        ref_logprobs (None unless beta). Losses of the passes are added up. Override it for another loss.
        """
        args = self.args
        loss, stats = policy_loss(
            logprobs,
            rows.logprobs,
            rows.ref_logprobs,
            rows.advantages,
            rows.weights,
            kind=POLICY_KINDS[args.loss_type],
            eps_low=args.epsilon,
            eps_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
            delta=args.delta,
            beta=args.beta,
            bias_kl=args.use_bias_correction_kl,
            cu_seqlens=rows.cu_learnt if args.importance_sampling_level == "sequence" else None,
        )
        return loss, {"stats": stats}

    def step_metrics(self, sums):
        if not sums:  # nothing counted
            return {}
        tokens = max(float(sums["tokens"]), 1.0)
        metrics = {"entropy": float(sums["entropy"] / tokens)}
        if "stats" in sums:
            metrics |= self._loss_metrics(dict(zip(STATS, sums["stats"].tolist(), strict=True)), tokens)
        if "difference" in sums:
            low, high = np.exp(np.clip([-sums["max/-log_ratio"], sums["max/log_ratio"]], -MAX_LOG_RATIO, MAX_LOG_RATIO))
            metrics |= {
                "sampling/sampling_logp_difference/mean": float(sums["difference"] / tokens),
                "sampling/sampling_logp_difference/max": float(sums["max/difference"]),
                "sampling/importance_sampling_ratio/mean": float(sums["ratio"] / tokens),
                "sampling/importance_sampling_ratio/min": float(low),
                "sampling/importance_sampling_ratio/max": float(high),
            }
        return metrics

    def _loss_metrics(self, stats: dict, tokens: float) -> dict:
        """The kl, the shares of clipped tokens (or sequences), and how many tokens had a log-ratio beyond the bound."""
        low, high = (stats[name] / max(stats["clip_count"], 1.0) for name in ("clip_low", "clip_high"))
        metrics = {"sampling/extreme_log_ratios": stats["extreme"]}
        if self.args.beta:
            metrics["kl"] = stats["kl"] / tokens
        if self.args.loss_type == "cispo":
            return metrics | {"cispo_clip_ratio": high}
        return metrics | {
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
        }

    def weights_changed(self):
        self.rollout.weights_changed()

    def after_update(self):
        if self.args.sync_ref_model and (self.global_step + 1) % self.args.ref_model_sync_steps == 0:
            self.reference.store.mix_from(self.model.store, self.args.ref_model_mixup_alpha)

    # ---- evaluation, checkpoints ----

    def run_evaluation(self):
        """Greedy completions of eval_dataset (num_generations_eval: that many sampled ones) and their rewards.

        eval/accuracy: see rewarding.accuracy; eval/frac_reward_none is the share of completions left out of it.
        """
        args, started = self.args, time.perf_counter()
        count, seeds = args.num_generations_eval or 1, None
        sampling = args.sampling_params(n=count, logprobs=False)
        if args.num_generations_eval is None:
            sampling.temperature = 0.0
        else:
            seeds = [prompt_seed(args.seed, EVALUATION, place) for place in range(len(self.eval_rows))]
        samples = self.rollout.generate([ids for _, ids in self.eval_rows], sampling, seeds, self.raise_if_stopped)
        rows = [self.eval_rows[group][0] for group in samples.groups]
        with self.interruptible():
            rewards, by_function = self.scorer(rows, samples, self.tokenizer)
        if self.logger is not None:
            shown = completion_rows(rows[:32], samples, self.scorer.names, by_function)
            self.logger.log_completions(self.global_step, shown)
        metrics = evaluation_metrics(self.scorer.names, samples, rewards, by_function)
        return metrics | {"eval/runtime": time.perf_counter() - started}

    def method_state(self):
        arrays = {}
        if self.global_step % self._updates_a_generation:
            arrays |= {f"batch.{name}": value for name, value in self._batch.to_arrays().items()}
        if self.args.sync_ref_model:
            arrays |= {f"reference.{name}": value for name, value in self.reference.parts().items()}
        return arrays, {"updates_a_generation": self._updates_a_generation}

    def load_method_state(self, arrays, values):
        if values["updates_a_generation"] != self._updates_a_generation:
            raise ValueError(
                f"the checkpoint made {values['updates_a_generation']} updates a generation batch, this run makes "
                f"{self._updates_a_generation}; resume with the same num_iterations and steps_per_generation"
            )
        batch = {name.removeprefix("batch."): value for name, value in arrays.items() if name.startswith("batch.")}
        self._batch = PackedBatch.from_arrays(batch).to(self.model.backend) if batch else None
        if self.args.sync_ref_model:
            parts = {name.removeprefix("reference."): x for name, x in arrays.items() if name.startswith("reference.")}
            _load_parts(self.reference, parts)


def _load_parts(model: Decoder, parts: dict) -> None:
    """Weights under Hugging Face's names, or under this model's own as older checkpoints have them."""
    own = model.parts()
    if own.keys() != parts.keys():
        own = {name: parameter.data for name, parameter in model.named_parameters().items()}
    if own.keys() != parts.keys():
        raise ValueError("the checkpoint holds another reference model, or none: resume without sync_ref_model")
    for name, view in own.items():
        view[...] = model.backend.array(parts[name], view.dtype)
