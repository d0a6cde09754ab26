"""Reads the words of a command line: which of them are options, how many values follow, what a text means."""

import json
import re
from typing import Any, get_args, get_origin

from ..options import Option, typed

# Only a word that looks like an option is one: -5+3, -1e-3 and "-- try again" are values.
OPTION = re.compile(r"--([A-Za-z][A-Za-z0-9_-]*)(?:=(.*))?", re.DOTALL)
WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def option_name(word: str) -> str | None:
    """The name of an option that this word gives (dashes as underscores), or None for a value."""
    match = OPTION.fullmatch(word)
    return match[1].replace("-", "_") if match else None


def split_words(
    words: list[str], known: dict[str, Option], plain: str | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """-> (values of known options, values of unknown ones), as texts.

    An option takes the words up to the next option: a list several (and it may be repeated), a true-or-false option (or
    one of words that takes true and false too) none or one. If an option is given twice, the later counts.
    `--name=value` gives a value that looks like an option. `plain` is the option that takes the words of no option:
    one, or a list all of them.
    """
    found: dict[str, Any] = {}
    unknown: dict[str, Any] = {}
    place = 0
    while place < len(words):
        word = "--help" if words[place] == "-h" else words[place]
        match, name, place = OPTION.fullmatch(word), option_name(word), place + 1
        if match is None or name is None:
            if plain is not None and not word.startswith("-") and (is_list(known[plain]) or plain not in found):
                found[plain] = [*found.get(plain, []), word] if is_list(known[plain]) else word
                continue
            raise ValueError(f"unexpected word {word!r}: options look like --name value; quote a text of several words")
        values = [match[2]] if match[2] is not None else []
        while match[2] is None and place < len(words) and option_name(words[place]) is None:
            if name in known and not is_list(known[name]) and values:
                break
            values.append(words[place])
            place += 1
        if name not in known:
            unknown[name] = " ".join(values) or None
        elif is_list(known[name]):
            found[name] = [*found.get(name, []), *values]
        else:
            found[name] = values[0] if values else None
        if name in known and not values:
            if known[name].kind is not bool and not known[name].bools:
                raise ValueError(f"--{name} needs a value: {known[name].help}")
            found[name] = "true"
    return found, unknown


def is_list(item: Option) -> bool:
    return get_origin(item.kind) is list


def parsed(item: Option, value: Any, where: str) -> Any:
    """A command line's or YAML's value as the option's type; ValueError in one line, which begins with `where`."""
    try:
        return typed(item, from_text(item, value))
    except ValueError as error:
        hint = "; leave it out for its default" if value is None else ""
        if item.kind is str and not isinstance(value, (str, list, dict, type(None))):  # YAML read it as something else
            words = [*item.choices, *(["null"] if item.optional else [])]
            hint = f": one of {', '.join(words)}" if item.choices else "; put it in quotes"
        raise ValueError(f"{where}{error}{hint}") from None


def from_text(item: Option, value: Any) -> Any:
    """What a text means for this option; a text that means nothing stays one, for typed() to refuse.

    `none` and `null` un-give a number, a truth value, an object, one of some words and a place. They are texts where
    other texts are wanted.
    """
    kind = get_args(item.kind)[0] if is_list(item) else item.kind
    worded = item.choices or item.is_place
    if worded and item.optional and value in ("none", "null") and value not in item.choices:
        return None
    if kind is str:
        return WORDS.get(value.lower(), value) if item.bools and isinstance(value, str) else value
    if isinstance(value, list):
        nothing = item.optional and len(value) == 1 and isinstance(value[0], str) and value[0] in ("none", "null")
        return None if nothing else [_from_text(kind, part) for part in value]
    if item.optional and isinstance(value, str) and value in ("none", "null"):
        return None
    return _from_text(kind, value)


def _from_text(kind: Any, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if kind is bool:
        return WORDS.get(value.lower(), value)
    try:
        return json.loads(value) if kind is dict else kind(value)
    except (ValueError, RecursionError):
        return value
