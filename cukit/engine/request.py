"""A request and its samples. A request owns its output: its caller reads from it, after steps of any caller."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..tokenizer import Context, Tokenizer, context_of, text_after
from .config import SamplingParams
from .text import CompletionText, StopTexts

SEED_MASK = (1 << 64) - 1


@dataclass(slots=True)
class Begun:
    """A sample as one engine leaves it and another goes on with it."""

    token_ids: np.ndarray  # of the completion so far, int32
    logprobs: np.ndarray
    finish_reason: str | None = None  # None: it goes on
    stop_reason: int | str | None = None
    text: str | None = None  # of a finished sample


@dataclass(eq=False, slots=True)
class Request:
    """One prompt and its params.n samples. Those beyond the first come into being when the prompt has been computed."""

    request_id: int
    prompt_ids: np.ndarray  # int32
    prompt: str | None
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]  # every id that ends a completion
    stop_texts: StopTexts
    limit: int  # longest prompt + completion
    tokenizer: Tokenizer | None = None  # for the text of samples that is read while they grow
    keeps_cache: bool = False  # finished samples keep their KV, so that a later request may continue them
    adapter: Any = None  # what computes its tokens beside the model's weights (engine/adapters.py)
    sequences: list[Sequence] = field(default_factory=list)
    num_finished: int = 0  # samples that have finished and left the engine
    num_cached_tokens: int = 0  # prompt tokens that had their KV at the first admission
    context: Context | None = None  # of the prompt, behind which the texts of its samples are decoded; once it is known

    @property
    def finished(self) -> bool:
        return self.num_finished == self.params.n

    @property
    def num_missing(self) -> int:
        """Samples that have not come into being."""
        return self.params.n - len(self.sequences)

    def new_sequence(self) -> Sequence:
        """The next sample, with nothing of it computed."""
        nothing = np.empty(0, np.float32)
        sequence = Sequence(self, len(self.sequences), self.prompt_ids, len(self.prompt_ids), nothing)
        if self.tokenizer is not None:
            sequence.text = CompletionText(self.tokenizer, self.prompt_ids, self.stop_texts)
        self.sequences.append(sequence)
        return sequence

    def begun(self) -> list[Begun] | None:
        """Its samples as they are, for begin() of a request of another engine; after this one was aborted. None if none
        has a token.
        """
        if not any(seq.num_generated for seq in self.sequences):
            return None
        return [
            Begun(seq.completion_ids, seq.logprobs)
            if seq.finish_reason == "abort"
            else Begun(seq.completion_ids, seq.logprobs, seq.finish_reason, seq.stop_reason, seq.shown)
            for seq in self.sequences
        ]

    def begin(self, samples: list[Begun]) -> list[Sequence]:
        """Make all samples as another engine left them; returns those that go on, with nothing of them computed."""
        going = []
        for one in samples:
            seq = self.new_sequence()
            seq.ids, seq.drawn = np.concatenate([self.prompt_ids, one.token_ids]), one.logprobs
            if one.finish_reason is not None:
                seq.finish_reason, seq.stop_reason, seq.shown = one.finish_reason, one.stop_reason, one.text
                self.num_finished += 1
                continue
            going.append(seq)
            if seq.text is not None:
                for place, token in enumerate(one.token_ids.tolist(), 1):
                    seq.text.push(token, place > self.params.min_tokens)
        return going


@dataclass(eq=False, slots=True)
class Sequence:
    """Sample `index` of a request. Its KV lives in block_table; the first num_computed tokens have theirs there.

    finish_reason: "stop" (a stop id or stop string; see stop_reason), "length" (max_tokens or max_model_len), "abort",
    "error" (the model's logits were not finite; the token that they gave is not kept), or None while it grows.
    """

    request: Request
    index: int
    ids: np.ndarray  # prompt + completion, int32; out of date while the sequence has a row: read token_ids
    prompt_length: int
    drawn: np.ndarray  # log-prob of each completion token; out of date likewise: read logprobs
    text: CompletionText | None = None  # kept up to date for stop strings and streaming only
    rows: Any = None  # the Rows that hold its tokens while it decodes
    row: int = -1  # place among the rows while it decodes, else -1
    block_table: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # chained hashes of the whole blocks, as far as needed
    num_registered: int = 0  # blocks that were offered to the prefix cache
    num_computed: int = 0  # out of date while it has a row: all but the newest token
    may_share_tail: bool = False  # the last, partly filled block may belong to other samples too
    shown: str | None = None  # the text of a finished sample, if it is known
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop_token_id or stop string that ended it; None for end-of-text

    def fork(self) -> Sequence:
        """The next sample, at the end of this one's computed prompt; the caller counts the blocks' new owner."""
        sequence = self.request.new_sequence()
        sequence.block_table, sequence.digests = list(self.block_table), list(self.digests)
        sequence.num_registered, sequence.num_computed = self.num_registered, self.num_computed
        sequence.may_share_tail = self.may_share_tail = True
        return sequence

    @property
    def token_ids(self) -> np.ndarray:
        """Prompt + completion, (T,) int32."""
        return self.ids if self.rows is None else self.rows.token_ids(self.row)

    @property
    def logprobs(self) -> np.ndarray:
        """One a completion token, float32 (float64 for a float64 model)."""
        return self.drawn if self.rows is None else self.rows.logprobs(self.row, self.prompt_length)

    @property
    def length(self) -> int:
        return len(self.ids) if self.rows is None else self.rows.length(self.row)

    @property
    def num_generated(self) -> int:
        return self.length - self.prompt_length

    @property
    def completion_ids(self) -> np.ndarray:
        return self.token_ids[self.prompt_length :]

    def shown_text(self, tokenizer: Tokenizer) -> str:
        """The text without special tokens, cut before what stopped it; a finished sample keeps it."""
        if self.shown is not None:
            return self.shown
        if self.text is not None:
            text = self.text.text
        else:
            request, ids = self.request, self.completion_ids.tolist()
            ids = ids[:-1] if self.finish_reason == "stop" else ids  # a stop token is no part of it, special or not
            request.context = request.context or context_of(tokenizer, request.prompt_ids)
            text = text_after(tokenizer, request.prompt_ids, ids, context=request.context)
        self.shown = None if self.finish_reason is None else text
        return text

    @property
    def order(self) -> tuple[int, int]:
        """Sequences that arrived first have the lowest order."""
        return self.request.request_id, self.index

    @property
    def seed(self) -> int:
        return (self.request.seed + self.index) & SEED_MASK

    @property
    def is_ready(self) -> bool:
        """All but the newest token are computed, and that token was drawn: it needs nothing but a row."""
        return self.num_computed == len(self.ids) - 1 and len(self.ids) > self.prompt_length

    def append(self, token: int | np.integer, logprob: np.floating) -> None:
        """Add a drawn token to a sequence without a row."""
        self.ids = _longer(self.ids, token, self.ids.dtype)
        self.drawn = _longer(self.drawn, logprob, logprob.dtype)

    def look_for_end(self, token: int) -> None:
        """Finish the sequence if its newest token ends it: by a stop id, then a stop string, then the length."""
        request = self.request
        if token in request.stop_ids:  # never drawn before min_tokens: the sampler bans these ids until then
            given = token if token in (request.params.stop_token_ids or ()) else None
            self.finish("stop", request.stop_texts.ids.get(token, given))
        elif self.text is not None and self.text.push(token, self.num_generated > request.params.min_tokens):
            self.finish("stop", self.text.stopped_by)
        elif self.length >= request.limit:
            self.finish("length")

    def catch_up(self) -> None:
        """What an interrupt left out between a token and the look at it, for a sequence without a row."""
        if len(self.drawn) and not np.isfinite(self.drawn[-1]):
            self.ids, self.drawn = self.ids[:-1], self.drawn[:-1]
            self.finish("error")
        elif len(self.drawn) and (self.text is None or self.text.num_tokens < self.num_generated):
            self.look_for_end(int(self.ids[-1]))

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self.text is not None:
            stopped = self.text.stopped_by
            self.text.finish()
            if self.text.stopped_by != stopped and reason in (
                "stop",
                "length",
            ):  # the last characters held a stop string
                self.finish_reason, self.stop_reason = "stop", self.text.stopped_by


def _longer(values: np.ndarray, last: int | np.number, dtype: np.dtype) -> np.ndarray:
    """The values and one more."""
    found = np.empty(len(values) + 1, dtype)
    found[:-1], found[-1] = values, last
    return found
