"""Proximal policy optimisation: a critic values each token, and the policy moves towards what was better than valued.

PPO: Schulman et al. 2017; generalised advantage estimation: Schulman et al. 2016; its use for language models: Ziegler
et al. 2019. Names and metrics are those of TRL's PPOTrainer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..autograd import Tensor, no_grad
from ..datasets.sampler import batches_an_epoch
from ..engine.memory import Plan
from ..engine.shapes import ModelUse
from ..models.config import ModelConfig
from ..models.decoder import Decoder
from ..models.logprobs import PackedTokens, predicting_states
from ..models.value_head import ValueHead
from ..models.weights import load_config, load_model, model_folder
from ..ops import ppo_loss
from ..ops.ppo_loss import PPO_STATS
from ..options import require
from ..tokenizer import Tokenizer
from .batch import Rows
from .experience import Experience
from .policy_trainer import PolicyTrainer
from .ppo_config import PPOConfig
from .state import POLICY, TrainedModel

logger = logging.getLogger(__name__)
CRITIC = "critic"


class PPOTrainer(PolicyTrainer):
    """PPOTrainer(model="folder", reward_funcs=[f], args=PPOConfig(…), train_dataset=rows).train()

    Also .evaluate() and .save_model(folder). A step is one optimizer step; a rollout gives num_ppo_epochs *
    num_mini_batches of them. Where this differs from TRL:

    * The old log-probabilities are the engine's own, so before the first update of a rollout every ratio is exactly 1.
    * Policy and critic have an optimizer each, their gradients are clipped each by itself, and the critic may have a
      learning rate of its own. A shared critic is a head on the policy's hidden states (critic=shared).
    * Losses are means over the tokens of a mini-batch, however it is split; mini-batches have about as many tokens
      each, and are the same in every epoch of a rollout.
    * A completion without a reward, or that failed, is left out.
    """

    label = "ppo"
    args: PPOConfig
    config_class = PPOConfig
    batch_options = "num_ppo_epochs and num_mini_batches"
    also_named = {"lr": "learning_rate"}  # noqa: RUF012
    generation: Experience

    def make_generation(self) -> Experience:
        self._ratios: list[float] = []  # mean ratio of each update of the rollout
        return Experience(self)

    # ---- models ----

    def make_models(self, policy: Decoder) -> dict[str, TrainedModel]:
        if not self.ranks.trains:
            return super().make_models(policy)
        rate = self.args.critic_learning_rate
        return super().make_models(policy) | {
            CRITIC: TrainedModel(CRITIC, self._make_critic(policy), learning_rate=rate)
        }

    def _make_critic(self, policy: Decoder) -> Decoder | ValueHead:
        if self.args.critic == "shared":
            return ValueHead(policy.backend, policy.dtype, policy.config.hidden_size)
        if self.args.critic_model is not None:
            self._critic_config(policy.config)
            given = self.args.critic_model, policy.backend.name, policy.dtype
            critic = load_model(*given, head="score", tensor=policy.tensor)
        else:
            critic = Decoder(policy.config, policy.backend, policy.dtype, head="score", tensor=policy.tensor)
            own = policy.parts()
            for name, view in critic.parts().items():
                if name in own:
                    view[...] = own[name]
        return critic

    def _critic_config(self, policy: ModelConfig) -> ModelConfig:
        """The separate critic's; ValueError if it cannot read what the policy writes."""
        name = self.args.critic_model
        if name is None:
            return policy
        config, folder = load_config(name), model_folder(name, weights=False)
        same = "give a critic with the policy's tokenizer, or leave critic_model out"
        require(
            config.vocab_size >= self.tokenizer.vocab_size,
            f"critic_model={name} has {config.vocab_size} ids, and the policy's tokenizer {self.tokenizer.vocab_size}; "
            f"{same}",
        )
        if (folder / "tokenizer.json").is_file():
            agrees = Tokenizer.from_folder(folder).agrees_with(self.tokenizer)
            require(agrees, f"critic_model={name} has another tokenizer than the policy; {same}")
        length, context = self.args.max_model_len or policy.max_position_embeddings, config.max_position_embeddings
        require(
            min(length, policy.max_position_embeddings) <= context,
            f"critic_model={name} has a context of {context} tokens, shorter than the policy's; give "
            f"max_model_len={context}",
        )
        return config

    @property
    def critic(self) -> Decoder | ValueHead:
        return self.models[CRITIC].model

    @property
    def needs_reference(self) -> bool:
        return self.args.kl_coef != 0 or self.args.beta != 0

    @property
    def has_kl_in_loss(self) -> bool:
        return self.args.beta != 0

    def learns(self, name: str) -> bool:
        return name == CRITIC or self.global_step >= self.args.critic_warmup_steps

    def plan_memory(self, *more: ModelUse, **sizes: Any) -> Plan:
        use, critics = self.model, []
        if self.args.critic == "separate":
            loaded = isinstance(use, Decoder)
            config = self._critic_config(use.config)
            critics = [ModelUse(CRITIC, self.own_shape(config), use.dtype, trained=True, loaded=loaded, head=False)]
        return super().plan_memory(*critics, *more, **sizes)

    def count_steps(self) -> int:
        args, size = self.args, self.args.generation_size
        if args.max_steps > 0 or args.total_episodes is None:
            steps = super().count_steps()
        else:
            epochs, rest = divmod(args.total_episodes, len(self.train_rows))
            batches = batches_an_epoch(len(self.train_rows), size)  # the last one may be smaller
            steps = (epochs * batches + math.ceil(rest / size)) * self.updates_a_generation
        if args.critic_warmup_steps >= steps:
            logger.warning(
                "critic_warmup_steps=%d leaves the policy none of the run's %d steps, so it stays as it is: lower it, "
                "or make the run longer",
                *(args.critic_warmup_steps, steps),
            )
        return steps

    def train_step(self) -> dict:
        """See Trainer. A rollout that a stop or an error cuts short is drawn again, so its counts are put back too."""
        step, before = self.global_step, self.generation.state()
        try:
            return super().train_step()
        except BaseException:
            if self.global_step == step:
                self.generation.load(before)
            raise

    # ---- the loss ----

    def values(self, tokens: PackedTokens, hidden: Tensor | None = None) -> Tensor:
        """The critic's value before each wanted token (N,). hidden: the policy's states there, if they are known."""
        if self.args.critic == "separate":
            hidden = predicting_states(self.critic, tokens)
        elif hidden is None:
            hidden = predicting_states(self.model, tokens)
        return self.critic.scores(hidden)

    def make_batch(self, step: int) -> tuple[list[Rows], dict]:
        """A separate critic has passes of its own, after the policy's: one model's activations are held at a time."""
        micro_batches, metrics = super().make_batch(step)
        if self.args.critic == "separate":
            micro_batches = [replace(rows, serves=name) for name in (POLICY, CRITIC) for rows in micro_batches]
        return micro_batches, metrics

    def served_by(self, micro_batch: Rows) -> Iterable[str]:
        return self.models if micro_batch.serves is None else (micro_batch.serves,)

    def compute_loss(self, rows: Rows) -> tuple[Tensor, dict[str, np.ndarray]]:
        """The loss of policy and critic, or of the one that this pass serves."""
        tokens = rows.tokens
        if rows.serves == CRITIC:
            known = Tensor(rows.logprobs)
            loss, stats = self._loss_of(rows, self.values(tokens), known, known)
            return loss, {CRITIC: stats}
        learns, served = self.learns(POLICY), (POLICY,) if rows.serves == POLICY else (POLICY, CRITIC)
        with nullcontext() if learns else no_grad():
            hidden = predicting_states(self.model, tokens)
        values = Tensor(rows.values) if rows.serves == POLICY else self.values(tokens, hidden)
        loss_of, given = partial(self._loss_of, rows, values), (hidden, rows.targets)
        if learns:
            loss, stats, logprobs, _ = self.model.lm_head.loss(*given, loss_of, self.upstream, self.args.temperature)
        else:
            with no_grad():
                found, entropy = self.model.lm_head.logprobs(*given, self.args.temperature)
            loss, stats = loss_of(found, entropy)
            logprobs = found.data
        return loss, {name: stats for name in served} | self.sampling_sums(logprobs, rows)

    def _loss_of(
        self, rows: Rows, values: Tensor, logprobs: Tensor, entropy: Tensor, part: slice | None = None
    ) -> tuple[Tensor, Any]:
        """PPO's loss of the rows' tokens, or of some, and its sums. values: of all; constant where part is given."""
        args, own, to_critic, to_policy = self.args, rows.part(part), rows.serves == CRITIC, rows.serves == POLICY
        beta = 0.0 if to_critic else args.beta
        return ppo_loss(
            logprobs,
            values if part is None else Tensor(values.data[part]),
            entropy,
            own.logprobs,
            own.values,
            own.ref_logprobs if beta else None,
            own.advantages * 0 if to_critic else own.advantages,
            own.returns,
            own.weights,
            eps_low=args.cliprange,
            eps_high=args.cliprange if args.cliprange_high is None else args.cliprange_high,
            dual_clip=args.dual_clip,
            vf_coef=0.0 if to_policy else args.vf_coef,
            cliprange_value=args.cliprange_value,
            entropy_coef=0.0 if to_critic else args.entropy_coef,
            beta=beta,
        )

    def step_metrics(self, sums: dict) -> dict:
        if self._on_policy:
            self._ratios.clear()
        progress = self.generation.progress()
        if not sums:  # nothing counted
            return progress
        policy, critic = (dict(zip(PPO_STATS, sums[name].tolist(), strict=True)) for name in (POLICY, CRITIC))
        tokens = max(policy["num_tokens"], 1.0)
        self._ratios.append(policy["ratio"] / tokens)
        metrics = {
            "loss/policy_avg": policy["policy_loss"],
            "loss/value_avg": critic["value_loss"],
            "policy/approxkl_avg": policy["approx_kl"] / tokens,
            "policy/clipfrac_avg": policy["clip"] / tokens,
            "policy/entropy_avg": policy["entropy"],
            "val/clipfrac_avg": critic["value_clip"] / tokens,
            "val/ratio": self._ratios[-1],
            "val/ratio_var": float(np.var(self._ratios, ddof=1)) if len(self._ratios) > 1 else 0.0,
            "entropy": policy["entropy"],
            "sampling/extreme_log_ratios": policy["extreme"],
        }
        if self.args.dual_clip is not None:
            metrics["policy/dual_clipfrac_avg"] = policy["dual_clip"] / tokens
        if self.args.beta:
            metrics["kl"] = policy["kl"] / tokens
        return metrics | self.sampling_metrics(sums, tokens) | progress

    # ---- checkpoints ----

    def method_state(self) -> tuple[dict, dict]:
        arrays, values = super().method_state()
        return arrays, values | {"ratios": list(self._ratios)} | self.generation.state()

    def load_method_state(self, arrays: dict, values: dict) -> None:
        super().load_method_state(arrays, values)
        self._ratios = list(values["ratios"])
        self.generation.load(values)
