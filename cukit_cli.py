"""The command line of cukit: the table of commands, and how a command ends.

An error that a user can cause ends in one line; CUKIT_TRACEBACK=1 shows where it came from. Exit codes: 0; 2 after a
mistake in options, data or models; 1 where the machine refuses (memory, files); 130 after Ctrl-C; 141 where stdout was
closed.
"""

import logging
import os
import sys
from collections.abc import Callable

from cukit.bench import GenerateBench, GRPOBench, KernelsBench, PPOBench, ScaleBench, TrainBench
from cukit.commands.bench import bench_generate, bench_grpo, bench_kernels, bench_ppo, bench_scale, bench_train
from cukit.commands.chat import TINY_MODEL, ChatOptions, chat
from cukit.commands.command import Command
from cukit.commands.data import PrepareOptions, ShowOptions, data_prepare, data_show
from cukit.commands.doctor import doctor
from cukit.commands.evaluate import TEST_ROWS, EvalOptions, evaluate
from cukit.commands.generate import GenerateOptions, generate
from cukit.commands.kernels import KernelsOptions, kernels_build
from cukit.commands.merge import MergeOptions, merge
from cukit.commands.parser import parse, resolve, say
from cukit.commands.report import ReportOptions, report
from cukit.commands.train import TrainFiles, grpo, ppo, reward, sft
from cukit.parallel.config import launched_rank, num_processes
from cukit.parallel.world import is_said
from cukit.runs.progress import show_log_lines
from cukit.trainers.config import SFTConfig
from cukit.trainers.grpo_config import GRPOConfig
from cukit.trainers.ppo_config import PPOConfig
from cukit.trainers.reward_config import RewardConfig

COMMANDS = {
    "grpo": Command(
        grpo,
        "train with rewards (group relative policy optimisation)",
        (TrainFiles, GRPOConfig),
        examples=(
            "cukit grpo                                  # the bundled model on the bundled task, about a minute",
            "cukit grpo --model FOLDER --data train.jsonl --reward_funcs my_rewards.py:reward --max_steps 200",
            "cukit grpo --config run.yaml --learning_rate 2e-6 --dry_run",
        ),
        recipe="data/recipes/tiny-grpo.yaml",
        bundled={"data": "data/arithmetic/train.jsonl", "eval_data": TEST_ROWS, "reward_funcs": ["gsm8k"]},
    ),
    "ppo": Command(
        ppo,
        "train with rewards and a critic (proximal policy optimisation)",
        (TrainFiles, PPOConfig),
        examples=(
            "cukit ppo                                   # the bundled model on the bundled task",
            "cukit ppo --model FOLDER --data train.jsonl --reward_funcs REWARD_MODEL_FOLDER --total_episodes 20000",
            "cukit ppo --model FOLDER --data train.jsonl --reward_funcs boxed --critic shared",
        ),
        recipe="data/recipes/tiny-ppo.yaml",
        bundled={"data": "data/arithmetic/train.jsonl", "eval_data": TEST_ROWS, "reward_funcs": ["gsm8k"]},
    ),
    "sft": Command(
        sft,
        "train on demonstrations",
        (TrainFiles, SFTConfig),
        examples=(
            "cukit sft --model FOLDER --data demonstrations.jsonl --num_train_epochs 2",
            "cukit sft --output_dir runs/sft-001 --resume_from_checkpoint latest",
        ),
        recipe="data/recipes/tiny-sft.yaml",
        bundled={"data": "data/arithmetic/sft.jsonl"},
    ),
    "reward": Command(
        reward,
        "train a reward model on pairs of answers",
        (TrainFiles, RewardConfig),
        examples=(
            "cukit reward                                # the bundled model on bundled pairs, about a minute",
            "cukit reward --model FOLDER --data pairs.jsonl --eval_data held_out.jsonl --eval_steps 100",
            "cukit reward --model FOLDER --data trl-lib/ultrafeedback_binarized --center_rewards_coefficient 0.01",
        ),
        recipe="data/recipes/tiny-reward.yaml",
        bundled={"data": "data/arithmetic/pairs.jsonl", "eval_data": "data/arithmetic/test-pairs.jsonl"},
    ),
    "chat": Command(
        chat,
        "talk with a model",
        (ChatOptions,),
        examples=(
            "cukit chat --model runs/grpo-001            # with the newest model of a run; /help in it shows more",
            'cukit chat --model FOLDER --system_prompt "Answer in one word." --temperature 0.7',
        ),
        words="prompt",
        bundled={"model": TINY_MODEL},
        alone=True,
    ),
    "generate": Command(
        generate,
        "answer a prompt",
        (GenerateOptions,),
        examples=(
            'cukit generate --model FOLDER "What is the capital of France?"',
            "echo 2+9+9-6 | cukit generate --temperature 0",
            'cukit generate --model FOLDER --raw --prompt "Once upon a time" --n 4',
        ),
        words="prompt",
        bundled={"model": TINY_MODEL},
        alone=True,
    ),
    "eval": Command(
        evaluate,
        "accuracy of a model on rows with a reward",
        (EvalOptions,),
        examples=(
            "cukit eval --model FOLDER --data test.jsonl --reward_funcs boxed",
            "cukit eval --model FOLDER --tasks gsm8k,math500 --n 8 --temperature 0.6 --output answers.jsonl",
        ),
        bundled={"model": TINY_MODEL, "data": TEST_ROWS, "reward_funcs": ["gsm8k"]},
    ),
    "merge": Command(
        merge,
        "an adapter (LoRA) and its base as one plain model folder",
        (MergeOptions,),
        examples=(
            "cukit merge runs/grpo-001 --output merged   # a run with --use_peft",
            "cukit merge ADAPTER --output FOLDER --dtype bfloat16",
        ),
        words="model",
        alone=True,
    ),
    "report": Command(
        report,
        "one HTML page about one run or several: curves, completions, options",
        (ReportOptions,),
        examples=(
            "cukit report runs/grpo-001                  # writes runs/grpo-001/report.html, as the run did at its end",
            "cukit report runs/grpo-001 runs/grpo-002 --output both.html",
        ),
        words="runs",
        alone=True,
    ),
    "data prepare": Command(
        data_prepare,
        "write a data set for mathematics as JSONL rows with prompt and answer",
        (PrepareOptions,),
        examples=(
            "cukit data prepare gsm8k --output gsm8k.jsonl",
            "cukit data prepare math --split test --limit 500 --output math-test.jsonl",
        ),
        words="name",
        alone=True,
    ),
    "data show": Command(
        data_show,
        "the columns and first rows of any source of data",
        (ShowOptions,),
        examples=(
            "cukit data show openai/gsm8k:main:test",
            "cukit data show rows.parquet --columns prompt=question,answer=answer",
        ),
        words="source",
        alone=True,
    ),
    "kernels build": Command(
        kernels_build,
        "compile all CUDA kernels ahead",
        (KernelsOptions,),
        examples=("cukit kernels build --report", "cukit kernels build --families norm attention --archs sm_90a"),
        alone=True,
    ),
    "bench kernels": Command(
        bench_kernels,
        "time of each array function against the device's limits",
        (KernelsBench,),
        examples=(
            "cukit bench kernels --model qwen3-0.6b --output kernels.json",
            "cukit bench kernels --only attention_forward",
        ),
    ),
    "bench generate": Command(
        bench_generate,
        "speed of the engine on a workload of random tokens",
        (GenerateBench,),
        examples=(
            "cukit bench generate --model qwen3-0.6b --workload G",
            "cukit bench generate --enforce_eager --scale 0.1",
        ),
    ),
    "bench train": Command(
        bench_train,
        "speed and memory of training on random tokens",
        (TrainBench,),
        examples=("cukit bench train --model qwen3-0.6b", "cukit bench train --rows 8 --tokens_per_row 512"),
    ),
    "bench grpo": Command(
        bench_grpo,
        "a whole step of GRPO on random tokens, phase by phase",
        (GRPOBench,),
        examples=(
            "cukit bench grpo --model qwen3-0.6b --gradient_checkpointing auto",
            "cukit bench grpo --prompts 16 --gpu_memory_utilization 0.4",
        ),
    ),
    "bench ppo": Command(
        bench_ppo,
        "one PPO update of policy and critic on random tokens",
        (PPOBench,),
        examples=("cukit bench ppo --model qwen3-0.6b", "cukit bench ppo --critic separate --rows 8"),
    ),
    "bench scale": Command(
        bench_scale,
        "a step of GRPO on many GPUs, simulated from the times of one",
        (ScaleBench,),
        examples=(
            "cukit bench scale --gpus 8 64 1024 --completions lognormal",
            "cukit bench scale --model qwen3-8b --zero_stage 1 --rollout_share 0.5 --measured grpo.json",
        ),
    ),
    "doctor": Command(doctor, "versions and devices, for a bug report", (), alone=True),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    show_log_lines(logging.ERROR if launched_rank() else logging.INFO)  # of several ranks the first one speaks
    return ending(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: list[str]) -> int:
    name, given = parse(COMMANDS, argv)
    command = COMMANDS[name]
    values = resolve(command, given)
    if command.alone and (started := num_processes()) > 1 and values.get("tensor_parallel_size", 1) == 1:
        say(f"{name} is the work of one process, and {started} were started: the first does it")
        if launched_rank():
            return 0
    code = command.run(values) or 0
    sys.stdout.flush()  # a closed pipe shows here and not at the interpreter's end
    return code


def ending(run: Callable[[], int]) -> int:
    """The exit code of `run()`; one line on stderr for what a user or the machine can cause."""
    try:
        return run()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_output()
        return 141
    except Exception as error:
        if os.environ.get("CUKIT_TRACEBACK") or (code := exit_code(error)) is None:
            raise
        if not is_said(error):
            print("error: " + one_line(error), file=sys.stderr)
        return code


def exit_code(error: Exception) -> int | None:
    """2: the user's to mend; 1: the machine refuses; None: our own mistake, which keeps its traceback."""
    if isinstance(error, (MemoryError, OSError)) or out_of_device_memory(error):
        return 1
    return 2 if isinstance(error, ValueError) else None


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or out_of_device_memory(error):
        advice = "use less: a smaller model, max_tokens_per_batch, max_num_seqs, max_model_len or batch"
        return f"out of memory ({text[:200] or 'no more to be had'}); {advice}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return text or type(error).__name__


def out_of_device_memory(error: Exception) -> bool:
    """CUDA's and cuBLAS's own words for it; CuPy's OutOfMemoryError is a MemoryError."""
    words = ("cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED")
    return type(error).__module__.startswith("cupy") and any(word in str(error) for word in words)


def _drop_output() -> None:
    """Nothing reads stdout any more. What its buffer still holds must not fail again when the interpreter ends."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        pass


if __name__ == "__main__":
    sys.exit(main())
