"""Models by their names on the Hugging Face hub: the files that a model folder needs here, and no others."""

import json
from fnmatch import fnmatch
from pathlib import Path

from ..hub import Listing, fetch, list_files, parse_name

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def fetch_model(text: str, weights: bool = True) -> Path:
    """The local copy of `owner/name[@revision]`. Without `weights`: its configuration and tokenizer alone. An adapter
    comes whole: it is small.

    ValueError in one line, before anything large is fetched, if the repository holds no safetensors model.
    """
    named = parse_name(text)
    if named is None:
        raise ValueError(f"model folder {text!r} does not exist, and it is no name of the hub (owner/name[@revision])")
    listing = list_files(named[0], "model", named[1])
    if "config.json" not in listing.files and {ADAPTER_CONFIG, ADAPTER_WEIGHTS} <= set(listing.files):
        whole = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, *SMALL_FILES)
        return fetch(listing, [file for file in whole if file in listing.files])
    if "config.json" not in listing.files:
        raise ValueError(f"model {text!r} has no config.json on the hub: it is no model in Hugging Face's format")
    small = [file for file in (*SMALL_FILES, INDEX) if file in listing.files]
    folder = fetch(listing, small)
    return fetch(listing, [*small, *weight_files(listing, folder)]) if weights else folder


def weight_files(listing: Listing, folder: Path) -> list[str]:
    """The shards that the index names or, without an index, the one file."""
    if INDEX in listing.files:
        try:
            names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ValueError(f"{folder / INDEX} is not a safetensors index (an object with weight_map)") from None
        if missing := sorted(str(name) for name in names if name not in listing.files):
            raise ValueError(f"model {listing.name!r}: its {INDEX} names {missing[0]}, which it does not have")
        return sorted(names)
    if WEIGHTS in listing.files:
        return [WEIGHTS]
    hint = "; .bin checkpoints are not read" if any(fnmatch(file, "*.bin") for file in listing.files) else ""
    raise ValueError(f"model {listing.name!r} has neither {WEIGHTS} nor {INDEX} on the hub{hint}")
