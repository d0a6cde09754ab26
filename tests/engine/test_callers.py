"""Several callers of one engine: each gets all of its own, in whatever order they ask."""

import gc
import sys
import threading
import time

import numpy as np
import pytest

from cukit import SamplingParams
from cukit.engine.llm import LLM

from .helpers import HashModel, check_engine, qwen_tokenizer, reciting_llm

pytestmark = pytest.mark.usefixtures("order")

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]]
OTHERS = [[11, 12], [13, 14, 15]]


def params(**options):
    return SamplingParams(**{"max_tokens": 9, "seed": 5, "n": 2} | options)


def make_llm(**options):
    return LLM.from_model(HashModel(), None, **{"max_model_len": 64, "block_size": 4, "num_kv_blocks": 60} | options)


def tokens_of(outputs):
    return [[sample.token_ids for sample in out.outputs] for out in outputs]


def last_of(stream):
    """The last output of each prompt of a stream."""
    last = {}
    for out in stream:
        assert not (out.index in last and last[out.index].finished), "an output after the last one"
        last[out.index] = out
    assert all(out.finished for out in last.values())
    return [last[number] for number in sorted(last)]


@pytest.fixture(scope="module")
def expected():
    return tokens_of(make_llm().generate(PROMPTS, params())), tokens_of(make_llm().generate(OTHERS, params(seed=8)))


def test_e1_generate_between_two_pieces_of_a_stream(expected):
    llm = make_llm()
    stream = llm.generate(PROMPTS, params(), stream=True)
    first = next(stream)
    assert tokens_of(llm.generate(OTHERS, params(seed=8))) == expected[1]
    rest = [first, *stream]
    assert tokens_of(last_of(rest)) == expected[0]
    assert len(rest) <= 1 + 2 * len(PROMPTS), "what grew while others computed comes in one piece"


@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 3}, {"num_kv_blocks": 16}, {"max_num_batched_tokens": 4}])
def test_e1_streams_read_in_turn(options, expected):
    llm = make_llm(**options)
    streams = [llm.generate(PROMPTS, params(), stream=True), llm.generate(OTHERS, params(seed=8), stream=True)]
    found = [[], []]
    turn = 0
    while any(stream is not None for stream in streams):
        turn += 1
        for number, stream in enumerate(streams):
            if stream is not None and (number == 0 or turn % 3 == 0):  # one reader is slower
                try:
                    found[number].append(next(stream))
                except StopIteration:
                    streams[number] = None
    assert (tokens_of(last_of(found[0])), tokens_of(last_of(found[1]))) == expected
    check_engine(llm)
    assert not llm.core.scheduler.has_work


def test_e1_zip_of_two_streams(expected):
    llm = make_llm()
    same = [llm.generate(PROMPTS, params(), stream=True) for _ in range(2)]
    pairs = list(zip(*same, strict=False))
    assert pairs
    for stream, number in zip(same, (0, 1), strict=True):
        assert tokens_of(last_of([*[pair[number] for pair in pairs], *stream]))[:2] == expected[0][:2]


def test_e1_deltas_are_whole_however_late_they_are_read():
    text = "Deltas join to the text: 汉字 👋🏽, after steps of any caller."
    ids = qwen_tokenizer().encode(text)
    llm, prompt_ids = reciting_llm("Q:", ids)
    greedy = SamplingParams(temperature=0, max_tokens=len(ids), ignore_eos=True)
    streams = [llm.generate([prompt_ids], greedy, stream=True) for _ in range(3)]
    deltas = [[next(stream).outputs[0].text_delta] for stream in streams]
    deltas[1] += [next(streams[1]).outputs[0].text_delta for _ in range(4)]
    assert llm.generate([prompt_ids], greedy)[0].outputs[0].text == text
    for stream, found in zip(streams, deltas, strict=True):
        rest = [out.outputs[0].text_delta for out in stream]
        assert "".join(found + rest) == text and len(rest) == 1


def test_e1_an_abandoned_stream_ends_its_requests(expected):
    llm = make_llm()
    streams = [llm.generate(PROMPTS, params(), stream=True) for _ in range(3)]
    for stream in streams:
        next(stream)
    assert len(llm.core.requests) == 9
    streams[0].close()
    assert len(llm.core.requests) == 6
    streams.pop()
    gc.collect()
    del stream
    gc.collect()
    assert len(llm.core.requests) == 3
    assert tokens_of(llm.generate(OTHERS, params(seed=8))) == expected[1]
    assert tokens_of(last_of(streams[1])) == expected[0]
    assert llm.core.blocks.num_free == 60


def test_e1_a_stream_dropped_within_a_step():
    """The garbage collector may run anywhere, also while the same thread computes a step."""
    llm = make_llm()
    stream = llm.generate(PROMPTS, params(), stream=True)
    next(stream)
    cycle = [stream]
    cycle.append(cycle)
    del stream
    plain = llm.core.runner.run

    def run(step):
        nonlocal cycle
        cycle = None
        gc.collect()
        return plain(step)

    llm.core.runner.run = run
    llm.generate(OTHERS, params())
    check_engine(llm)
    assert not llm.core.requests and llm.core.blocks.num_free == 60


@pytest.mark.parametrize("options", [{}, {"num_kv_blocks": 18, "max_num_seqs": 4}])
def test_e1_threads(options):
    """Threads that generate, stream, abandon and abort at the same time: each gets what it would get alone."""
    llm = make_llm(**options)
    alone, problems = make_llm(), []
    rng = np.random.default_rng(0)
    work = [
        ([rng.integers(0, 53, rng.integers(1, 20)).tolist() for _ in range(rng.integers(1, 4))], params(seed=seed))
        for seed in range(24)
    ]
    expected = [tokens_of(alone.generate(*job)) for job in work]

    def worker(number):
        try:
            for job, wanted in list(zip(work, expected, strict=True))[number::6]:
                kind = number % 3
                if kind == 0:
                    assert tokens_of(llm.generate(*job)) == wanted
                elif kind == 1:
                    assert tokens_of(last_of(llm.generate(*job, stream=True))) == wanted
                else:
                    stream = llm.generate(*job, stream=True)
                    next(stream)
                    del stream
                    request = llm.add_request(job[0][0], job[1])
                    llm.abort(request.request_id)
                    runs = llm.run(*job)
                    assert [[seq.completion_ids.tolist() for seq in run.sequences] for run in runs] == wanted
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a caller waits for ever"
    assert not problems, problems[0]
    llm.step()
    check_engine(llm)
    assert not llm.core.requests and llm.core.blocks.num_free == llm.config.num_kv_blocks


def test_e1_a_finished_caller_leaves_while_another_goes_on():
    """One caller needs thousands of steps; another, which comes later and needs few, does not wait for its end."""
    llm = make_llm(max_model_len=512, num_kv_blocks=300)
    running, order = threading.Event(), []

    def long():
        stream = llm.generate([[1]], params(n=1, max_tokens=500), stream=True)
        next(stream)
        running.set()
        for _ in stream:
            pass
        order.append("long")

    thread = threading.Thread(target=long)
    thread.start()
    running.wait(10)
    llm.generate([[2]], params(n=1, max_tokens=3))
    order.append("short")
    thread.join(60)
    assert order == ["short", "long"]


def test_an_error_of_one_caller_is_not_the_others(expected):
    """A step that raises reaches its caller; the requests of others go on."""
    llm = make_llm()
    stream = llm.generate(PROMPTS, params(), stream=True)
    found = [next(stream)]
    plain, llm.core.runner.run = llm.core.runner.run, lambda step: 1 / 0
    with pytest.raises(ZeroDivisionError):
        llm.generate(OTHERS, params())
    llm.core.runner.run = plain
    check_engine(llm)
    assert tokens_of(last_of([*found, *stream])) == expected[0]
    assert llm.core.blocks.num_free == 60


def test_run_gives_arrays(expected):
    llm = make_llm()
    requests = llm.run([np.array(PROMPTS[0], np.int64), PROMPTS[1], tuple(PROMPTS[2])], params(logprobs=False))
    for request, prompt, wanted in zip(requests, PROMPTS, expected[0], strict=True):
        for seq, tokens in zip(request.sequences, wanted, strict=True):
            assert seq.token_ids.dtype == np.int32 and seq.token_ids.tolist() == prompt + tokens
            assert seq.prompt_length == len(prompt) and seq.logprobs.dtype == np.float64
            assert seq.logprobs.shape == (9,) and seq.finish_reason == "length"
            assert llm.text_of(seq) == ""
    assert llm.run(np.array([1, 2, 3], np.int32), params())[0].prompt_ids.tolist() == [1, 2, 3]


def test_run_calls_between_steps_and_aborts_what_it_stops():
    llm, steps = make_llm(), []

    def stop():
        steps.append(llm.stats.num_steps)
        if len(steps) == 4:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        llm.run(PROMPTS, params(), between_steps=stop)
    assert steps == [1, 2, 3, 4] and not llm.core.requests and llm.core.blocks.num_free == 60


@pytest.mark.parametrize("max_tokens", [1, 6])
@pytest.mark.parametrize("length", [1, 4, 5, 11])
def test_a_further_turn_goes_on_from_kept_kv(length, max_tokens):
    """It computes only what follows the last computed token, and equals a fresh prompt. Samples of one token still
    share their last block when their further turns begin.
    """
    llm = make_llm(enable_prefix_caching=False)
    prompt = np.arange(length, dtype=np.int32)
    first = llm.core.add(prompt, None, params(max_tokens=max_tokens), keeps_cache=True)
    while not first.finished:
        llm.step()
    check_engine(llm)
    before = llm.stats.num_prefill_tokens
    turns = []
    for seq in first.sequences:
        ids = np.append(seq.token_ids, [7, 8]).astype(np.int32)
        turns.append(llm.core.add(ids, None, params(seed=9), after=seq))
    while llm.core.requests:
        llm.step()
        check_engine(llm)
    shared = length % 4 if max_tokens == 1 else 0  # computed anew by the one that leaves the shared block first
    assert llm.stats.num_prefill_tokens - before == 2 * 3 + shared  # the token drawn last, and the two new ones
    for turn in turns:
        (fresh,) = make_llm().run([turn.prompt_ids], params(seed=9))
        assert [seq.token_ids.tolist() for seq in turn.sequences] == [seq.token_ids.tolist() for seq in fresh.sequences]
    assert sum(turn.num_cached_tokens for turn in turns) == 2 * (length + max_tokens - 1) - shared
    llm.core.release(first)
    assert llm.core.blocks.num_free == 60
    with pytest.raises(ValueError, match="must begin with all tokens"):
        llm.core.add(prompt, None, params(), after=first.sequences[0])
    assert not llm.core.requests


def test_the_kept_kv_of_one_sample_is_released_alone():
    llm = make_llm(enable_prefix_caching=False)
    first, other = (llm.core.add(np.arange(9 + i, dtype=np.int32), None, params(n=2), keeps_cache=True) for i in (0, 1))
    while llm.core.requests:
        llm.step()
    held = llm.core.scheduler.held
    assert len(held) == 4
    llm.core.release(first.sequences[1])
    assert set(held) == {first.sequences[0], *other.sequences}
    check_engine(llm)
    llm.core.release(other)
    assert set(held) == {first.sequences[0]}
    llm.core.release(first)
    assert not held and llm.core.blocks.num_free == 60


def test_kept_kv_gives_way_to_what_runs():
    llm = make_llm(num_kv_blocks=16)
    kept = llm.core.add(np.arange(40, dtype=np.int32), None, params(n=1, max_tokens=6), keeps_cache=True)
    while not kept.finished:
        llm.step()
    assert llm.core.blocks.num_free < 6
    llm.generate([list(range(50))], params(n=1))
    assert not llm.core.scheduler.held
    check_engine(llm)
    llm.reset_prefix_cache()
    assert llm.core.blocks.num_free == 16


def test_kept_kv_of_an_aborted_request_is_given_back():
    llm = make_llm()
    request = llm.core.add(np.arange(10, dtype=np.int32), None, params(max_tokens=30), keeps_cache=True)
    for _ in range(4):
        llm.step()
    llm.core.abort(request)
    assert llm.core.blocks.num_free == 60 and not llm.core.scheduler.held


def test_turns_are_given_in_the_order_of_asking():
    core, order = make_llm().core, []

    def other():
        with core.paused():
            order.append("other")

    for _ in range(20):
        order.clear()
        with core.paused():
            thread = threading.Thread(target=other)
            thread.start()
            while not core._queue:
                time.sleep(0.001)
        with core.paused():
            order.append("first again")
        thread.join(10)
        assert order == ["other", "first again"]


@pytest.mark.parametrize("order", ["in turn", "at once"], indirect=True)
def test_a_steady_step_costs_the_same_calls_for_any_number_of_rows():
    """No Python per row or token while rows only decode."""

    def calls_of(num_rows):
        llm = make_llm(max_num_seqs=num_rows, block_size=32, num_kv_blocks=2 * num_rows)
        be = llm.model.backend
        llm.core.runner._make_step = lambda rows, *_: (
            llm.core.rows.views(rows),
            lambda: (be.zeros((rows,), np.int32), be.zeros((rows,), np.float64)),
        )
        prompts = [[number % 53, number // 53] for number in range(num_rows)]
        for prompt in prompts:
            llm.add_request(prompt, params(n=1, max_tokens=20, stop_token_ids=[52]))
        while llm.core.rows.count < num_rows or llm.core.scheduler.waiting:
            llm.step()
        llm.step()
        counted = []
        sys.setprofile(lambda frame, event, argument: counted.append(event) if event in ("call", "c_call") else None)
        llm.step()
        sys.setprofile(None)
        return len(counted)

    few, many = calls_of(4), calls_of(256)
    assert few == many < 150


def test_a_stream_that_begins_after_sleep_reads_no_cache():
    llm = make_llm()
    (expected,) = tokens_of(llm.generate([PROMPTS[0]], params()))
    stream = llm.generate([PROMPTS[0]], params(), stream=True)
    llm.sleep()
    with pytest.raises(ValueError, match="the engine sleeps: call wake_up"):
        next(stream)
    assert not llm.core.requests
    llm.wake_up()
    assert tokens_of(llm.generate([PROMPTS[0]], params())) == [expected]
