"""What every method shares around its steps (step.py): models, rows, the memory plan, evaluation, checkpoints, resume.

A method says how many steps there are and how it is evaluated (the hooks below); all else is here.
"""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from numpy.typing import ArrayLike

from ..backend import backend_for
from ..backend.states import MOMENT_BYTES
from ..datasets.columns import dataset_rows
from ..datasets.sampler import EpochSampler
from ..engine.config import EngineConfig
from ..engine.fitting import TRAINING, TRAINING_TOGETHER, Search, search
from ..engine.memory import DoesNotFit, Plan, hold_memory, plan_memory
from ..engine.shapes import ModelUse, adapted
from ..engine.tensor_parallel import least_memory
from ..models.config import ModelConfig
from ..models.decoder import Decoder
from ..models.weights import load_model, model_folder, save_model, tokenizer_folders, whole_model
from ..optim import AdamW
from ..options import stated_values
from ..runs.metrics import MetricsLogger, Timer
from ..runs.progress import Progress
from ..runs.reporters import check_packages
from ..runs.signals import RunStopped, StopSignal
from ..tokenizer import Tokenizer
from .best import BestModel
from .callbacks import TrainerCallback, call_callbacks, checked_callbacks
from .config import TrainerConfig
from .loop import Run
from .lora import adapter_of, check_base, put_adapter, with_peft
from .ranks import Ranks
from .state import POLICY, TrainedModel, shard_weights
from .step import Steps

__all__ = ["Trainer", "TrainerCallback"]

logger = logging.getLogger(__name__)

ModelSource = str | os.PathLike | Decoder
DataSource = str | os.PathLike | Iterable[dict]  # what load_rows takes: a file, a name of the hub, rows


class Trainer(Steps):
    """See SFTTrainer and GRPOTrainer. `model`: a model folder, or a Decoder (then with processing_class).

    peft_config: a peft.LoraConfig, or a dict of its fields; the same as use_peft and its options in args.
    """

    label = "run"
    head = "lm_head"  # of the model that is trained
    args: TrainerConfig
    _least_memory: dict[str, Any] | None = None  # of the ranks that share the models; None: of this one

    def __init__(
        self,
        model: ModelSource,
        args: TrainerConfig,
        train_dataset: DataSource,
        eval_dataset: DataSource | None = None,
        processing_class: Tokenizer | None = None,
        callbacks: Iterable[TrainerCallback] = (),
        device: str = "auto",
        dtype: str = "auto",
        peft_config: Any = None,
    ):
        self.ranks = Ranks(options=args.parallel, rollout_gpus=args.num_processes - args.training_processes)
        args = with_peft(args, peft_config, self.head)
        check_packages(args.report_to or [])
        self.args, self.callbacks = args, checked_callbacks(callbacks)
        self.run_folder: Path | None = None
        self.run: Run | None = None
        self.logger: MetricsLogger | None = None
        self.progress: Progress | None = None
        device, dtype = (
            chosen if chosen != "auto" else given for chosen, given in ((device, args.device), (dtype, args.dtype))
        )
        self.model_name = None if isinstance(model, Decoder) else str(model)
        hold_memory(model.backend if isinstance(model, Decoder) else backend_for(device), args.memory.nbytes)
        if isinstance(model, Decoder):
            if processing_class is None:
                raise ValueError("a model that is already loaded needs its tokenizer: give processing_class")
            self.tokenizer = processing_class
        else:
            folder = model_folder(model)
            check_base(args, folder, model)
            self.tokenizer = processing_class or Tokenizer.from_folder(*tokenizer_folders(folder))
            model = self.load_model(folder, device, dtype)
        if self.ranks.tensor is not None and model.tensor is None:
            model = model.share_out(self.ranks.tensor)
        put_adapter(model, args, self.model_name)
        model.limit_vocabulary(self.tokenizer.vocab_size)
        self.models = self.make_models(model)
        self.train_rows = self.read_rows(train_dataset, "train_dataset")
        self.eval_rows: list = []
        self.sampler = self.make_sampler(len(self.train_rows))
        if eval_dataset is not None:
            self.eval_rows = self.read_rows(eval_dataset, "eval_dataset")
        elif args.evaluates != "no":
            raise ValueError(f"eval_strategy={args.evaluates} needs an eval_dataset")
        self.total_steps, self._least_memory = self.count_steps(), least_memory(self.ranks.tensor, model.backend)
        try:
            self.plan = self.plan_memory()
        except DoesNotFit as error:
            raise DoesNotFit(f"{error}; {self.search_options().line()}", error.plan) from None
        for trained in self.models.values():
            if isinstance(trained.model, Decoder) and self.plan.level:
                trained.model.gradient_checkpointing = self.plan.level
            trained.weights = shard_weights(trained.model, args.zero_stage, self.ranks.training)
        self.global_step, self.num_tokens = 0, 0
        self.evaluations: list[tuple[int, dict]] = []
        self.evaluation_due = False
        self.best = BestModel(args) if args.best.tracks else None
        self.timer, self._stop = Timer(), StopSignal(self.ranks.several, self.ranks.is_first)

    @property
    def model(self) -> Decoder:
        """The policy."""
        return cast(Decoder, self.models[POLICY].model)

    @property
    def finished(self) -> bool:
        """Whether no step is left: the last one is done, or early_stopping_patience is at its end."""
        return self.global_step >= self.total_steps or (self.best is not None and self.best.exhausted)

    @property
    def optimizer(self) -> AdamW | None:
        """The policy's AdamW; None before the run begins."""
        return self.models[POLICY].optimizer

    def read_rows(self, dataset: Any, name: str) -> list:
        """The prepared rows of train_dataset or eval_dataset: anything that cukit.datasets.sources.load_rows takes."""
        try:
            rows = dataset_rows(dataset, self.args.rows, "train" if name == "train_dataset" else "test")
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return self.prepare_rows(rows, name)

    # ---- hooks of a method; those that are not abstract may stay as they are ----

    def load_model(self, folder: Path, device: str, dtype: str) -> Decoder:
        return load_model(folder, device, dtype, tensor=self.ranks.tensor)

    def make_models(self, policy: Decoder) -> dict[str, TrainedModel]:
        """The models that the run trains, by name; the policy is the one that it publishes."""
        return {POLICY: TrainedModel(POLICY, policy)}

    @abstractmethod
    def prepare_rows(self, rows: list[dict], name: str) -> list:
        """Tokenise and check the rows once, before anything runs."""

    @abstractmethod
    def ids_of(self, row: Any) -> Iterable[ArrayLike]:
        """The ids of a prepared row, by which ranks compare their data."""

    def make_sampler(self, num_rows: int) -> EpochSampler:
        """The order of the training rows; its state goes into checkpoints."""
        return EpochSampler(num_rows, self.args.seed, self.args.shuffle_dataset)

    def plan_memory(
        self,
        *more: ModelUse,
        engine: EngineConfig | None = None,
        step_tokens: int | None = None,
        trains: bool = True,
        **sizes: Any,
    ) -> Plan:
        """What the run will hold on its device; ValueError if a card has no room for it.

        A method with an engine or further models passes them on: super().plan_memory(ModelUse(…), engine=args.engine).
        step_tokens: the most tokens of an optimizer step. trains: whether this process trains the policy. sizes: what
        plan_memory takes besides (longest_sequence, packed_tokens). Called once, after the rows are prepared.
        """
        most = self.args.max_tokens_per_batch
        if step_tokens is not None:
            if (ranks := self.args.training_processes) > 1:  # a rank's share, to a row
                step_tokens = min(step_tokens, step_tokens // ranks + sizes["longest_sequence"])
            sizes["micro_batches"] = 1 if step_tokens <= most else 2
            most = min(most, step_tokens)
        policy = self.model
        loaded, head = isinstance(policy, Decoder), policy.config.head == "lm_head"
        shape = self.own_shape(policy.config)
        trained = ModelUse(POLICY, shape, policy.dtype, trained=trains, loaded=loaded, head=head)
        if found := adapter_of(policy, self.args):
            trained = adapted(trained, *found)
        offloaded = self.args.offload_optimizer and policy.backend.name == "cuda"
        states: dict[str, Any] = {"moment_bytes": MOMENT_BYTES[self.args.optimizer_state], "offloaded": offloaded}
        states["updated_in_backward"], gathers = self.args.optimizer_in_bwd, self.args.tensor_parallel_invariant
        plan_of = partial(
            plan_memory,
            [replace(use, gathers=gathers, **(states if use.trained else {})) for use in (trained, *more)],
            engine,
            self.model.backend,
            gradient_checkpointing=self.args.gradient_checkpointing,
            ranks=self.args.training_processes if self.args.zero_stage else 1,
            zero_stage=self.args.zero_stage,
            memory_limit=self.args.memory.nbytes,
            **(self._least_memory or {}),
            **sizes,
        )
        try:
            return plan_of(max_tokens_per_batch=most)
        except DoesNotFit as error:
            if step_tokens is None or step_tokens <= most or not _fits_in_one_pass(plan_of, step_tokens):
                raise
            raise DoesNotFit(
                f"{error}; with --max_tokens_per_batch {step_tokens} an update is one pass, which holds "
                "no gradients of the whole model, and fits",
                error.plan,
            ) from None

    def own_shape(self, config: ModelConfig) -> ModelConfig:
        """The shape of this rank's part of a model."""
        return config.part_of(self.args.tensor_parallel_size)

    def search_options(self) -> Search:
        """Which options would make the run fit."""

        def plan_of(args: TrainerConfig) -> Plan:
            before, self.args = self.args, args
            try:
                return self.plan_memory(quiet=True)
            finally:
                self.args = before

        return search(self.args, plan_of, TRAINING if self.args.training_processes == 1 else TRAINING_TOGETHER)

    @abstractmethod
    def count_steps(self) -> int:
        """Optimizer steps of the whole run."""

    @abstractmethod
    def run_evaluation(self) -> dict:
        """Metrics (eval/…) of the model as it is now. A stop may cut it short (raise_if_stopped())."""

    def method_state(self) -> tuple[dict, dict]:
        """What an exact resume needs beyond weights, optimizer and counters: (arrays, JSON values)."""
        return {}, {}

    def load_method_state(self, arrays: dict, values: dict) -> None:
        """Take back what method_state() gave."""
        return None

    # ---- the public face ----

    def train(self, resume_from_checkpoint: str | os.PathLike | bool | None = None) -> dict:
        """Run to the last step and return the last logged metrics. resume_from_checkpoint: a checkpoint or run folder,
        or "latest".

        The first Ctrl-C (or SIGTERM) ends the run as soon as its state can be saved; the second ends it at once. An
        exception between two updates (a reward's, a callback's) saves the finished steps before it goes on.
        """
        with self._stop:
            self.run = Run(self, resume_from_checkpoint or self.args.resume_from_checkpoint)
            with self.run:
                return self.run.loop()

    def evaluate(self) -> dict:
        """Metrics of the model as it is now on eval_dataset, {} without one; logged if a run is open."""
        if not self.eval_rows:
            return {}
        self.whole_weights()
        metrics = self.run_evaluation()
        self.raise_if_stopped()  # the evaluation may have ended early
        self.evaluations.append((self.global_step, metrics))
        if self.logger is not None:
            self.logger.log(self.global_step, metrics)
        if self.progress is not None:
            self.progress.update(self.global_step, metrics)
        self.call("on_evaluate", metrics)
        self.timer.pop()  # the next step's time is its own
        return metrics

    def save_model(self, folder: str | os.PathLike) -> None:
        """Write a Hugging Face model folder: config.json, model.safetensors and the tokenizer's files. With use_peft an
        adapter's folder, in PEFT's format. Every rank calls it, and the first one writes.
        """
        self.whole_weights()
        if self.ranks.rank == 0:  # those that share the first one's models help it
            model = whole_model(self.model)
            if self.ranks.is_first:
                save_model(model, folder)
                self.tokenizer.save(folder)

    def whole_weights(self) -> None:
        """With zero_stage=3, gather all weights on every rank, which all call it: for what reads or uses them. The next
        step drops them.
        """
        for one in self.models.values():
            if one.weights is not None:
                one.weights.whole()

    def is_world_process_zero(self) -> bool:
        """Whether this process is the first rank, or the only one: the one that writes files."""
        return self.ranks.is_first

    def save_checkpoint(self) -> Path:
        """Write run_folder/checkpoint-N of the run that is open: a model folder plus the trainer's state."""
        if self.run is None:
            raise ValueError("save_checkpoint() needs a run: call it from a callback; save_model(folder) needs none")
        return self.run.save_checkpoint()

    def stop(self) -> None:
        """End the run after this step, as Ctrl-C does; for callbacks. Before train(): before the first step."""
        self._stop.request()

    def stop_requested(self) -> bool:
        """Whether the run is to end soon; long phases may look at it and end early. Every rank gets the same answer,
        and asks at the same place, unless it is alone (ranks.each).
        """
        return self.ranks.any(self._stop.requested)

    def raise_if_stopped(self) -> None:
        """RunStopped if the run is to end soon: for phases that change no weight, between their parts."""
        if self.stop_requested():
            raise RunStopped

    def interruptible(self) -> AbstractContextManager[None]:
        """`with trainer.interruptible():` around a user's code (a reward): a stop ends it there and then."""
        return self._stop.interruptible()

    def run_config(self) -> dict:
        """What config.yaml holds: the resolved options, without how the run was started."""
        values = stated_values(self.args)
        values.pop("resume_from_checkpoint", None)
        return ({"model": self.model_name} if self.model_name else {}) | values | {"output_dir": str(self.run_folder)}

    def say(self, text: str) -> None:
        """A line for the user above the progress display; a log line where there is no display."""
        self.progress.message(text) if self.progress is not None else logger.warning(text)

    def call(self, event: str, *arguments: object) -> None:
        """Call the hook `event` of every callback."""
        call_callbacks(self.callbacks, event, self, *arguments)


def _fits_in_one_pass(plan_of: Callable[..., Plan], step_tokens: int) -> bool:
    try:
        plan_of(max_tokens_per_batch=step_tokens, micro_batches=1, quiet=True)
    except DoesNotFit:
        return False
    return True
