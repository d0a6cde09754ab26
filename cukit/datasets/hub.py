"""Data sets by their names on the Hugging Face hub: the files of one configuration and split, in the local cache."""

from dataclasses import dataclass
from pathlib import Path

from ..hub import Listing, fetch, list_files, parse_name
from .layout import Chosen, NoReadableFiles, choose, converted

CONVERTED = "refs/convert/parquet"  # the branch where the hub puts its own conversion of what main holds


@dataclass(frozen=True)
class Source:
    """NAME[@REVISION][:CONFIG[:SPLIT]]"""

    name: str
    revision: str | None
    config: str | None
    split: str | None


def split_source(text: str) -> tuple[str, str | None, str | None]:
    """(what stands before the first colon, configuration, split); what is empty is None."""
    head, config, split = ([*text.split(":", 2), "", ""])[:3]
    return head, config or None, split or None


def parse_source(text: str) -> Source | None:
    """The parts of a name of the hub; None for what cannot be one. A data set's name has an owner."""
    head, config, split = split_source(text)
    named = parse_name(head)
    return None if named is None or "/" not in named[0] else Source(*named, config, split)


def fetch_split(source: Source, use: str = "train") -> tuple[list[Path], str]:
    """Local copies of the files of the configuration and split, and in words what they are; see layout.choose."""
    listing = list_files(source.name, "dataset", source.revision)
    where = f"data set {source.name!r}"
    readme = _readme(listing)
    try:
        chosen = choose(listing.files, readme, where, source.config, source.split, use)
    except NoReadableFiles as error:
        listing, chosen = _choose_converted(source, use, error)
    folder = fetch(listing, chosen.files)
    what = f"{source.name}: configuration {chosen.config}, split {chosen.split}, commit {listing.commit:.8}"
    return [folder / file for file in chosen.files], what


def _readme(listing: Listing) -> str:
    if "README.md" not in listing.files:
        return ""
    return (fetch(listing, ["README.md"]) / "README.md").read_text(encoding="utf-8", errors="replace")


def _choose_converted(source: Source, use: str, error: NoReadableFiles) -> tuple[Listing, Chosen]:
    """What the hub has converted to Parquet of a data set in another format; it exists for main alone."""
    if source.revision is not None:
        raise ValueError(f"{error}; the hub converts main alone, so leave @{source.revision} out") from None
    try:
        listing = list_files(source.name, "dataset", CONVERTED)
    except ValueError as missing:
        raise ValueError(f"{error}; and the hub's own conversion was not found: {missing}") from None
    where = f"data set {source.name!r} as the hub has converted it"
    return listing, choose(listing.files, converted(listing.files), where, source.config, source.split, use)
