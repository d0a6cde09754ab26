"""Numbers that a kernel source fixes, read from its text: a launcher need not repeat them, and nothing is compiled."""

import functools
import re
from pathlib import Path

from .compile import kernels_folder

SCALAR_BYTES = {"bf16": 2, "f16": 2, "f32": 4}


def source_constant(family: str, name: str, **defines) -> int:
    """The value of `constexpr int NAME = …` or `#define NAME …` in a family's source or the headers that it includes.

    defines: what the constant depends on (SCALAR="bf16", HEAD_LIMIT=64). So a launcher need not repeat a number, and
    nothing is compiled. ValueError if the source has no such constant, has several values for it under conditions, or
    computes it by more than integer arithmetic.
    """
    sizes = {key: SCALAR_BYTES[value] if key == "SCALAR" else int(value) for key, value in defines.items()}
    return _Constants(family, sizes)[name]


class _Constants(dict):
    """Name -> value; what is not known yet is computed from its expression in the source."""

    def __init__(self, family, values):
        super().__init__(values)
        self.family, self.expressions = family, _constant_expressions(family)

    def __missing__(self, name):
        found = self.expressions.get(name, set())
        if len(found) != 1:
            raise ValueError(f"kernels/{self.family}.cu has {len(found)} values for {name}: want one")
        (expression,) = found
        try:
            self[name] = int(eval(_as_python(expression), {"__builtins__": {}}, self))  # our own source and its names
        except (SyntaxError, TypeError):
            raise ValueError(
                f"kernels/{self.family}.cu: {name} = {expression} is more than integer arithmetic"
            ) from None
        return self[name]


@functools.cache
def _constant_expressions(family: str) -> dict[str, set[str]]:
    """Name -> the expressions that a family's source and its headers give it."""
    found: dict[str, set[str]] = {}
    for path in included_files(kernels_folder() / f"{family}.cu"):
        text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", path.read_text(encoding="utf-8"), flags=re.S)
        for name, expression in re.findall(r"^[ \t]*#define[ \t]+(\w+)[ \t]+(\S.*)$", text, re.M):
            found.setdefault(name, set()).add(expression.strip())
        for declaration in re.findall(r"\bconstexpr int ([^;{}]*);", text):
            for part in re.split(r",(?=\s*\w+\s*=[^=])", declaration):
                name, _, expression = part.partition("=")
                found.setdefault(name.strip(), set()).add(" ".join(expression.split()))
    return found


def _as_python(expression: str) -> str:
    """An integer expression of C in Python: a ? b : c, /, sizeof(SCALAR)."""
    condition, mark, rest = expression.partition("?")
    if mark:
        first, _, second = rest.partition(":")
        return f"({_as_python(first)}) if ({_as_python(condition)}) else ({_as_python(second)})"
    return re.sub(r"sizeof\((\w+)\)", r"\1", expression).replace("/", "//").strip()


def included_files(path: Path) -> list[Path]:
    """A source of kernels/ and the headers of kernels/ that it includes, directly or not."""
    found = [path]
    for file in found:
        for name in re.findall(r'^\s*#include "(\S+)"', file.read_text(encoding="utf-8"), re.M):
            if (header := path.parent / name) not in found:
                found.append(header)
    return found
