"""When a step is called plainly, captured and replayed, and what is left after a failure: with a stream that only takes
notes, without a GPU.
"""

import pytest

pytest.importorskip("cupy", reason="steps are captured through CuPy")
from cukit.backend.cuda import graph  # noqa: E402
from cukit.backend.cuda.graph import _Arena  # noqa: E402


class Stream:
    capturing = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def begin_capture(self):
        assert not self.capturing, "a capture within a capture"
        self.capturing = True

    def end_capture(self):
        if not self.capturing:
            raise RuntimeError("there is no capture to end")
        self.capturing = False
        return Graph()


class Graph:
    def launch(self):
        notes.append("replay")


notes = []


@pytest.fixture
def stream(monkeypatch):
    notes.clear()
    stream = Stream()
    monkeypatch.setattr(graph, "_stream", lambda: stream)
    monkeypatch.setattr(graph, "synchronize", lambda: notes.append("wait"))
    return stream


def make_step(stream, errors):
    """A step; its captures raise the given errors, in order."""
    errors = iter(errors)

    def function():
        notes.append("captured" if stream.capturing else "plain")
        if stream.capturing:
            error = next(errors, None)
            if error is not None:
                raise error
        return notes[-1]

    return graph._Step(function, _Arena(make_slab=None, device_id=0))


def test_plain_then_captured_then_replayed(stream):
    step = make_step(stream, [])
    assert [step() for _ in range(4)] == ["plain", "captured", "captured", "captured"]
    # no graph runs while exchanges of the same ranks come plainly (nccl.py)
    assert notes == ["wait", "plain", "captured", "replay", "replay", "replay"]


def test_exchanges_know_a_step_by_its_stream():
    """nccl.py takes the communicator of steps by this mark; tests/parallel/test_nccl.py sets it by hand."""
    assert graph._StepStream.is_of_steps


def test_a_capture_that_fails_is_tried_once_more_and_said_once(stream, caplog):
    step = make_step(stream, [MemoryError("no range"), None])
    assert [step() for _ in range(3)] == ["plain", "plain", "captured"] and not caplog.messages
    step = make_step(stream, [MemoryError("no range"), RuntimeError("it waits")])
    assert [step() for _ in range(5)] == ["plain"] * 5
    assert caplog.messages == ["a step runs without a CUDA graph, which could not be captured: it waits"]
    assert not stream.capturing and not step._arena.frozen


def test_an_interrupted_capture_leaves_the_stream_and_the_arena_usable(stream):
    step = make_step(stream, [KeyboardInterrupt()])
    step()
    with pytest.raises(KeyboardInterrupt):
        step()
    assert not stream.capturing and not step._arena.frozen
    assert step() == "captured" and notes[-1] == "replay"
