"""Which files of a data set's folder or repository are a configuration's split, by the rules of the hub.

`configs` in README.md's front matter says it. Without them the names do: data/SPLIT-00000-of-00001.*, else a folder or
file name with the word train, validation or test; all files are "train" if no name has such a word.
Source of the rules: the hub's documentation, "File names and splits" and "Data files configuration".
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from .tables import FORMATS, format_of

SHARDED = re.compile(r"data/(?P<split>\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
IGNORED = ("README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
PREFERRED = {"train": ("train",), "test": ("test", "validation", "eval", "dev", "val")}


class NoReadableFiles(ValueError):
    """A data set has no file in a format that is read here."""


@dataclass(frozen=True)
class Chosen:
    config: str
    split: str
    files: list[str]


def choose(
    files: list[str], readme: str, where: str, config: str | None, split: str | None, use: str = "train"
) -> Chosen:
    """The files of `config` and `split`. files: paths relative to the folder; readme: the text of its README.md.

    What is not given must be clear: the only configuration, the one named default or marked as such; and for the split
    train, or for `use` "test" test or validation, or the only one. ValueError in one line that lists the choices.
    """
    configs = _configs(readme, where)
    config = _chosen_config(configs, where, config)
    splits = _splits(files, configs[config], where)
    split = _chosen_split(splits, f"{where}, configuration {config!r}", split, use)
    if not (found := splits[split]):
        raise NoReadableFiles(f"{where}: its README.md names files for the split {split!r}, and none is there")
    if unread := [file for file in found if format_of(file) is None]:
        raise NoReadableFiles(f"{where}: {unread[0]} is none of {', '.join(FORMATS)}")
    return Chosen(config, split, found)


def converted(files: list[str]) -> str:
    """The front matter for the hub's own conversion; its files are CONFIG/SPLIT/0000.parquet."""
    found: dict[str, list[dict]] = {}
    for file in sorted(files):
        parts = PurePosixPath(file).parts
        if len(parts) == 3 and parts[2].endswith(".parquet"):
            entry = {"split": parts[1], "path": f"{parts[0]}/{parts[1]}/*.parquet"}
            if entry not in found.setdefault(parts[0], []):
                found[parts[0]].append(entry)
    configs = [{"config_name": name, "data_files": entries} for name, entries in found.items()]
    return f"---\n{yaml.safe_dump({'configs': configs})}---\n" if configs else ""


# ---- configurations --------------------------------------------------------------------------------------------------


def _configs(readme: str, where: str) -> dict[str, dict]:
    """Name -> what the front matter says of it; one named default if it says nothing."""
    match = re.match(r"\ufeff?---[ \t]*\r?\n(.*?\n)---[ \t]*(\r?\n|$)", readme, re.DOTALL)
    try:
        values = yaml.safe_load(match[1]) if match else None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ValueError(f"{where}: the front matter of its README.md is not YAML") from None
    entries = values.get("configs") if isinstance(values, dict) else None
    if not entries:
        return {"default": {}}
    if not isinstance(entries, list) or not all(isinstance(e, dict) and "config_name" in e for e in entries):
        raise ValueError(f"{where}: `configs` in its README.md must be a list of entries with a config_name")
    return {str(entry["config_name"]): entry for entry in entries}


def _chosen_config(configs: dict[str, dict], where: str, config: str | None) -> str:
    names = ", ".join(configs)
    if config:
        if config not in configs:
            raise ValueError(f"{where} has no configuration {config!r}, it has: {names}; write NAME:CONFIG:SPLIT")
        return config
    marked = [name for name in configs if len(configs) == 1 or name == "default" or configs[name].get("default")]
    if not marked:
        raise ValueError(f"{where} has several configurations, choose one as NAME:CONFIG: {names}")
    return marked[0]


# ---- splits ----------------------------------------------------------------------------------------------------------


def _splits(files: list[str], config: dict, where: str) -> dict[str, list[str]]:
    """Split -> its files, in the order of their names."""
    root = str(config.get("data_dir") or "").strip("./")
    inside = [file for file in sorted(files) if not root or file.startswith(f"{root}/")]
    if config.get("data_files"):
        prefix = f"{root}/" if root else ""
        return {
            split: _matching(inside, [prefix + pattern.removeprefix("./") for pattern in patterns])
            for split, patterns in _patterns(config["data_files"], where).items()
        }
    return _splits_by_name([file[len(root) :].lstrip("/") for file in inside], f"{root}/" if root else "", where)


def _splits_by_name(names: list[str], prefix: str, where: str) -> dict[str, list[str]]:
    seen = [name for name in names if not _is_hidden(name) and PurePosixPath(name).name not in IGNORED]
    kinds = Counter(kind for name in seen if (kind := format_of(name)))
    if not kinds:
        raise NoReadableFiles(f"{where} holds no file with a name in {', '.join(FORMATS)}")
    kind = max(FORMATS, key=lambda one: kinds[one])  # the first of those that are most often there
    seen = [name for name in seen if format_of(name) == kind]
    found: dict[str, list[str]] = {}
    for name in seen:
        if match := SHARDED.fullmatch(name):
            found.setdefault(match["split"], []).append(prefix + name)
    for parts in (slice(None, -1), slice(-1, None)):  # folders, then the name
        if not found:
            for split, words in WORDS.items():
                if files := [name for name in seen if _words(PurePosixPath(name).parts[parts]) & set(words)]:
                    found[split] = [prefix + name for name in files]
    return found or {"train": [prefix + name for name in seen]}


def _words(parts: Iterable[str]) -> set[str]:
    """The words of names; they end at - . _ space and digits."""
    return {word for part in parts for word in re.split(r"[-._ 0-9]", part)}


def _chosen_split(splits: dict[str, list[str]], where: str, split: str | None, use: str) -> str:
    names = ", ".join(splits)
    if split:
        if split not in splits:
            raise ValueError(f"{where} has no split {split!r}, it has: {names}; write NAME:CONFIG:SPLIT")
        return split
    wanted = next((name for name in PREFERRED[use] if name in splits), None)
    if wanted is None and len(splits) > 1:
        raise ValueError(f"{where} has no split {PREFERRED[use][0]!r}, choose one as NAME:CONFIG:SPLIT: {names}")
    return wanted or next(iter(splits))


# ---- patterns --------------------------------------------------------------------------------------------------------


def _patterns(data_files: Any, where: str) -> dict[str, list[str]]:
    """Split -> patterns, of the forms that the hub allows: a text, a list of texts, a list of {split, path}."""
    entries = data_files if isinstance(data_files, list) else [data_files]
    if all(isinstance(entry, str) for entry in entries):
        return {"train": entries}
    found: dict[str, list[str]] = {}
    for entry in entries:
        paths = entry.get("path") if isinstance(entry, dict) and "split" in entry else None
        paths = [paths] if isinstance(paths, str) else paths
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise ValueError(f"{where}: `data_files` in its README.md is no list of entries with split and path")
        found.setdefault(str(entry["split"]), []).extend(paths)
    return found


def _matching(files: list[str], patterns: list[str]) -> list[str]:
    """The files of each pattern in turn, each file once."""
    found: dict[str, None] = {}
    for pattern in patterns:
        try:
            expression = re.compile(_expression(pattern))
        except re.error:
            raise ValueError(f"README.md: {pattern!r} is no pattern of file names") from None
        for file in files:
            asked = PurePosixPath(pattern).name == PurePosixPath(file).name
            hidden = _is_hidden(file) and not _is_hidden(pattern)
            if expression.fullmatch(file) and not hidden and (asked or PurePosixPath(file).name not in IGNORED):
                found[file] = None
    return list(found)


def _expression(pattern: str) -> str:
    """A file pattern as a regular expression: * and ? stay within a name, ** goes through folders."""
    pieces = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    known = {"**/": r"(?:.*/)?", "**": r".*", "*": r"[^/]*", "?": r"[^/]"}

    def piece(text: str) -> str:
        if text in known:
            return known[text]
        if text.startswith("[") and text.endswith("]") and len(text) > 2:
            body = re.escape(text[1:-1]).replace(r"\-", "-").replace(r"\!", "!").replace(r"\^", "^")
            return f"[^{body[1:]}]" if body[0] in "!^" and len(body) > 1 else f"[{body}]"
        return re.escape(text)

    return "".join(map(piece, pieces))


def _is_hidden(path: str) -> bool:
    return any(part.startswith((".", "__")) for part in PurePosixPath(path).parts)
