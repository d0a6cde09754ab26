"""Options of TRL and transformers in a command line or a YAML file: taken, left out with a reason, or refused.

`trl_table` says what becomes of each name. What a command has as an option needs no row there.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from ..options import nearest
from .trl_table import NOT_NEEDED, NOT_YET, TABLE, TAKEN, Row

DATA_PARTS = ("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split")
LOADER_ARGUMENTS = {  # of model_init_kwargs: the name that TRL's own options have for it
    "dtype": "torch_dtype",
    "revision": "model_revision",
} | {
    name: name for name in ("torch_dtype", "attn_implementation", "trust_remote_code", "low_cpu_mem_usage", "use_cache")
}
FILES = (".jsonl", ".json", ".csv", ".parquet", ".gz")
OFF: tuple = (None, "none", "no", "", [], {})  # and False


def rows(known: Iterable[str]) -> dict[str, Row]:
    """The table for a command with these options."""
    return {name: row for name, row in TABLE.items() if name not in set(known)}


def plain_alias(name: str, known: Iterable[str]) -> str | None:
    """The option that a name only spells in another way, else None."""
    row = TABLE.get(name)
    whole = row is not None and row.kind == TAKEN and not row.becomes and name not in (*DATA_PARTS, "model_revision")
    return row.text if row is not None and whole and name not in known and row.text in known else None


@dataclass
class Translated:
    """values: those of cukit's options. left_out: names that are not needed. missing and unknown ones are refused.

    idle: names of what is not there yet with TRL's defaults, which ask for nothing.
    """

    values: dict[str, Any] = field(default_factory=dict)
    taken: dict[str, str] = field(default_factory=dict)  # TRL's name -> the option
    left_out: list[Row] = field(default_factory=list)
    missing: dict[Row, Any] = field(default_factory=dict)
    idle: list[Row] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def translated(given: Mapping[str, Any], known: Iterable[str], where: str = "", prefix: str = "") -> Translated:
    """Every given name as one of cukit's options, or what is to be said about it.

    where: " in FILE" for messages; prefix: "--" for a command line. Raises ValueError, in one line for all names, if
    one is unknown or asks for what is not there yet.
    """
    known = list(known)
    found = Translated({name: value for name, value in given.items() if name in known})
    foreign = {name: value for name, value in given.items() if name not in known}
    _take_loader_arguments(found, foreign, known, where)
    _take_rewards(found, foreign, known)
    _take_data(found, foreign, known, where, prefix)
    revision = foreign.pop("model_revision", None) if "model" in known else None
    for name, value in foreign.items():
        row = TABLE.get(name)
        if row is None or (row.kind == TAKEN and row.text not in known):
            found.unknown.append(name)
        elif row.kind == TAKEN:
            _take(found, row, value, where)
        elif stands_for := [new for new in row.options if new[0] == _plain(value) and new[1] in known]:
            _put(found, name, stands_for[0][1], stands_for[0][2], where)
        elif not _is_off(value):
            if _accepts(row, value):
                (found.left_out if row.kind == NOT_NEEDED else found.idle).append(row)
            else:
                found.missing[row] = value
    _take_revision(found, revision, where, prefix)
    if found.unknown or found.missing:
        raise ValueError(_explain(found, known, where, prefix))
    return found


def notice(found: Translated, where: str = "", prefix: str = "") -> str:
    """One line about the names that were left out, or "" if there are none."""
    return f"not needed{where}: {_with_reasons(found.left_out, prefix)}" if found.left_out else ""


# ---- what is taken ---------------------------------------------------------------------------------------------------


def _take(found: Translated, row: Row, value: Any, where: str) -> None:
    if row.becomes:
        made = [new for old, new in row.becomes if old == _plain(value)]
        if not made:
            if not _is_off(value) and not _accepts(row, value):
                found.missing[row] = value
            return
        value = made[0]
    _put(found, row.name, row.text, value, where)


def _take_loader_arguments(found: Translated, foreign: dict[str, Any], known: list[str], where: str) -> None:
    """model_init_kwargs: what has a name of its own counts as given by it; what else asks for something is missing."""
    arguments = foreign.get("model_init_kwargs")
    if not isinstance(arguments, dict) or "model" not in known:
        return
    for name, value in foreign.pop("model_init_kwargs").items():
        own = LOADER_ARGUMENTS.get(name)
        if own is None:
            if not _is_off(value):
                found.missing[replace(TABLE["model_init_kwargs"], name=f"model_init_kwargs.{name}")] = value
        elif own in foreign:
            raise ValueError(f"{own} is given twice{where}, once in model_init_kwargs; give only one")
        else:
            foreign[own] = value


def _take_revision(found: Translated, revision: Any, where: str, prefix: str) -> None:
    """model_revision as part of the model's name."""
    if _is_off(revision) or revision == "main":
        return
    if found.values.get("model") is None:
        name = f"{prefix}model_revision"
        raise ValueError(f"{name}{where} needs {prefix}model_name_or_path; or give {prefix}model as NAME@REVISION")
    found.values["model"] = f"{found.values['model']}@{revision}"
    found.taken["model_revision"] = "model"


def _put(found: Translated, name: str, option: str, value: Any, where: str) -> None:
    if option in found.values:
        raise ValueError(f"{option} is given twice{where}, once as {name}; give only one")
    found.values[option] = value
    found.taken[name] = option


def _take_data(found: Translated, foreign: dict[str, Any], known: list[str], where: str, prefix: str) -> None:
    """dataset_name, dataset_config and splits as NAME:CONFIG:SPLIT; the test split as eval_data if it is asked for."""
    parts = {name: None if _is_off(value := foreign.pop(name)) else value for name in DATA_PARTS if name in foreign}
    if not any(parts.values()) or "data" not in known:
        found.unknown += [name for name, value in parts.items() if value and "data" not in known]
        return
    name, config, train, test = (parts.get(part) for part in DATA_PARTS)
    if name is None:
        alone = next(part for part, value in parts.items() if value)
        raise ValueError(
            f"{prefix}{alone}{where} needs {prefix}dataset_name; or give {prefix}data as NAME:CONFIG:SPLIT"
        )
    # What is no text (a list) stays as it is, for the check of types to refuse.
    is_file = not isinstance(name, str) or Path(name).suffix in FILES or Path(name).is_file()
    _put(found, "dataset_name", "data", name if is_file else _source(name, config, train), where)
    when = "eval_strategy" if "eval_strategy" in found.values else "eval_steps"
    evaluates = not _is_off(found.values.get(when))
    if evaluates and not is_file and "eval_data" in known and "eval_data" not in found.values:
        _put(found, "dataset_test_split", "eval_data", _source(name, config, test or "test"), where)


def _source(name: Any, config: Any, split: Any) -> str:
    """NAME:CONFIG:SPLIT without what is not given at its end."""
    return ":".join(str(part or "") for part in (name, config, split)).rstrip(":")


def _take_rewards(found: Translated, foreign: dict[str, Any], known: list[str]) -> None:
    """reward_funcs with TRL's dotted paths as files, and TRL's options for a reward model as more of them."""
    rewards = found.values.get("reward_funcs") or []
    rewards = [_reward(one) for one in (rewards if isinstance(rewards, list) else [rewards])]
    for name in ("reward_model_path", "reward_model_name_or_path") if "reward_funcs" in known else ():
        if not _is_off(model := foreign.pop(name, None)):
            rewards.append(model)
            found.taken[name] = "reward_funcs"
    if rewards:
        found.values["reward_funcs"] = rewards


def _reward(name: Any) -> Any:
    """TRL's dotted path of a function, package.module.function, as package/module.py:function if there is that file."""
    if not isinstance(name, str) or not re.fullmatch(r"\w+(\.\w+)+", name) or Path(name).is_file():
        return name
    module, _, function = name.rpartition(".")
    path = Path(*module.split(".")).with_suffix(".py")
    return f"{path}:{function}" if path.is_file() else name


# ---- values ----------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """A command line's text as YAML would read it."""
    if not isinstance(value, str):
        return value
    try:
        read = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: a date that is none
        return value
    return value.lower() if isinstance(read, str) else read


def _is_off(value: Any) -> bool:
    """Whether a value only switches a name off."""
    value = _plain(value)
    return value is False or (not isinstance(value, (bool, int, float)) and value in OFF)


def _accepts(row: Row, value: Any) -> bool:
    return row.accepted is None or _plain(value) in [_plain(accepted) for accepted in row.accepted]


# ---- messages --------------------------------------------------------------------------------------------------------


def _explain(found: Translated, known: list[str], where: str, prefix: str) -> str:
    """One line for all names: taken as …, not needed because …, not there yet, unknown."""
    if len(found.unknown) == 1 and not found.missing and not found.left_out:
        name = found.unknown[0]
        return f"unknown option {prefix + name if prefix else repr(name)}{where}{_way_out(name, known, prefix)}"
    parts = []
    if found.taken:
        parts.append("taken as: " + ", ".join(f"{name} as {option}" for name, option in sorted(found.taken.items())))
    if found.left_out:
        parts.append("not needed: " + _with_reasons(found.left_out, prefix))
    if found.missing:
        parts.append("not there yet: " + _with_reasons([*found.missing, *found.idle], prefix, found.missing))
    if found.unknown:
        names = sorted(found.unknown)
        parts.append("unknown: " + ", ".join(prefix + name + _hint(name, known, prefix) for name in names))
    return f"not all options{where} can be taken; " + "; ".join(parts)


def _with_reasons(found: Iterable[Row], prefix: str, values: Mapping[Row, Any] | None = None) -> str:
    """`name, name (reason), …`; a name stands with its value where another value would have been accepted."""
    reasons: dict[str, list[str]] = {}
    for row in sorted(found, key=lambda row: row.name):
        shown = f"{prefix}{row.name}"
        if values is not None and row.kind != NOT_YET:
            shown += f"={values[row]}"
        text = f"{row.text} takes no such value" if row.kind == TAKEN else row.text
        reasons.setdefault(text, []).append(shown)
    return ", ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items())


def _way_out(name: str, known: list[str], prefix: str) -> str:
    """What to give in place of an unknown name, as the end of an error message."""
    if name == "lora_adapter_path" and "model" in known:  # of training commands alone
        beside = f", or beside its base as {prefix}lora_modules NAME=FOLDER" if "lora_modules" in known else ""
        return f"; give the adapter's folder as {prefix}model{beside}"
    return nearest(name, known, prefix)


def _hint(name: str, known: list[str], prefix: str) -> str:
    found = _way_out(name, known, prefix).removeprefix("; ")
    return f" ({found})" if found else ""
