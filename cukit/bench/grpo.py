"""bench grpo: whole steps of GRPO (draw, reward, train, update) on random tokens. Completions run to their full length
and get rewards that differ within their group, so that every token has a gradient.
"""

from __future__ import annotations

import tempfile

import numpy as np
import tokenizers

from ..options import given_values
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
    """
    subject = choose_subject(options)
    before = memory_in_use(subject.backend)
    scale = options.scale or (CPU_SCALE if subject.backend.name == "cpu" else 1.0)
    report = new_report("grpo", subject, options) | {"scale": scale, "processes": num_processes()}
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(options, subject, scale, folder)
        report["plan"] = trainer.plan.table().splitlines()
        trainer.run = Run(trainer, None)
        with trainer.run, DriverPeak(subject.backend) as driver:
            peak = peak_memory(subject.backend, trainer.train_step, before)
            trainer.train_step()
            for _ in range(trainer.total_steps - WARM_UP):
                report["rows"].append(_row(trainer, peak) | {"driver_gb": driver.gb})
    return report


def _trainer(options: GRPOBench, subject: Subject, scale: float, folder: str) -> GRPOTrainer:
    prompts = options.prompts or scaled(PROMPTS, scale)
    length = options.prompt_length or scaled(PROMPT, scale)
    completion = options.max_completion_length or scaled(COMPLETION, scale)
    check_length(subject, length + completion, "lower --prompt_length, --max_completion_length or --scale")
    of_all = prompts * num_processes() // options.parallel.tensor_parallel_size, length
    ids = np.random.default_rng(options.seed).integers(0, subject.config.vocab_size, of_all)
    samples = prompts * options.num_generations
    limits = {"max_model_len": length + completion, "max_num_seqs": min(samples, MOST_ROWS)}
    args = GRPOConfig(
        output_dir=f"{folder}/run",
        max_steps=options.steps or WARM_UP + options.repeats,
        num_generations=options.num_generations,
        per_device_train_batch_size=samples,
        max_completion_length=completion,
        ignore_eos=True,
        beta=options.beta,
        gradient_checkpointing=options.gradient_checkpointing,
        max_tokens_per_batch=options.max_tokens_per_batch,
        eval_on_start=False,
        save_steps=0,
        seed=options.seed,
        **({"max_grad_norm": 0.0} if options.states.optimizer_in_bwd else {}),
        **(limits | given_values(options.engine) | given_values(options.states) | given_values(options.memory)),
        **given_values(options.parallel),
    )
    return GRPOTrainer(
        model=build_model(subject, options.seed, options.lora),
        reward_funcs=[by_place],
        args=args,
        train_dataset=[{"prompt": " ".join(map(str, row))} for row in ids.tolist()],
        processing_class=number_tokenizer(subject.config.vocab_size),
    )


def _row(trainer: GRPOTrainer, peak: int) -> dict:
    tokens = trainer.num_tokens
    metrics = trainer.train_step()
    phases = {f"{name}_seconds": metrics.get(f"time/{name}", 0.0) for name in PHASES}
    return {
        "samples": trainer.args.generation_size,
        "tokens": trainer.num_tokens - tokens,
        "seconds": metrics["step_time"],
        **phases,
        "other_seconds": metrics["step_time"] - sum(phases.values()),
        "largest_difference": metrics["sampling/sampling_logp_difference/max"],
        "peak_gb": peak / 1e9,
    }
