"""Group relative policy optimisation: draw n completions of a prompt, reward them, raise those above the group's mean.

GRPO: Shao et al. 2024 ("DeepSeekMath"); DAPO: Yu et al. 2025; Dr. GRPO: Liu et al. 2025. Names and formulas are TRL's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import numpy as np

from ..autograd import Tensor, no_grad
from ..datasets.demonstrations import encode_prompts, fit_prompts
from ..datasets.sampler import EpochSampler, batches_an_epoch
from ..datasets.sources import prompt_rows
from ..engine.memory import Plan
from ..engine.shapes import ModelUse
from ..models.decoder import Decoder
from ..models.logprobs import packed_logprobs
from ..ops.policy_loss import MAX_LOG_RATIO, STATS
from ..options import flat_values
from ..tokenizer import Tokenizer
from .batch import PackedBatch, Rows
from .callbacks import TrainerCallback
from .curriculum import CurriculumSampler
from .entropy import EntropyBonus, high_entropy
from .environment import EnvironmentMaker, make_maker
from .episodes import Episodes
from .evaluation import evaluate
from .generation import Generation
from .grpo_config import GRPOConfig
from .loss import OWN, built_in_loss, load_loss
from .rewarding import RewardScorer, trainer_state
from .rollout import Rollout
from .trainer import DataSource, ModelSource, Trainer

Reward = str | Callable[..., Any]


class GRPOTrainer(Trainer):
    """GRPOTrainer(model="folder", reward_funcs=[f], args=GRPOConfig(…), train_dataset=rows).train()

    Also .evaluate() and .save_model(folder). A reward is a callable, "exact", "boxed", "gsm8k" or
    "path/file.py:function"; see cukit.rewards. Where this differs from TRL:

    * The old log-probabilities are the engine's own, of the tokens it drew, so the ratio is exactly that of the trained
      policy to the one that sampled, in every iteration and every slice of a generation batch. TRL takes its trainer's
      and corrects for vLLM's; vllm_importance_sampling_correction does so here.
    * A step in which no completion has a gradient (all rewards of each group equal and beta = 0, or all completions cut
      off and mask_truncated_completions) changes no weight; with TRL the optimizer's momentum still moves them.
    * bnpo averages over the whole optimizer batch, so that max_tokens_per_batch changes nothing; with one device it
      equals dapo.
    * An epoch is each prompt once: its last generation batch is smaller if the prompts do not divide.

    tools and environment_factory give a completion many turns: see docs/ENVIRONMENTS.md. A loss of your own is one
    method, policy_loss (docs/examples/custom_loss.py), or --loss file.py:function.
    """

    label = "grpo"
    args: GRPOConfig

    def __init__(
        self,
        model: ModelSource,
        reward_funcs: Reward | Sequence[Reward] | None = None,
        args: GRPOConfig | None = None,
        train_dataset: DataSource | None = None,
        eval_dataset: DataSource | None = None,
        processing_class: Tokenizer | None = None,
        callbacks: Iterable[TrainerCallback] = (),
        device: str = "auto",
        dtype: str = "auto",
        eval_reward_funcs: Reward | Sequence[Reward] | None = None,
        tools: Sequence[Callable] | None = None,
        environment_factory: Callable[[], Any] | None = None,
    ):
        self.args = args = args or GRPOConfig()
        self._tools, self._environment_factory = tools, environment_factory
        reward_funcs = reward_funcs if reward_funcs is not None else args.reward_funcs
        if train_dataset is None:
            raise ValueError("GRPOTrainer needs train_dataset: rows with a prompt, a file, or a name of the hub")
        self.scorer = self.eval_scorer = self._make_scorer(reward_funcs, args.reward_weights)
        eval_reward_funcs = eval_reward_funcs if eval_reward_funcs is not None else args.eval_reward_funcs
        if eval_reward_funcs is not None:
            self.eval_scorer = self._make_scorer(eval_reward_funcs)
        self.loss_function = load_loss(args.loss) if args.loss else built_in_loss
        self.entropy_bonus, self._entropy_weight = EntropyBonus(args.loss_options), 0.0
        super().__init__(model, args, train_dataset, eval_dataset, processing_class, callbacks, device, dtype)
        engine = flat_values(args.engine) | {
            "num_kv_blocks": self.plan.num_kv_blocks,
            "max_model_len": self.plan.max_model_len,
        }
        self.rollout = Rollout(self.model, self.tokenizer, self.plan.sleeps_cache, **engine)
        if self.environments is not None:
            self.rollout.episodes = self._make_episodes(self.environments)
        self.reference = self.model.frozen_copy() if args.beta else None
        self._batch: PackedBatch | None = None
        self.generation = Generation(self)

    # ---- environments ----

    _tools: Sequence[Callable] | None = None
    _environment_factory: Callable | None = None

    @cached_property
    def environments(self) -> EnvironmentMaker | None:
        """What makes the environment of each completion; None without one."""
        args, factory, tools = self.args, self._environment_factory, self._tools
        return make_maker(args.environment if factory is None else factory, args.tools if tools is None else tools)

    def _make_scorer(self, reward_funcs: Any, weights: list[float] | None = None) -> RewardScorer:
        if self.environments is not None:
            reward_funcs, weights = self.environments.with_own_reward(reward_funcs, weights)
        state, in_process = partial(trainer_state, self), self.environments is not None
        return RewardScorer(reward_funcs, weights, self.args.reward_limits, state, in_process)

    def _make_episodes(self, maker: EnvironmentMaker) -> Episodes:
        args = self.args
        episodes = Episodes(self.rollout.llm, maker, args.chat_template_kwargs, args.max_tool_calling_iterations)
        episodes.around = self.interruptible
        return episodes

    # ---- rows and steps ----

    def prepare_rows(self, rows: list[dict], name: str) -> list[tuple[dict, list[int]]]:
        """[(row, prompt ids)]. A prompt beyond max_prompt_length, or that leaves no room for a completion, is refused,
        skipped or cut, as overlong_prompts says.
        """
        limit = min(
            self.args.max_model_len or self.model.config.max_position_embeddings,
            self.model.config.max_position_embeddings,
        )
        rows, model_rows = prompt_rows(rows), self.model.config.vocab_size
        try:
            shown = rows if self.environments is None else self.environments.with_tools(rows)
            prompts = encode_prompts(shown, self.tokenizer, self.args.chat_template_kwargs, model_rows)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        try:
            rows, prompts, said = fit_prompts(rows, prompts, self.args.prompts, limit)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
        if said:
            self.say(f"{name}: {said}")
        return list(zip(rows, prompts, strict=True))

    def make_sampler(self, num_rows: int) -> EpochSampler:
        args = self.args
        if args.curriculum == "none":
            return super().make_sampler(num_rows)
        given = (args.seed, args.shuffle_dataset, args.curriculum, args.curriculum_patience)
        return CurriculumSampler(num_rows, *given)

    def plan_memory(self, *more: ModelUse, **sizes: Any) -> Plan:
        args, use = self.args, self.model
        reference = [ModelUse("reference", use.config, use.dtype)] if args.beta else []
        longest = max(len(ids) for _, ids in self.train_rows) + args.max_completion_length
        tokens = args.generation_size * longest
        sizes = {"packed_tokens": tokens, "longest_sequence": longest, "step_tokens": tokens // self._slices} | sizes
        return super().plan_memory(*reference, *more, engine=args.engine, **sizes)

    @property
    def _slices(self) -> int:
        """Optimizer batches in a generation batch."""
        return self.args.num_slices

    @property
    def _updates_a_generation(self) -> int:
        return self._slices * self.args.num_iterations

    def count_steps(self) -> int:
        args = self.args
        if args.max_steps > 0:
            return args.max_steps
        batches = batches_an_epoch(len(self.train_rows), args.prompts_a_generation)
        generations = args.num_train_epochs * batches
        return max(1, math.ceil(generations)) * self._updates_a_generation

    def make_batch(self, step: int) -> tuple[list[Rows], dict]:
        metrics: dict = {}
        place = step % self._updates_a_generation
        if place == 0:
            self._batch, metrics = self.generation.batch(step // self._updates_a_generation)
        assert self._batch is not None
        micro_batches = self._batch.micro_batches(place % self._slices, self.args.max_tokens_per_batch)
        self._on_policy = place == 0
        num_chosen = sum(rows.num_learnt for rows in micro_batches)
        if self.args.top_entropy_quantile < 1:
            with self.timer("entropy"):
                num_chosen = self._choose_tokens(self._batch, micro_batches)
        self._entropy_weight = self.entropy_bonus.applied / max(num_chosen, 1)
        return micro_batches, metrics | {"step_tokens": sum(rows.num_learnt for rows in micro_batches)}

    def _choose_tokens(self, batch: PackedBatch, micro_batches: list[Rows]) -> int:
        """Mark the tokens of an optimizer batch that learn, those of high entropy under the policy as it is now."""
        if not micro_batches:
            return 0
        backend = self.model.backend
        if batch.chosen is None:
            batch.chosen = backend.zeros(batch.weights.shape, batch.weights.dtype)
        with no_grad():
            found = [packed_logprobs(self.model, rows.tokens, self.args.temperature)[1].data for rows in micro_batches]
        entropies = [backend.to_numpy(entropy) for entropy in found]
        chosen = high_entropy(np.concatenate(entropies).astype(np.float64), self.args.top_entropy_quantile)
        for rows, part in zip(micro_batches, np.split(chosen, np.cumsum(list(map(len, entropies)))[:-1]), strict=True):
            rows.chosen[...] = backend.array(part.astype(batch.chosen.dtype))
        return int(chosen.sum())

    # ---- the loss ----

    def compute_loss(self, rows: Rows) -> tuple[Tensor, dict[str, np.ndarray]]:
        with nullcontext() if rows.has_gradient else no_grad():
            logprobs, entropy = packed_logprobs(self.model, rows.tokens, self.args.temperature)
            loss, extra = self.policy_loss(logprobs, rows)
            extra = extra | {"tokens": np.asarray(rows.num_learnt), "entropy": entropy.data.sum()}
            if self.args.loss_options.has_entropy_bonus:
                extra |= {"policy_loss": loss.data} | self._chosen_entropy(entropy.data, rows)
                loss = self._with_entropy(loss, entropy, rows)
        if self._on_policy:
            log_ratio = logprobs.data - (rows.logprobs if rows.sampled is None else rows.sampled)
            extra |= {
                "difference": abs(log_ratio).sum(),
                "ratio": np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)).sum(),
                "max/difference": abs(log_ratio).max(),
                "max/log_ratio": log_ratio.max(),
                "max/-log_ratio": (-log_ratio).max(),
            }
        return loss, extra

    def policy_loss(self, logprobs: Tensor, rows: Rows) -> tuple[Tensor, dict[str, np.ndarray]]:
        """The loss of some rows of an optimizer batch, a scalar Tensor, and {name: array} for step_metrics.

        What the arguments hold: cukit/trainers/loss.py. Override it for another loss, or give args.loss.
        """
        return self.loss_function(logprobs, rows, self.args)

    def _with_entropy(self, loss: Tensor, entropy: Tensor, rows: Rows) -> Tensor:
        """loss − coefficient · mean entropy of the chosen tokens of the whole optimizer batch."""
        chosen = entropy if rows.chosen is None else entropy * rows.chosen
        return loss - chosen.sum() * self._entropy_weight

    @staticmethod
    def _chosen_entropy(entropy: Any, rows: Rows) -> dict[str, Any]:
        """Sums over the chosen tokens."""
        if rows.chosen is None:
            return {"chosen_entropy": entropy.sum(), "chosen": np.asarray(rows.num_learnt)}
        return {"chosen_entropy": (entropy * rows.chosen).sum(), "chosen": rows.chosen.sum()}

    def step_metrics(self, sums: dict) -> dict:
        """See Trainer; the adaptive entropy coefficient moves here, once a step."""
        if not sums:  # nothing counted
            return {}
        tokens = max(float(sums["tokens"]), 1.0)
        metrics = {"entropy": float(sums["entropy"] / tokens)}
        metrics |= {name.removeprefix(OWN): float(x / tokens) for name, x in sums.items() if name.startswith(OWN)}
        if "policy_loss" in sums:
            metrics |= {"policy_loss": float(sums["policy_loss"]), "entropy_coef": self.entropy_bonus.applied}
            self.entropy_bonus.update(float(sums["chosen_entropy"]) / max(float(sums["chosen"]), 1.0))
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
        if self.args.loss_options.kl_in_loss:
            metrics["kl"] = stats["kl"] / tokens
        if self.args.off_policy_mask_threshold is not None:
            metrics["sampling/off_policy_rows"] = stats["off_policy"]
        if self.args.loss_type == "cispo":
            return metrics | {"cispo_clip_ratio": high}
        if self.args.loss_type in ("sapo", "vespo"):  # they clip nothing
            return metrics
        return metrics | {
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
        }

    def weights_changed(self) -> None:
        self.rollout.weights_changed()

    def after_update(self) -> None:
        due = self.args.sync_ref_model and (self.global_step + 1) % self.args.ref_model_sync_steps == 0
        if due and self.reference is not None:
            self.reference.store.mix_from(self.model.store, self.args.ref_model_mixup_alpha)

    # ---- evaluation, checkpoints ----

    def run_evaluation(self) -> dict:
        return evaluate(self)

    def method_state(self) -> tuple[dict, dict]:
        arrays: dict = {}
        if self.global_step % self._updates_a_generation:
            assert self._batch is not None
            arrays |= {f"batch.{name}": value for name, value in self._batch.to_arrays().items()}
        if self.reference is not None and self.args.sync_ref_model:
            arrays |= {f"reference.{name}": value for name, value in self.reference.parts().items()}
        return arrays, {"updates_a_generation": self._updates_a_generation} | self.entropy_bonus.state()

    def load_method_state(self, arrays: dict, values: dict) -> None:
        if values["updates_a_generation"] != self._updates_a_generation:
            raise ValueError(
                f"the checkpoint made {values['updates_a_generation']} updates a generation batch, this run makes "
                f"{self._updates_a_generation}; resume with the same num_iterations and steps_per_generation"
            )
        self.entropy_bonus.load(values)
        batch = {name.removeprefix("batch."): value for name, value in arrays.items() if name.startswith("batch.")}
        self._batch = PackedBatch.from_arrays(batch).to(self.model.backend) if batch else None
        if self.reference is not None and self.args.sync_ref_model:
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
