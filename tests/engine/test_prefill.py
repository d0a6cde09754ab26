"""Passes over spans of prompts: their inputs, which of them are kept steps, and that these change nothing."""

from types import SimpleNamespace

import numpy as np
import pytest

from cukit import SamplingParams
from cukit.engine import prefill, shapes
from cukit.engine.copies import views
from cukit.engine.llm import LLM
from cukit.engine.prefill import inputs_of, packed, power_of_two
from cukit.engine.scheduler import Span

from .helpers import HashModel, check_engine, random_prompts, tiny_llm
from .test_random_engines import outcome

BLOCK = 4


def random_spans(rng, count):
    spans, free = [], iter(rng.permutation(400).tolist())
    for _ in range(count):
        length, spare = int(rng.integers(1, 30)), int(rng.integers(0, 3))
        first = int(rng.integers(0, length))
        blocks = [next(free) for _ in range(-(-length // BLOCK) + spare)]
        sequence = SimpleNamespace(ids=rng.integers(0, 99, length).astype(np.int32), block_table=blocks)
        spans.append(Span(sequence, first, int(rng.integers(1, length - first + 1)), 1))
    return spans


@pytest.mark.parametrize("seed", range(20))
def test_inputs_are_those_of_each_token(seed):
    rng = np.random.default_rng(seed)
    spans = random_spans(rng, int(rng.integers(1, 12)))
    total, most = sum(span.count for span in spans), max(span.first + span.count for span in spans)
    tokens, num_spans, width = (least + int(rng.integers(0, 5)) for least in (total, len(spans), -(-most // BLOCK)))
    places, nbytes = inputs_of(tokens, num_spans, width)
    block = packed(spans, places, nbytes, BLOCK)
    assert len(block) == nbytes
    inputs, row = views(block, places), 0
    for place, span in enumerate(spans):
        seq = span.sequence
        assert inputs.borders[place] == row and inputs.context_lens[place] == span.first + span.count
        for position in range(span.first, span.first + span.count):
            assert (inputs.tokens[row], inputs.positions[row]) == (seq.ids[position], position)
            assert inputs.slot_mapping[row] == seq.block_table[position // BLOCK] * BLOCK + position % BLOCK
            row += 1
        assert inputs.last_rows[place] == row - 1 and inputs.borders[place + 1] == row
        listed = seq.block_table[:width]
        assert inputs.block_tables[place].tolist() == listed + [0] * (width - len(listed))
    assert (
        (inputs.slot_mapping[row:] == -1).all() and not inputs.tokens[row:].any() and not inputs.positions[row:].any()
    )
    assert (inputs.borders[len(spans) :] == row).all() and (inputs.last_rows[len(spans) :] == row - 1).all()
    assert not inputs.context_lens[len(spans) :].any() and not inputs.block_tables[len(spans) :].any()


def test_powers_of_two():
    assert [power_of_two(count) for count in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]


def kept_keys(llm):
    return [key[:3] for key in llm.core.runner._prefill._passes]


def params(**options):
    return SamplingParams(**{"max_tokens": 3, "seed": 5, "ignore_eos": True, "logprobs": True} | options)


def make_llm(**options):
    options = {"max_model_len": 512, "block_size": BLOCK, "enable_prefix_caching": False} | options
    return LLM.from_model(HashModel(max_position_embeddings=512), None, **options)


def test_a_pass_is_kept_by_its_rounded_shape():
    llm = make_llm()
    for lengths in ([5, 6, 7], [9, 7, 1, 1], [300]):
        llm.run([[7] * length for length in lengths], params())
    assert kept_keys(llm) == [(18, 4, 2), (18, 4, 4), (300, 1, 128)]
    llm.run([[1] * 4, [2] * 8, [3] * 6], params())
    assert len(kept_keys(llm)) == 3, "three spans and 18 tokens in two columns are there already"


def test_what_is_too_long_or_eager_is_not_kept(monkeypatch):
    llm = make_llm()
    monkeypatch.setattr(prefill, "SHORT_TOKENS", 10)
    llm.run([[1] * 10], params())
    llm.run([[1] * 11], params())
    assert kept_keys(llm) == [(10, 1, 4)]
    monkeypatch.setattr(prefill, "INPUT_BYTES", inputs_of(10, 1, 4)[1] - 1)
    llm.core.runner._prefill._passes.clear()
    llm.run([[2] * 10], params())
    llm.run([[2] * 2], params())
    assert kept_keys(llm) == [(2, 1, 1)]
    eager = make_llm(enforce_eager=True)
    eager.run([[1] * 4], params())
    assert kept_keys(eager) == []


def test_passes_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(prefill, "MOST_PASSES", 3)
    llm, most = make_llm(), 0
    expected = [outcome(request) for request in make_llm(enforce_eager=True).run(prompts_of(40), params())]
    for prompt, wanted in zip(prompts_of(40), expected, strict=True):
        (request,) = llm.run([prompt], params())
        assert outcome(request) == wanted
        most = max(most, len(kept_keys(llm)))
    assert most == 3


def prompts_of(count):
    return [[number, *range(number % 9)] for number in range(count)]


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7}, {"enable_prefix_caching": True}])
def test_kept_passes_change_no_bit(options):
    """Samples of one prompt, bans and penalties, chunks of prompts, prompts whose beginning is there; rows beside."""
    prompts = random_prompts(9, 1, 30, vocab_size=53)
    prompts += [prompts[0][:9] + [7], prompts[3] + [1]]
    given = [params(n=1 + number % 3, seed=number, max_tokens=2 + 3 * number) for number in range(8)]
    given += [params(min_tokens=2, stop_token_ids=[3, 4]), params(repetition_penalty=1.7), params(temperature=0)]
    expected = [outcome(request) for request in make_llm(enforce_eager=True, **options).run(prompts, given)]
    llm = make_llm(**options)
    for _ in range(3):
        assert [outcome(request) for request in llm.run(prompts, given)] == expected
        check_engine(llm)
    assert kept_keys(llm)


def test_a_pass_that_was_interrupted_leaves_nothing_behind(monkeypatch):
    llm, prompts = make_llm(), prompts_of(5)
    expected = [outcome(request) for request in make_llm(enforce_eager=True).run(prompts, params())]
    llm.run(prompts, params())
    plain = llm.core.runner._prefill._sample

    def interrupted(*given):
        monkeypatch.setattr(llm.core.runner._prefill, "_sample", plain)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.core.runner._prefill, "_sample", interrupted)
    requests = [llm.add_request(prompt, params()) for prompt in prompts]
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    while llm.core.requests:
        llm.step()
    assert [outcome(request) for request in requests] == expected


def test_kept_passes_follow_new_weights_and_a_new_cache():
    llm = tiny_llm()
    weight, prompts = llm.core.model.norm.weight.data, random_prompts(4, 2, 20)
    first = [outcome(request) for request in llm.run(prompts, params())]
    before = weight.copy()
    try:
        weight[...] *= 1.5
        llm.reset_prefix_cache()
        changed = [outcome(request) for request in llm.run(prompts, params())]
        assert changed != first
        assert changed == [outcome(r) for r in tiny_llm(enforce_eager=True).run(prompts, params())]
        llm.sleep()
        llm.wake_up()
        assert [outcome(request) for request in llm.run(prompts, params())] == changed
    finally:
        weight[...] = before


@pytest.mark.parametrize("capacity, rows", [(1, 1), (5, 8), (256, 256), (3000, 1024)])
def test_there_is_room_for_the_ends_of_all_spans(capacity, rows):
    assert shapes.ends_of_spans(capacity) == rows


def test_every_short_pass_of_an_engine_of_usual_size_is_kept():
    """1,024 tokens of 256 spans, whose contexts are up to 4,096 tokens in blocks of 16."""
    assert inputs_of(shapes.SHORT_TOKENS, 256, 256)[1] <= shapes.INPUT_BYTES
