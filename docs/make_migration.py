"""Write the tables of MIGRATION.md from the table that the command line uses: python docs/make_migration.py"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import cukit_cli  # noqa: E402
from cukit.commands.parser import command_options  # noqa: E402
from cukit.commands.trl_table import NOT_NEEDED, NOT_YET, ROWS, TAKEN, Row  # noqa: E402

PAGE = ROOT / "docs/MIGRATION.md"
BEGIN, END = "<!-- made by docs/make_migration.py -->", "<!-- end -->"
FIELDS = json.loads((ROOT / "tests/commands/trl_fields.json").read_text())
KNOWN = {name: command_options(cukit_cli.COMMANDS[name]) for name in ("grpo", "ppo", "sft", "reward")}


def with_tables(page: str) -> str:
    """The page's text with what stands between its two marks made anew."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n\n" + tables() + "\n" + END + rest.split(END)[1]


def tables() -> str:
    names = {name for owner in FIELDS["fields"].values() for name in owner}
    own = sorted(name for name in names if any(name in known for known in KNOWN.values()))
    lines = [f"Taken as they are: {', '.join(f'`{name}`' for name in own)}.", ""]
    lines += ["| TRL | here | |", "|---|---|---|"]
    lines += [f"| {shown(row)} | `{row.text}` | {row.note} |" for row in rows_of(TAKEN)]
    for row in rows_of(NOT_NEEDED):
        for option, new in dict.fromkeys(tuple(pair) for _, *pair in row.options):
            values = ", ".join(value for value, *pair in row.options if (option, new) == tuple(pair))
            lines.append(f"| `{row.name}={values}` | `{option}` | {str(new).lower()} |")
    for kind, title in ((NOT_NEEDED, "not needed, because"), (NOT_YET, "not there yet")):
        reasons: dict[str, list[str]] = {}
        for row in rows_of(kind):
            reasons.setdefault(row.text, []).append(shown(row))
        lines += ["", f"| {title} | TRL |", "|---|---|"]
        lines += [f"| {why} | {', '.join(found)} |" for why, found in reasons.items()]
    return "\n".join(lines) + "\n"


def rows_of(kind: str) -> list[Row]:
    return [row for row in ROWS if row.kind == kind and commands_of(row)]


def commands_of(row: Row) -> list[str]:
    """The commands that look at this row."""
    return [name for name, known in KNOWN.items() if row.name not in known and (row.kind != TAKEN or row.text in known)]


def shown(row: Row) -> str:
    """A name, with the values that are accepted if not all are, and its commands if they are not all."""
    values = ", ".join(map(str, row.accepted or ())) if row.kind == NOT_NEEDED else ""
    commands = commands_of(row)
    shown_commands = f" ({', '.join(commands)})" if len(commands) < len(KNOWN) else ""
    return f"`{row.name}{f'={values}' if values else ''}`" + shown_commands


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
