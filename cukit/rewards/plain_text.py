"""Rewards that look at the text as it stands: whether it is the answer, and whether a thinking turn has its form."""

import re
from collections.abc import Sequence
from fractions import Fraction

from .columns import Column, Completion, NumberText, completion_text, gold_texts, score

PLAIN_NUMBER = re.compile(r"[-+]?[0-9]{1,400}(\.[0-9]{1,400})?")
# What a chat template may have begun the turn with: an open thought, or an empty one where thinking is off.
PREFILLED = re.compile(r"<think>\s*(</think>\s*)?\Z")


def exact(
    completions: Sequence[Completion], answer: Column = None, solution: Column = None, **kwargs: object
) -> list[float | None]:
    """1.0 if the completion, without white space around it, is the answer; None where the row has none.

    An answer that the data gives as a number is compared as a number: for 14.0 the completion `14` is right.
    """
    golds = gold_texts(len(completions), answer, solution, "exact")
    return [score(completion, texts, _is_exact) for completion, texts in zip(completions, golds, strict=True)]


def format(
    completions: Sequence[Completion],
    prompt_text: Sequence[str] | None = None,
    *,
    answer_tags: bool = False,
    **kwargs: object,
) -> list[float]:
    """1.0 if the turn is one thought in <think>…</think> and then the answer, as TRL's `think_format_reward` has it.

    The turn begins with <think>, which stands nowhere else in it. A thought that the chat template began (the end of
    `prompt_text`) counts. Where <answer> tags are used, one pair holds all that follows the thought; `answer_tags=True`
    wants that pair.
    """
    prompts = prompt_text if prompt_text is not None else [""] * len(completions)
    turns = zip(prompts, completions, strict=True)
    return [float(_is_thinking_turn(prompt, completion_text(turn), answer_tags)) for prompt, turn in turns]


def _is_exact(text: str, gold: str) -> bool:
    text = text.strip()
    if isinstance(gold, NumberText) and PLAIN_NUMBER.fullmatch(text):
        return Fraction(text) == Fraction(gold)
    return text == gold.strip()


def _is_thinking_turn(prompt: str | None, completion: str, answer_tags: bool) -> bool:
    prefilled = PREFILLED.search((prompt or "")[-100:])
    turn = (prefilled[0] if prefilled else "") + completion
    thought, closed, answer = turn.partition("</think>")
    if not (thought.startswith("<think>") and closed and turn.count("<think>") == 1):
        return False
    if "<answer>" not in turn and "</answer>" not in turn:
        return not answer_tags
    answer = answer.strip()
    tags = (turn.count("<answer>"), turn.count("</answer>"))
    return tags == (1, 1) and answer.startswith("<answer>") and answer.endswith("</answer>")
