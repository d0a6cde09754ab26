"""The command line of cukit: options from the dataclass fields, one function per subcommand.

A new subcommand is one function and its row in COMMANDS. A ValueError (what a user can cause) prints one line and ends
with code 2; CUKIT_TRACEBACK=1 shows where it came from.
"""

import argparse
import difflib
import json
import os
import sys
import types
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

import yaml

import cukit
from cukit.config import DTYPES, EngineConfig, GRPOConfig, SamplingParams, SFTConfig, option

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
    reward_funcs: list[str] = field(default_factory=lambda: ["gsm8k"], metadata={
        "help": "rewards: exact, boxed, gsm8k, or path/file.py:function; right means that the first is at least 1"})
    limit: int | None = option(None, "only the first rows")
    temperature: float = option(0.0, "0 is greedy")
    device: str = option("auto", "where to run", ("auto", "cpu", "cuda"))
    dtype: str = option("auto", "weights and activations; auto: bfloat16 on cuda, float32 on cpu", DTYPES)
    chat_template_kwargs: dict | None = option(None, "arguments of the chat template, as JSON")


# ---- subcommands -----------------------------------------------------------------------------------------------------


def grpo(values: dict) -> int:
    from cukit.trainers.grpo import GRPOTrainer

    args = make(GRPOConfig, values)
    return _train(values, args, GRPOTrainer, reward_funcs=args.reward_funcs)


def sft(values: dict) -> int:
    from cukit.trainers.sft import SFTTrainer

    return _train(values, make(SFTConfig, values), SFTTrainer)


def _train(values: dict, args, trainer_class, **more) -> int:
    from cukit.data import load_rows

    class CommandLineTrainer(trainer_class):
        def run_config(self) -> dict:
            """The trainer's own, so that --config reads it back: with the data files, without what follows from the rest."""
            config = super().run_config()
            config.pop("generation_batch_size", None)
            return {name: values[name] for name in ("model", "data", "eval_data") if values.get(name)} | config

    files = make(TrainFiles, values)
    eval_rows = load_rows(files.eval_data) if files.eval_data else None
    trainer = CommandLineTrainer(model=files.model, args=args, train_dataset=load_rows(files.data), eval_dataset=eval_rows, **more)
    trainer.train()
    accuracies = [metrics["eval/accuracy"] for _, metrics in trainer.evaluations if "eval/accuracy" in metrics]
    if len(accuracies) > 1:
        print(f"held-out accuracy: {accuracies[0]:.3f} before, {accuracies[-1]:.3f} after")
    print(f"run folder: {trainer.run_folder}")
    return 0 if trainer.global_step >= trainer.total_steps else 130


def generate(values: dict) -> None:
    from cukit.engine.llm import LLM

    options = make(GenerateOptions, values)
    sampling = make(SamplingParams, _generation_defaults(Path(options.model)) | values)
    llm = LLM(options.model, device=options.device, dtype=options.dtype, **engine_options(values))
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
            _answer(llm, options, sampling, messages, text)


def _answer(llm, options: GenerateOptions, sampling: SamplingParams, messages: list[dict], text: str) -> None:
    """Stream the answer to `text` to stdout; a conversation's `messages` grow by both."""


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
    pass


def doctor(values: dict) -> None:
    """Versions and devices, for a bug report."""
    import platform
    from importlib import metadata

    from cukit.backend import backend_for, cuda_problem

    print(f"cukit {cukit.__version__}, Python {platform.python_version()}, {platform.platform()}")
    for name in ("numpy", "ml_dtypes", "safetensors", "tokenizers", "pyyaml", "jinja2", "rich", "cupy-cuda12x", "cupy-cuda13x"):
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


@dataclass(frozen=True)
class Command:
    run: Callable[[dict], int | None]  # the values of its options -> exit code
    help: str
    parts: tuple[type, ...]  # the dataclasses whose fields are its options; the first to have a name wins
    recipe: str | None = None  # runs without --config and --model
    bundled: dict[str, Any] = field(default_factory=dict)  # stands in for what neither options nor --config name


COMMANDS = {
    "grpo": Command(grpo, "train with rewards (group relative policy optimisation)", (TrainFiles, GRPOConfig),
                    "data/recipes/tiny-grpo.yaml",
                    {"data": TRAIN_ROWS, "eval_data": TEST_ROWS, "reward_funcs": ["gsm8k"]}),
    "sft": Command(sft, "train on demonstrations", (TrainFiles, SFTConfig), "data/recipes/tiny-sft.yaml",
                   {"data": "data/arithmetic/sft.jsonl"}),
    "generate": Command(generate, "talk with a model, or answer --prompt", (GenerateOptions, SamplingParams, EngineConfig),
                        bundled={"model": TINY_MODEL}),
    "eval": Command(evaluate, "accuracy of a model on rows with a reward", (EvalOptions, SamplingParams, EngineConfig),
                    bundled={"model": TINY_MODEL, "data": TEST_ROWS, "reward_funcs": ["gsm8k"]}),
    "doctor": Command(doctor, "versions and devices", ()),
}


METAVARS = {int: "N", float: "X", bool: "true|false", dict: "JSON", list[float]: "X"}


# ---- options ---------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors and, for an unknown option, the nearest known one."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 2 after a user's mistake, 130 after an interruption."""
    try:
        name, given = parse(sys.argv[1:] if argv is None else argv)
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


def parse(argv: list[str]) -> tuple[str, dict]:
    """-> (subcommand, the options that were given, with the types of their fields)."""
    parser = Parser(prog="cukit", description="Train and run language models without PyTorch.", allow_abbrev=False,
                    usage="cukit COMMAND [--option value ...]", epilog="cukit COMMAND --help shows a command's options.")
    parser.add_argument("--version", action="version", version=f"cukit {cukit.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    for name, command in COMMANDS.items():
        add_options(commands.add_parser(name, help=command.help, description=command.help.capitalize() + ".",
                                        usage=f"cukit {name} [--option value ...]", allow_abbrev=False), command)
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        raise ValueError(f"unknown command {argv[0]!r}{nearest(argv[0], COMMANDS)}; the commands are {', '.join(COMMANDS)}")
    namespace, unknown = parser.parse_known_args([_underscored(word) for word in argv] or ["--help"])
    given = vars(namespace)
    name = given.pop("command")
    if unknown:
        word = unknown[0].partition("=")[0]
        known = [*command_fields(COMMANDS[name]), "config"]
        raise ValueError(f"unknown option {word}{nearest(word.lstrip('-'), known, '--')}")
    return name, coerce_all(COMMANDS[name], given, "--")


def _underscored(word: str) -> str:
    """--max-steps=3 -> --max_steps=3"""
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value if word.startswith("--") else word


def add_options(parser: argparse.ArgumentParser, command: Command) -> None:
    if command.parts:
        parser.add_argument("--config", default=argparse.SUPPRESS, metavar="FILE", help="YAML file of options; options given here override it")
    for name, item in command_fields(command).items():
        kind = without_none(item.type)
        more = {"nargs": "?", "const": "true"} if kind is bool else {"nargs": "+"} if get_origin(kind) is list else {}
        choices = item.metadata.get("choices")
        default = default_of(item)
        text = item.metadata.get("help", "") + (f" ({', '.join(choices)})" if choices else "")
        text += "" if default is None else f" [{default}]"
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, help=text.replace("%", "%%"),
                            metavar=METAVARS.get(kind, "TEXT"), **more)


def resolve(command: Command, given: dict) -> dict:
    """All values of a run: bundled recipe or --config, then what was given, then the bundled files (said aloud)."""
    given = dict(given)
    path = given.pop("config", None) or resumed_config(given)
    if path is None and command.recipe and "model" not in given:
        path = bundled(command.recipe)
        print(f"recipe: {path}")
    values = (read_yaml(command, path) if path else {}) | given
    if path and command.recipe and not values.get("model"):
        raise ValueError(f"{path} names no model; add 'model:' or give --model")
    own_data = values.get("data") is not None
    for name, value in command.bundled.items():
        if values.get(name) is None and not (name == "eval_data" and own_data):
            values[name] = value
            print(f"{name}: {value} (bundled; choose with --{name})")
    for name in ("model", "data", "eval_data"):
        if values.get(name):
            values[name] = bundled(values[name])
    return values


def bundled(path: str) -> str:
    """A path that begins with data/ and is not in the working directory means cukit's own data (checkout or wheel)."""
    if path.startswith("data/") and not Path(path).exists():
        package = Path(cukit.__file__).parent
        for root in (package.parent / "data", package / "data_files"):
            if (root / path.removeprefix("data/")).exists():
                return str(root / path.removeprefix("data/"))
    return path


def resumed_config(given: dict) -> str | None:
    """A resumed run goes on with its own config.yaml."""
    if not given.get("resume_from_checkpoint"):
        return None
    from cukit.checkpoint import find_checkpoint

    path = find_checkpoint(given["resume_from_checkpoint"], given.get("output_dir")).parent / "config.yaml"
    return str(path) if path.is_file() else None


def read_yaml(command: Command, path: str) -> dict:
    """The options of a YAML file, with the types of their fields; ValueError for a key that is no option."""
    path = bundled(path)
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"config {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"config {path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"config {path} must hold 'option: value' lines")
    for name in values:
        if name not in command_fields(command):
            raise ValueError(f"unknown option {name!r} in {path}{nearest(str(name), command_fields(command))}")
    return coerce_all(command, values, f"{path}: ")


def command_fields(command: Command) -> dict[str, Field]:
    found: dict[str, Field] = {}
    for part in command.parts:
        for item in fields(part):
            found.setdefault(item.name, item)
    return found


def make(cls: type, values: dict):
    """`cls` from those of `values` that are its fields."""
    return cls(**{item.name: values[item.name] for item in fields(cls) if item.name in values})


def engine_options(values: dict) -> dict:
    """The EngineConfig fields among the values; `seed` is the sampling's."""
    return {item.name: values[item.name] for item in fields(EngineConfig) if item.name in values and item.name != "seed"}


def default_of(item: Field):
    return item.default_factory() if item.default_factory is not MISSING else item.default


def nearest(word: str, known, prefix: str = "") -> str:
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {prefix}{found[0]}?" if found else ""


def without_none(kind):
    """X of `X | None`."""
    return next(part for part in get_args(kind) if part is not types.NoneType) if isinstance(kind, types.UnionType) else kind


def coerce_all(command: Command, values: dict, where: str) -> dict:
    known = command_fields(command)
    return {name: coerce(known[name], value, where) if name in known else value for name, value in values.items()}


def coerce(item: Field, value, where: str):
    """A command line's or YAML's value as the field's type; ValueError names the option."""
    if isinstance(item.type, types.UnionType) and (value is None or value in ("none", "null")):
        return None
    kind = without_none(item.type)
    try:
        return _convert(kind, value, item.metadata.get("choices") or ())
    except (ValueError, TypeError) as error:
        expected = {int: "a whole number", float: "a number", bool: "true or false", dict: "a JSON object"}.get(kind, "text")
        raise ValueError(f"{where}{item.name} must be {expected}, got {value!r}") from error


def _convert(kind, value, choices=()):
    if get_origin(kind) is list:
        return [_convert(get_args(kind)[0], part) for part in (value if isinstance(value, list) else [value])]
    if kind is dict:
        value = json.loads(value) if isinstance(value, str) else value
    elif kind is bool and isinstance(value, str):
        return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(value.lower(), value)
    elif kind is int and isinstance(value, str):
        value = int(value)
    elif kind is float and isinstance(value, (str, int)) and not isinstance(value, bool):
        value = float(value)  # YAML reads 1e-4 (without a dot) as text
    elif kind is str and value is not None:
        if value is False and "no" in choices:
            return "no"  # YAML reads a bare no as false
        return value if isinstance(value, bool) else str(value)  # GRPOConfig.scale_rewards takes a bool
    if kind is int and isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError
    return value


if __name__ == "__main__":
    sys.exit(main())
