"""Steps that are launched before the results of the one before them are on the host."""

import numpy as np
import pytest

from cukit import SamplingParams
from cukit.engine.copies import Inbox, Outbox
from cukit.engine.llm import LLM

from .helpers import HashModel, check_engine
from .test_random_engines import outcome

pytestmark = pytest.mark.usefixtures("order")
PROMPTS = [[number, 3, 2 * number] for number in range(24)]


def make_llm(**options):
    return LLM.from_model(HashModel(), None, **{"max_model_len": 64, "block_size": 4, "num_kv_blocks": 400} | options)


def params(**options):
    return SamplingParams(**{"max_tokens": 40, "seed": 5, "logprobs": True} | options)


def launches(llm):
    """A list that grows by (rows that compute, whether the step before is in flight) at each launch."""
    found, plain = [], llm.core.runner.launch

    def launch(step, before=None):
        found.append((int((llm.core.rows.host.context_lens > 0).sum()), before is not None))
        return plain(step, before)

    llm.core.runner.launch = launch
    return found


@pytest.mark.parametrize("order", ["ahead", "at once"], indirect=True)
def test_rows_that_stop_do_not_hold_up_the_device():
    """Rows end by stop ids at many steps. Each costs one token that is discarded, and every other step is ahead."""
    given = [params(stop_token_ids=[number % 53, 7, 30], seed=number) for number in range(24)]
    plain = make_llm(async_scheduling=False)
    expected = [outcome(request) for request in plain.run(PROMPTS, given)]
    lengths = sorted(len(samples[0][0]) for samples in expected)
    assert len(set(lengths)) > 10
    llm = make_llm()
    found = launches(llm)
    assert [outcome(request) for request in llm.run(PROMPTS, given)] == expected
    assert [ahead for _, ahead in found] == [False] + [True] * (len(found) - 1)
    stopped = sum(samples[0][2] == "stop" and len(samples[0][0]) > 1 for samples in expected)
    assert sum(count for count, _ in found) == sum(lengths) - 24 + stopped
    check_engine(llm)
    assert llm.core.blocks.num_free == 400
    for name in ("num_steps", "num_generated_tokens", "num_prefill_tokens"):
        assert getattr(llm.stats, name) == getattr(plain.stats, name)


@pytest.mark.parametrize("order", ["ahead", "at once"], indirect=True)
def test_a_row_that_ends_by_its_length_is_in_no_further_step():
    llm = make_llm()
    found = launches(llm)
    llm.run(PROMPTS[:3], [params(max_tokens=count) for count in (1, 4, 6)])
    assert [count for count, _ in found] == [2, 2, 2, 1, 1]  # the first token is the prompt's


@pytest.mark.parametrize("options", [{"async_scheduling": False}, {}])
def test_the_option_and_the_device_decide(options, order):
    llm = make_llm(**options)
    found = launches(llm)
    llm.run(PROMPTS[:3], params())
    assert any(ahead for _, ahead in found) == (order is not None and not options)


def test_each_step_gives_each_row_a_token(order):
    """Also the first one, and one before which a request is added; that one's prompt comes at once or a step later."""
    llm = make_llm()
    first = llm.add_request([1, 2], params(max_tokens=20))
    for count in range(1, 8):
        llm.step()
        assert first.sequences[0].num_generated == len(first.sequences[0].logprobs) == count
    second = llm.add_request([3, 4], params(max_tokens=4))
    llm.step()
    assert first.sequences[0].num_generated == 8 and second.sequences[0].num_generated == (order is None)
    while not second.finished:
        before = [request.sequences[0].num_generated for request in (first, second)]
        llm.step()
        assert [request.sequences[0].num_generated for request in (first, second)] == [count + 1 for count in before]


def test_waiting_requests_without_room_do_not_hold_up_the_device(order):
    """6 requests for 4 rows: while all rows are taken, steps run ahead; the places of those that end are filled."""
    llm = make_llm(max_num_seqs=4)
    found = launches(llm)
    requests = llm.run(PROMPTS[:6], [params(max_tokens=10 + 5 * number) for number in range(6)])
    assert [request.sequences[0].num_generated for request in requests] == [10 + 5 * number for number in range(6)]
    if order is not None:
        assert sum(ahead for _, ahead in found) > 0.7 * len(found)


@pytest.mark.parametrize("order", ["ahead", "at once"], indirect=True)
@pytest.mark.parametrize("length", [5, 8])
def test_samples_that_wait_for_a_row_do_not_hold_up_the_device(length):
    """30 samples of a prompt for 6 rows: one takes the place of another while a step is in flight, and copies the last
    block of the prompt. The prompt's step alone is not overlapped.
    """
    given = params(n=30, stop_token_ids=[1, 2, 3], max_tokens=20)
    prompt = list(range(length))
    (expected,) = make_llm(async_scheduling=False).run([prompt], given)
    assert len({seq.length for seq in expected.sequences}) > 10
    llm = make_llm(max_num_seqs=6)
    found = launches(llm)
    (request,) = llm.run([prompt], given)
    assert outcome(request) == outcome(expected)
    assert [ahead for _, ahead in found] == [False] + [True] * (len(found) - 1)
    decoded = [seq.num_generated - 1 for seq in expected.sequences]
    overrun = sum(seq.finish_reason == "stop" and 1 < seq.num_generated < 20 for seq in expected.sequences)
    assert sum(count for count, _ in found) == sum(decoded) + overrun
    check_engine(llm)


@pytest.mark.parametrize("order", ["ahead"], indirect=True)
def test_a_row_with_a_penalty_comes_while_a_step_is_in_flight():
    """Its draws need its tokens on the host, so that steps run ahead no more."""
    prompts, given = [[1, 2], [3, 4, 5], [6, 7]], [params(), params(seed=6), params(repetition_penalty=1.9)]
    expected = [outcome(request) for request in make_llm(async_scheduling=False).run(prompts, given)]
    llm = make_llm()
    requests = [llm.add_request(*one) for one in zip(prompts, given, strict=True)]
    for _ in range(4):
        llm.step()
    assert llm.core._flight is None
    scheduler, (waiting,) = llm.core.scheduler, requests[-1].sequences
    scheduler._take_out(waiting)
    scheduler.add(waiting)
    llm.core.rows.capacity = 2  # it waits a while, with its KV
    for _ in range(4):
        llm.step()
    assert llm.core._flight is not None and waiting.is_ready
    llm.core.rows.capacity = 8
    llm.step()
    assert llm.core._flight is None and waiting.row == 2
    while llm.core.requests:
        llm.step()
    assert [outcome(request) for request in requests] == expected


@pytest.mark.parametrize("order", ["ahead"], indirect=True)
def test_no_sequence_loses_its_blocks_to_a_step_ahead(monkeypatch):
    """In pools with room for few samples: where one must give way, what is in flight is looked at first. Among the
    cases are some in which a sample that comes needs one block too many.
    """
    refused = 0
    for seed in (0, 1, 2, 5, 21, 34, 40, 43, 48, 50, 64, 84):
        rng = np.random.default_rng(seed)
        options = {"max_num_seqs": int(rng.integers(3, 9)), "num_kv_blocks": int(rng.integers(8, 20))}
        options["max_model_len"] = 32
        prompts = [rng.integers(0, 53, rng.integers(3, 12)).tolist() for _ in range(3)]
        given = [params(n=6, max_tokens=20, seed=seed + k, stop_token_ids=[0, 1, 2, 3]) for k in range(3)]
        roomy = make_llm(async_scheduling=False, max_model_len=32)
        expected = [outcome(request) for request in roomy.run(prompts, given)]
        llm = make_llm(**options)
        scheduler, plain = llm.core.scheduler, llm.core.scheduler.schedule_ahead

        def schedule_ahead(scheduler=scheduler, plain=plain):
            nonlocal refused
            before = scheduler.num_preemptions
            step = plain()
            assert scheduler.num_preemptions == before
            refused += step is None
            return step

        monkeypatch.setattr(scheduler, "schedule_ahead", schedule_ahead)
        assert [outcome(request) for request in llm.run(prompts, given)] == expected
    assert refused > 12


@pytest.mark.parametrize("order", ["ahead"], indirect=True)
def test_what_is_in_flight_is_left_alone(order):
    """An engine that is dropped, and one whose requests all end by an abort."""
    llm = make_llm()
    requests = [llm.add_request(prompt, params()) for prompt in PROMPTS]
    for _ in range(3):
        llm.step()
    assert order.num_waiting
    for request in requests:
        llm.abort(request.request_id)
    check_engine(llm)
    assert llm.core.blocks.num_free == 400
    request = llm.add_request([1], params(max_tokens=1))
    llm.step()
    assert request.finished, "the step waited for the one in flight, which is nobody's"
    expected = [outcome(request) for request in make_llm(async_scheduling=False).run(PROMPTS, params())]
    assert [outcome(request) for request in llm.run(PROMPTS, params())] == expected
    llm.add_request([1], params())
    for _ in range(3):
        llm.step()
    assert order.num_waiting
    del llm, requests
    assert not order.num_waiting, "page-locked memory was given back while a copy was to come"


def test_copies_of_any_length_in_turn():
    from cukit.backend import numpy as backend

    rng = np.random.default_rng(0)
    outbox, inbox = Outbox(backend, 4, np.int32), Inbox(backend, 4, np.int32, np.float64)
    before = None
    for _ in range(40):
        count = int(rng.integers(1, 30))
        values = rng.integers(0, 99, count).tolist()
        target, halves = backend.empty((count,), np.int32), backend.zeros((count,), np.float64)
        outbox.send(target, values)
        results = inbox.fetch(target, halves)
        if before is not None:
            assert [x.tolist() for x in before[0].on_host()] == before[1]
        before = results, [values, [0.0] * count]
