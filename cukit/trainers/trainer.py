"""The loop that every method shares: micro-batches, clipping, the update, metrics, evaluation, checkpoints, resume.

A method says how many steps there are, what a batch is, what its loss is and how it is evaluated (the hooks below); all
else is here.
"""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np

from ..datasets.sampler import EpochSampler
from ..datasets.sources import load_rows
from ..models.decoder import Decoder
from ..models.weights import load_model, model_folder, save_model
from ..optim import AdamW, learning_rate_factor
from ..options import flat_values
from ..runs import checkpoint
from ..runs.folder import open_run_folder, write_run_config
from ..runs.metrics import MetricsLogger, Timer
from ..runs.progress import Progress
from ..tokenizer import Tokenizer

# In a logged row these are the newest value; every other metric is the mean over the steps since the last row.
LATEST = ("learning_rate", "num_tokens", "epoch", "skipped_updates", "loss_scale")


class TrainerCallback:
    """What a user may hook into. `trainer` has model, tokenizer, args, global_step, run_folder."""

    def on_step_end(self, trainer, metrics: dict):
        """After every optimizer step, with that step's metrics."""

    def on_log(self, trainer, row: dict):
        """After a row was written to metrics.jsonl."""

    def on_evaluate(self, trainer, metrics: dict):
        """After an evaluation, with its eval/ metrics."""

    def on_train_end(self, trainer):
        """After the last step and the last checkpoint."""


class Trainer(ABC):
    """See SFTTrainer and GRPOTrainer. `model`: a model folder, or a Decoder (then with processing_class)."""

    label = "run"

    def __init__(
        self,
        model,
        args,
        train_dataset,
        eval_dataset=None,
        processing_class=None,
        callbacks=(),
        device="auto",
        dtype="auto",
    ):
        self.args, self.callbacks = args, list(callbacks)
        self.run_folder = self.optimizer = self.logger = self.progress = None
        device, dtype = (
            chosen if chosen != "auto" else given for chosen, given in ((device, args.device), (dtype, args.dtype))
        )
        self.model_name = None if isinstance(model, Decoder) else str(model)
        if isinstance(model, Decoder) and processing_class is None:
            raise ValueError("a model that is already loaded needs its tokenizer: give processing_class")
        if not isinstance(model, Decoder):
            model = model_folder(model)
        self.tokenizer = processing_class or Tokenizer.from_folder(model)
        self.model = model if isinstance(model, Decoder) else self.load_model(model, device, dtype)
        self.model.gradient_checkpointing = args.gradient_checkpointing
        self.train_rows, self.eval_rows = self.prepare_rows(load_rows(train_dataset), "train_dataset"), []
        self.sampler = EpochSampler(len(self.train_rows), args.seed, args.shuffle_dataset)
        if eval_dataset is not None:
            self.eval_rows = self.prepare_rows(load_rows(eval_dataset), "eval_dataset")
        elif args.evaluates != "no":
            raise ValueError(f"eval_strategy={args.evaluates} needs an eval_dataset")
        self.total_steps = self.count_steps()
        self.global_step, self.num_tokens, self.evaluations = 0, 0, []
        self.timer, self._epoch_ended = Timer(), False

    # ---- hooks of a method; those that are not abstract may stay as they are ----

    def load_model(self, folder, device: str, dtype: str) -> Decoder:
        return load_model(folder, device, dtype)

    @abstractmethod
    def prepare_rows(self, rows: list[dict], name: str) -> list:
        """Tokenise and check the rows once, before anything runs."""

    @abstractmethod
    def count_steps(self) -> int:
        """Optimizer steps of the whole run."""

    @abstractmethod
    def make_batch(self, step: int) -> tuple[list, dict]:
        """The micro-batches of optimizer step `step` (from 0), and metrics known before training on them."""

    @abstractmethod
    def compute_loss(self, micro_batch):
        """(loss Tensor, {name: array}) of one micro-batch. A step adds them up; of names max/… it takes the largest."""

    @abstractmethod
    def step_metrics(self, sums: dict) -> dict:
        """Metrics of a step from the added-up arrays of compute_loss (now on the host)."""

    @abstractmethod
    def run_evaluation(self) -> dict:
        """Metrics (eval/…) of the model as it is now."""

    def weights_changed(self) -> None:
        """Called after every update and after a checkpoint was loaded."""
        return None

    def after_update(self) -> None:
        """Called after every update."""
        return None

    def method_state(self) -> tuple[dict, dict]:
        """What an exact resume needs beyond weights, optimizer and counters: (arrays, JSON values)."""
        return {}, {}

    def load_method_state(self, arrays: dict, values: dict) -> None:
        """Take back what method_state() gave."""
        return None

    # ---- the public face ----

    def train(self, resume_from_checkpoint=None) -> dict:
        """Run to the last step and return the last logged metrics. resume_from_checkpoint: a checkpoint or run folder,
        or "latest".

        Ctrl-C ends the run after the current step with a checkpoint; a second Ctrl-C ends it at once.
        """
        resume = resume_from_checkpoint or self.args.resume_from_checkpoint
        self._open_run(resume)
        last_row = {}
        window = _Window()
        with Progress(self.total_steps, self.label, self.global_step) as self.progress, _StopSignal() as stop:
            if self.args.eval_on_start and self.global_step == 0:
                self.evaluate()
            self.timer.pop()
            while self.global_step < self.total_steps and not stop.requested:
                metrics = self._train_step()
                window.add(metrics)
                self._call("on_step_end", metrics)
                self.progress.advance(self.global_step)
                if (
                    self.global_step % self.args.logging_steps == 0
                    or self.global_step == self.total_steps
                    or stop.requested
                ):
                    last_row = self._log(window.pop())
                self._evaluate_and_save_if_due(stop.requested)
        self.progress = None
        self.logger.close()
        if self.global_step < self.total_steps:
            print(
                f"stopped at step {self.global_step} of {self.total_steps}; go on with "
                f"--output_dir {self.run_folder} --resume_from_checkpoint latest",
                flush=True,
            )
        self._call("on_train_end")
        return last_row

    def evaluate(self) -> dict:
        """Metrics of the model as it is now on eval_dataset, {} without one; logged if a run is open."""
        if not self.eval_rows:
            return {}
        metrics = self.run_evaluation()
        self.evaluations.append((self.global_step, metrics))
        if self.logger is not None:
            self.logger.log(self.global_step, metrics)
        if self.progress is not None:
            self.progress.update(self.global_step, metrics)
        self._call("on_evaluate", metrics)
        self.timer.pop()  # the next step's time is its own
        return metrics

    def save_model(self, folder):
        """Write a Hugging Face model folder: config.json, model.safetensors and the tokenizer's files."""
        save_model(self.model, folder)
        self.tokenizer.save(folder)

    # ---- one step ----

    def _train_step(self) -> dict:
        be, epochs_before = self.model.backend, self.sampler.epochs_done
        micro_batches, metrics = self.make_batch(self.global_step)
        loss_value, sums = 0.0, {}
        with self.timer("train"):
            for micro_batch in micro_batches:
                loss, extra = self.compute_loss(micro_batch)
                if loss.requires_grad:
                    loss.backward(loss.data * 0 + self.optimizer.loss_scale)
                for name, value in (extra | {"loss": loss.data}).items():
                    combine = np.maximum if name.startswith("max/") else np.add
                    sums[name] = combine(sums[name], value) if name in sums else value
            sums = {
                name: be.to_numpy(value).astype(np.float64) for name, value in sums.items()
            }  # the step's one wait for the device
            loss_value = float(sums.pop("loss", 0.0))
            warmup = self.args.num_warmup_steps(self.total_steps)
            factor = learning_rate_factor(self.args.lr_scheduler_type, self.global_step, self.total_steps, warmup)
            grad_norm, applied = self.optimizer.step(self.args.learning_rate * factor)
            if applied:
                self.weights_changed()
                self.after_update()
        self.global_step += 1
        self._epoch_ended = int(self.sampler.epochs_done) > int(epochs_before)
        metrics |= self.step_metrics(sums)
        metrics |= {
            "loss": loss_value,
            "grad_norm": grad_norm,
            "learning_rate": self.args.learning_rate * factor,
            "skipped_updates": self.optimizer.skipped,
            "num_tokens": self.num_tokens,
            "epoch": self.sampler.epochs_done,
        }
        if self.optimizer.loss_scale != 1:
            metrics["loss_scale"] = self.optimizer.loss_scale
        if not applied:
            self.say(f"step {self.global_step}: the gradient is not finite (norm {grad_norm}); the update was skipped")
        times = self.timer.pop()
        tokens = metrics.pop("step_tokens", 0)
        return metrics | times | {"tokens_per_second": tokens / max(times["step_time"], 1e-9)}

    def _log(self, metrics: dict) -> dict:
        row = self.logger.log(self.global_step, metrics)
        self.progress.update(self.global_step, metrics)
        self._call("on_log", row)
        return row

    def _evaluate_and_save_if_due(self, stopping: bool):
        args, step = self.args, self.global_step
        last = step == self.total_steps
        by_steps = args.evaluates == "steps" and step % args.eval_steps == 0
        by_epoch = args.evaluates == "epoch" and self._epoch_ended
        if by_steps or by_epoch or (last and args.eval_on_start):
            self.evaluate()
        if last or stopping or (args.save_steps and step % args.save_steps == 0):
            self.save_checkpoint()

    def say(self, text: str):
        """A line for the user, above the progress display if there is one."""
        self.progress.message(text) if self.progress is not None else print(text, flush=True)

    def _call(self, event: str, *arguments):
        for callback in self.callbacks:
            if hook := getattr(callback, event, None):
                hook(self, *arguments)

    # ---- runs and checkpoints ----

    def _open_run(self, resume):
        """Make the run folder and the optimizer; go back to a checkpoint if asked."""
        args = self.args
        source = checkpoint.find_checkpoint(resume, args.output_dir) if resume else None
        # a run that is resumed goes on in its own folder unless another is named
        folder = args.output_dir or (str(source.parent) if source else None)
        self.run_folder = open_run_folder(folder, self.label, resume=source is not None)
        decays = {
            id(p): not name.endswith("bias") and "norm" not in name for name, p in self.model.named_parameters().items()
        }
        self.optimizer = AdamW(
            self.model.parameters(),
            args.learning_rate,
            (args.adam_beta1, args.adam_beta2),
            args.adam_epsilon,
            args.weight_decay,
            args.max_grad_norm,
            decay=lambda parameter: decays[id(parameter)],
        )
        if source:
            self._resume(source)
        if not (Path(self.run_folder) / "config.yaml").exists():
            write_run_config(self.run_folder, self.run_config())
        self.logger = MetricsLogger(self.run_folder, self.global_step if source else None)

    def run_config(self) -> dict:
        """What config.yaml holds: the resolved options."""
        values = {key: value for key, value in flat_values(self.args).items() if value is not None}
        return ({"model": self.model_name} if self.model_name else {}) | values | {"output_dir": str(self.run_folder)}

    def save_checkpoint(self) -> Path:
        """Write run_folder/checkpoint-N: a model folder plus the trainer's state."""
        arrays, values = self.method_state()
        state = {
            "global_step": self.global_step,
            "num_tokens": self.num_tokens,
            "evaluations": self.evaluations,
            "sampler": self.sampler.state_dict(),
            "method": values,
        }
        arrays = {f"method.{name}": value for name, value in arrays.items()} | self.optimizer.state_dict()
        folder = checkpoint.save_checkpoint(
            checkpoint.checkpoint_folder(self.run_folder, self.global_step), self.model, self.tokenizer, arrays, state
        )
        checkpoint.rotate_checkpoints(self.run_folder, self.args.save_total_limit)
        return folder

    def _resume(self, source: Path):
        arrays, state = checkpoint.load_checkpoint(source)
        stored = load_model(source, self.model.backend.name, self.model.dtype)
        for parameter, other in zip(self.model.parameters(), stored.parameters(), strict=True):
            if parameter.shape != other.shape:
                raise ValueError(
                    f"{source} holds another model: {other.name} has shape {other.shape}, "
                    f"this one's is {parameter.shape}"
                )
            parameter.data[...] = other.data
        own = {name.removeprefix("method."): value for name, value in arrays.items() if name.startswith("method.")}
        self.optimizer.load_state_dict(
            {name: value for name, value in arrays.items() if not name.startswith("method.")}
        )
        self.global_step, self.num_tokens = state["global_step"], state["num_tokens"]
        self.evaluations = [(step, metrics) for step, metrics in state["evaluations"]]
        if self.global_step > self.total_steps:
            raise ValueError(
                f"{source} is at step {self.global_step}, beyond this run's {self.total_steps} steps; raise max_steps"
            )
        self.sampler.load_state(state["sampler"])
        self.load_method_state(own, state["method"])
        self.weights_changed()


class _Window:
    """Metrics of the steps since the last logged row."""

    def __init__(self):
        self._values = {}

    def add(self, metrics: dict):
        for name, value in metrics.items():
            if value is not None and not (np.isnan(value) and name not in ("loss", "grad_norm")):
                self._values.setdefault(name, []).append(float(value))

    def pop(self) -> dict:
        values, self._values = self._values, {}
        return {name: found[-1] if name in LATEST else sum(found) / len(found) for name, found in values.items()}


class _StopSignal:
    """Turns the first Ctrl-C (or SIGTERM) into a flag, so that a step is never cut in the middle of an update."""

    def __init__(self):
        self.requested, self._before = False, {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error):
        self._restore()

    def _handle(self, number, frame):
        self.requested = True
        self._restore()
        print("\nstopping after this step with a checkpoint; once more to stop at once", flush=True)

    def _restore(self):
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
