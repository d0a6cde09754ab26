"""The command line of cukit: options from the dataclass fields, one function per subcommand.

A new subcommand is one function and its row in COMMANDS. A ValueError (what a user can cause) prints one line and ends
with code 2; CUKIT_TRACEBACK=1 shows where it came from.
"""

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import cukit
from cukit.bench import GenerateBench, KernelsBench, TrainBench
from cukit.commands.parser import Command, engine_options, make, parse, resolve
from cukit.engine.config import EngineConfig, SamplingParams
from cukit.models.config import DTYPES
from cukit.options import option
from cukit.trainers.config import GRPOConfig, SFTConfig

TINY_MODEL, TRAIN_ROWS, TEST_ROWS = "data/tiny-qwen3", "data/arithmetic/train.jsonl", "data/arithmetic/test.jsonl"


@dataclass
class TrainFiles:
    """What a training command reads."""

    model: str | None = option(None, "model folder (Hugging Face format)")
    data: str | None = option(None, "training rows, JSONL")
    eval_data: str | None = option(None, "held-out rows, JSONL")


@dataclass
class GenerateOptions:
    model: str = option(TINY_MODEL, "model folder (Hugging Face format)")
    device: str = option("auto", "where to run", ("auto", "cpu", "cuda"))
    dtype: str = option("auto", "weights and activations; auto: bfloat16 on cuda, float32 on cpu", DTYPES)
    prompt: str | None = option(None, "answer this and end; without it: a conversation")
    raw: bool = option(False, "give the text to the model as it is, without the chat template")
    chat_template_kwargs: dict | None = option(None, "arguments of the chat template, as JSON")


@dataclass
class EvalOptions:
    model: str = option(TINY_MODEL, "model folder (Hugging Face format)")
    data: str = option(TEST_ROWS, "rows to answer, JSONL")
    reward_funcs: list[str] = field(
        default_factory=lambda: ["gsm8k"],
        metadata={
            "help": "rewards: exact, boxed, gsm8k, or path/file.py:function; right means that the first is at least 1"
        },
    )
    limit: int | None = option(None, "only the first rows")
    temperature: float = option(0.0, "0 is greedy")
    device: str = option("auto", "where to run", ("auto", "cpu", "cuda"))
    dtype: str = option("auto", "weights and activations; auto: bfloat16 on cuda, float32 on cpu", DTYPES)
    chat_template_kwargs: dict | None = option(None, "arguments of the chat template, as JSON")

    def __post_init__(self):
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, got {self.limit}")


@dataclass
class KernelsOptions:
    report: bool = option(False, "print registers, shared memory and spills of each kernel")
    archs: list[str] | None = option(
        None, "only these architectures, for example sm_90a; default: all that a kernel declares"
    )
    families: list[str] | None = option(None, "only these files of kernels/, without .cu")


# ---- subcommands -----------------------------------------------------------------------------------------------------


def grpo(values: dict) -> int:
    from cukit.trainers.grpo import GRPOTrainer

    args = make(GRPOConfig, values)
    return _train(values, args, GRPOTrainer, reward_funcs=args.reward_funcs)


def sft(values: dict) -> int:
    from cukit.trainers.sft import SFTTrainer

    return _train(values, make(SFTConfig, values), SFTTrainer)


def _train(values: dict, args, trainer_class, **more) -> int:
    from cukit.datasets.sources import load_rows

    class CommandLineTrainer(trainer_class):
        def run_config(self) -> dict:
            """The trainer's own, so that --config reads it back: with the data files, without what follows from the
            rest.
            """
            config = super().run_config()
            config.pop("generation_batch_size", None)
            return {name: values[name] for name in ("model", "data", "eval_data") if values.get(name)} | config

    files = make(TrainFiles, values)
    eval_rows = load_rows(files.eval_data) if files.eval_data else None
    trainer = CommandLineTrainer(
        model=files.model, args=args, train_dataset=load_rows(files.data), eval_dataset=eval_rows, **more
    )
    trainer.train()
    accuracies = [metrics["eval/accuracy"] for _, metrics in trainer.evaluations if "eval/accuracy" in metrics]
    if len(accuracies) > 1:
        print(f"held-out accuracy: {accuracies[0]:.3f} before, {accuracies[-1]:.3f} after")
    print(f"run folder: {trainer.run_folder}")
    return 0 if trainer.global_step >= trainer.total_steps else 130


def generate(values: dict) -> None:
    from cukit.engine.llm import LLM
    from cukit.models.weights import model_folder

    options = make(GenerateOptions, values)
    folder = model_folder(options.model)
    sampling = make(SamplingParams, _generation_defaults(folder) | values)
    llm = LLM(folder, device=options.device, dtype=options.dtype, **engine_options(values))
    if options.prompt is not None:
        _answer(llm, options, sampling, [], options.prompt)
        return
    if not sys.stdin.isatty():
        raise ValueError("generate without --prompt is a conversation and needs a terminal; give --prompt")
    print(f"{options.model}: type a message; /new starts anew, /exit or Ctrl-D ends")
    messages: list[dict] = []
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return
        if text in ("/exit", "/quit"):
            return
        if text == "/new":
            messages = []
        elif text:
            try:
                _answer(llm, options, sampling, messages, text)
            except ValueError as error:  # a conversation beyond the model's length must not end the program
                print(f"error: {error}")


def _answer(llm, options: GenerateOptions, sampling: SamplingParams, messages: list[dict], text: str) -> None:
    """Stream the answer to `text` to stdout; a conversation's `messages` grow by both. --raw continues the text."""
    if options.raw:
        stream = llm.generate([text], sampling, stream=True)
    elif llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise ValueError(f"{options.model} has no chat template; --raw gives it the text as it is")
    else:
        question = {"role": "user", "content": text}
        stream = llm.chat([*messages, question], sampling, stream=True, **(options.chat_template_kwargs or {}))
    for request in stream:
        if sampling.n == 1:
            print(request.outputs[0].text_delta, end="", flush=True)
    print("\n---\n".join(output.text for output in request.outputs) if sampling.n > 1 else "")
    if not options.raw:
        messages += [question, {"role": "assistant", "content": request.outputs[0].text}]


def _generation_defaults(folder: Path) -> dict:
    """The sampling that generation_config.json asks for, as SamplingParams fields."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {name: stored[name] for name in names if stored.get(name) is not None}
    if stored.get("max_new_tokens"):
        found["max_tokens"] = stored["max_new_tokens"]
    return found | ({"temperature": 0.0} if stored.get("do_sample") is False else {})


def evaluate(values: dict) -> None:
    from cukit.datasets.demonstrations import encode_prompt
    from cukit.datasets.sources import load_rows, prompt_rows
    from cukit.models.weights import load_model, model_folder
    from cukit.tokenizer import Tokenizer
    from cukit.trainers.rewarding import RewardScorer
    from cukit.trainers.rollout import Rollout

    options = make(EvalOptions, values)
    sampling = make(SamplingParams, {"temperature": options.temperature} | values)
    scorer = RewardScorer(options.reward_funcs)
    rows = prompt_rows(load_rows(options.data))[: options.limit]
    folder = model_folder(options.model)
    tokenizer = Tokenizer.from_folder(folder)
    prompts = [encode_prompt(row, tokenizer, options.chat_template_kwargs) for row in rows]
    rollout = Rollout(load_model(folder, options.device, options.dtype), tokenizer, **engine_options(values))
    start = time.perf_counter()
    samples = rollout.generate(prompts, sampling, None if sampling.seed is None else [sampling.seed] * len(prompts))
    seconds = time.perf_counter() - start
    _, scores = scorer([row for row in rows for _ in range(sampling.n)], samples)
    applies = ~np.isnan(scores[:, 0])
    if not applies.any():
        raise ValueError(f"reward {scorer.names[0]!r} applies to no row of {options.data}")
    right = scores[applies, 0] >= 1
    print(f"accuracy {right.mean():.4f} ({right.sum()} of {right.size}; {options.data})")
    for name, found in zip(scorer.names, scores.T, strict=True):
        print(
            f"  rewards/{name}/mean {np.nanmean(found):.4f}"
            if not np.isnan(found).all()
            else f"  rewards/{name} applies to no row"
        )
    print(
        f"  mean length {samples.lengths.mean():.1f}, cut at max_tokens {samples.truncated.mean():.4f}, "
        f"{samples.lengths.sum() / seconds:,.0f} tokens/s"
    )


def doctor(values: dict) -> None:
    """Versions and devices, for a bug report."""
    import platform
    from importlib import metadata

    from cukit.backend import backend_for, cuda_problem

    print(f"cukit {cukit.__version__}, Python {platform.python_version()}, {platform.platform()}")
    for name in (
        "numpy",
        "ml_dtypes",
        "safetensors",
        "tokenizers",
        "pyyaml",
        "jinja2",
        "rich",
        "cupy-cuda12x",
        "cupy-cuda13x",
    ):
        try:
            print(f"  {name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            print(f"  {name} is not installed" + (" (needed for GPUs)" if name.startswith("cupy") else ""))
    cpu_free, cpu_total = backend_for("cpu").memory_info()
    print(f"cpu: {os.cpu_count()} cores, {cpu_free / 2**30:.1f} of {cpu_total / 2**30:.1f} GiB free")
    problem = cuda_problem()
    if problem:
        print(f"cuda: {problem}")
    else:
        free, total = backend_for("cuda").memory_info()
        print(f"cuda: {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    print(f"device auto means {backend_for('auto').name}")


def kernels_build(values: dict) -> None:
    """Compile every kernel ahead, for this machine's use or for a look at registers and spills; needs no GPU."""
    from cukit.backend import kernel_compiler

    compiler = kernel_compiler()
    options = make(KernelsOptions, values)
    for name, chosen, known in (
        ("families", options.families, compiler.families()),
        ("archs", options.archs, sorted({a for f in compiler.families() for a in compiler.architectures(f)})),
    ):
        if unknown := set(chosen or ()) - set(known):
            raise ValueError(f"{name}: {', '.join(sorted(unknown))} is not known; there are {', '.join(known)}")
    start = time.perf_counter()
    compiled = compiler.build(archs=options.archs, names=options.families)
    if options.report:
        print(compiler.report(compiled))
    print(f"{len(compiled)} modules in {time.perf_counter() - start:.1f} s; they lie in {compiler.cache_folder()}")


def bench_kernels(values: dict) -> None:
    from cukit.bench.kernels import run

    _report(run(make(KernelsBench, values)), values)


def bench_generate(values: dict) -> None:
    from cukit.bench.generate import run

    _report(run(make(GenerateBench, values), engine_options(values)), values)


def bench_train(values: dict) -> None:
    from cukit.bench.train import run

    _report(run(make(TrainBench, values)), values)


def _report(report: dict, values: dict) -> None:
    from cukit.bench.report import print_report, write_report

    print_report(report)
    if values.get("output"):
        write_report(report, values["output"])
        print(f"rows: {values['output']}")


COMMANDS = {
    "grpo": Command(
        grpo,
        "train with rewards (group relative policy optimisation)",
        (TrainFiles, GRPOConfig),
        recipe="data/recipes/tiny-grpo.yaml",
        bundled={"data": TRAIN_ROWS, "eval_data": TEST_ROWS, "reward_funcs": ["gsm8k"]},
    ),
    "sft": Command(
        sft,
        "train on demonstrations",
        (TrainFiles, SFTConfig),
        recipe="data/recipes/tiny-sft.yaml",
        bundled={"data": "data/arithmetic/sft.jsonl"},
    ),
    "generate": Command(
        generate,
        "talk with a model, or answer --prompt",
        (GenerateOptions, SamplingParams, EngineConfig),
        without=("logprobs",),
        bundled={"model": TINY_MODEL},
    ),
    "eval": Command(
        evaluate,
        "accuracy of a model on rows with a reward",
        (EvalOptions, SamplingParams, EngineConfig),
        without=("logprobs",),
        bundled={"model": TINY_MODEL, "data": TEST_ROWS, "reward_funcs": ["gsm8k"]},
    ),
    "kernels build": Command(kernels_build, "compile all CUDA kernels ahead", (KernelsOptions,)),
    "bench kernels": Command(bench_kernels, "time of each array function against the device's limits", (KernelsBench,)),
    "bench generate": Command(
        bench_generate, "speed of the engine on a workload of random tokens", (GenerateBench, EngineConfig)
    ),
    "bench train": Command(bench_train, "speed and memory of training on random tokens", (TrainBench,)),
    "doctor": Command(doctor, "versions and devices", ()),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 2 after a user's mistake, 130 after an interruption."""
    try:
        name, given = parse(COMMANDS, sys.argv[1:] if argv is None else argv)
        command = COMMANDS[name]
        return command.run(resolve(command, given)) or 0
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except ValueError as error:
        if os.environ.get("CUKIT_TRACEBACK"):
            raise
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
