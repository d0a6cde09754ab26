"""The Hugging Face hub by huggingface_hub: which files a repository has, and local copies of some of them.

The cache is huggingface_hub's own. HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE mean what they mean there. What a
repository holds is remembered beside the cache, so that an offline run knows which files belong together.
"""

import glob
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

logger = logging.getLogger(__name__)
NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?:@(?P<revision>[^:@\s]+))?", re.ASCII)
KINDS = {"model": "model", "dataset": "data set"}
ANCHORS = {"model": "config.json", "dataset": "README.md"}  # a file that a cached repository most often has
WORTH_SAYING = 1_000_000  # bytes of a download
SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(.*)")


@dataclass(frozen=True)
class Listing:
    """A repository at one commit."""

    name: str
    kind: str  # "model" or "dataset"
    commit: str
    sizes: dict[str, int | None]  # file -> bytes (None: not known)

    @property
    def files(self) -> list[str]:
        return list(self.sizes)


def parse_name(text: str) -> tuple[str, str | None] | None:
    """(name, revision) of `owner/name` or `owner/name@revision`; None for what cannot be a name of the hub."""
    match = NAME.fullmatch(text)
    if match is None or ".." in match["name"] or "--" in match["name"]:
        return None
    return match["name"], match["revision"]


def list_files(name: str, kind: str, revision: str | None = None) -> Listing:
    """The files of a repository at a revision (a branch, tag or commit; default: main).

    Where the hub cannot be reached, what is remembered or cached stands in, which is said. ValueError in one line.
    """
    try:
        from huggingface_hub import HfApi, constants
        from huggingface_hub.errors import OfflineModeIsEnabled
    except ImportError:
        raise ValueError(
            f"{name!r} is no file or folder here, and as a name of the hub it needs: pip install huggingface_hub"
        ) from None
    try:
        if constants.HF_HUB_OFFLINE:
            raise OfflineModeIsEnabled("no request is made")
        info = HfApi(library_name="cukit").repo_info(name, repo_type=kind, revision=revision, files_metadata=True)
    except Exception as error:
        if _answered(error) or (known := _remembered(name, kind, revision)) is None:
            raise _explained(error, name, kind, revision) from None
        if not isinstance(error, OfflineModeIsEnabled):
            logger.warning(f"the hub cannot be reached: the cached files of {name} are used (commit {known.commit:.8})")
        return known
    found = Listing(name, kind, info.sha, {file.rfilename: file.size for file in info.siblings or ()})
    found = Listing(name, kind, info.sha, {file: found.sizes[file] for file in found.sizes if _is_inside(file)})
    _remember(found, revision)
    return found


def fetch(listing: Listing, files: list[str]) -> Path:
    """The folder of the repository's copy in the cache, with these files in it; what it lacks is downloaded."""
    from huggingface_hub import constants, snapshot_download

    if not (missing := _missing(listing, files)):
        return _snapshot(listing, files[0])
    sizes = [listing.sizes.get(file) or 0 for file in missing]
    if sum(sizes) >= WORTH_SAYING:
        count = f"{len(missing)} file{'s' if len(missing) > 1 else ''}"
        logger.info(f"{listing.name}: fetching {count}, {sum(sizes) / 1e6:,.1f} MB")
    try:
        with _progress_bars(sum(sizes) >= WORTH_SAYING and sys.stderr is not None and sys.stderr.isatty()):
            folder = snapshot_download(
                listing.name,
                repo_type=listing.kind,
                revision=listing.commit,
                allow_patterns=[glob.escape(file) for file in files],
                library_name="cukit",
                local_files_only=constants.HF_HUB_OFFLINE,
            )
    except Exception as error:
        raise _explained(error, listing.name, listing.kind, listing.commit) from None
    if missing := [file for file in files if not (Path(folder) / file).is_file()]:
        raise ValueError(f"{KINDS[listing.kind]} {listing.name!r}: {missing[0]} is not in the cache; {_offline_hint()}")
    return Path(folder)


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """huggingface_hub's bars as it draws them, or none; its own switches stay as they are."""
    from huggingface_hub import constants, utils

    if shown or constants.HF_HUB_DISABLE_PROGRESS_BARS is not None or utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


def _missing(listing: Listing, files: list[str]) -> list[str]:
    from huggingface_hub import try_to_load_from_cache

    def is_cached(file: str) -> bool:
        return isinstance(try_to_load_from_cache(listing.name, file, None, listing.commit, listing.kind), str)

    return [file for file in files if not is_cached(file)]


def _snapshot(listing: Listing, file: str) -> Path:
    from huggingface_hub import try_to_load_from_cache

    path = Path(str(try_to_load_from_cache(listing.name, file, None, listing.commit, listing.kind)))
    return path.parents[len(PurePosixPath(file).parts) - 1]


def _is_inside(file: str) -> bool:
    """Whether this is a path within the repository's folder; a listing is untrusted."""
    return ".." not in PurePosixPath(file).parts and not file.startswith("/") and "\\" not in file


# ---- what is known without the hub -----------------------------------------------------------------------------------


def _memory(name: str, kind: str, revision: str | None) -> Path:
    from huggingface_hub import cached_assets_path, constants

    folder = cached_assets_path(
        "cukit", namespace=f"{kind}s", subfolder=f"{name}@{revision or 'main'}", assets_dir=constants.HF_ASSETS_CACHE
    )
    return folder / "listing.json"


def _remember(listing: Listing, revision: str | None) -> None:
    text = json.dumps({"commit": listing.commit, "sizes": listing.sizes})
    for key in {revision, listing.commit}:
        try:
            path = _memory(listing.name, listing.kind, key)
            temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        except OSError as error:  # a cache that cannot be written serves this run all the same
            logger.warning(f"{error.filename}: {error.strerror}; {listing.name} cannot be found offline later")


def _remembered(name: str, kind: str, revision: str | None) -> Listing | None:
    """The listing of an earlier call, or of what another program left in the cache if no shard of it is missing."""
    from huggingface_hub import try_to_load_from_cache

    try:
        values = json.loads(_memory(name, kind, revision).read_text(encoding="utf-8"))
        return Listing(name, kind, values["commit"], values["sizes"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    anchor = try_to_load_from_cache(name, ANCHORS[kind], None, revision, kind)
    if not isinstance(anchor, str):
        return None
    folder = Path(anchor).parent
    files = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    if _has_all_shards(files):
        return Listing(name, kind, folder.name, dict.fromkeys(files))
    return None


def _has_all_shards(files: list[str]) -> bool:
    counts: dict[tuple[str, ...], int] = {}
    for file in files:
        if match := SHARD.fullmatch(file):
            key = (match[1], match[3], match[4])
            counts[key] = counts.get(key, 0) + 1
    return all(int(key[1]) == count for key, count in counts.items())


# ---- what went wrong, in one line ------------------------------------------------------------------------------------


def _answered(error: Exception) -> bool:
    """Whether the hub said no, in contrast to a hub that cannot be reached or is ill."""
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    return isinstance(error, (HFValidationError, RepositoryNotFoundError, RevisionNotFoundError))


def _offline_hint() -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE is set: run once without it, or set HF_HOME (cache: {constants.HF_HUB_CACHE})"
    return f"run it again with a connection to {constants.ENDPOINT}"


def _explained(error: Exception, name: str, kind: str, revision: str | None) -> ValueError:
    from huggingface_hub import constants, errors

    what = f"{KINDS[kind]} {name!r}"
    if isinstance(error, errors.GatedRepoError):
        return ValueError(f"{what} is gated: accept its terms on its page of the hub, then log in by `hf auth login`")
    if isinstance(error, errors.RevisionNotFoundError):
        return ValueError(f"{what} has no revision {revision!r}: give a branch, a tag or a commit")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ValueError(
            f"{what} is no file or folder here, and {constants.ENDPOINT} has none of that name; "
            "if it is a private one, log in by `hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError)):
        at = f" at revision {revision!r}" if revision else ""
        return ValueError(f"{what}{at} is no file or folder here and not wholly in the cache; {_offline_hint()}")
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return ValueError(f"{what} is no file or folder here, and cannot be had from {constants.ENDPOINT}: {reason:.300}")
