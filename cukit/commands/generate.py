"""generate: answer a prompt (an option or stdin), or hold a conversation on the terminal."""

import json
import sys
from pathlib import Path
from typing import Any

from ..engine.config import EngineConfig, SamplingParams
from ..models.config import DTYPES
from ..options import Options, given_values, nested, option
from .dry_run import show_engine
from .parser import make

TINY_MODEL = "data/tiny-qwen3"


class GenerateOptions(Options):
    group = "files"
    model: str = option(TINY_MODEL, "model folder (Hugging Face format), or a run folder")
    dry_run: bool = option(False, "print the resolved options and the plan of memory, then end")
    prompt: str | None = option(
        None, "answer this and end; without it: what comes on stdin, or a conversation", group="generation"
    )
    raw: bool = option(False, "give the text to the model as it is, without the chat template", group="generation")
    chat_template_kwargs: dict | None = option(None, "arguments of the chat template, as JSON", group="generation")
    device: str = option("auto", "where to run", ("auto", "cpu", "cuda"), "device and memory")
    dtype: str = option(
        "auto", "weights and activations; auto: bfloat16 on cuda, float32 on cpu", DTYPES, "device and memory"
    )
    sampling: SamplingParams = nested(SamplingParams, without=("logprobs",))
    engine: EngineConfig = nested(EngineConfig, without=("seed",))


def generate(values: dict[str, Any]) -> None:
    from ..engine.llm import LLM
    from ..models.weights import model_folder

    folder = model_folder(values["model"], weights=not values.get("dry_run"))
    options = make(GenerateOptions, generation_defaults(folder) | values)
    if options.dry_run:
        show_engine(options, options.model, options.device, options.dtype, options.engine)
        return
    prompt = options.prompt if options.prompt is not None or sys.stdin.isatty() else _stdin()
    llm = LLM(folder, device=options.device, dtype=options.dtype, **given_values(options.engine))
    if prompt is not None:
        answer(llm, options, [], prompt)
    else:
        converse(llm, options)


def _stdin() -> str:
    """The prompt that was piped in, without the line's end."""
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise ValueError("stdin is empty and no terminal: give --prompt, or pipe a prompt in")
    return text


def converse(llm: Any, options: GenerateOptions) -> None:
    """Read a line, answer it, until the end. Ctrl-C ends an answer, never the conversation."""
    try:
        import readline  # noqa: F401  input() then has arrow keys and a history
    except ImportError:  # Windows' console has its own
        pass
    print(f"{options.model}: type a message; /new starts anew, Ctrl-C ends an answer, /exit or Ctrl-D ends")
    messages: list[dict[str, str]] = []
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D ends)")
            continue
        if text in ("/exit", "/quit"):
            return
        if text == "/new":
            messages = []
        elif text:
            try:
                answer(llm, options, messages, text, keep_interrupted=True)
            except ValueError as error:  # a conversation beyond the model's length must not end the program
                print(f"error: {error}")


def answer(
    llm: Any, options: GenerateOptions, messages: list[dict[str, str]], text: str, keep_interrupted: bool = False
) -> None:
    """Stream the answer to `text` to stdout; a conversation's `messages` grow by both. --raw continues the text.

    keep_interrupted: Ctrl-C ends the answer alone, and what there is of it stays in the conversation.
    """
    sampling, question = options.sampling, {"role": "user", "content": text}
    if options.raw:
        stream = llm.generate([text], sampling, stream=True)
    elif llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise ValueError(f"{options.model} has no chat template; --raw gives it the text as it is")
    else:
        stream = llm.chat([*messages, question], sampling, stream=True, **(options.chat_template_kwargs or {}))
    texts = [""] * sampling.n
    try:
        for request in stream:
            texts = [output.text for output in request.outputs]
            if sampling.n == 1:
                print(request.outputs[0].text_delta, end="", flush=True)
    except KeyboardInterrupt:
        stream.close()  # aborts the request
        if not keep_interrupted:
            raise
    print("\n---\n".join(texts) if sampling.n > 1 else "")
    if not options.raw:
        messages += [question, {"role": "assistant", "content": texts[0]}]


def generation_defaults(folder: Path) -> dict[str, Any]:
    """The sampling that generation_config.json asks for, as SamplingParams' options."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(stored, dict):
        raise ValueError(f"{path} must hold an object, got {type(stored).__name__}")
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {name: stored[name] for name in names if stored.get(name) is not None}
    if stored.get("max_new_tokens"):
        found["max_tokens"] = stored["max_new_tokens"]
    return found | ({"temperature": 0.0} if stored.get("do_sample") is False else {})
