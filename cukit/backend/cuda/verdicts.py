"""What exact.py found on this card, kept on disk beside the compiled kernels: a comparison takes milliseconds, and a
run of batches of many sizes needs hundreds.

A file holds the verdicts of one card, driver, cuBLAS and version of these sources, one JSON list a line; any of them
changes the file's name.
"""

import functools
import hashlib
import json
import logging
from pathlib import Path

import cupy as cp
from cupy_backends.cuda.api import runtime

from .compile import cache_folder, source_digest

logger = logging.getLogger(__name__)
Key = tuple[int, int, str, bool, int | str]  # out, in, dtype, biased, rows or "in order"


class Verdicts:
    """Whether the product of a Key has the reference's bits. A line that cannot be read counts as absent; where the
    file cannot be written, verdicts last as long as the process.
    """

    def __init__(self, path: Path):
        self._path, self._found = path, _read(path)

    def get(self, key: Key) -> bool | None:
        return self._found.get(key)

    def add(self, key: Key, verdict: bool) -> None:
        self._found[key] = verdict
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as file:  # one write a line: lines of processes do not mix
                file.write((json.dumps([*key, verdict]) + "\n").encode())
        except OSError as error:
            logger.info("comparisons of products are not kept: %s", error)


def _read(path: Path) -> dict[Key, bool]:
    found: dict[Key, bool] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return found
    for line in lines:
        try:
            *key, verdict = json.loads(line)
        except (ValueError, TypeError):
            continue
        if isinstance(verdict, bool) and [type(word) for word in key[:4]] == [int, int, str, bool] and len(key) == 5:
            found[tuple(key)] = verdict
    return found


@functools.cache
def card_verdicts() -> Verdicts:
    """Those of the current device."""
    from cupy_backends.cuda.libs import cublas  # the import fails where cuBLAS is not installed

    properties = runtime.getDeviceProperties(cp.cuda.runtime.getDevice())
    card = properties["name"], properties["multiProcessorCount"], runtime.driverGetVersion()
    library = cublas.getVersion(cp.cuda.device.get_cublas_handle())
    own = [Path(__file__).with_name(name).read_bytes() for name in ("exact.py", "cublas.py")]
    key = repr((card, library, source_digest(), own))
    return Verdicts(cache_folder() / f"exact-{hashlib.sha256(key.encode()).hexdigest()[:16]}.jsonl")
