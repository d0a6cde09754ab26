"""Random engines with little room against a roomy one, token for token; the pool's books are checked at each step."""

import numpy as np
import pytest

from cukit import SamplingParams
from cukit.engine.llm import LLM

from .helpers import HashModel, check_engine, tiny_llm

pytestmark = pytest.mark.usefixtures("order")

CASES, QUICK = 125, 50  # all of them, each in both orders, and those of a plain `pytest`; CI runs all


def bad(state):
    return state % 61 == 7


def random_params(rng, room):
    max_tokens = int(rng.integers(1, room + 4))
    return SamplingParams(
        n=int(rng.integers(1, 10)) if rng.random() < 0.6 else 1,
        temperature=float(rng.choice([0, 0.7, 1.0])),
        top_k=int(rng.choice([0, 0, 5])),
        max_tokens=max_tokens,
        min_tokens=int(rng.integers(0, max_tokens + 1)) if rng.random() < 0.2 else 0,
        stop_token_ids=rng.integers(0, 53, rng.integers(0, 4)).tolist(),
        repetition_penalty=float(rng.choice([1, 1, 1, 1, 1.5])),
        seed=int(rng.integers(2**63)),
        logprobs=True,
    )


def roomy(model, prompt, params):
    """[(tokens, log-probs, reason)] of a request alone in an engine with room for everything."""
    options = {"max_model_len": params_len(model), "num_kv_blocks": 400, "block_size": 16, "async_scheduling": False}
    llm = LLM.from_model(model, None, **options)
    (request,) = llm.run([prompt], params)
    return outcome(request)


def params_len(model):
    return model.config.max_position_embeddings


def outcome(request):
    return [
        (seq.completion_ids.tolist(), seq.logprobs.tolist(), seq.finish_reason, seq.stop_reason)
        for seq in request.sequences
    ]


def random_prompt(rng, beginnings, longest):
    length = int(rng.integers(1, longest + 1))
    beginning = beginnings[rng.integers(len(beginnings))] if rng.random() < 0.6 else []
    tail = rng.integers(0, 53, length).tolist()
    return np.array((beginning[: length - 1] + tail)[:length], np.int32)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case >= QUICK else []) for case in range(CASES)]
)
def test_e2_random_engines(case):
    """Pools from one longest sequence up, n = 1 … 9, aborts, chunk sizes, prefix cache on and off, stop ids, rows with
    NaN logits, requests that come while others run, and further turns that go on from kept KV.
    """
    rng = np.random.default_rng([8, case])
    longest, block_size = int(rng.integers(4, 40)), int(rng.choice([1, 2, 4, 8, 16]))
    least = -(-longest // block_size)
    model = HashModel(max_position_embeddings=longest, bad=bad if rng.random() < 0.5 else None)
    llm = LLM.from_model(
        model,
        None,
        max_model_len=longest,
        block_size=block_size,
        num_kv_blocks=int(least + (rng.integers(0, 2 * least + 1) if rng.random() < 0.6 else 0)),
        max_num_seqs=int(rng.integers(1, 10)),
        max_num_batched_tokens=int(rng.choice([1, 3, 7, 20, 64])),
        enable_prefix_caching=bool(rng.random() < 0.6),
    )
    core, beginnings = llm.core, [rng.integers(0, 53, 40).tolist() for _ in range(2)]
    requests, aborted, left = [], set(), int(rng.integers(1, 9))

    def add(prompt, after=None):
        params = random_params(rng, longest)
        requests.append(
            core.add(*core.check_prompt(prompt, params, 0), params, keeps_cache=rng.random() < 0.3, after=after)
        )

    for _ in range(5000):
        while left and (rng.random() < 0.3 or not core.requests):
            left -= 1
            done = [r for r in requests if r.finished and r.request_id not in aborted and r.keeps_cache]
            if done and rng.random() < 0.7:  # a further turn
                before = done[-1].sequences[int(rng.integers(done[-1].params.n))]
                prompt = np.append(before.token_ids, rng.integers(0, 53, rng.integers(1, 5))).astype(np.int32)
                if len(prompt) < longest:
                    add(prompt, before)
                    continue
            add(random_prompt(rng, beginnings, longest - 1))
        if not (core.requests or left):
            break
        if core.requests and rng.random() < 0.03:
            victim = list(core.requests.values())[rng.integers(len(core.requests))]
            aborted.add(victim.request_id)
            core.abort(victim)
            check_engine(llm)
        core.step()
        check_engine(llm)
    assert all(request.finished for request in requests)
    for request in requests:
        expected, got = roomy(model, request.prompt_ids, request.params), outcome(request)
        if request.request_id in aborted:
            for (tokens, *_), (all_tokens, *_) in zip(got, expected, strict=True):
                assert tokens == all_tokens[: len(tokens)]
        else:
            assert got == expected
    for request in requests:
        core.release(request)
    assert core.blocks.num_free == core.blocks.num_blocks and not core.scheduler.has_work


def test_e2_samples_that_cannot_all_hold_their_prompt():
    """8 samples of a prompt that fills the pool: making room for the copy of one block takes the need for it away."""
    llm = tiny_llm(block_size=16, max_model_len=256, num_kv_blocks=16)
    params = SamplingParams(n=8, max_tokens=4, ignore_eos=True, seed=3)
    (out,) = llm.generate([[1] * 250], params)
    assert [len(sample.token_ids) for sample in out.outputs] == [4] * 8
    (free,) = tiny_llm(block_size=16, max_model_len=256, num_kv_blocks=160).generate([[1] * 250], params)
    assert [sample.token_ids for sample in out.outputs] == [sample.token_ids for sample in free.outputs]


@pytest.mark.parametrize(
    "order, where",
    [("in turn", where) for where in ("run", "advance", "schedule")]
    + [("ahead", where) for where in ("launch", "append", "count_on", "leave_out_ended", "schedule_ahead")],
    indirect=["order"],
)
def test_an_interrupted_step_loses_nothing(where, monkeypatch):
    """Ctrl-C anywhere in a step: all blocks come back, and the other requests go on to the same tokens, one included
    that another thread added during the step.
    """
    model = HashModel(bad=lambda state: state % 23 == 7)
    prompts = [np.arange(n, dtype=np.int32) for n in (3, 9, 17)]
    params = SamplingParams(n=3, max_tokens=12, seed=1, logprobs=True)
    expected = [roomy(model, prompt, params) for prompt in prompts]
    assert {reason for samples in expected for *_, reason, _ in samples} == {"error", "length"}
    for number in range(12):
        llm = LLM.from_model(model, None, max_model_len=64, num_kv_blocks=24, block_size=4, max_num_batched_tokens=11)
        core = llm.core
        requests = [llm.add_request(prompt, params) for prompt in prompts]
        for _ in range(number):
            llm.step()
        owner = next(owner for owner in (core.runner, core.rows, core.scheduler) if hasattr(owner, where))
        plain = getattr(owner, where)

        def interrupted(*args, plain=plain, llm=llm, requests=requests):
            plain(*args)
            requests.append(llm.add_request(prompts[0], params))
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(owner, where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                for _ in range(5):
                    llm.step()
        check_engine(llm)
        assert core.blocks.num_free == core.blocks.num_blocks
        while core.requests:
            llm.step()
            check_engine(llm)
        for request, wanted in zip(requests, [*expected, expected[0]], strict=True):
            assert outcome(request) == wanted


@pytest.mark.parametrize(
    "action, where", [("abort", "remove"), ("abort", "_release"), ("abort", "_take_out"), ("release", "_release")]
)
@pytest.mark.parametrize("late", [False, True])
def test_an_interrupted_abort_or_release_loses_nothing(action, where, late, monkeypatch):
    """A second Ctrl-C, while the first one ends requests: the aborted request ends, the other ones go on."""
    model, params = HashModel(), SamplingParams(n=3, max_tokens=12, seed=1)
    prompts = [np.arange(n, dtype=np.int32) for n in (3, 9)]
    expected = roomy(model, prompts[0], params)
    llm = LLM.from_model(model, None, max_model_len=64, num_kv_blocks=64, block_size=4)
    core = llm.core
    kept = core.add(prompts[1], None, params, keeps_cache=True)
    while core.requests:
        llm.step()
    going, aborted = [llm.add_request(prompt, params) for prompt in prompts]
    for _ in range(3):
        llm.step()
    plain = getattr(core.scheduler, where)

    def interrupted(*args):
        monkeypatch.setattr(core.scheduler, where, plain)  # once: what makes the engine whole again calls it too
        if late:
            plain(*args)
        raise KeyboardInterrupt

    act = {"abort": lambda: core.abort(aborted), "release": lambda: core.release(kept)}[action]
    monkeypatch.setattr(core.scheduler, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        act()
    check_engine(llm)
    while core.requests:
        llm.step()
        check_engine(llm)
    assert outcome(going) == expected and aborted.finished
    assert {seq.finish_reason for seq in aborted.sequences} == {"abort" if action == "abort" else "length"}
    core.release(kept)
    assert core.blocks.num_free == core.blocks.num_blocks
