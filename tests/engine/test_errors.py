"""Rows with logits that are not finite, and scores that do not exist."""

import logging

import numpy as np
import pytest

from cukit import SamplingParams
from cukit.autograd import Tensor
from cukit.backend import backend_for
from cukit.engine.llm import LLM

from .helpers import HashModel, ScriptModel, check_engine, check_sample, qwen_tokenizer, tiny_llm, tiny_model

pytestmark = pytest.mark.usefixtures("order")

PROMPTS = [[number, 1, 2] for number in range(8)]


def params(**options):
    return SamplingParams(**{"max_tokens": 12, "seed": 5, "ignore_eos": True, "logprobs": True} | options)


class FaultyModel(HashModel):
    """Gives `value` as a logit of sequences that begin with the token `first`, from position `start` on."""

    def __init__(self, first, start, value=np.nan, which=slice(None)):
        super().__init__()
        self.config.hidden_size = 2
        self.first, self.start, self.value, self.which = first, start, value, which

    def forward(self, tokens, positions, attend):
        hidden = super().forward(tokens, positions, attend).data
        cells, tables = attend.kv[0][0].reshape(-1), np.asarray(attend.block_tables)
        borders = getattr(attend, "cu_seqlens_q", np.arange(len(tokens) + 1))
        wrong = np.zeros_like(hidden)
        for row, length in enumerate(np.asarray(attend.context_lens).tolist()):
            begins = length and cells[tables[row, 0] * attend.kv[0][0].shape[1]] == self.first * 7919.0 + 12345
            rows = slice(borders[row], borders[row + 1])
            wrong[rows, 0] = begins * (np.asarray(positions)[rows] >= self.start)
        return Tensor(np.concatenate([hidden, wrong], axis=1))

    def logits(self, hidden):
        logits = super().logits(hidden)
        rows = np.flatnonzero(hidden.data[:, 1])
        for row in rows:
            logits.data[row, self.which] = self.value
        return logits


def make_llm(model, **options):
    return LLM.from_model(model, None, **{"max_model_len": 64, "block_size": 4, "num_kv_blocks": 60} | options)


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("value, which", [(np.nan, slice(None)), (np.nan, 17), (np.inf, 17)])
@pytest.mark.parametrize("kept", [0, 1, 5])
def test_e4_one_row_ends_with_error_and_the_others_go_on(kept, value, which, greedy, caplog):
    """At the prompt's end (kept 0) as in decoding; later calls work too."""
    options = {"temperature": 0.0 if greedy else 1.0}
    good = make_llm(HashModel()).generate(PROMPTS, params(**options))
    llm = make_llm(FaultyModel(3, 2 + kept, value, which))
    with caplog.at_level(logging.WARNING, "cukit"):
        outputs = llm.generate(PROMPTS, params(**options))
    assert len(caplog.records) == 1 and "1 of 8 completions" in caplog.text
    for number, (out, fine) in enumerate(zip(outputs, good, strict=True)):
        (sample,), (wanted,) = out.outputs, fine.outputs
        if number == 3:
            assert (sample.finish_reason, sample.stop_reason, len(sample.token_ids)) == ("error", None, kept)
            assert sample.token_ids == wanted.token_ids[:kept] and sample.logprobs == wanted.logprobs[:kept]
            assert np.isfinite(sample.logprobs).all()
        else:
            assert (sample.finish_reason, sample.token_ids) == ("length", wanted.token_ids)
            assert sample.logprobs == wanted.logprobs
    check_engine(llm)
    assert llm.core.blocks.num_free == 60 and not llm.core.requests
    again = llm.generate(PROMPTS[4:], params(**options))
    assert [out.outputs[0].token_ids for out in again] == [out.outputs[0].token_ids for out in good[4:]]


def test_e4_samples_of_one_prompt_fail_one_by_one():
    """The state after the first token differs by sample: some fail, each at its place."""
    fine = make_llm(HashModel()).run([[1, 2, 3]], params(n=9))[0]
    llm = make_llm(HashModel(bad=lambda state: state % 5 == 0), max_num_seqs=4)
    (request,) = llm.run([[1, 2, 3]], params(n=9))
    reasons = [seq.finish_reason for seq in request.sequences]
    assert 0 < reasons.count("error") < 9
    for seq, wanted in zip(request.sequences, fine.sequences, strict=True):
        assert np.array_equal(seq.token_ids, wanted.token_ids[: seq.length]) and len(seq.logprobs) == seq.num_generated
    check_engine(llm)


def test_e4_only_errors_is_one_clear_line():
    llm = make_llm(HashModel(bad=lambda state: state >= 0))
    for stream in (False, True):
        with pytest.raises(ValueError, match="logits are not finite .* damaged") as error:
            list(llm.generate(PROMPTS, params(n=2), stream=stream))
        assert "\n" not in str(error.value)
    (request,) = llm.run([[1, 2]], params(n=2))
    assert [seq.finish_reason for seq in request.sequences] == ["error"] * 2
    assert request.sequences[0].logprobs.shape == (0,) and not llm.core.requests


@pytest.mark.parametrize("stop", [[], ["never"]])
def test_e4_the_text_before_the_error_is_kept(stop):
    tokenizer = qwen_tokenizer()
    model = ScriptModel([5, *tokenizer.encode("one two three four")])
    plain = model.logits

    def logits(hidden):
        found = plain(hidden)
        found.data[hidden.data[:, 0] >= 3] = np.nan
        return found

    model.logits = logits
    llm = LLM.from_model(model, tokenizer)
    (request,) = llm.run([[5]], params(temperature=0, stop=stop))
    assert request.sequences[0].finish_reason == "error"
    assert llm.text_of(request.sequences[0]) == "one two three"


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("fault", ["nan", "one nan", "inf", "two inf", "-inf"])
def test_e4_sample_gives_ids_within_range(fault, dtype):
    """A row of any logits draws an id of the vocabulary; its log-prob is not finite, and no other row changes."""
    check_sample(backend_for("cpu"), fault, dtype)


@pytest.mark.parametrize("temperature", [0, -1, float("nan"), float("inf"), None, "1", True, np.float32(0)])
def test_e6_score_checks_its_temperature(temperature):
    with pytest.raises(ValueError, match="temperature must be a finite number above 0") as error:
        tiny_llm().score([[1, 2, 3]], temperature=temperature)
    assert "\n" not in str(error.value)


def test_e6_score_of_ids_between_the_vocabularies():
    """The tokenizer has ids up to 151,668, the model more rows: such an id is never drawn, so it has no log-prob."""
    llm = LLM.from_model(ScriptModel([1], vocab_size=151_936), qwen_tokenizer())
    for ids, number in (([[5, 6], [5, 151_700, 6]], 1), ([[1, 151_669]], 0)):
        with pytest.raises(ValueError, match=f"sequence {number} has the token id 151{'700' if number else '669'}"):
            llm.score(ids)
    with pytest.raises(ValueError, match="goes from 0 to 151935"):
        llm.score([[5, 151_936]])
    assert len(tiny_llm().score([np.array([210, 210], np.int32)], np.float64(0.5))[0]) == 1
    assert tiny_model().config.vocab_size == 211
