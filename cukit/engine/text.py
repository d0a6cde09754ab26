"""The text that grows out of a completion's tokens, and the stop strings that end it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..tokenizer import IncrementalDecoder

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT_TOKENS = 8  # of the prompt, decoded before a completion so that its first character and space come out right


@dataclass(slots=True)
class StopTexts:
    """A request's stop strings by how each is found."""

    ids: dict[int, str] = field(default_factory=dict)  # id -> text: the strings that are one special token
    shown: list[str] = field(default_factory=list)  # to be found in the text that the user sees
    raw: list[str] = field(default_factory=list)  # with a special token inside: found in the text with special tokens

    @classmethod
    def of(cls, stop: list[str], tokenizer) -> StopTexts:
        """Sort `stop` by what the tokenizer makes of each. Without a tokenizer `stop` must be empty."""
        texts = cls()
        for text in stop:
            token = tokenizer.token_to_id(text)
            if token is not None and _is_special(tokenizer, token):
                texts.ids[token] = text
            elif any(_is_special(tokenizer, token) for token in tokenizer.encode(text)):
                texts.raw.append(text)
            else:
                texts.shown.append(text)
        return texts


def _is_special(tokenizer, token: int) -> bool:
    return tokenizer.decode([token]) == "" != tokenizer.decode([token], skip_special_tokens=False)


class CompletionText:
    """The text of a growing completion without special tokens, cut at the first stop string, in whole characters."""

    def __init__(self, tokenizer, prompt_ids, stop: StopTexts):
        context = [int(token) for token in prompt_ids[-CONTEXT_TOKENS:]]
        self._decoder = IncrementalDecoder(tokenizer, context)
        self._stop = stop.shown
        self._longest_stop = max(map(len, stop.shown), default=0)
        self._raw = _RawText(tokenizer, context, stop.raw) if stop.raw else None
        self._finished = False
        self.text = ""
        self.num_tokens = 0
        self.num_given = 0  # characters that take_delta has given out
        self.stopped_by: str | None = None

    def push(self, token: int, may_stop: bool = True) -> bool:
        """Add a token; True if a stop string is complete now (and the text was cut before it)."""
        self.num_tokens += 1
        piece = self._decoder.push(token)
        before = len(self.text)
        self.text += piece
        found = _found(self._stop, self.text, max(0, before - self._longest_stop + 1)) if piece else []
        if self._raw is not None:
            found += self._raw.push(token, before, len(self.text))
        if not (found and may_stop):
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
            end -= _held_back(self._stop, self.text)
            if self._raw is not None:
                end = min(end, self._raw.certain())
            end = max(end, self.num_given)
        delta = self.text[self.num_given : end]
        self.num_given = end
        return delta


class _RawText:
    """The same text with its special tokens, for stop strings that hold one, and where each token's part is shown."""

    def __init__(self, tokenizer, context: list[int], stop: list[str]):
        self._decoder = IncrementalDecoder(tokenizer, context, skip_special_tokens=False)
        self._stop, self._longest_stop, self._text = stop, max(map(len, stop)), ""
        self._parts: list[tuple[int, int, int]] = []  # (first raw character, first shown one, shown end) a token

    def push(self, token: int, shown_start: int, shown_end: int) -> list[tuple[int, int, str]]:
        """(place in the shown text, -length, string) of the stop strings that the token completed."""
        piece, before = self._decoder.push(token), len(self._text)
        if not piece:
            return []
        self._text += piece
        self._parts.append((before, shown_start, shown_end))
        found = _found(self._stop, self._text, max(0, before - self._longest_stop + 1))
        return [(self._shown(place), length, stop) for place, length, stop in found]

    def certain(self) -> int:
        """Characters of the shown text before what may become a stop string."""
        return self._shown(len(self._text) - _held_back(self._stop, self._text))

    def _shown(self, place: int) -> int:
        for raw_start, shown_start, shown_end in reversed(self._parts):
            if raw_start <= place:
                return min(shown_end, shown_start + place - raw_start)
        return 0


def _found(stop: list[str], text: str, start: int) -> list[tuple[int, int, str]]:
    return [(place, -len(one), one) for one in stop if (place := text.find(one, start)) >= 0]


def _held_back(stop: list[str], text: str) -> int:
    """How many characters at the end of `text` may be the beginning of a stop string."""
    longest = min(max(map(len, stop), default=0) - 1, len(text))
    return next((k for k in range(longest, 0, -1) if any(one.startswith(text[-k:]) for one in stop)), 0)


def completion_text(tokenizer, prompt_ids, completion_ids) -> str:
    """The text of a whole completion, equal to what CompletionText gives piece by piece."""
    context, completion = ([int(token) for token in ids] for ids in (prompt_ids[-CONTEXT_TOKENS:], completion_ids))
    head = tokenizer.decode(context)
    unfinished = min(3, len(head) - len(head.rstrip(REPLACEMENT)))
    return tokenizer.decode(context + completion)[len(head) - unfinished :]
