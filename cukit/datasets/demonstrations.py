"""Rows -> token ids and masks: prompts to continue, and demonstrations with the loss on what the assistant says."""

import os
from collections.abc import Sequence

from ..tokenizer import Tokenizer
from .sources import QUESTION_COLUMNS, checked_column, column_names, located, prompt_of


def encode_prompt(row: dict, tokenizer: Tokenizer, chat_template_kwargs: dict | None = None) -> list[int]:
    """Ids a completion of the row continues: chat template with generation prompt, or the text with special tokens.

    A "tools" column (JSON schemas) goes to the template, `chat_template_kwargs` too.
    """
    prompt = prompt_of(row)
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, add_special_tokens=True)
    else:
        if prompt[-1]["role"] == "assistant":
            raise ValueError("the prompt ends with an assistant message; a prompt must end before the answer")
        ids = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tools=row.get("tools"), **(chat_template_kwargs or {})
        )
    if not ids:
        raise ValueError(f"the prompt {prompt!r:.60} has no tokens")
    return ids


def encode_sft(
    row: dict, tokenizer: Tokenizer, max_length: int | None = None, chat_template_kwargs: dict | None = None
) -> tuple[list[int], list[int]]:
    """(ids, mask) of a demonstration; mask is 1 on the tokens that are learnt, the end token included.

    What lies beyond `max_length` is cut off; the mask may then hold no 1 (see `encode_sft_rows`). A mask without any
    1 before cutting is refused. Prompt and completion are tokenised apart wherever joining them would change the
    prompt's ids, because generation starts from the prompt's own ids.
    """
    ids, mask = _encode_demonstration(row, tokenizer, chat_template_kwargs or {})
    if not any(mask[1:]):  # the first token has nothing before it to be predicted from
        raise ValueError(
            f"nothing to learn: no assistant message, completion or text (columns found: {column_names(row)})"
        )
    return ids[:max_length], mask[:max_length]


def encode_sft_rows(
    rows: Sequence[dict], tokenizer: Tokenizer, max_length: int | None = None, chat_template_kwargs: dict | None = None
) -> tuple[list[tuple[list[int], list[int]]], dict[str, int]]:
    """`encode_sft` of every row -> (examples, {"truncated": rows cut, "skipped": rows left out}).

    A row is left out if the cut took all its learnt tokens: it would add nothing but a division by zero.
    """
    examples, counts = [], {"truncated": 0, "skipped": 0}
    for index, row in enumerate(rows):
        ids, mask = located(encode_sft, index, row, tokenizer, None, chat_template_kwargs)
        if max_length is not None and len(ids) > max_length:
            ids, mask = ids[:max_length], mask[:max_length]
            counts["truncated"] += 1
        if any(mask[1:]):
            examples.append((ids, mask))
        else:
            counts["skipped"] += 1
    if not examples:
        raise ValueError(f"max_length={max_length} cuts off every completion of the {len(rows)} rows; raise max_length")
    return examples, counts


def _encode_demonstration(row: dict, tokenizer: Tokenizer, template_arguments: dict) -> tuple[list[int], list[int]]:
    if "messages" in row and "prompt" not in row:
        messages = checked_column(row["messages"], "messages")
        if isinstance(messages, str):
            raise ValueError("column 'messages' must be a list of {role, content} messages, got text")
        return _encode_conversation(messages, 0, row.get("tools"), tokenizer, template_arguments)
    if "text" in row and "prompt" not in row:
        if not isinstance(row["text"], str):
            raise ValueError(f"column 'text' must be text, got {row['text']!r:.60}")
        ids = _with_end(tokenizer.encode(row["text"], add_special_tokens=True), tokenizer)
        return ids, [1] * len(ids)
    prompt, completion = prompt_of(row), _completion_of(row)
    if isinstance(prompt, str) != isinstance(completion, str):
        raise ValueError("prompt and completion must both be text or both be message lists")
    if not isinstance(prompt, str):
        return _encode_conversation(prompt + completion, len(prompt), row.get("tools"), tokenizer, template_arguments)
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=True)
    ids = tokenizer.encode(prompt + completion, add_special_tokens=True)
    if ids[: len(prompt_ids)] != prompt_ids:
        ids = prompt_ids + tokenizer.encode(completion)
    ids = _with_end(ids, tokenizer)
    return ids, [0] * len(prompt_ids) + [1] * (len(ids) - len(prompt_ids))


def _completion_of(row: dict) -> str | list[dict]:
    if "completion" in row:
        return checked_column(row["completion"], "completion")
    if "prompt" not in row:
        for question, answer in QUESTION_COLUMNS.items():
            if question in row and isinstance(row.get(answer), str):
                return [{"role": "assistant", "content": row[answer]}]
    raise ValueError(f"no 'completion' column (columns found: {column_names(row)})")


def _with_end(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Append the end token, so that stopping is learnt, unless the text ends with one."""
    if tokenizer.eos_token_id is None or (ids and ids[-1] in tokenizer.eos_token_ids):
        return ids
    return [*ids, tokenizer.eos_token_id]


def _encode_conversation(
    messages: list[dict], first_learnt: int, tools, tokenizer: Tokenizer, template_arguments: dict
) -> tuple[list[int], list[int]]:
    """Ids and mask of a rendered conversation: 1 on the assistant messages from `first_learnt` on.

    Each learnt stretch is found by prefix rendering (templates seldom mark it) and tokenised on its own, as it will be
    when it is generated. What a template writes after the last end token is left out: it is never generated.
    """

    def render(count: int, add_generation_prompt: bool) -> str:
        return tokenizer.apply_chat_template(
            messages[:count], add_generation_prompt, tools=tools, tokenize=False, **template_arguments
        )

    text = render(len(messages), False)
    ends = [tokenizer.id_to_token(token) for token in tokenizer.eos_token_ids]
    ids: list[int] = []
    mask: list[int] = []
    position = 0
    for index in range(first_learnt, len(messages)):
        if messages[index]["role"] != "assistant":
            continue
        start = _answer_start(text, render, index, tokenizer)
        through_answer = text if index + 1 == len(messages) else render(index + 1, False)
        stop = _answer_stop(text, start, through_answer, ends)
        for piece, learnt in ((text[position:start], 0), (text[start:stop], 1)):
            piece_ids = tokenizer.encode(piece)
            ids += piece_ids
            mask += [learnt] * len(piece_ids)
        position = stop
    if not any(mask):
        return ids, mask
    if messages[-1]["role"] == "assistant":
        ids = _with_end(ids, tokenizer)
        return ids, mask + [1] * (len(ids) - len(mask))
    rest = tokenizer.encode(text[position:])
    return ids + rest, mask + [0] * len(rest)


def _answer_start(text: str, render, index: int, tokenizer: Tokenizer) -> int:
    """Where assistant message `index` begins in `text`: behind the generation prompt of the messages before it."""
    head = render(index, True)
    if text.startswith(head):
        return len(head)
    # Qwen3 with enable_thinking=False ends the generation prompt with an empty think block, which it does not repeat
    # in earlier turns: the messages themselves must agree, the generation prompt as far as its tokens do.
    before = render(index, False)
    common = 0
    if text.startswith(before) and head.startswith(before):
        tokens, wanted = (tokenizer.encode(part[len(before) :]) for part in (text, head))
        matching = len(os.path.commonprefix([tokens, wanted]))
        common = len(tokenizer.decode(tokens[:matching], skip_special_tokens=False))
    if common == 0:
        raise ValueError(
            f"the chat template renders the messages before message {index} differently once it follows, so what "
            "the assistant wrote can not be told apart; split the conversation into prompt and completion rows"
        )
    return len(before) + common


def _answer_stop(text: str, start: int, through_answer: str, ends: list[str]) -> int:
    """End of the answer that begins at `start`, its end token included."""
    if text.startswith(through_answer):
        stops = [text.rfind(end, start, len(through_answer)) + len(end) for end in ends if end]
        return max((stop for stop in stops if stop > start), default=len(through_answer))
    # The template shortens this answer once more follows (Qwen3 drops earlier thoughts).
    stops = [text.find(end, start) + len(end) for end in ends if end and end in text[start:]]
    if not stops:
        raise ValueError("the chat template writes no end token after an assistant message")
    return min(stops)
