"""Requests that go on in another engine, token for token as if they had stayed."""

import numpy as np
import pytest

from cukit import SamplingParams
from cukit.engine.llm import LLM

from .helpers import HashModel, check_engine, qwen_tokenizer, reciting_llm
from .test_random_engines import bad, outcome, random_params, random_prompt, roomy

pytestmark = pytest.mark.usefixtures("order")


def moved(request, giver, taker):
    giver.abort(request)
    prompt = request.prompt_ids, request.prompt, request.params
    return taker.add(*prompt, begun=request.begun())


@pytest.mark.parametrize("case", range(8))
def test_a_request_moves_at_any_moment(case):
    """Between two engines with little room, with stops, penalties, failed samples and samples that have not begun."""
    rng = np.random.default_rng([9, case])
    longest, block_size = int(rng.integers(8, 40)), int(rng.choice([1, 4, 8]))
    model = HashModel(max_position_embeddings=longest, bad=bad if rng.random() < 0.5 else None)
    engines = [
        LLM.from_model(
            model,
            None,
            max_model_len=longest,
            block_size=block_size,
            num_kv_blocks=-(-longest // block_size) + int(rng.integers(0, 9)),
            max_num_seqs=int(rng.integers(2, 10)),
            max_num_batched_tokens=int(rng.choice([3, 7, 64])),
        )
        for _ in range(2)
    ]
    beginnings = [rng.integers(0, 53, 40).tolist() for _ in range(2)]
    homes, requests = [], []
    for _ in range(6):
        params, home = random_params(rng, longest), int(rng.integers(2))
        core = engines[home].core
        requests.append(core.add(*core.check_prompt(random_prompt(rng, beginnings, longest - 1), params, 0), params))
        homes.append(home)
    for _ in range(3000):
        if all(request.finished for request in requests):
            break
        for place, request in enumerate(requests):
            if not request.finished and rng.random() < 0.15:
                giver, taker = (engines[home].core for home in (homes[place], 1 - homes[place]))
                requests[place], homes[place] = moved(request, giver, taker), 1 - homes[place]
        for llm in engines:
            llm.core.step()
            check_engine(llm)
    assert all(request.finished for request in requests)
    for request in requests:
        assert outcome(request) == roomy(model, request.prompt_ids, request.params)
    for llm in engines:
        assert llm.core.blocks.num_free == llm.core.blocks.num_blocks and not llm.core.scheduler.has_work


@pytest.mark.parametrize("stop, min_tokens", [("two three", 0), ("one", 4), ("e<|im_end|>", 0), ("never", 0)])
def test_stop_strings_that_begin_before_a_move_and_end_after_it(stop, min_tokens):
    ids = qwen_tokenizer().encode("one two three<|im_end|> one two")
    params = SamplingParams(
        temperature=0, max_tokens=len(ids), ignore_eos=True, stop=[stop], min_tokens=min_tokens, logprobs=True
    )

    def ended(steps):
        (giver, prompt), (taker, _) = reciting_llm("Q:", ids), reciting_llm("Q:", ids)
        request = giver.add_request(prompt, params)
        for _ in range(steps):
            giver.step()
        if not request.finished:
            request = moved(request, giver.core, taker.core)
        while not request.finished:
            taker.step()
        (sample,) = request.sequences
        return sample.finish_reason, sample.stop_reason, taker.text_of(sample), sample.completion_ids.tolist()

    truth = ended(99)
    assert (truth[1] == stop) == (stop != "never")
    assert [ended(steps) for steps in range(1, len(ids))] == [truth] * (len(ids) - 1)


def test_samples_that_have_ended_go_along():
    """Their texts too, which only the engine that drew them can know without the tokens of its stop strings."""
    ids = qwen_tokenizer().encode("one two three")
    (giver, prompt), (taker, _) = reciting_llm("Q:", ids), reciting_llm("Q:", ids)
    params = SamplingParams(n=2, temperature=0, max_tokens=len(ids), stop=["three"])
    request = giver.add_request(prompt, params)
    giver.step()
    first = request.sequences[0]
    first.finish("stop", "three")
    giver.core._retire(first)
    text = giver.text_of(first)
    request = moved(request, giver.core, taker.core)
    while not request.finished:
        taker.step()
    found, other = request.sequences
    assert (found.finish_reason, found.stop_reason, taker.text_of(found)) == ("stop", "three", text)
    assert other.finish_reason == "stop" and taker.text_of(other) == "one two "
