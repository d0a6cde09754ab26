"""Pairs of answers, the better one first, as the ids that a reward model reads.

Row forms (a column "margin" holds by how much the chosen answer is better; other columns are left):
    {"prompt": text or messages, "chosen": ..., "rejected": ...}
    {"chosen": ..., "rejected": ...}                                the prompt stands in both
An answer is text where the prompt is text, else messages; a text answer to messages is the assistant's.

Text ends with the end token, a conversation as the chat template ends it. A sampled completion lacks what a template
writes after the end token; `turn_end` is the whole end.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..tokenizer import Tokenizer
from .demonstrations import Ids, check_ids, encoded_texts, with_end
from .sources import checked_column, column_names, located, prompt_of

ANSWERS = ("chosen", "rejected")
ROWS_AT_ONCE = 2000  # encoded in one call, on all cores


@dataclass(frozen=True)
class Pair:
    """The ids of a chosen and a rejected sequence, and the margin between them."""

    chosen: Ids
    rejected: Ids
    margin: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.chosen) + len(self.rejected)


def encode_pairs(
    rows: Sequence[dict],
    tokenizer: Tokenizer,
    max_length: int | None = None,
    chat_template_kwargs: dict | None = None,
    model_rows: int | None = None,
) -> tuple[list[Pair], int]:
    """(pairs, how many rows were left out because an answer with its prompt is longer than max_length).

    ValueError that names the row, or if no row is left. model_rows: see `check_ids`.
    """
    pairs, left_out = [], 0
    for start in range(0, len(rows), ROWS_AT_ONCE):
        batch = list(enumerate(rows[start : start + ROWS_AT_ONCE], start))
        plans = [located(_texts, index, row, tokenizer, chat_template_kwargs or {}) for index, row in batch]
        texts = [text for plan in plans for text in plan]
        encoded = encoded_texts(tokenizer, texts, [index for index, _ in batch for _ in ANSWERS])
        ended = [with_end(ids, tokenizer) if is_text else ids for (_, is_text), ids in zip(texts, encoded, strict=True)]
        for (index, row), chosen, rejected in zip(batch, ended[0::2], ended[1::2], strict=True):
            pair = Pair(chosen, rejected, located(_margin, index, row))
            for name, ids in zip(ANSWERS, (pair.chosen, pair.rejected), strict=True):
                if not ids:
                    raise ValueError(f"data row {index}: the {name} answer has no tokens")
                if model_rows is not None:
                    check_ids(ids, model_rows, f"data row {index}")
            if max_length is not None and max(len(pair.chosen), len(pair.rejected)) > max_length:
                left_out += 1
            else:
                pairs.append(pair)
    if not pairs:
        raise ValueError(f"all {len(rows)} pairs are longer than {max_length} tokens; raise max_length")
    return pairs, left_out


def turn_end(tokenizer: Tokenizer, chat_template_kwargs: dict | None = None) -> Ids:
    """The ids that the chat template writes after an assistant's last message: its end token and what follows it."""
    word = "4815162342"  # which no template writes by itself
    messages = [{"role": "user", "content": word}, {"role": "assistant", "content": word}]
    text = tokenizer.render_chat(messages, False, None, **(chat_template_kwargs or {}))
    return tokenizer.encode(text[text.rindex(word) + len(word) :])


def _texts(row: dict, tokenizer: Tokenizer, template_arguments: dict) -> list[tuple[str, bool]]:
    """(text, is it plain text, which gets special tokens and an end) of the chosen and the rejected sequence."""
    missing = [name for name in ANSWERS if name not in row]
    if missing:
        raise ValueError(
            f"no {missing[0]!r} column (columns found: {column_names(row)}); a pair has chosen and rejected"
        )
    answers = [checked_column(row[name], name) for name in ANSWERS]
    prompt: str | list[dict] | None = None
    if "prompt" in row or not all(isinstance(answer, list) for answer in answers):
        prompt = prompt_of(row) if any(name in row for name in ("prompt", "question", "problem")) else ""
    found = []
    for name, answer in zip(ANSWERS, answers, strict=True):
        if isinstance(prompt, list) and isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        if isinstance(prompt, str) and not isinstance(answer, str):
            raise ValueError(
                f"prompt and {name} must both be text or both be message lists; where {name} begins with the prompt, "
                "leave that out (columns chosen,rejected)"
            )
        if isinstance(answer, str):
            found.append((f"{prompt}{answer}", True))
        else:
            messages = [*(prompt or []), *answer]
            found.append((tokenizer.render_chat(messages, False, row.get("tools"), **template_arguments), False))
    return found


def _margin(row: dict) -> float:
    margin = row.get("margin")
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not math.isfinite(margin):
        raise ValueError(f"column 'margin' must be a number, got {margin!r:.60}")
    return float(margin)
