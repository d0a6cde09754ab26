"""Tasks that models are compared by: the rows, what the model is asked, the reward that says what is right."""

import re
from dataclasses import dataclass

COLUMN = re.compile(r"\{(question|problem)\}")
BOXED = "{problem}\n\nReason step by step, and put the final answer within \\boxed{}."


@dataclass(frozen=True)
class Task:
    """One benchmark."""

    data: str  # NAME:CONFIG:SPLIT of the hub, or a file
    template: str | None  # the user's message, {question} or {problem} a column; None: the row's own prompt
    reward: str  # reads the row's answer column
    seen: bool  # whether the columns' names were checked against the data itself

    def row(self, row: dict) -> dict:
        """The data row with its prompt; ValueError if it lacks a column of the template."""

        def text(match: re.Match) -> str:
            if not isinstance(row.get(match[1]), str):
                raise ValueError(f"no column {match[1]!r} with text (columns found: {', '.join(map(str, row))})")
            return row[match[1]]

        if self.template is None:
            return row
        return {**row, "prompt": [{"role": "user", "content": COLUMN.sub(text, self.template)}]}


TASKS = {
    "gsm8k": Task(
        "openai/gsm8k:main:test",
        "{question}\n\nReason step by step. End with a line of #### and the final number.",
        "gsm8k",
        seen=True,
    ),
    "math500": Task("HuggingFaceH4/MATH-500:default:test", BOXED, "boxed", seen=False),
    "arithmetic": Task("data/arithmetic/test.jsonl", None, "gsm8k", seen=True),  # the bundled one
}


def find_tasks(names: list[str]) -> dict[str, Task]:
    """The tasks of these names, each a name or several with commas; ValueError in one line for one that is none."""
    found = {}
    for name in (part.strip().lower() for text in names for part in text.split(",")):
        if name not in TASKS:
            known = f"{', '.join(TASKS)} (for others give --data and --reward_funcs)"
            raise ValueError(f"tasks has {name!r}; there are {known}")
        found[name] = TASKS[name]
    return found
