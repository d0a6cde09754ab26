"""The display: plain lines, the live one, log lines; a display never ends work."""

import errno
import io
import logging

import pytest

from cukit.runs.progress import LogHandler, Progress, SafeStream, format_seconds, show_log_lines


def test_progress_without_a_terminal_is_one_line_an_update(capsys):
    with Progress(4, "grpo", live=False) as progress:
        progress.update(0, {"eval/accuracy": 0.25})
        progress.advance(1)
        progress.update(
            2, {"reward": 0.5, "completions/mean_length": 12.0, "tokens_per_second": 1234.4, "loss": float("nan")}
        )
        progress.message("[red]as it is[/red]")
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "grpo step 0/4  accuracy 0.250"
    assert second.startswith("grpo step 2/4  reward 0.500  length 12.0  tokens/s 1,234  ") and second.endswith(" left")
    assert third == "[red]as it is[/red]"


def test_c14_a_pipe_gets_each_number_once(capsys):
    """The accuracy of the last evaluation is no news at the next step; a live display goes on showing it."""
    for live, times in ((False, 1), (True, 1)):
        with Progress(4, "grpo", live=live) as progress:
            progress.update(0, {"eval/accuracy": 0.25})
            progress.update(1, {"reward": 0.5})
        out = capsys.readouterr().out
        assert out.count("accuracy 0.250") == times
    assert "reward 0.500  accuracy 0.250" in out


def test_live_progress_draws(capsys):
    with Progress(4, "grpo", start_step=1, live=True) as progress:
        progress.update(2, {"reward": 0.5})
        progress.message("[red]as it is[/red]")
    out = capsys.readouterr().out
    assert "2/4" in out and "reward 0.500" in out and "[red]as it is[/red]" in out


def test_durations_read_well():
    assert [format_seconds(s) for s in (0.4, 59.6, 200, 7500)] == ["0 s", "1 min 00 s", "3 min 20 s", "2 h 05 min"]


# ---- c8: a display never ends work -----------------------------------------------------------------------------------

TEXT = "prompt 猫は何匹? é \ud83d \x1b[0m"  # half a surrogate pair: no encoding has it


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "utf-8"])
def test_c8_characters_that_a_console_lacks_are_replaced(monkeypatch, encoding, live):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding=encoding, write_through=True))
    with Progress(4, "猫", live=live) as progress:
        progress.message(TEXT)
        progress.update(1, {"reward": 0.5})
    shown = raw.getvalue().decode(encoding)
    assert "prompt " in shown and "reward 0.500" in shown and ("猫" in shown) == (encoding == "utf-8")


class Broken(io.TextIOBase):
    """A stream that fails from the second write on."""

    encoding = "utf-8"

    def __init__(self, error):
        self.error, self.text = error, []

    def write(self, text):
        if self.text:
            raise self.error
        self.text.append(text)
        return len(text)

    def flush(self):
        if len(self.text) > 1:
            raise self.error


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize(
    "error", [BrokenPipeError(errno.EPIPE, "pipe"), OSError(errno.ENOSPC, "full"), ValueError("closed file")]
)
def test_c8_a_stream_that_breaks_goes_silent(monkeypatch, error, live):
    monkeypatch.setattr("sys.stdout", Broken(error))
    with Progress(4, "grpo", live=live) as progress:
        for step in range(3):
            progress.update(step, {"reward": 0.5})
            progress.message("a line")


def test_c8_no_stream_at_all(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    with Progress(4, "grpo") as progress:
        progress.update(1, {"reward": 0.5})
    closed = io.StringIO()
    closed.close()
    assert SafeStream(closed).write("x") == 1 and not SafeStream(closed).isatty()


# ---- log lines -------------------------------------------------------------------------------------------------------


@pytest.fixture
def shown():
    handler = show_log_lines()
    assert show_log_lines() is handler and logging.getLogger("cukit").handlers.count(handler) == 1
    yield logging.getLogger("cukit.runs.test")
    logging.getLogger("cukit").removeHandler(handler)
    logging.getLogger("cukit").setLevel(logging.NOTSET)


def test_log_lines_go_to_stderr_or_above_the_live_display(shown, capsys):
    shown.info("plan of %d lines", 3)
    shown.warning("careful")
    shown.warning("warning: said already")
    shown.debug("hidden")
    assert capsys.readouterr().err == "plan of 3 lines\nwarning: careful\nwarning: said already\n"
    with Progress(4, "grpo", live=True):
        shown.info("[b]above[/b]")
    captured = capsys.readouterr()
    assert "[b]above[/b]" in captured.out and not captured.err


def test_c8_a_log_line_never_ends_work(shown, monkeypatch):
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(io.BytesIO(), encoding="cp1252"))
    shown.warning("猫")
    monkeypatch.setattr("sys.stderr", None)
    shown.warning("unheard")
    assert isinstance(logging.getLogger("cukit").handlers[-1], LogHandler)


def test_a_silent_display_shows_nothing(capsys):
    """Of several ranks one has the screen."""
    with Progress(4, "grpo", silent=True) as progress:
        progress.update(1, {"loss": 0.5})
        progress.message("a line")
    assert capsys.readouterr().out == ""
