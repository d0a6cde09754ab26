"""The options that say how rows become prompts."""

import re
from typing import Any

from ..options import Options, check_choices, check_range, option, require

OVERLONG = ("error", "skip", "cut")
PLACE = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}", re.ASCII)  # {{word}} or {column}


class RowOptions(Options):
    """Which columns a row has, and how its prompt is made of them."""

    group = "data"
    columns: dict | None = option(
        None,
        "the columns to keep, as name=column,…: prompt=question,answer=answer; a bare name keeps a column as it is, "
        "a.b is the entry b of column a; default: all",
    )
    prompt_template: str | None = option(
        None, "the prompt, a text with {column} places; {{word}} writes {word}, any other brace stands for itself"
    )
    system_prompt: str | None = option(
        None, "a system message before each conversational prompt, in place of the row's own"
    )
    chat_prompts: bool | None = option(
        None,
        "true: a text prompt becomes a user's message; false: a single user's message becomes text; "
        "default: as the rows have it (a question or problem is a user's message, a prompt that is text stays text)",
    )

    @classmethod
    def respelled(cls, values: dict[str, Any]) -> dict[str, Any]:
        """`prompt=question,answer` as a dict."""
        text = values.get("columns")
        if not isinstance(text, str) or text in ("none", "null"):
            return values
        pairs = [part.partition("=") for part in text.split(",")]
        names = [name.strip() for name, _, _ in pairs]
        require(
            all(names) and len(set(names)) == len(names),
            f"columns must name each column once, as prompt=question,answer=answer, got {text!r:.100}",
        )
        found = {name: column.strip() if equals else name for name, (_, equals, column) in zip(names, pairs)}
        return values | {"columns": found}

    def __post_init__(self) -> None:
        for name, column in (self.columns or {}).items():
            require(
                isinstance(name, str) and isinstance(column, str) and name and column,
                f"columns must give a column's name for each name, got {name!r:.60}: {column!r:.60}",
            )
        require(self.columns is None or self.columns, "columns names no column; leave it out to keep all")
        require(
            self.prompt_template is None or any(column for _, column in PLACE.findall(self.prompt_template)),
            f"prompt_template has no {{column}} place, all prompts would be equal: {self.prompt_template!r:.60}",
        )

    @property
    def wanted(self) -> list[str] | None:
        """The columns of the source that are read; None: all."""
        return None if self.columns is None else list(dict.fromkeys(self.columns.values()))


class PromptOptions(Options):
    """What happens to prompts that are too long."""

    group = "data"
    max_prompt_length: int | None = option(
        None, "longest prompt in tokens; default: what the context holds with one token to spare"
    )
    overlong_prompts: str = option(
        "error", "longer prompts: refuse the data, skip these rows, or cut all but the prompt's last tokens", OVERLONG
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, "max_prompt_length", 1)
