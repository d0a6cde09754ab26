"""The text of a growing sequence of ids, in whole characters."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from .tokenizer import Tokenizer

# A UTF-8 character has at most 4 bytes, so at most 3 replacement characters at the end of a text may still become one.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_PENDING = 3
Context = tuple[list[int], int]
CONTEXT_TOKENS = 8  # decoders may treat the first id of a text specially, so a completion is decoded behind some others


class IncrementalDecoder:
    """Text of a growing sequence of ids, given out only in whole characters that later ids can not change.

    The pieces of `push` and the last one of `flush` join to `tokenizer.decode(ids)`. With `prompt_ids` (give all), a
    character that the prompt began is completed instead of shown as U+FFFD.

    Tokenizers with byte fallback (Llama 2) decode a run of byte tokens as one: to its characters, or if a single byte
    is wrong, to U+FFFD a byte. The text of a run is therefore given out when the run has ended.
    """

    def __init__(
        self, tokenizer: "Tokenizer", prompt_ids: "Sequence[int] | np.ndarray" = (), skip_special_tokens: bool = True
    ):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # Only a short window is decoded again: the ids of the last piece given out and those after it.
        self._window, self._printed = context_of(tokenizer, prompt_ids, skip_special_tokens)
        self._piece_start = len(self._window)

    def push(self, token_id: int) -> str:
        """Add one id; the text that became certain, often "" ."""
        token_id = int(token_id)
        if not self._tokenizer.shows(token_id, self._skip_special_tokens):
            return ""
        self._window.append(token_id)
        if token_id in self._tokenizer.byte_ids:
            return ""
        text = self._decode()
        whole = _whole(text)
        piece = whole[self._printed :]
        self._printed = max(self._printed, len(whole))
        if piece and whole == text:
            del self._window[: self._piece_start]
            self._piece_start = len(self._window)
            self._printed = len(self._decode())
        return piece

    def flush(self) -> str:
        """The rest, with U+FFFD for a character that never became whole; the decoder then starts anew."""
        rest = self._decode()[self._printed :]
        self._window, self._printed, self._piece_start = [], 0, 0
        return rest

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, self._skip_special_tokens)


def token_texts(tokenizer: "Tokenizer", ids: Sequence[int]) -> list[str]:
    """The text of each id; joined they are `tokenizer.decode(ids, skip_special_tokens=False)`.

    A character of several ids stands at the last of them, and the others have "".
    """
    pieces = [tokenizer.text_of(token_id) for token_id in ids]
    if REPLACEMENT not in (text := tokenizer.decode(ids, skip_special_tokens=False)) and "".join(pieces) == text:
        return pieces
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=False)
    pieces = [decoder.push(token_id) for token_id in ids]
    if pieces:
        pieces[-1] += decoder.flush()
    return pieces


def text_after(
    tokenizer: "Tokenizer",
    prompt_ids: "Sequence[int] | np.ndarray",
    ids: Iterable[int],
    skip_special_tokens: bool = True,
    context: Context | None = None,
) -> str:
    """The text that `ids` add to a prompt: what IncrementalDecoder gives piece by piece. context: context_of() the
    prompt, where that is known.
    """
    before, printed = context or context_of(tokenizer, prompt_ids, skip_special_tokens)
    return tokenizer.decode([*before, *ids], skip_special_tokens)[printed:]


def context_of(
    tokenizer: "Tokenizer", prompt_ids: "Sequence[int] | np.ndarray", skip_special_tokens: bool = True
) -> Context:
    """(the last ids of the prompt that show anything, back to before its last byte run; characters that are certain)"""
    context: list[int] = []
    for token_id in reversed(prompt_ids):
        if tokenizer.shows(int(token_id), skip_special_tokens):
            if len(context) >= CONTEXT_TOKENS and context[-1] not in tokenizer.byte_ids:
                break
            context.append(int(token_id))
    context.reverse()
    text = tokenizer.decode(context, skip_special_tokens)
    if not context or context[-1] not in tokenizer.byte_ids or not text.endswith(REPLACEMENT):
        return context, len(_whole(text))
    run = next(
        (index for index, token in enumerate(reversed(context)) if token not in tokenizer.byte_ids), len(context)
    )
    before, bytes_of_run = context[: len(context) - run], context[len(context) - run :]
    # The whole characters of a run that ends within one.
    shown = bytes(tokenizer.byte_ids[token] for token in bytes_of_run).decode("utf-8", errors="ignore")
    return context, len(tokenizer.decode(before, skip_special_tokens)) + len(shown)


def _whole(text: str) -> str:
    end = len(text)
    while end > 0 and len(text) - end < MAX_PENDING and text[end - 1] == REPLACEMENT:
        end -= 1
    return text[:end]
