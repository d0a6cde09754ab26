r"""The reward for problems with a formula as their answer, written in \boxed{...} (MATH's form)."""

import functools
import re
from collections.abc import Sequence

from .answer import NUM_READ, last_boxed, read, same_answer
from .columns import Column, Completion, completion_text, gold_texts
from .final_number import MARKER

NO_ANSWER = {"n/a", "none", "null", "nan", "unknown"}
# Signs that a text reasons and is no answer by itself.
MATH = re.compile(r"\\[(\[]|(?<!\\)\$")
PROSE_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
REASONING = re.compile(
    r"\b(?:is|are|equals|gives|get|hence|therefore|thus|so|answer|because|since|we)\b", re.IGNORECASE
)
SENTENCES = re.compile(r"[.!?]\s+[A-Z]|\n\s*\n")
MAX_WORDS = 8


def boxed(
    completions: Sequence[Completion], answer: Column = None, solution: Column = None, **kwargs: object
) -> list[float | None]:
    r"""1.0 if the completion's last `\boxed{...}` is the answer, up to how it is written (see `answer.same_answer`).

    A gold text that holds a box itself (MATH's solutions) stands for what is in it. Another gold must be an answer by
    itself: None for one that can not be read, or that reasons its way to an answer it does not box.
    """
    return [score for score, _ in _scores_and_boxes(completions, answer, solution)]


def boxed_partial(
    completions: Sequence[Completion],
    answer: Column = None,
    solution: Column = None,
    *,
    partial: float = 0.1,
    **kwargs: object,
) -> list[float | None]:
    r"""1.0 for a box that holds the answer (see `boxed`), `partial` for another box, 0.0 without one.

    The reward of the Dr. GRPO recipe (Liu et al. 2025): what is sought, and a little for its form.
    """
    found = _scores_and_boxes(completions, answer, solution)
    return [float(partial) if score == 0 and box is not None else score for score, box in found]


def _scores_and_boxes(
    completions: Sequence[Completion], answer: Column, solution: Column
) -> list[tuple[float | None, str | None]]:
    """For each completion 1.0 or 0.0, None without a right answer to compare with; and what its last box holds."""
    found = []
    for completion, texts in zip(completions, gold_texts(len(completions), answer, solution, "boxed"), strict=True):
        golds = [gold for text in texts if (gold := _gold(text)) is not None]
        box = last_boxed(completion_text(completion))
        is_right = box is not None and any(same_answer(box, gold) for gold in golds)
        found.append((float(is_right) if golds else None, box))
    return found


@functools.lru_cache(NUM_READ)
def _gold(text: str) -> str | None:
    box = last_boxed(text)
    if box is None and ("\\boxed" in text or "\\fbox" in text or MARKER in text or _is_solution(text)):
        return None
    gold = text if box is None else box
    return None if gold.strip().lower() in NO_ANSWER or read(gold) is None else gold


def _is_solution(text: str) -> bool:
    """Whether a text without a box is more than an answer: sentences, or words that lead to a formula."""
    math = MATH.search(text)
    leads = math is not None and PROSE_WORD.search(text, 0, math.start()) is not None
    return leads or len(PROSE_WORD.findall(text)) > MAX_WORDS or bool(REASONING.search(text) or SENTENCES.search(text))
