"""Group relative policy optimisation: draw n completions of a prompt, reward them, raise those above the group's mean.

GRPO: Shao et al. 2024 ("DeepSeekMath"); DAPO: Yu et al. 2025; Dr. GRPO: Liu et al. 2025. Names and formulas are TRL's.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np

from ..autograd import Tensor, no_grad
from ..datasets.sampler import EpochSampler
from ..models.decoder import Decoder
from ..models.logprobs import packed_logprobs, predicting_states
from ..models.weights import whole_parts
from ..ops.policy_loss import STATS
from .batch import PackedBatch, Rows
from .curriculum import CurriculumSampler
from .entropy import EntropyBonus, high_entropy
from .group_generation import GroupGeneration
from .grpo_config import GRPOConfig
from .loss import OWN, built_in_loss, is_by_token, is_ours, load_loss
from .policy_trainer import PolicyTrainer
from .tensor_parallel import own_share


class GRPOTrainer(PolicyTrainer):
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
    config_class = GRPOConfig
    shares_prompts = True

    def make_generation(self) -> GroupGeneration:
        self.loss_function = load_loss(self.args.loss) if self.args.loss else built_in_loss
        self.entropy_bonus, self._entropy_weight = EntropyBonus(self.args.loss_options), 0.0
        return GroupGeneration(self)

    # ---- steps ----

    @property
    def needs_reference(self) -> bool:
        return self.args.beta != 0

    @property
    def has_kl_in_loss(self) -> bool:
        return bool(self.args.loss_options.kl_in_loss)

    def make_sampler(self, num_rows: int) -> EpochSampler:
        args = self.args
        if args.curriculum == "none":
            return super().make_sampler(num_rows)
        given = (args.seed, args.shuffle_dataset, args.curriculum, args.curriculum_patience)
        return CurriculumSampler(num_rows, *given)

    def make_batch(self, step: int) -> tuple[list[Rows], dict]:
        micro_batches, metrics = super().make_batch(step)
        num_chosen = metrics["step_tokens"]
        if self.args.top_entropy_quantile < 1 and self._batch is not None:
            with self.timer("entropy"):
                num_chosen = self._choose_tokens(self._batch, micro_batches)
        self._entropy_weight = self.entropy_bonus.applied / max(num_chosen, 1)
        return micro_batches, metrics

    def _choose_tokens(self, batch: PackedBatch, micro_batches: list[Rows]) -> int:
        """Mark the tokens of an optimizer batch that learn, those of high entropy under the policy as it is now."""
        self.whole_weights()
        backend = self.model.backend
        if batch.chosen is None:
            batch.chosen = backend.zeros(batch.weights.shape, batch.weights.dtype)

        def entropies() -> list[tuple[int, int, np.ndarray]]:
            with no_grad():
                found = [
                    packed_logprobs(self.model, rows.shared_tokens, self.args.temperature)[1] for rows in micro_batches
                ]
            return [
                (rows.first, rows.last, backend.to_numpy(entropy.data))
                for rows, entropy in zip(micro_batches, found, strict=True)
            ]

        parts = [part for one in self.ranks.training.each(entropies, "entropies") for part in one]
        if not parts:
            return 0
        values = [entropy for *_, entropy in parts]
        chosen = high_entropy(np.concatenate(values).astype(np.float64), self.args.top_entropy_quantile)
        borders = np.cumsum(list(map(len, values)))[:-1]
        for (first, last, _), marks in zip(parts, np.split(chosen, borders), strict=True):
            Rows(batch, first, last).chosen[...] = backend.array(marks.astype(batch.chosen.dtype))
        return int(chosen.sum())

    # ---- the loss ----

    def compute_loss(self, rows: Rows) -> tuple[Tensor, dict[str, np.ndarray]]:
        with nullcontext() if rows.has_gradient else no_grad():
            hidden = predicting_states(self.model, rows.shared_tokens)
            loss, extra, logprobs, entropy = self.model.lm_head.loss(
                hidden, rows.targets, partial(self._loss_of, rows), self._known_upstream(), self.args.temperature
            )
        extra = extra | {"tokens": np.asarray(rows.num_learnt), "entropy": entropy.sum()}
        if self.args.loss_options.has_entropy_bonus:
            extra |= self._chosen_entropy(entropy, rows)
        return loss, extra | self.sampling_sums(logprobs, rows)

    def _loss_of(self, rows: Rows, logprobs: Tensor, entropy: Tensor, part: slice | None) -> tuple[Tensor, dict]:
        """The loss of some of the rows' tokens, and {name: array}."""
        rows = rows.part(part)
        loss, extra = self.policy_loss(logprobs, rows)
        if not self.args.loss_options.has_entropy_bonus:
            return loss, extra
        return self._with_entropy(loss, entropy, rows), extra | {"policy_loss": loss.data}

    def _known_upstream(self) -> Any:
        """For a head's loss in one pass: where the loss is known token by token, which a subclass's may not be."""
        return self.upstream if is_ours(self.policy_loss) and is_by_token(self.loss_function, self.args) else None

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
        return metrics | self.sampling_metrics(sums, tokens)

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

    def after_update(self) -> None:
        due = self.args.sync_ref_model and (self.global_step + 1) % self.args.ref_model_sync_steps == 0
        if due and isinstance(self.reference, Decoder):
            self.whole_weights()
            self.reference.store.mix_from(self.model.store, self.args.ref_model_mixup_alpha)

    # ---- checkpoints ----

    def method_state(self) -> tuple[dict, dict]:
        arrays, values = super().method_state()
        if self.reference is not None and self.args.sync_ref_model:
            found = self.reference.parts()
            if isinstance(self.reference, Decoder) and self.reference.tensor is not None:
                found = whole_parts(self.reference, found)
            arrays |= {f"reference.{name}": value for name, value in found.items()}
        return arrays, values | self.entropy_bonus.state()

    def load_method_state(self, arrays: dict, values: dict) -> None:
        super().load_method_state(arrays, values)
        self.entropy_bonus.load(values)
        if isinstance(self.reference, Decoder) and self.args.sync_ref_model:
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
        view[...] = model.backend.array(own_share(model, name, parts[name]), view.dtype)
