"""What trainers share that learn from their own completions: prompts, rollouts, rewards, environments, evaluation."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..datasets.demonstrations import encode_prompts, fit_prompts
from ..datasets.sampler import batches_an_epoch
from ..datasets.sources import prompt_rows
from ..engine.memory import DoesNotFit, Plan
from ..engine.shapes import ModelUse
from ..models.adapters import WithoutAdapter
from ..models.decoder import Decoder
from ..ops.policy_loss import MAX_LOG_RATIO
from ..options import flat_values
from ..tokenizer import Tokenizer
from .apart import Apart
from .batch import PackedBatch, Rows
from .callbacks import TrainerCallback
from .environment import EnvironmentMaker, make_maker
from .episodes import Episodes
from .evaluation import evaluate
from .generation import Generation
from .in_backward import UpdateInBackward
from .loop import Run
from .lora import adapter_of, with_peft
from .loss import is_ours
from .policy_config import PolicyConfig
from .reward_model import RewardModel, reward_models, with_models
from .rewarding import RewardScorer, trainer_state
from .rollout import Rollout
from .state import POLICY
from .tensor_parallel import check_plays_alone
from .trainer import DataSource, ModelSource, Trainer

Reward = str | Callable[..., Any]
LAUNCHING = 1e11  # FLOPs of a device while the host launches a layer's forward pass: 0.25 ms at 400 TFLOP/s


class PolicyTrainer(Trainer):
    """See GRPOTrainer and PPOTrainer, which say what a generation batch is and what its loss is."""

    args: PolicyConfig
    config_class: type[PolicyConfig]
    # the options that a checkpoint in the middle of a generation batch depends on
    batch_options = "num_iterations and steps_per_generation"
    shares_prompts = False  # whether compute_loss() takes shared_tokens

    def __init__(
        self,
        model: ModelSource,
        reward_funcs: Reward | Sequence[Reward] | None = None,
        args: PolicyConfig | None = None,
        train_dataset: DataSource | None = None,
        eval_dataset: DataSource | None = None,
        processing_class: Tokenizer | None = None,
        callbacks: Iterable[TrainerCallback] = (),
        device: str = "auto",
        dtype: str = "auto",
        eval_reward_funcs: Reward | Sequence[Reward] | None = None,
        tools: Sequence[Callable] | None = None,
        environment_factory: Callable[[], Any] | None = None,
        peft_config: Any = None,
    ):
        self.args = args = self.config_class() if args is None else args
        if not isinstance(args, self.config_class):
            raise ValueError(
                f"{type(self).__name__} takes args={self.config_class.__name__}(…), got {type(args).__name__}"
            )
        self.args = args = with_peft(args, peft_config)
        self._tools, self._environment_factory = tools, environment_factory
        reward_funcs = reward_funcs if reward_funcs is not None else args.reward_funcs
        eval_reward_funcs = eval_reward_funcs if eval_reward_funcs is not None else args.eval_reward_funcs
        self._reward_funcs = (reward_funcs, eval_reward_funcs)
        if train_dataset is None:
            raise ValueError(
                f"{type(self).__name__} needs train_dataset: rows with a prompt, a file, or a name of the hub"
            )
        self.scorer = self.eval_scorer = self._make_scorer(reward_funcs, args.reward_weights)
        if eval_reward_funcs is not None:
            self.eval_scorer = self._make_scorer(eval_reward_funcs)
        check_plays_alone(self.environments, args.tensor_parallel_size)
        self.generation = self.make_generation()
        super().__init__(model, args, train_dataset, eval_dataset, processing_class, callbacks, device, dtype)
        self.apart = Apart(self) if args.rollout_gpus else None
        self.rollout: Rollout | None = None  # of a rank that draws
        self.reference: Decoder | WithoutAdapter | None = None
        if self.ranks.draws:
            self._make_rollout()
        else:  # an engine would say so
            self.model.exact = args.engine.exact
        if self.needs_reference and self.ranks.trains:
            self.reference = self.model.frozen_copy() if self.model.adapter is None else WithoutAdapter(self.model)
        self._batch: PackedBatch | None = None

    def _make_rollout(self) -> None:
        """The engine, and what rewards its completions."""
        args, plan = self.args, self.plan
        sizes = {"num_kv_blocks": plan.num_kv_blocks, "max_model_len": plan.max_model_len}
        self.rollout = Rollout(self.model, self.tokenizer, plan.sleeps_cache, True, **flat_values(args.engine) | sizes)
        if self.environments is not None:
            self.rollout.episodes = self._make_episodes(self.environments, self.rollout)
        for one in self.reward_models.values():
            one.load(self.model, self.tokenizer, args.max_tokens_per_batch, args.chat_template_kwargs)

    @abstractmethod
    def make_generation(self) -> Generation:
        """What draws this method's generation batches; called before anything is loaded."""

    # ---- rewards and environments ----

    _reward_funcs: tuple | None = None  # of the training and of evaluations, as they were given
    _tools: Sequence[Callable] | None = None
    _environment_factory: Callable | None = None

    @cached_property
    def environments(self) -> EnvironmentMaker | None:
        """What makes the environment of each completion; None without one."""
        args, factory, tools = self.args, self._environment_factory, self._tools
        return make_maker(args.environment if factory is None else factory, args.tools if tools is None else tools)

    @cached_property
    def reward_models(self) -> dict[str, RewardModel]:
        """The reward models among the rewards, by the names that they were given as."""
        return reward_models(*(self._reward_funcs or (self.args.reward_funcs, self.args.eval_reward_funcs)))

    def _make_scorer(self, reward_funcs: Any, weights: list[float] | None = None) -> RewardScorer:
        reward_funcs = with_models(reward_funcs, self.reward_models)
        if self.environments is not None:
            reward_funcs, weights = self.environments.with_own_reward(reward_funcs, weights)
        state, in_process = partial(trainer_state, self), self.environments is not None
        return RewardScorer(reward_funcs, weights, self.args.reward_limits, state, in_process)

    def _make_episodes(self, maker: EnvironmentMaker, rollout: Rollout) -> Episodes:
        args = self.args
        episodes = Episodes(rollout.llm, maker, args.chat_template_kwargs, args.max_tool_calling_iterations)
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
        model_rows = self.model.config.vocab_size
        try:
            rows = prompt_rows(rows)
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

    def ids_of(self, row: tuple[dict, list[int]]) -> Iterable[ArrayLike]:
        return (row[1],)

    @property
    def needs_reference(self) -> bool:
        """Whether the method compares the policy with the model as it was."""
        return False

    @property
    def has_kl_in_loss(self) -> bool:
        """Whether the loss needs the reference's log-probabilities."""
        return False

    def plan_memory(self, *more: ModelUse, **sizes: Any) -> Plan:
        args, use, draws, trains = self.args, self.model, self.ranks.draws, self.ranks.trains
        copied = self.needs_reference and adapter_of(use, args) is None  # with an adapter, the base is the reference
        others = [ModelUse("reference", self.own_shape(use.config), use.dtype)] if copied and trains else []
        others += [one.use(use.dtype) for one in self.reward_models.values()] if draws else []
        others += more if trains else ()
        longest = max(len(ids) for _, ids in self.train_rows) + args.max_completion_length
        tokens = args.generation_size * longest
        sizes = {"packed_tokens": tokens, "longest_sequence": longest, "step_tokens": tokens // args.num_slices} | sizes
        plan = super().plan_memory(*others, engine=args.engine if draws else None, trains=trains, **sizes)
        if draws and args.max_model_len is None:
            self._check_room(plan, longest)
        return plan

    def _check_room(self, plan: Plan, longest: int) -> None:
        """ValueError unless the KV cache holds one sequence of so many tokens, or of the model's own context."""
        needed = min(longest, self.model.config.max_position_embeddings)
        if plan.max_model_len >= needed:
            return
        args, blocks = self.args, self.args.num_kv_blocks
        ways = "num_kv_blocks" if blocks is not None else plan.share_option
        if blocks is None and self.model.backend.name == "cpu":
            ways += " or num_kv_blocks"  # its cache has a limit of its own
        cut = f", or give max_model_len={plan.max_model_len} to cut completions there"
        message = (
            f"the KV cache has room for {plan.max_model_len} tokens ({plan.num_kv_blocks} blocks of {args.block_size}),"
            f" and the longest prompt with max_completion_length={args.max_completion_length} takes {needed}: raise "
            f"{ways}, or lower max_completion_length"
            f"{cut if plan.max_model_len > longest - args.max_completion_length else ''}"
        )
        if blocks is not None:  # no option that takes less memory would help
            raise ValueError(message)
        raise DoesNotFit(message, plan)

    @property
    def updates_a_generation(self) -> int:
        return self.args.num_slices * self.args.num_iterations

    def count_steps(self) -> int:
        args = self.args
        if args.max_steps > 0:
            return args.max_steps
        batches = batches_an_epoch(len(self.train_rows), args.prompts_a_generation)
        generations = args.num_train_epochs * batches
        return max(1, math.ceil(generations)) * self.updates_a_generation

    def make_batch(self, step: int) -> tuple[list[Rows], dict]:
        metrics: dict = {}
        place = step % self.updates_a_generation
        if place == 0:
            self.generation.balance = {}
            self.whole_weights()
            self._batch, metrics = self.generation.batch(step // self.updates_a_generation)
            metrics |= self.generation.balance | ({} if self.apart is None else self.apart.take_metrics())
        self._on_policy = place == 0
        if not self.ranks.trains:
            return [], metrics | {"step_tokens": 0}
        assert self._batch is not None
        index = place % self.args.num_slices
        shares = self.shares_prompts and is_ours(self.compute_loss)  # a subclass's may take whole rows
        given = self.args.max_tokens_per_batch, self.ranks.training.share, self._riding_tokens, shares
        micro_batches = self._batch.micro_batches(index, *given)
        first, last = self._batch.slices[index : index + 2]
        return micro_batches, metrics | {"step_tokens": int(self._batch.num_learnt[first:last].sum())}

    @cached_property
    def _riding_tokens(self) -> int:
        """So many tokens without a gradient go through the backward pass of the others in less time than the host
        takes for a pass of their own.
        """
        if not self.model.backend.is_asynchronous:
            return 0
        return int(LAUNCHING * self.model.config.num_hidden_layers / (4 * self.model.num_parameters))

    # ---- ranks that are apart ----

    def _accumulate(self, micro_batches: list, in_backward: UpdateInBackward | None = None) -> tuple[float, dict, bool]:
        """See Steps. A rank that does not train may draw the next batch meanwhile."""
        if self.ranks.trains:
            return super()._accumulate(micro_batches, in_backward)
        number, place = divmod(self.global_step, self.updates_a_generation)
        if self._is_stale and place == 0 and (number + 1) * self.updates_a_generation < self.total_steps:
            self.generation.draw_ahead(number + 1)
        return math.nan, {}, False

    def _update(self, run: Run, has_gradient: bool, in_backward: UpdateInBackward | None) -> dict:
        if self.ranks.trains:
            return super()._update(run, has_gradient, in_backward)
        return {"learning_rate": self._rate_of(self.models[POLICY])}

    @property
    def _is_stale(self) -> bool:
        """Whether batches are drawn ahead."""
        return self.apart is not None and self.apart.stale

    def send_weights(self) -> None:
        if self.apart is not None:
            self.whole_weights()
            self.apart.send_weights()

    def stop_requested(self) -> bool:
        """See Trainer. Ranks of which some draw ahead ask one another between two generation batches alone."""
        if self.apart is None or self.ranks.alone:
            return super().stop_requested()
        if self._is_stale and self.global_step % self.updates_a_generation:
            return False
        with self.apart.waiting():
            return super().stop_requested()

    def raise_if_stopped(self) -> None:
        if not self._is_stale or self.ranks.alone:
            super().raise_if_stopped()

    # ---- the sampler and the trainer ----

    def sampling_sums(self, logprobs: Any, rows: Rows) -> dict[str, Any]:
        """How far the trainer's log-probabilities (N,) are from the sampler's, before the first update of a generation
        batch; {} after it. For sampling_metrics.
        """
        if not self._on_policy:
            return {}
        log_ratio = logprobs - (rows.logprobs if rows.sampled is None else rows.sampled)
        return {
            "difference": abs(log_ratio).sum(),
            "ratio": np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)).sum(),
            "max/difference": abs(log_ratio).max(),
            "max/log_ratio": log_ratio.max(),
            "max/-log_ratio": (-log_ratio).max(),
        }

    @staticmethod
    def sampling_metrics(sums: dict, tokens: float) -> dict:
        """TRL's sampling/… of a step from the added-up sampling_sums."""
        if "difference" not in sums:
            return {}
        low, high = np.exp(np.clip([-sums["max/-log_ratio"], sums["max/log_ratio"]], -MAX_LOG_RATIO, MAX_LOG_RATIO))
        return {
            "sampling/sampling_logp_difference/mean": float(sums["difference"] / tokens),
            "sampling/sampling_logp_difference/max": float(sums["max/difference"]),
            "sampling/importance_sampling_ratio/mean": float(sums["ratio"] / tokens),
            "sampling/importance_sampling_ratio/min": float(low),
            "sampling/importance_sampling_ratio/max": float(high),
        }

    def weights_changed(self) -> None:
        if self.rollout is not None:
            self.rollout.weights_changed()

    # ---- evaluation, checkpoints ----

    def run_evaluation(self) -> dict:
        self.send_weights()
        return evaluate(self)

    def _check_rest(self, batch: PackedBatch) -> None:
        """ValueError unless this run's options can go on with a half-used generation batch."""
        wanted = self.args.num_slices
        if batch.num_slices != wanted:
            raise ValueError(
                f"the checkpoint's generation batch makes {batch.num_slices} optimizer batches, and this run's options "
                f"make {wanted}; resume with the same {self.batch_options}"
            )
        if self.has_kl_in_loss and batch.ref_logprobs is None:
            raise ValueError(
                "the checkpoint stands within a generation batch that was drawn without beta; resume with beta=0, or "
                "from a checkpoint after its last step"
            )

    def method_state(self) -> tuple[dict, dict]:
        arrays: dict = {}
        if self.global_step % self.updates_a_generation and self.ranks.trains:
            assert self._batch is not None
            arrays |= {f"batch.{name}": value for name, value in self._batch.to_arrays().items()}
        return arrays, {"updates_a_generation": self.updates_a_generation}

    def load_method_state(self, arrays: dict, values: dict) -> None:
        if self.apart is not None:
            self.apart.forget()
        if values["updates_a_generation"] != self.updates_a_generation:
            raise ValueError(
                f"the checkpoint made {values['updates_a_generation']} updates a generation batch, this run makes "
                f"{self.updates_a_generation}; resume with the same {self.batch_options}"
            )
        batch = {name.removeprefix("batch."): value for name, value in arrays.items() if name.startswith("batch.")}
        found = PackedBatch.from_arrays(batch) if batch else None
        if found is not None:
            self._check_rest(found)
        self._batch = found.to(self.model.backend) if found is not None and self.ranks.trains else None
