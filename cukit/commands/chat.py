"""chat: a conversation with a model on the terminal, or its answer to one prompt. generate talks through it too."""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..engine.config import LORA_OPTIONS, EngineConfig, MemoryOptions, SamplingParams
from ..models.config import DTYPES
from ..options import Options, changed, given_values, nested, option
from ..parallel.config import TensorOptions, launched_rank
from ..runs.terminal import for_stream
from .conversation import Conversation
from .dry_run import show_engine
from .parser import make, say

TINY_MODEL = "data/tiny-qwen3"
HELP = r"""/system TEXT   what the model is told before the conversation; alone it shows that, /system "" removes it
/reset         forget the conversation (the system prompt stays); also /new
/regenerate    answer the last message again
/exit          end; also /quit and Ctrl-D
Ctrl-C ends an answer; what there is of it stays in the conversation. A line that ends with \ goes on in the next."""
COMMAND = re.compile(r"(/[a-z]+)(?:\s+(.*))?", re.DOTALL)


class ChatOptions(Options):
    group = "files"
    model: str = option(TINY_MODEL, "model folder (Hugging Face format), a run folder, or a name of the hub")
    dry_run: bool = option(False, "print the resolved options and the plan of memory, then end")
    prompt: str | None = option(
        None, "the first message; where stdin is no terminal, it is answered and that is all", group="generation"
    )
    system_prompt: str | None = option(None, "what the model is told before the conversation", group="generation")
    chat_template_kwargs: dict | None = option(None, "arguments of the chat template, as JSON", group="generation")
    device: str = option("auto", "where to run", ("auto", "cpu", "cuda"), "device and memory")
    dtype: str = option(
        "auto", "weights and activations; auto: bfloat16 on cuda, float32 on cpu", DTYPES, "device and memory"
    )
    memory: MemoryOptions = nested(MemoryOptions)
    sampling: SamplingParams = nested(SamplingParams, without=("logprobs", "n"))
    engine: EngineConfig = nested(EngineConfig, without=("seed", *LORA_OPTIONS))
    tensor: TensorOptions = nested(TensorOptions)


def chat(values: dict[str, Any]) -> None:
    found = ready(ChatOptions, values)
    if found is None:
        return
    llm, options, prompt = found
    if _at_terminal() and options.tensor_parallel_size == 1:
        Chat(llm, options).converse(prompt)
    elif prompt is not None:
        say(Chat(llm, options).answer(prompt))


def ready(
    cls: Any, values: dict[str, Any], more: Callable[[Any], dict[str, Any]] = lambda options: {}
) -> tuple[Any, Any, str | None] | None:
    """(engine, options, prompt: an option or stdin, None on a terminal); None after a dry run. more(options): further
    options of the engine.
    """
    from ..engine.llm import LLM
    from ..models.weights import model_folder, tokenizer_folders

    folder = model_folder(values["model"], weights=not values.get("dry_run"))
    options = make(cls, generation_defaults(tokenizer_folders(folder)[0]) | values)
    if options.dry_run:
        show_engine(options, options.model, changed(options.engine, **more(options)))
        return None
    if options.tensor_parallel_size > 1:
        _let_one_speak(options)
    prompt = options.prompt if options.prompt is not None or _at_terminal() else _stdin()
    given = {"device": options.device, "dtype": options.dtype, "memory_limit": options.memory.nbytes}
    given |= given_values(options.tensor)
    return LLM(folder, **given, **given_values(options.engine) | more(options)), options, prompt


def _let_one_speak(options: Any) -> None:
    """Of the processes that share the model all compute the same; the first one says it."""
    if options.prompt is None:
        raise ValueError(
            f"tensor_parallel_size={options.tensor_parallel_size} processes share the model, and the terminal is one's "
            "alone: give --prompt"
        )
    if launched_rank():
        sys.stdout = open(os.devnull, "w")


def _at_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()  # None: it is closed


def _stdin() -> str:
    """The prompt that was piped in, without the line's end."""
    text = sys.stdin.read().removesuffix("\n") if sys.stdin is not None else ""
    if not text:
        raise ValueError("stdin is empty and no terminal: give --prompt, or pipe a prompt in")
    return text


class Chat:
    """A model, a conversation and the terminal. raw: each text is continued as it is, without template and memory."""

    def __init__(self, llm: Any, options: Any, raw: bool = False):
        self.llm, self.options, self.raw = llm, options, raw
        if not raw and (llm.tokenizer is None or not llm.tokenizer.has_chat_template):
            raise ValueError(f"{options.model} has no chat template; generate --raw gives it the text as it is")
        self.conversation = Conversation(llm.tokenizer, options.system_prompt, options.chat_template_kwargs)
        self.tries = 0  # of /regenerate: with a seed, each draws anew

    # ---- the loop ----

    def converse(self, first: str | None = None) -> None:
        """Read a line, answer it, until the end. Ctrl-C ends an answer, never the conversation."""
        try:
            import readline  # noqa: F401  input() then has arrow keys and a history
        except ImportError:  # Windows' console has its own
            pass
        self._print(f"{self.options.model}: type a message; /help shows more, Ctrl-C ends an answer, Ctrl-D ends\n")
        if first is not None:
            self._print(f"> {first}\n")
            self._turn(lambda: self._say(self.answer(first, in_conversation=True)))
        while True:
            try:
                line = self._read()
            except EOFError:
                self._print("\n")
                return
            except KeyboardInterrupt:
                self._print("\n(/exit or Ctrl-D ends)\n")
                continue
            except ValueError as error:  # bytes that are no text
                self._print(f"error: {error}\n")
                continue
            if line in ("/exit", "/quit"):
                return
            if line:
                self._turn(lambda line=line: self._obey(line))

    def _read(self) -> str:
        """A message: a line, with those that follow while it ends with a backslash."""
        lines = [input("> ")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input("… "))
        return "\n".join(lines).rstrip()

    def _turn(self, act: Any) -> None:
        """A mistake or a Ctrl-C ends the turn, never the conversation."""
        try:
            act()
        except ValueError as error:
            self._print(f"error: {error}\n")
        except KeyboardInterrupt:
            self._print("\n(stopped)\n")

    def _obey(self, line: str) -> None:
        match = COMMAND.fullmatch(line)
        if match is None:
            self.tries = 0
            return self._say(self.answer(line.strip(), in_conversation=True))
        command, text = match[1], match[2] or ""
        if command == "/help":
            self._print(HELP + "\n")
        elif command in ("/reset", "/new"):
            self.conversation.reset()
        elif command == "/system":
            self._system(text)
        elif command == "/regenerate":
            self._regenerate()
        else:
            raise ValueError(
                f"there is no command {command}; /help shows them, a space before it sends it as a message"
            )

    def _system(self, text: str) -> None:
        if text:
            self.conversation.set_system_prompt(None if text == '""' else text)
        else:
            self._print(f"system prompt: {self.conversation.system_prompt or 'none'}\n")

    def _regenerate(self) -> None:
        turn = self.conversation.take_back()
        self.tries += 1
        try:
            self._say(self.answer(turn[0], in_conversation=True))
        except (ValueError, KeyboardInterrupt):
            self.conversation.add(*turn)  # the old answer stays
            raise

    # ---- an answer ----

    def answer(self, question: str, in_conversation: bool = False) -> str:
        """Stream the answer to stdout, and add both to the conversation; returns a line of what it took.

        in_conversation: Ctrl-C ends the answer alone, and what there is of it stays in the conversation.
        """
        sampling = self.options.sampling
        if self.tries and sampling.seed is not None:
            sampling = changed(sampling, seed=sampling.seed + self.tries)
        prompt = self.prompt_of(question)
        start, first, output = time.perf_counter(), None, None
        with _ctrl_c(in_conversation) as pressed:
            stream = self.llm.generate([prompt], sampling, stream=True)
            try:
                for output in stream:
                    first = first or time.perf_counter()
                    if sampling.n == 1:
                        self._print(output.outputs[0].text_delta)
                    if pressed.now:
                        break
            except KeyboardInterrupt:
                if not in_conversation:
                    raise
                pressed.now = True
            finally:
                stream.close()  # aborts the request, if it still runs
        if output is None:
            raise ValueError("stopped before the first token; the message is no part of the conversation")
        end, texts = time.perf_counter(), [one.text for one in output.outputs]
        self._print(("\n---\n".join(texts) if sampling.n > 1 else "") + "\n")
        if not self.raw:
            self.conversation.add(question, texts[0], [*output.prompt_token_ids, *output.outputs[0].token_ids])
        return self._summary(output, sampling, (start, first, end), pressed.now)

    def prompt_of(self, question: str) -> str | list[int]:
        """What the model is given: the text as it is (raw), or the ids of the conversation with this message."""
        return question if self.raw else self._prompt_ids(question)

    def _prompt_ids(self, question: str) -> list[int]:
        ids, limit = self.conversation.prompt_ids(question), self.llm.config.max_model_len
        if len(ids) >= limit and self.conversation.messages:
            raise ValueError(
                f"the context is full: with this message the conversation has {len(ids)} tokens and max_model_len="
                f"{limit} leaves no room for an answer; nothing is lost: send a shorter message, or /reset and send it "
                "again"
            )
        return ids

    def _summary(self, output: Any, sampling: SamplingParams, times: tuple, stopped: bool) -> str:
        """Tokens, speed (of those after the first), how full the context is, and what cut the answer."""
        (start, first, end), counts = times, [len(one.token_ids) for one in output.outputs]
        count, context = sum(counts), len(output.prompt_token_ids) + max(counts)
        speed = (count - 1) / (end - first) if count > 1 and end > first else count / (end - start)
        limit, cut = self.llm.config.max_model_len, ""
        if stopped:
            cut = "; stopped"
        elif any(one.finish_reason == "length" for one in output.outputs):
            full = "the context is full: /reset makes room"
            cut = f"; cut, {full}" if context >= limit else f"; cut at max_tokens={sampling.max_tokens}"
        return (
            f"[{count} tokens, {speed:,.1f} tokens/s, the first after {first - start:.2f} s; "
            f"context {context} of {limit}, {output.num_cached_tokens} of them cached{cut}]"
        )

    def _say(self, line: str) -> None:
        self._print(line + "\n")

    def _print(self, text: str) -> None:
        print(for_stream(text, sys.stdout), end="", flush=True)


@contextmanager
def _ctrl_c(caught: bool) -> Iterator[SimpleNamespace]:
    """Within it the first Ctrl-C only sets `.now`, so that no engine step is cut in two; the second one interrupts."""
    pressed = SimpleNamespace(now=False)
    if not caught or threading.current_thread() is not threading.main_thread():
        yield pressed
        return

    def note(number: int, frame: Any) -> None:
        pressed.now = True
        signal.signal(number, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


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
