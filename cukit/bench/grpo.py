"""bench grpo: whole steps of GRPO (draw, reward, train, update) on random tokens. Completions run to their full length
and get rewards that differ within their group, so that every token has a gradient.
"""

from __future__ import annotations

import math
import tempfile

import numpy as np
import tokenizers

from ..options import changed, given_values
from ..parallel.config import num_processes
from ..tokenizer import Tokenizer
from ..trainers.grpo import GRPOTrainer
from ..trainers.grpo_config import GRPOConfig
from ..trainers.loop import Run
from . import GRPOBench
from .generate import MOST_ROWS
from .measure import DriverPeak, memory_in_use, peak_memory
from .report import new_report
from .subject import Subject, build_model, check_length, choose_subject, scaled

PROMPTS, PROMPT, COMPLETION = 64, 200, 512
CPU_SCALE = 0.05
WARM_UP = 2  # steps: kernels are compiled and products compared, then decoding is captured as graphs
PHASES = ("generate", "reward", "reference", "train")
# key of a row -> metric, where groups may move between processes
MOVED = {"moved_groups": "balance/moved_groups", "balance_wait_seconds": "balance/wait"}


def number_tokenizer(vocab_size: int) -> Tokenizer:
    """Each id is a word, its own number: random ids keep their value on the way through text."""
    words = {str(number): number for number in range(vocab_size)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return Tokenizer(backend, {}, "numbers", {"eos_token_id": 0})


def by_place(completions, **_) -> list[float]:
    """A reward that differs within every group."""
    return [float(place % 7) for place in range(len(completions))]


def run(options: GRPOBench) -> dict:
    """The report: a row for each measured step. Two steps before are not timed; the first gives the peak of what arrays
    take. The driver's peak is that of all steps so far.

    Of several processes the first one measures, which always trains. What it says of others: see _apart and
    _add_generation_of_ranks.
    """
    subject = choose_subject(options)
    before = memory_in_use(subject.backend)
    scale = options.scale or (CPU_SCALE if subject.backend.name == "cpu" else 1.0)
    report = new_report("grpo", subject, options) | {"scale": scale, "processes": num_processes()}
    if report["processes"] > 1:
        report["rollout_gpus"] = options.rollout_gpus
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(options, subject, scale, folder)
        trainer.run = Run(trainer, None)
        with trainer.run, DriverPeak(subject.backend) as driver:
            report["plan"] = trainer.ranks.tables(trainer.plan.table()).splitlines()
            peak = peak_memory(subject.backend, trainer.train_step, before)
            trainer.train_step()
            for _ in range(trainer.total_steps - WARM_UP):
                report["rows"].append(_row(trainer, peak) | {"driver_gb": driver.gb})
            if trainer.ranks.several and trainer.apart is None:
                _add_generation_of_ranks(trainer, report["rows"])
    return report


def _trainer(options: GRPOBench, subject: Subject, scale: float, folder: str) -> GRPOTrainer:
    length = options.prompt_length or scaled(PROMPT, scale)
    args = _trainer_options(options, subject, scale, length, f"{folder}/run")
    shape = args.prompts_a_generation, length
    ids = np.random.default_rng(options.seed).integers(0, subject.config.vocab_size, shape)
    return GRPOTrainer(
        model=build_model(subject, options.seed, options.lora),
        reward_funcs=[by_place],
        args=args,
        train_dataset=[{"prompt": " ".join(map(str, row))} for row in ids.tolist()],
        processing_class=number_tokenizer(subject.config.vocab_size),
    )


def _trainer_options(options: GRPOBench, subject: Subject, scale: float, length: int, run_folder: str) -> GRPOConfig:
    """length: tokens of a prompt. A process draws all of its completions at once, up to MOST_ROWS."""
    prompts = options.prompts or scaled(PROMPTS, scale)
    completion = options.max_completion_length or scaled(COMPLETION, scale)
    check_length(subject, length + completion, "lower --prompt_length, --max_completion_length or --scale")
    args = GRPOConfig(
        output_dir=run_folder,
        max_steps=options.steps or WARM_UP + options.repeats,
        num_generations=options.num_generations,
        per_device_train_batch_size=prompts * options.num_generations,
        max_completion_length=completion,
        ignore_eos=True,
        beta=options.beta,
        gradient_checkpointing=options.gradient_checkpointing,
        max_tokens_per_batch=options.max_tokens_per_batch,
        eval_on_start=False,
        save_steps=0,
        seed=options.seed,
        **({"max_grad_norm": 0.0} if options.states.optimizer_in_bwd else {}),
        **({"max_model_len": length + completion} | given_values(options.engine)),
        **(given_values(options.states) | given_values(options.memory)),
        **(given_values(options.parallel) | given_values(options.rollouts)),
    )
    if "max_num_seqs" in options.engine.given:
        return args
    most_prompts = math.ceil(args.prompts_a_generation / (args.rollout_gpus or args.num_processes))
    return changed(args, max_num_seqs=min(most_prompts * args.num_generations, MOST_ROWS))


def _row(trainer: GRPOTrainer, peak: int) -> dict:
    tokens = trainer.num_tokens
    metrics = trainer.train_step()
    phases = {f"{name}_seconds": metrics.get(f"time/{name}", 0.0) for name in PHASES}
    phases["other_seconds"] = metrics["step_time"] - sum(phases.values())
    return {
        "samples": trainer.args.generation_size,
        "tokens": trainer.num_tokens - tokens,
        "seconds": metrics["step_time"],
        **(phases if trainer.apart is None else _apart(phases, metrics)),
        **{name: metrics[metric] for name, metric in MOVED.items() if metric in metrics},
        # a process that only draws has none; with max_staleness, the updates since the draw are in it
        "largest_difference": metrics.get("sampling/sampling_logp_difference/max"),
        "peak_gb": peak / 1e9,
    }


def _apart(phases: dict, metrics: dict) -> dict:
    """The phases of a step where processes are apart (trainers/apart.py). What one that trains does one after the other
    is reference, old_logprobs, train, wait (a mean), weights (of the first) and other.

    generate: of the slowest process that draws, rewards included. It lies in the wait, but for what was drawn during
    the step before (max_staleness).
    """
    own = {"wait_seconds": metrics["time/wait"], "weights_seconds": metrics["time/weights"]}
    own["old_logprobs_seconds"] = metrics.get("time/old_logprobs", 0.0)
    return phases | {
        "generate_seconds": metrics["time/rollout"],
        "reward_seconds": None,
        **own,
        "other_seconds": phases["other_seconds"] - sum(own.values()),
        "rollout_wait_seconds": metrics["time/rollout_wait"],
        "weights_bytes": metrics["weights/bytes"],
    }


def _add_generation_of_ranks(trainer: GRPOTrainer, rows: list[dict]) -> None:
    """Each process's seconds of generation into every row; after all steps, for asking is a wait too."""
    of_ranks = trainer.ranks.group.gather_values([row["generate_seconds"] for row in rows], "seconds of generation")
    for row, seconds in zip(rows, zip(*of_ranks, strict=True), strict=True):
        row["generate_seconds_of_processes"] = list(seconds)
