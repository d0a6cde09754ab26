"""Options of every trainer, and of SFT (GRPO: grpo_config.py); names, defaults and meaning are TRL's.

Values stay as they were given (None stays None). A value that follows from several of them is a property.
"""

import logging
import math
import os
from typing import Any, ClassVar

from ..datasets.config import RowOptions
from ..engine.config import MemoryOptions
from ..models.config import DTYPES, LEVELS, LEVELS_OF_BOOLS
from ..options import (
    LARGEST_SEED,
    Options,
    check_choices,
    check_range,
    nested,
    option,
    require,
    say_once,
)
from ..parallel.config import ParallelOptions, num_processes
from .evaluation_config import BestModelOptions
from .lora_config import LoraOptions
from .memory_config import OPTIMIZER_STATES as OPTIMIZER_STATES
from .memory_config import StateOptions

logger = logging.getLogger(__name__)
EXCLUSIVE: tuple[tuple[str, ...], ...] = (
    ("max_steps", "num_train_epochs"),
    ("warmup_steps", "warmup_ratio"),
    ("eval_strategy", "eval_steps"),
    ("dtype", "bf16", "fp16"),
)
DASHBOARDS = ("trackio", "wandb", "tensorboard")
SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup")


class TrainerConfig(Options):
    """What every trainer shares.

    Of two options that exclude each other the one given later wins (command line over YAML over recipe). Both in one
    place: max_steps rules num_train_epochs, warmup_steps above 0 rules warmup_ratio, eval_strategy rules eval_steps, as
    in transformers. eval_steps alone means eval_strategy=steps.
    """

    group = "training"
    exclusive = EXCLUSIVE
    way_out = "; docs/MIGRATION.md says what becomes of each option of TRL"
    default_metric: ClassVar[str] = "eval/loss"  # of metric_for_best_model

    output_dir: str | None = option(None, "run folder; default: a fresh one below runs/", group="files")
    resume_from_checkpoint: str | None = option(
        None, "a checkpoint-N or run folder, or 'latest' of output_dir", group="files"
    )
    device: str = option("auto", "where to run", ("auto", "cpu", "cuda"), "device and memory")
    dtype: str = option(
        "auto", "weights and activations; auto: bfloat16 on cuda, float32 on cpu", DTYPES, "device and memory"
    )
    bf16: bool | None = option(None, "true is the same as dtype=bfloat16; false: float32", group="device and memory")
    fp16: bool | None = option(None, "true is the same as dtype=float16", group="device and memory")
    max_tokens_per_batch: int = option(
        16384, "most tokens in one forward pass; only splits the work", group="device and memory"
    )
    gradient_checkpointing: str = option(
        "full",
        "what the backward pass makes again to save memory: nothing, what is cheap, or all but the stream between "
        "layers; auto: the fastest that fits; true is full, false none",
        (*LEVELS, "auto"),
        "device and memory",
        bools=(LEVELS_OF_BOOLS[False], LEVELS_OF_BOOLS[True]),
    )
    states: StateOptions = nested(StateOptions)
    seed: int = option(42, "seed of initial weights, data order and sampling")
    learning_rate: float = option(5e-5, "peak learning rate of AdamW")
    lr_scheduler_type: str = option("linear", "learning rate after the warm-up", SCHEDULES)
    warmup_steps: int = option(0, "steps of linear warm-up")
    warmup_ratio: float = option(0.0, "share of all steps for linear warm-up, rounded up")
    weight_decay: float = option(0.0, "AdamW weight decay (not on norms and biases)")
    adam_beta1: float = option(0.9, "AdamW beta1")
    adam_beta2: float = option(0.999, "AdamW beta2")
    adam_epsilon: float = option(1e-8, "AdamW epsilon")
    max_grad_norm: float = option(1.0, "clip the gradient's global norm to this; 0 is off")
    num_train_epochs: float = option(3.0, "passes over the training data")
    max_steps: int = option(-1, "optimizer steps; -1: as num_train_epochs says")
    per_device_train_batch_size: int = option(8, "rows (for GRPO: completions) per micro-batch")
    gradient_accumulation_steps: int = option(1, "micro-batches per optimizer step")
    shuffle_dataset: bool = option(True, "new random order of the rows in every epoch")
    logging_steps: int = option(10, "steps between rows of metrics.jsonl", group="log and checkpoints")
    log_completions: bool = option(
        False, "at every logging step: print a completion, send a table to dashboards", group="log and checkpoints"
    )
    report_to: list[str] | None = option(
        None, "dashboards: trackio, wandb, tensorboard (comma separated), or none", group="log and checkpoints"
    )
    run_name: str | None = option(
        None, "the run's name in trackio and wandb; default: its folder's", group="log and checkpoints"
    )
    project: str | None = option(
        None, "the project in trackio and wandb; default: WANDB_PROJECT (wandb), cukit", group="log and checkpoints"
    )
    save_steps: int = option(500, "steps between checkpoints; 0: only at the end", group="log and checkpoints")
    save_total_limit: int | None = option(
        None, "keep only the newest checkpoints (and the best)", group="log and checkpoints"
    )
    eval_strategy: str = option("no", "when to evaluate during training", ("no", "steps", "epoch"), "evaluation")
    eval_steps: int | None = option(None, "steps between evaluations (eval_strategy=steps)", group="evaluation")
    eval_on_start: bool = option(False, "evaluate before the first and after the last step", group="evaluation")
    memory: MemoryOptions = nested(MemoryOptions)
    lora: LoraOptions = nested(LoraOptions)
    best: BestModelOptions = nested(BestModelOptions)
    rows: RowOptions = nested(RowOptions)
    parallel: ParallelOptions = nested(ParallelOptions)

    @classmethod
    def respelled(cls, values: dict[str, Any]) -> dict[str, Any]:
        values = RowOptions.respelled(values)
        resume = values.get("resume_from_checkpoint")
        if isinstance(resume, str) and resume.lower() in ("true", "false"):
            resume = resume.lower() == "true"
        if isinstance(resume, bool):  # TRL's: the latest of output_dir
            values = values | {"resume_from_checkpoint": "latest" if resume else None}
        if (share := _share(values.get("warmup_steps"))) is not None:  # transformers 5
            values = {name: value for name, value in values.items() if name != "warmup_steps"}
            require("warmup_ratio" not in values, f"warmup_steps={share} is a ratio, and warmup_ratio is given too")
            values["warmup_ratio"] = share
        return values

    @classmethod
    def merged(cls, earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
        if later.get("use_peft") is False:  # what was said of the adapter goes with it
            earlier = {name: value for name, value in earlier.items() if name not in LoraOptions.options()}
        found = super().merged(earlier, later)
        if later.get("eval_strategy") == "steps" and "eval_steps" in earlier:  # these two belong together
            found.setdefault("eval_steps", earlier["eval_steps"])
        return found

    def __post_init__(self) -> None:
        check_choices(self)
        self.output_dir = None if self.output_dir is None else os.path.expanduser(self.output_dir)
        check_range(self, "seed", 0, LARGEST_SEED)
        for name in ("max_grad_norm", "weight_decay", "warmup_steps", "save_steps"):
            check_range(self, name, 0)
        for name in (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "max_tokens_per_batch",
            "logging_steps",
            "save_total_limit",
            "eval_steps",
        ):
            check_range(self, name, 1)
        for name in ("learning_rate", "adam_epsilon", "num_train_epochs"):
            check_range(self, name, 0, open_low=name != "learning_rate")
        for name in ("adam_beta1", "adam_beta2"):
            check_range(self, name, 0, 1)
            require(getattr(self, name) < 1, f"{name} must be below 1, got {getattr(self, name)}")
        check_range(self, "warmup_ratio", 0, 1)
        check_range(self, "max_steps", -1)
        require(self.max_steps != 0, "max_steps must be -1 (off) or at least 1, got 0")
        require(
            not self.zero_stage or self.optimizer_state != "int8",
            f"optimizer_state=int8 has blocks that zero_stage={self.zero_stage} would cut; give "
            "optimizer_state=bfloat16",
        )
        require(
            self.num_processes == 1 or not self.optimizer_in_bwd,
            f"optimizer_in_bwd=true updates a layer before the gradients of {self.num_processes} processes are added "
            "up; leave it out",
        )
        for name in ("use_peft", "optimizer_in_bwd"):
            require(
                self.tensor_parallel_size == 1 or not getattr(self, name),
                f"{name} knows whole models, and tensor_parallel_size={self.tensor_parallel_size} processes share "
                "each: leave one of the two out",
            )
        require(
            self.max_grad_norm == 0 or not self.optimizer_in_bwd,
            f"optimizer_in_bwd=true updates a layer before the gradient's norm is known, so that max_grad_norm="
            f"{self.max_grad_norm:g} cannot clip it: give max_grad_norm=0 too",
        )
        self._resolve_dtype()
        self._check_dashboards()
        require(
            self.evaluates != "steps" or self.eval_steps is not None,
            "eval_strategy=steps needs eval_steps (steps between evaluations)",
        )
        require(
            self.evaluates != "no" or not self.best.tracks,
            f"{'load_best_model_at_end' if self.load_best_model_at_end else 'early_stopping_patience'} compares "
            "evaluations of the run: give eval_steps or eval_strategy",
        )
        for ruling, void in EXCLUSIVE[:3]:
            if void in self.ruled_out() and {ruling, void} <= self.given and getattr(self, void):
                value = getattr(self, ruling)
                say_once(logger, f"{ruling}={value} rules: {void}={getattr(self, void)} is not used")

    def _resolve_dtype(self) -> None:
        """bf16 and fp16 are other spellings of dtype; bf16=false alone is TRL's way to ask for float32."""
        require(not (self.bf16 and self.fp16), "bf16=true and fp16=true contradict; give only one")
        for flag, name in (("bf16", "bfloat16"), ("fp16", "float16")):
            if getattr(self, flag):
                require(self.dtype in ("auto", name), f"{flag}=true and dtype={self.dtype} contradict; give only one")
                self.dtype = name
            elif getattr(self, flag) is False:
                require(self.dtype != name, f"{flag}=false and dtype={self.dtype} contradict; give only one")
        if self.bf16 is False and self.dtype == "auto" and not self.fp16:
            self.dtype = "float32"

    def _check_dashboards(self) -> None:
        """report_to as a list of known names; "none" is the empty one."""
        if self.report_to is None:
            return
        names = [name.strip().lower() for text in self.report_to for name in text.split(",")]
        if names != ["none"]:
            for name in names:
                known = f"{', '.join(DASHBOARDS)}, or none alone"
                require(name in DASHBOARDS, f"report_to must be among {known}, got {name!r}")
        self.report_to = [] if names == ["none"] else list(dict.fromkeys(names))

    @property
    def num_processes(self) -> int:
        """Ranks that share the work: the processes that mpirun or srun started as this run, those that share a model
        counted as one; else 1.
        """
        return max(1, num_processes() // self.tensor_parallel_size)

    @property
    def training_processes(self) -> int:
        """Those that train: all, but for rollout_gpus where a method has it."""
        return self.num_processes

    @property
    def evaluates(self) -> str:
        """When evaluations happen: "no", "steps" (of eval_steps) or "epoch"."""
        if self.eval_steps is not None and "eval_strategy" not in self.given and self.eval_strategy == "no":
            return "steps"
        return self.eval_strategy

    def num_warmup_steps(self, total_steps: int) -> int:
        """Steps of warm-up in a run of total_steps: warmup_steps, else warmup_ratio of them rounded up."""
        return self.warmup_steps or math.ceil(total_steps * self.warmup_ratio)

    def ruled_out(self) -> set[str]:
        return {
            "num_train_epochs" if self.max_steps > 0 else "max_steps",
            "warmup_ratio" if self.warmup_steps else "warmup_steps",
            "eval_strategy" if self.evaluates == "steps" else "eval_steps",
        }


def _share(steps: Any) -> float | None:
    """A number of steps that is a share of all of them (between 0 and 1), else None."""
    try:
        share = float(steps)
    except (TypeError, ValueError, OverflowError):
        return None
    return share if 0 < share < 1 else None


class SFTConfig(TrainerConfig):
    """Supervised fine-tuning; names and defaults as in TRL."""

    group = "training"
    learning_rate: float = option(2e-5, "peak learning rate of AdamW")
    max_length: int | None = option(
        1024,
        "longest row in tokens; what is longer loses its end; none: the model's context",
        group="demonstrations",
    )
    packing: bool = option(
        False,
        "fill rows of max_length tokens with whole examples (each attends to itself)",
        group="demonstrations",
    )
    completion_only_loss: bool | None = option(
        None, "loss on completions only; default: if rows have a completion", group="demonstrations"
    )
    dataset_text_field: str = option("text", "column of plain-text rows", group="demonstrations")
    chat_template_kwargs: dict | None = option(None, "arguments of the chat template, as JSON", group="demonstrations")
    init_from_config: bool = option(
        False, "start from random weights: the model folder's config.json and tokenizer", group="files"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "max_length", 2)
        require(
            not (self.use_peft and self.init_from_config),
            "init_from_config starts from random weights, and use_peft saves an adapter without them; leave one out",
        )
