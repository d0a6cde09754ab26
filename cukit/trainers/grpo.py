"""Group relative policy optimisation: draw n completions of a prompt, score them, raise those above the group's mean.

GRPO: Shao et al. 2024 ("DeepSeekMath"); DAPO: Yu et al. 2025; Dr. GRPO: Liu et al. 2025. Names and formulas are TRL's.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from ..autograd import no_grad
from ..datasets.demonstrations import encode_prompt
from ..datasets.sources import prompt_rows
from ..models.decoder import Decoder
from ..models.logprobs import batches_by_tokens, target_logprobs
from ..ops import policy_loss
from ..options import flat_values
from .advantage import POLICY_KINDS, group_advantages, token_weights
from .config import GRPOConfig
from .rewarding import RewardScorer, completion_rows, nan_mean, sample_metrics
from .rollout import GenerationBatch, Rollout, Samples, prompt_seed
from .trainer import Trainer

SILENT_BATCHES = 10  # generation batches without any reward after which the user is told
EVALUATION = 2**63  # the "step" in the seeds of sampled evaluations: one that no training step has


@dataclass
class _MicroBatch:
    """Rows of one forward pass; weight is that of each completion token of a row."""

    rows: list[int]
    weights: np.ndarray
    batch: GenerationBatch
    has_gradient: bool


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
            raise ValueError("GRPOTrainer needs train_dataset: a list of rows with a prompt, or a JSONL file")
        self.scorer = RewardScorer(reward_funcs, args.reward_weights)
        super().__init__(model, args, train_dataset, eval_dataset, processing_class, callbacks, device, dtype)
        self.rollout = Rollout(self.model, self.tokenizer, **flat_values(args.engine))
        self.reference = _frozen_copy(self.model) if args.beta else None
        self.vocab_limit = min(self.tokenizer.vocab_size, self.model.config.vocab_size)
        self._batch: GenerationBatch | None = None
        self._warned_cut, self._silent_batches = False, 0

    # ---- rows and steps ----

    def prepare_rows(self, rows, name):
        """[(row, prompt ids)]. A prompt that leaves no room for a completion is refused."""
        limit = min(
            self.args.max_model_len or self.model.config.max_position_embeddings,
            self.model.config.max_position_embeddings,
        )
        prepared = []
        for index, row in enumerate(prompt_rows(rows)):
            try:
                ids = encode_prompt(row, self.tokenizer, self.args.chat_template_kwargs)
            except ValueError as error:
                raise ValueError(f"{name} row {index}: {error}") from None
            if len(ids) >= limit:
                raise ValueError(
                    f"{name} row {index}: the prompt has {len(ids)} tokens and the context only {limit}; shorten or "
                    "remove that row, or raise max_model_len if the model allows it"
                )
            prepared.append((row, ids))
        return prepared

    @property
    def _slices(self):
        """Optimizer batches in a generation batch."""
        return self.args.num_slices

    @property
    def _updates_a_generation(self):
        return self._slices * self.args.num_iterations

    def count_steps(self):
        args = self.args
        if args.max_steps > 0:
            return args.max_steps
        prompts = args.generation_size // args.num_generations
        return max(1, math.ceil(args.num_train_epochs * len(self.train_rows) / prompts)) * self._updates_a_generation

    def make_batch(self, step):
        metrics = {}
        place = step % self._updates_a_generation
        if place == 0:
            self._batch, metrics = self._generate(step // self._updates_a_generation)
        size = len(self._batch) // self._slices
        first = place % self._slices * size
        rows = list(range(first, first + size))
        self._on_policy = place == 0
        tokens = int(self._batch.completion_lengths[rows].sum())
        return self._micro_batches(rows), metrics | {"step_tokens": tokens}

    def _micro_batches(self, rows):
        """The rows that count, cut by max_tokens_per_batch; those without a gradient apart, to run without the tape."""
        batch, args = self._batch, self.args
        lengths = np.where(batch.counted, batch.completion_lengths, 0)[rows]
        weights = np.zeros(len(batch))
        weights[rows] = token_weights(args.loss_type, lengths, args.max_completion_length)
        counted = [row for row in rows if batch.counted[row]]
        with_gradient = [row for row in counted if args.beta or batch.advantages[row] != 0]
        without = [row for row in counted if row not in set(with_gradient)]
        found = []
        for chosen, has_gradient in ((with_gradient, True), (without, False)):
            for part in batches_by_tokens([len(batch.sequences[row]) for row in chosen], args.max_tokens_per_batch):
                part_rows = [chosen[i] for i in part]
                found.append(_MicroBatch(part_rows, weights[part_rows], batch, has_gradient))
        return found

    # ---- generation ----

    def _generate(self, generation: int):
        """Draw and score the generation batch number `generation`; returns it and its metrics."""
        args = self.args
        picked = [self.train_rows[i] for i in self.sampler.take(args.generation_size // args.num_generations)]
        with self.timer("generate"):
            samples = self.rollout.generate(
                [ids for _, ids in picked],
                args.sampling_params(n=args.num_generations),
                [prompt_seed(args.seed, generation, place) for place in range(len(picked))],
            )
        rows = [row for row, _ in picked for _ in range(args.num_generations)]
        with self.timer("reward"), self.interruptible():
            rewards, by_function = self.scorer(rows, samples)
        advantages, mean, std = group_advantages(rewards, args.num_generations, args.scale_rewards)
        self.num_tokens += sum(map(len, samples.prompt_ids)) + int(samples.lengths.sum())
        metrics = sample_metrics(samples) | self.scorer.metrics(by_function, rewards, mean, std)
        shown = slice(0, args.num_generations)
        if self.logger is not None:
            self.logger.log_completions(
                self.global_step + 1, completion_rows(rows[shown], samples, self.scorer.names, by_function, advantages)
            )
        if args.log_completions and (self.global_step + 1) % args.logging_steps == 0:
            self.say(f"prompt {rows[0]['prompt']!r}\ncompletion {samples.texts[0]!r} reward {rewards[0]:g}")
        self._warn(samples, rewards)
        finite = np.array([bool(np.isfinite(logps).all()) for logps in samples.logprobs])
        if not finite.all():
            metrics["sampling/non_finite_rows"] = float((~finite).sum())
            self.say(
                f"step {self.global_step + 1}: {(~finite).sum()} completions have log-probabilities that are not "
                "finite; left out"
            )
        counted = finite & ~(samples.truncated & args.mask_truncated_completions)
        return self._keep(samples, advantages, counted, generation), metrics

    def _warn(self, samples: Samples, rewards: np.ndarray):
        """Say once what most often makes a run learn nothing: cut-off completions, and a reward that is never given."""
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

    def _keep(self, samples: Samples, advantages, counted, generation: int) -> GenerationBatch:
        """The batch for training; shuffled if several updates share it, so that each sees samples of all prompts."""
        order = np.arange(len(advantages))
        if self._slices > 1:
            order = np.random.default_rng([self.args.seed, generation]).permutation(len(order))
        sequences = [samples.prompt_ids[i] + samples.completion_ids[i] for i in order]
        prompt_lengths = np.array([len(samples.prompt_ids[i]) for i in order])
        reference = None
        if self.reference is not None:
            with self.timer("reference"):
                reference = self._score(self.reference, sequences, prompt_lengths)
        return GenerationBatch(
            sequences,
            prompt_lengths,
            [samples.logprobs[i] for i in order],
            reference,
            advantages[order],
            counted[order],
        )

    def _score(self, model, sequences, prompt_lengths):
        """Log-probabilities of the completion tokens by the training forward pass, a host array a row."""
        scores = []
        with no_grad():
            for part in batches_by_tokens([len(ids) for ids in sequences], self.args.max_tokens_per_batch):
                wanted = [np.arange(len(sequences[i])) >= prompt_lengths[i] for i in part]
                logps, _ = target_logprobs(
                    model, [sequences[i] for i in part], wanted, self.args.temperature, self.vocab_limit
                )
                scores += np.split(model.backend.to_numpy(logps.data), np.cumsum([mask.sum() for mask in wanted])[:-1])
        return scores

    # ---- the loss ----

    def compute_loss(self, micro_batch):
        if not micro_batch.has_gradient:
            with no_grad():
                return self._loss(micro_batch)
        return self._loss(micro_batch)

    def _loss(self, micro_batch):
        args, model, batch, rows = self.args, self.model, micro_batch.batch, micro_batch.rows
        be = model.backend
        lengths = batch.completion_lengths[rows]
        dtype = be.accumulator(model.dtype)

        def per_token(values):
            return be.array(np.repeat(values, lengths), dtype)

        def joined(arrays):
            return be.array(np.concatenate([arrays[row] for row in rows]), dtype)

        wanted = [np.arange(len(batch.sequences[row])) >= batch.prompt_lengths[row] for row in rows]
        new, entropy = target_logprobs(
            model, [batch.sequences[row] for row in rows], wanted, args.temperature, self.vocab_limit
        )
        old = joined(batch.old_logps)
        by_sequence = args.importance_sampling_level == "sequence"
        cu_seqlens = be.array(np.concatenate([[0], np.cumsum(lengths)]), np.int32) if by_sequence else None
        loss, stats = policy_loss(
            new,
            old,
            joined(batch.ref_logps) if batch.ref_logps else None,
            per_token(batch.advantages[rows]),
            per_token(micro_batch.weights),
            kind=POLICY_KINDS[args.loss_type],
            eps_low=args.epsilon,
            eps_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
            delta=args.delta,
            beta=args.beta,
            bias_kl=args.use_bias_correction_kl,
            cu_seqlens=cu_seqlens,
        )
        extra = {"stats": stats, "entropy": entropy.data.sum()}
        if self._on_policy:
            log_ratio = new.data - old
            extra |= {
                "difference": abs(log_ratio).sum(),
                "ratio": np.exp(log_ratio).sum(),
                "max/difference": abs(log_ratio).max(),
                "max/log_ratio": log_ratio.max(),
                "max/-log_ratio": (-log_ratio).max(),
            }
        return loss, extra

    def step_metrics(self, sums):
        if not sums:  # nothing counted
            return {}
        low, high, units, kl, tokens = sums["stats"]
        tokens, units = max(tokens, 1.0), max(units, 1.0)
        metrics = {"entropy": float(sums["entropy"] / tokens)}
        if self.args.beta:
            metrics["kl"] = kl / tokens
        if self.args.loss_type == "cispo":
            metrics["cispo_clip_ratio"] = high / units
        else:
            metrics |= {
                "clip_ratio/low_mean": low / units,
                "clip_ratio/high_mean": high / units,
                "clip_ratio/region_mean": (low + high) / units,
            }
        if "difference" in sums:
            metrics |= {
                "sampling/sampling_logp_difference/mean": float(sums["difference"] / tokens),
                "sampling/sampling_logp_difference/max": float(sums["max/difference"]),
                "sampling/importance_sampling_ratio/mean": float(sums["ratio"] / tokens),
                "sampling/importance_sampling_ratio/min": math.exp(-sums["max/-log_ratio"]),
                "sampling/importance_sampling_ratio/max": math.exp(sums["max/log_ratio"]),
            }
        return metrics

    def weights_changed(self):
        self.rollout.weights_changed()

    def after_update(self):
        if self.args.sync_ref_model and (self.global_step + 1) % self.args.ref_model_sync_steps == 0:
            alpha = self.args.ref_model_mixup_alpha
            for mine, frozen in zip(self.model.parameters(), self.reference.parameters(), strict=True):
                frozen.data[...] = (alpha * mine.data + (1 - alpha) * frozen.data).astype(frozen.dtype)

    # ---- evaluation, checkpoints ----

    def run_evaluation(self):
        """Greedy completions of eval_dataset (num_generations_eval: that many sampled ones) and their rewards.

        eval/accuracy is the share of completions whose first reward is at least 1.
        """
        args, started = self.args, time.perf_counter()
        count, seeds = args.num_generations_eval or 1, None
        sampling = args.sampling_params(n=count, logprobs=False)
        if args.num_generations_eval is None:
            sampling.temperature = 0.0
        else:
            seeds = [prompt_seed(args.seed, EVALUATION, place) for place in range(len(self.eval_rows))]
        samples = self.rollout.generate([ids for _, ids in self.eval_rows], sampling, seeds)
        rows = [row for row, _ in self.eval_rows for _ in range(count)]
        with self.interruptible():
            rewards, by_function = self.scorer(rows, samples)
        if self.logger is not None:
            shown = slice(0, 32)
            self.logger.log_completions(
                self.global_step, completion_rows(rows[shown], samples, self.scorer.names, by_function)
            )
        return {
            "eval/accuracy": float(np.mean(by_function[:, 0] >= 1)),
            "eval/reward": nan_mean(rewards),
            **{f"eval/rewards/{name}/mean": nan_mean(by_function[:, i]) for i, name in enumerate(self.scorer.names)},
            "eval/length": float(samples.lengths.mean()),
            "eval/clipped_ratio": float(samples.truncated.mean()),
            "eval/runtime": time.perf_counter() - started,
        }

    def method_state(self):
        arrays = {}
        if self.global_step % self._updates_a_generation:
            arrays |= {f"batch.{name}": value for name, value in self._batch.to_arrays().items()}
        if self.args.sync_ref_model:
            arrays |= {f"reference.{parameter.name}": parameter.data for parameter in self.reference.parameters()}
        return arrays, {"updates_a_generation": self._updates_a_generation}

    def load_method_state(self, arrays, values):
        if values["updates_a_generation"] != self._updates_a_generation:
            raise ValueError(
                f"the checkpoint made {values['updates_a_generation']} updates a generation batch, this run makes "
                f"{self._updates_a_generation}; resume with the same num_iterations and steps_per_generation"
            )
        batch = {name.removeprefix("batch."): value for name, value in arrays.items() if name.startswith("batch.")}
        self._batch = GenerationBatch.from_arrays(batch) if batch else None
        for parameter in self.reference.parameters() if self.args.sync_ref_model else ():
            parameter.data[...] = self.model.backend.array(arrays[f"reference.{parameter.name}"], parameter.dtype)


def _frozen_copy(model: Decoder) -> Decoder:
    """The same weights in other memory, never trained."""
    copy = Decoder(model.config, model.backend, model.dtype)
    for mine, other in zip(model.parameters(), copy.parameters(), strict=True):
        other.data[...] = mine.data
        other.requires_grad = False
    return copy
