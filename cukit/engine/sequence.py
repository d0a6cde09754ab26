"""A request and its samples: tokens, KV blocks, stop conditions, and the text that grows out of the tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..tokenizer import IncrementalDecoder
from .config import SamplingParams

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
SEED_MASK = (1 << 64) - 1
CONTEXT_TOKENS = 8  # of the prompt, decoded before a completion so that its first character and space come out right


@dataclass(eq=False, slots=True)
class Request:
    """One prompt and its params.n samples. Those beyond the first come into being when the prompt has been computed."""

    request_id: int
    prompt_ids: list[int]
    prompt: str | None
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]  # every id that ends a completion
    limit: int  # longest prompt + completion
    streams: bool = False  # somebody reads the text as it grows
    sequences: list[Sequence] = field(default_factory=list)
    num_finished: int = 0
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache gave at the first admission

    @property
    def finished(self) -> bool:
        return self.num_finished == self.params.n


@dataclass(eq=False, slots=True)
class Sequence:
    """Sample `index` of a request. Its KV lives in block_table; the first num_computed tokens have theirs there."""

    request: Request
    index: int
    token_ids: list[int]
    prompt_length: int
    limit: int
    stop_ids: frozenset[int]
    logprobs: list[float] = field(default_factory=list)
    text: CompletionText | None = None  # kept up to date for stop strings and streaming only
    row: int = -1  # place in the runner's arrays while running, else -1
    block_table: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # chained hashes of the whole blocks, as far as needed
    num_registered: int = 0  # blocks that were offered to the prefix cache
    num_computed: int = 0
    pending_forks: int = 0  # samples that will share this one's prompt once it is computed
    may_share_tail: bool = False  # the last, partly filled block may belong to other samples too
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @classmethod
    def first_of(cls, request: Request, text: CompletionText | None) -> Sequence:
        """Sample 0, which computes the prompt for all."""
        prompt = list(request.prompt_ids)
        seq = cls(request, 0, prompt, len(prompt), request.limit, request.stop_ids, text=text)
        seq.pending_forks = request.params.n - 1
        request.sequences.append(seq)
        return seq

    def fork(self, index: int, text: CompletionText | None) -> Sequence:
        """Sample `index` at the end of the computed prompt; the caller counts the shared blocks' new owner."""
        prompt = self.token_ids[: self.prompt_length]
        seq = Sequence(self.request, index, prompt, len(prompt), self.limit, self.stop_ids, text=text)
        seq.block_table, seq.digests = list(self.block_table), list(self.digests)
        seq.num_registered, seq.num_computed = self.num_registered, self.num_computed
        seq.may_share_tail = True
        self.request.sequences.append(seq)
        return seq

    @property
    def order(self) -> tuple[int, int]:
        """Sequences that arrived first have the lowest order."""
        return self.request.request_id, self.index

    @property
    def seed(self) -> int:
        return (self.request.seed + self.index) & SEED_MASK

    @property
    def completion_ids(self) -> list[int]:
        return self.token_ids[self.prompt_length :]

    @property
    def is_decoding(self) -> bool:
        """Everything but the newest token has been computed, and that token was drawn."""
        return self.num_computed == len(self.token_ids) - 1 and len(self.token_ids) > self.prompt_length

    def append(self, token: int, logprob: float) -> None:
        """Add a drawn token and see whether it ends the sequence: by a stop id, then a stop string, then the length."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_ids:  # never drawn before min_tokens: the sampler bans these ids until then
            self.finish("stop", token if token in self.request.params.stop_token_ids else None)
        elif self.text is not None and self.text.push(token, len(self.logprobs) > self.request.params.min_tokens):
            self.finish("stop", self.text.stopped_by)
        elif len(self.token_ids) >= self.limit:
            self.finish("length")

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.request.num_finished += 1
        if self.text is not None:
            self.text.finish()


class CompletionText:
    """The text of a growing completion, cut at the first stop string, given out in whole characters only."""

    def __init__(self, tokenizer, prompt_ids: list[int], stop: list[str]):
        self._decoder = IncrementalDecoder(tokenizer, prompt_ids[-CONTEXT_TOKENS:])
        self._stop = stop
        self._longest_stop = max(map(len, stop), default=0)
        self._finished = False
        self.text = ""
        self.num_given = 0  # characters that take_delta has given out
        self.stopped_by: str | None = None

    def push(self, token: int, may_stop: bool = True) -> bool:
        """Add a token; True if a stop string is complete now (and the text was cut before it)."""
        piece = self._decoder.push(token)
        before = len(self.text)
        self.text += piece
        if not (piece and self._stop and may_stop):
            return False
        start = max(0, before - self._longest_stop + 1)
        found = [(place, -len(stop), stop) for stop in self._stop if (place := self.text.find(stop, start)) >= 0]
        if not found:
            return False
        place, _, self.stopped_by = min(found)
        self.text = self.text[:place]
        return True

    def finish(self) -> None:
        """No token follows: the rest of the text is certain now."""
        if self.stopped_by is None:
            self.text += self._decoder.flush()
        self._finished = True

    def take_delta(self) -> str:
        """What may be shown now and was not given out before; an end that may become a stop string is held back."""
        end = len(self.text)
        if not self._finished:
            longest = min(self._longest_stop - 1, end - self.num_given)
            lengths = range(longest, 0, -1)
            end -= next((k for k in lengths if any(stop.startswith(self.text[end - k :]) for stop in self._stop)), 0)
        delta = self.text[self.num_given : end]
        self.num_given = end
        return delta


def completion_text(tokenizer, prompt_ids: list[int], completion_ids: list[int]) -> str:
    """The text of a whole completion, equal to what CompletionText gives piece by piece."""
    context = prompt_ids[-CONTEXT_TOKENS:]
    head = tokenizer.decode(context)
    unfinished = min(3, len(head) - len(head.rstrip(REPLACEMENT)))
    return tokenizer.decode(context + completion_ids)[len(head) - unfinished :]
