"""Rows -> token ids and masks: prompts to continue, and demonstrations with the loss on what the assistant says."""

import os
from collections.abc import Callable, Iterator, Sequence

from ..tokenizer import Tokenizer
from .config import PromptOptions
from .sources import QUESTION_COLUMNS, checked_column, column_names, located, prompt_of

Ids = list[int]
# Texts of a row, each with a flag (add special tokens), and a function that makes (ids, mask) of their ids.
Plan = tuple[list[tuple[str, bool]], Callable[[list[Ids]], tuple[Ids, Ids]]]
ROWS_AT_ONCE = 2000  # encoded in one call, on all cores


def check_ids(ids: Sequence[int], model_rows: int, where: str) -> None:
    """ValueError if a token has no row in the model's embedding; `where` says which data row it is."""
    largest = max(ids, default=0)
    if largest >= model_rows:
        raise ValueError(
            f"{where}: token id {largest} has no row in the model, which has {model_rows}; "
            "use the model's own tokenizer, or a model with an embedding enlarged for it"
        )


def encode_prompt(row: dict, tokenizer: Tokenizer, chat_template_kwargs: dict | None = None) -> Ids:
    """Ids a completion of the row continues: chat template with generation prompt, or the text with special tokens.

    A "tools" column (JSON schemas) goes to the template, `chat_template_kwargs` too. Text that is a rendered chat
    already has its beginning-of-text token and gets no second one.
    """
    text, adds_special_tokens = _prompt_text(row, tokenizer, chat_template_kwargs)
    return _some(tokenizer.encode(text, adds_special_tokens), row)


def encode_prompts(
    rows: Sequence[dict],
    tokenizer: Tokenizer,
    chat_template_kwargs: dict | None = None,
    model_rows: int | None = None,
) -> list[Ids]:
    """`encode_prompt` of every row, on all cores; ValueError that names the row. model_rows: see `check_ids`."""
    found: list[Ids] = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        batch = rows[start : start + ROWS_AT_ONCE]
        indices = list(range(start, start + len(batch)))
        texts = [
            located(_prompt_text, index, row, tokenizer, chat_template_kwargs)
            for index, row in zip(indices, batch, strict=True)
        ]
        for row, ids in zip(batch, encoded_texts(tokenizer, texts, indices), strict=True):
            found.append(located(lambda row, ids=ids: _some(ids, row), len(found), row))
    if model_rows is not None:
        for index, ids in enumerate(found):
            check_ids(ids, model_rows, f"data row {index}")
    return found


def fit_prompts(
    rows: list[dict], prompts: list[Ids], options: PromptOptions, context: int
) -> tuple[list[dict], list[Ids], str | None]:
    """(rows, prompts, a sentence for the user) with no prompt beyond max_prompt_length, or that fills the context.

    overlong_prompts: "error" raises a ValueError that names the first such row; "skip" leaves these rows out; "cut"
    keeps a prompt's last tokens, as TRL does. The sentence says how many, or is None.
    """
    own, overlong = options.max_prompt_length, options.overlong_prompts
    longest = context - 1 if own is None else min(own, context - 1)
    long = [index for index, ids in enumerate(prompts) if len(ids) > longest]
    if not long:
        return rows, prompts, None
    if overlong == "error":
        advice = f"the context only {context}; shorten or remove that row, raise max_model_len if the model allows it"
        if longest == own:
            advice = f"max_prompt_length is {own}; raise it"
        raise ValueError(
            f"row {long[0]}: the prompt has {len(prompts[long[0]])} tokens and {advice}, or choose overlong_prompts "
            "skip or cut"
        )
    text = f"{len(long)} of {len(prompts)} prompts are longer than {longest} tokens: "
    if overlong == "cut":
        return rows, [ids[-longest:] for ids in prompts], text + f"cut to their last {longest} tokens"
    left = sorted(set(range(len(prompts))) - set(long))
    if not left:
        raise ValueError(f"{text}skipping them leaves no row; raise max_prompt_length or choose overlong_prompts=cut")
    return [rows[index] for index in left], [prompts[index] for index in left], text + "skipped"


def encode_sft(
    row: dict, tokenizer: Tokenizer, max_length: int | None = None, chat_template_kwargs: dict | None = None
) -> tuple[Ids, Ids]:
    """(ids, mask) of a demonstration; mask is 1 on the tokens that are learnt, the end token included.

    What lies beyond `max_length` is cut off; the mask may then hold no 1 (see `encode_sft_rows`). A mask without any
    1 before cutting is refused. Prompt and completion are tokenised apart wherever joining them would change the
    prompt's ids, because generation starts from the prompt's own ids.
    """
    texts, assemble = _plan(row, tokenizer, chat_template_kwargs)
    ids, mask = _learnable(assemble([tokenizer.encode(*text) for text in texts]), row)
    return ids[:max_length], mask[:max_length]


def encode_sft_rows(
    rows: Sequence[dict],
    tokenizer: Tokenizer,
    max_length: int | None = None,
    chat_template_kwargs: dict | None = None,
    model_rows: int | None = None,
) -> tuple[list[tuple[Ids, Ids]], dict[str, int]]:
    """`encode_sft` of every row -> (examples, {"truncated": rows cut, "skipped": rows left out}), on all cores.

    A row is left out if the cut took all its learnt tokens: it would add nothing but a division by zero.
    model_rows: see `check_ids`.
    """
    examples, counts = [], {"truncated": 0, "skipped": 0}
    for index, (ids, mask) in enumerate(_encoded_rows(rows, tokenizer, chat_template_kwargs)):
        if model_rows is not None:
            check_ids(ids, model_rows, f"data row {index}")
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


def _encoded_rows(
    rows: Sequence[dict], tokenizer: Tokenizer, chat_template_kwargs: dict | None
) -> Iterator[tuple[Ids, Ids]]:
    """(ids, mask) of every row in turn."""
    for start in range(0, len(rows), ROWS_AT_ONCE):
        batch = list(enumerate(rows[start : start + ROWS_AT_ONCE], start))
        plans = [located(_plan, index, row, tokenizer, chat_template_kwargs) for index, row in batch]
        indices = [index for (index, _), (texts, _) in zip(batch, plans, strict=True) for _ in texts]
        encoded = iter(encoded_texts(tokenizer, [text for texts, _ in plans for text in texts], indices))
        for (index, row), (texts, assemble) in zip(batch, plans, strict=True):
            pieces = [next(encoded) for _ in texts]
            yield located(lambda row, pieces=pieces, assemble=assemble: _learnable(assemble(pieces), row), index, row)


def encoded_texts(tokenizer: Tokenizer, texts: list[tuple[str, bool]], data_rows: list[int]) -> list[Ids]:
    """The ids of texts. data_rows: the data row of each text."""
    try:
        turns = {
            flag: iter(tokenizer.encode_batch([text for text, special in texts if special is flag], flag))
            for flag in (False, True)
        }
    except ValueError:  # one of them; now the row is wanted
        return [
            located(lambda text: tokenizer.encode(*text), index, text)
            for text, index in zip(texts, data_rows, strict=True)
        ]
    return [next(turns[special]) for _, special in texts]


def _prompt_text(row: dict, tokenizer: Tokenizer, chat_template_kwargs: dict | None) -> tuple[str, bool]:
    """The text that a completion of the row continues, and whether special tokens are added to it."""
    prompt = prompt_of(row)
    if isinstance(prompt, str):
        return prompt, True
    if prompt[-1]["role"] == "assistant":
        raise ValueError("the prompt ends with an assistant message; a prompt must end before the answer")
    return tokenizer.render_chat(prompt, True, row.get("tools"), **(chat_template_kwargs or {})), False


def _some(ids: Ids, row: dict) -> Ids:
    if not ids:
        raise ValueError(f"the prompt {prompt_of(row)!r:.60} has no tokens")
    return ids


def _learnable(example: tuple[Ids, Ids], row: dict) -> tuple[Ids, Ids]:
    if not any(example[1][1:]):  # the first token has nothing before it to be predicted from
        raise ValueError(
            f"nothing to learn: no assistant message, completion or text (columns found: {column_names(row)})"
        )
    return example


def _plan(row: dict, tokenizer: Tokenizer, chat_template_kwargs: dict | None) -> Plan:
    arguments = chat_template_kwargs or {}
    if "messages" in row and "prompt" not in row:
        messages = checked_column(row["messages"], "messages")
        if isinstance(messages, str):
            raise ValueError("column 'messages' must be a list of {role, content} messages, got text")
        return _conversation_plan(messages, 0, row.get("tools"), tokenizer, arguments)
    if "text" in row and "prompt" not in row:
        if not isinstance(row["text"], str):
            raise ValueError(f"column 'text' must be text, got {row['text']!r:.60}")
        return [(row["text"], True)], lambda pieces: _all_learnt(with_end(pieces[0], tokenizer))
    prompt, completion = prompt_of(row), _completion_of(row)
    if not isinstance(prompt, str) and not isinstance(completion, str):
        return _conversation_plan(prompt + completion, len(prompt), row.get("tools"), tokenizer, arguments)
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise ValueError("prompt and completion must both be text or both be message lists")

    def assemble(pieces: list[Ids]) -> tuple[Ids, Ids]:
        prompt_ids, ids = pieces
        if ids[: len(prompt_ids)] != prompt_ids:
            ids = prompt_ids + tokenizer.encode(completion)
        ids = with_end(ids, tokenizer)
        return ids, [0] * len(prompt_ids) + [1] * (len(ids) - len(prompt_ids))

    return [(prompt, True), (prompt + completion, True)], assemble


def _all_learnt(ids: Ids) -> tuple[Ids, Ids]:
    return ids, [1] * len(ids)


def _completion_of(row: dict) -> str | list[dict]:
    if "completion" in row:
        return checked_column(row["completion"], "completion")
    if "prompt" not in row:
        for question, answer in QUESTION_COLUMNS.items():
            if question in row and row.get(answer) is not None:
                if not isinstance(row[answer], str):
                    raise ValueError(
                        f"column {answer!r} is what the assistant says here and must be text, got {row[answer]!r:.60}"
                    )
                return [{"role": "assistant", "content": row[answer]}]
    raise ValueError(f"no 'completion' column (columns found: {column_names(row)})")


def with_end(ids: Ids, tokenizer: Tokenizer) -> Ids:
    """Append the end token, so that stopping is learnt, unless the text ends with one."""
    if tokenizer.eos_token_id is None or (ids and ids[-1] in tokenizer.eos_token_ids):
        return ids
    return [*ids, tokenizer.eos_token_id]


def _conversation_plan(
    messages: list[dict], first_learnt: int, tools: list[dict] | None, tokenizer: Tokenizer, template_arguments: dict
) -> Plan:
    """A rendered conversation, learnt on the assistant messages from `first_learnt` on.

    Each learnt stretch is found by prefix rendering (templates seldom mark it) and tokenised on its own, as it will be
    when it is generated. What a template writes after the last end token is left out: it is never generated.
    """

    def render(count: int, add_generation_prompt: bool) -> str:
        return tokenizer.render_chat(messages[:count], add_generation_prompt, tools, **template_arguments)

    text = render(len(messages), False)
    ends = [tokenizer.id_to_token(token) or "" for token in tokenizer.eos_token_ids]
    texts: list[tuple[str, bool]] = []
    position = 0
    for index in range(first_learnt, len(messages)):
        if messages[index]["role"] != "assistant":
            continue
        start = _answer_start(text, render, index, tokenizer)
        through_answer = text if index + 1 == len(messages) else render(index + 1, False)
        stop = _answer_stop(text, start, through_answer, ends)
        texts += [(text[position:start], False), (text[start:stop], False)]
        position = stop
    ends_with_answer = bool(texts) and messages[-1]["role"] == "assistant"
    if texts and not ends_with_answer:
        texts.append((text[position:], False))

    def assemble(pieces: list[Ids]) -> tuple[Ids, Ids]:
        ids = [token for piece in pieces for token in piece]
        mask = [place % 2 for place, piece in enumerate(pieces) for _ in piece]  # every second piece is an answer
        if ends_with_answer and any(mask):
            ids = with_end(ids, tokenizer)
            mask += [1] * (len(ids) - len(mask))
        return ids, mask

    return texts, assemble


def _answer_start(text: str, render: Callable[[int, bool], str], index: int, tokenizer: Tokenizer) -> int:
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
