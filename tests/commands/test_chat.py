"""chat on a terminal of its own (a pty) and in process: commands, Ctrl-C, bytes, a full context, the prefix cache."""

import io
import os
import re
import select
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import cukit_cli
from cukit import LLM, SamplingParams
from cukit.commands.chat import Chat, ChatOptions
from cukit.commands.conversation import Conversation
from cukit.commands.parser import make
from cukit.runs.terminal import for_stream

pty = pytest.importorskip("pty", reason="POSIX only")
ROOT = Path(__file__).parents[2]
TINY = ROOT / "data/tiny-qwen3"
# A conversation whose model says what it was asked, with an escape sequence, in pieces: `python -c ECHO`.
ECHO = r"""
import time
from types import SimpleNamespace as Of
from cukit.commands.chat import Chat, ChatOptions

def generate(prompts, sampling, stream):
    text = ""
    for piece in [repr(prompts[0]), "\x1b]0;title\x07\x1b[31m", "\x9b2J\r", "é€", *(".",) * 200]:
        text += piece
        one = Of(text=text, text_delta=piece, token_ids=[1] * len(text), finish_reason=None)
        yield Of(outputs=[one], prompt_token_ids=[1], num_cached_tokens=0)
        if "slow" in prompts[0]:
            time.sleep(0.05)

llm = Of(tokenizer=Of(has_chat_template=True), config=Of(max_model_len=999), generate=generate)
Chat(llm, ChatOptions(), raw=True).converse()
"""


class Terminal:
    """A program on a pty. say(text) types, until(text) waits for what it prints (all of it: seen)."""

    def __init__(self, *words: str):
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            more = {"TERM": "xterm", "LC_ALL": "C.UTF-8", "PYTHONPATH": str(ROOT)}
            os.chdir(ROOT)
            os.execve(sys.executable, [sys.executable, *words], os.environ | one | more)
        self.seen, self.place = b"", 0

    def say(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def until(self, text: str, seconds: float = 60) -> str:
        """What came since the last call, to the end of `text`."""
        end, wanted = time.monotonic() + seconds, text.encode()
        while (found := self.seen.find(wanted, self.place)) < 0:
            if time.monotonic() > end or not self._read():
                raise AssertionError(f"{text!r} did not come: {self.seen[self.place :]!r}")
        start, self.place = self.place, found + len(wanted)
        return self.seen[start : self.place].decode(errors="replace")

    def interrupt_until(self, text: str) -> str:
        """Press Ctrl-C until it shows: Python's input() misses one that comes before it waits for keys."""
        for _ in range(20):
            self.say("\x03")
            try:
                return self.until(text, seconds=3)
            except AssertionError:
                continue
        raise AssertionError(f"{text!r} did not come: {self.seen[self.place :]!r}")

    def end(self) -> int:
        """The exit code, when it has ended by itself."""
        while self._read(10):
            pass
        os.close(self.descriptor)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self, seconds: float = 0.2) -> bool:
        """False at the end."""
        if select.select([self.descriptor], [], [], seconds)[0]:
            try:
                more = os.read(self.descriptor, 4096)
            except OSError:  # Linux's way to say that the other side is closed
                return False
            self.seen += more
            return bool(more)
        return seconds < 10


@pytest.fixture
def terminal():
    opened = []

    def start(*words):
        opened.append(Terminal(*words))
        return opened[-1]

    yield start
    for one in opened:
        try:
            os.kill(one.pid, 9)
            os.waitpid(one.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def numbers(summary: str) -> tuple[int, int]:
    """(tokens of the context, cached ones) of the line after an answer."""
    found = re.search(r"context (\d+) of \d+, (\d+) of them cached", summary)
    return int(found[1]), int(found[2])


def test_a_conversation_on_a_terminal(terminal):
    """Ctrl-C during an answer keeps what there is of it; /reset forgets it; Ctrl-D ends."""
    chat = terminal("cukit_cli.py", "chat", "--device", "cpu", "--ignore_eos", "--seed", "1")
    chat.until("> ")
    chat.say("2+9+9-6\n")
    chat.until("=")  # the answer runs, and would fill the context
    chat.say("\x03")
    stopped = chat.until("]")
    context, cached = numbers(stopped)
    assert "; stopped]" in stopped and 16 < context < 256 and cached == 0
    chat.until("> ")
    chat.say("3+4\n")
    full = chat.until("]")
    assert numbers(full)[0] == 256 and 16 <= numbers(full)[1] <= context
    assert "cut, the context is full: /reset makes room" in full
    chat.until("> ")
    chat.say("5" * 250 + "\n")
    assert "nothing is lost" in chat.until("again")
    chat.until("> ")
    chat.say("/reset\n")
    chat.until("> ")
    chat.say("2+9+9-6\n")
    assert numbers(chat.until("]"))[0] == 256
    chat.until("> ")
    chat.interrupt_until("Ctrl-D ends")
    chat.until("> ")
    chat.say("\x04")
    assert chat.end() == 0 and b"Traceback" not in chat.seen


def test_what_is_typed_and_what_a_model_writes(terminal):
    """Editing knows characters of several bytes, lines can be continued and recalled; no control character passes."""
    chat = terminal("-c", ECHO)
    chat.until("> ")
    chat.say("a é€😀\x7f!\n")
    answer = chat.until("tokens/s")
    assert "'a é€!'" in answer and r"\x1b]0;title\x07\x1b[31m\x9b2J\ré€" in answer
    assert (
        "\x9b" not in answer and "\x07" not in answer.partition("'a é")[2] and "\x1b" not in answer.partition("'a é")[2]
    )
    chat.until("> ")
    chat.say("\x1b[A?\n")  # the line before
    assert "'a é€!?'" in chat.until("tokens/s")
    chat.until("> ")
    chat.say("one\\\ntwo\n")
    assert r"'one\ntwo'" in chat.until("tokens/s")
    chat.until("> ")
    chat.say("slow\n")
    chat.until("..")
    chat.say("\x03")
    assert "; stopped]" in chat.until("]")
    chat.until("> ")
    chat.say("/exit\n")
    assert chat.end() == 0


def test_bytes_that_are_no_text_end_nothing(terminal):
    chat = terminal("-c", ECHO)
    chat.until("> ")
    os.write(chat.descriptor, b"\xff\xfe\n")
    chat.until("> ")
    chat.say("/exit\n")
    assert chat.end() == 0 and b"Traceback" not in chat.seen


# ---- in process ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm():
    with LLM(TINY, device="cpu") as made:
        yield made


@pytest.fixture
def typed(llm, monkeypatch, capsys):
    """typed(lines, **options): what a conversation prints, and its Chat."""

    def run(lines, first=None, **options):
        given = iter(lines)

        def read(prompt):
            if (line := next(given, None)) is None:
                raise EOFError
            return line

        monkeypatch.setattr("builtins.input", read)
        chat = Chat(llm, make(ChatOptions, {"max_tokens": 8, "temperature": 0.0} | options))
        chat.converse(first)
        return capsys.readouterr().out, chat

    return run


def test_the_commands_of_a_conversation(typed):
    out, chat = typed(
        ["/help", "/system", "/system count", "/system", "/nothing", "/regenerate", "/usr/bin is what?", " /x"]
    )
    assert "/regenerate    answer" in out and "system prompt: none\n" in out and "system prompt: count\n" in out
    assert "there is no command /nothing" in out and "no answer yet" in out and out.count("error: ") == 2
    assert [message["content"] for message in chat.conversation.messages[::2]] == ["/usr/bin is what?", "/x"]
    assert chat.conversation.tokenizer.decode(chat.conversation.prompt_ids("1"), False).startswith("<|im_start|>system")
    _, chat = typed(['/system ""', "1+2", "/reset", "3+4"], system_prompt="count")
    assert chat.conversation.system_prompt is None and chat.conversation.messages[0]["content"] == "3+4"
    _, chat = typed([], first="1+2")
    assert chat.conversation.messages[0] == {"role": "user", "content": "1+2"}


def test_an_answer_is_given_again(typed):
    _, chat = typed(["1+2", "3+4"], temperature=1.0, seed=5, ignore_eos=True)
    before = chat.conversation.messages
    _, chat = typed(["1+2", "3+4", "/regenerate"], temperature=1.0, seed=5, ignore_eos=True)
    assert chat.conversation.messages[:3] == before[:3] and len(chat.conversation.messages) == 4
    assert chat.conversation.messages[3] != before[3]


def test_a_turn_that_fails_changes_nothing(typed):
    out, chat = typed(["1+2", "9" * 400, "/system " + "9" * 300, "/regenerate", '/system ""', "3+4"])
    assert out.count("error: ") == 2 and "nothing is lost" in out  # too long alone; the answer that was to come again
    contents = [message["content"] for message in chat.conversation.messages]
    assert contents[0] == "1+2" and contents[2] == "3+4" and len(contents) == 4


def test_the_ids_of_a_turn_begin_with_those_of_the_turn_before(llm):
    """Also where the model's ids are not those that the text would be encoded to."""
    conversation, tokenizer = Conversation(llm.tokenizer), llm.tokenizer
    for question in ("2+9", "3+4+1", "7-5"):
        ids = conversation.prompt_ids(question)
        assert ids == tokenizer.apply_chat_template(
            [*conversation.messages, {"role": "user", "content": question}], add_generation_prompt=True
        )
        output = llm.generate([ids], SamplingParams(temperature=0, max_tokens=32))[0]
        one = output.outputs[0]
        conversation.add(question, one.text, ids + one.token_ids)
        assert conversation.prompt_ids("1")[: len(ids) + len(one.token_ids)] == ids + one.token_ids
    split = [llm.tokenizer.encode("#")[0]] * 4  # "####", one id when it is encoded
    ids = conversation.prompt_ids("6+5")
    conversation.add("6+5", "####", ids + split)  # stopped before the end-of-text token
    assert conversation.prompt_ids("1")[: len(ids) + 4] == ids + split


def test_a_template_that_writes_earlier_turns_otherwise_is_encoded_anew():
    """Qwen3's drops earlier thoughts: then what counts is the template's text."""

    def render(messages, add_generation_prompt):
        return "".join(f"[{one['content'].split('/think ')[-1]}]" for one in messages)

    letters = SimpleNamespace(
        render_chat=render,
        encode=lambda text: [ord(letter) for letter in text],
        decode=lambda ids, skip_special_tokens: "".join(map(chr, ids)),
    )
    conversation = Conversation(letters)
    ids = conversation.prompt_ids("a")
    conversation.add("a", "hm/think b", [*ids, *letters.encode("[hm/think b]")])
    assert conversation.prompt_ids("c") == letters.encode("[a][b][c]")


def test_a_prompt_without_a_terminal_is_answered_once(monkeypatch, capsys, fails):
    argv = ["--device", "cpu", "--model", str(TINY), "--max_tokens", "9", "--temperature", "0"]
    assert cukit_cli.main(["generate", *argv, "--prompt", "1+2"]) == 0
    answer = capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO("1+2\n"))
    assert cukit_cli.main(["chat", *argv]) == 0
    single = capsys.readouterr()
    assert single.out == answer.out and "tokens/s" in single.err and "tokens/s" not in answer.err
    assert cukit_cli.main(["chat", *argv, "--prompt", "1+2", "--system_prompt", "999"]) == 0
    assert capsys.readouterr().out != answer.out
    assert "write the system_prompt into the text" in fails("generate", *argv, "--raw", "--system_prompt", "x")


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_a_closed_stdin_is_no_terminal(monkeypatch, capsys, fails, command):
    """`command <&-`, and what some services start: Python then has no sys.stdin."""
    argv = [command, "--device", "cpu", "--model", str(TINY), "--max_tokens", "3"]
    monkeypatch.setattr("sys.stdin", None)
    assert cukit_cli.main([*argv, "--prompt", "1+2"]) == 0
    assert capsys.readouterr().out
    assert "stdin is empty and no terminal: give --prompt" in fails(*argv)


def test_only_a_terminal_gets_escapes():
    class Screen(io.StringIO):
        encoding = "utf-8"

        def isatty(self):
            return True

    everything = "".join(map(chr, [*range(0x300), *range(0x2000, 0x2070), 0xD800, 0x1F600]))
    shown = for_stream(everything, Screen())
    raw = {letter for letter in shown if letter < " " or "\x7f" <= letter <= "\x9f"}
    assert (
        raw == {"\n", "\t"} and r"\x1b" in shown and r"\u202e" in shown and "\u200d" in shown and "\U0001f600" in shown
    )
    assert for_stream("\x1b[1m\ud800", SimpleNamespace(isatty=lambda: False, encoding="utf-8")) == "\x1b[1m\\ud800"
    assert for_stream("é", SimpleNamespace(isatty=lambda: False, encoding="ascii")) == r"\xe9"
