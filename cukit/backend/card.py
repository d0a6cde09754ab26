"""A card as numbers: what plans need of the CUDA shelf where there is neither CuPy nor a GPU, and what a limit on a
process's memory leaves for its arrays.
"""

from .dtypes import accumulator, resolve

CONTEXT_BYTES = 800 << 20  # the CUDA context, loaded kernels, cuBLAS's own memory; on an H200 up to 0.82 GB
UNKNOWN_BYTES = 1 << 50  # more than any card has


def next_bucket(rows: int) -> int:
    """The smallest row count of the list that is at least `rows`: powers of two to 64, then steps of 64, 128, 256 and
    512.
    """
    if rows <= 64:
        return 1 << max(rows - 1, 0).bit_length()
    step = 64 if rows <= 256 else 128 if rows <= 1024 else 256 if rows <= 4096 else 512
    return -(-rows // step) * step


class Card:
    """Stands in for the CUDA shelf in a plan for a card that is not here, of which a process may take `limit` bytes."""

    name = "cuda"

    def __init__(self, limit: int):
        self.limit = limit

    def memory_info(self) -> tuple[int, int]:
        return UNKNOWN_BYTES, UNKNOWN_BYTES

    def memory_limit(self) -> int:
        return self.limit

    def row_bucket(self, rows: int) -> int:
        return next_bucket(rows)

    def dtype_of(self, dtype):
        return resolve(dtype, "bfloat16", self.name)

    def accumulator(self, dtype):
        return accumulator(dtype)


class Room:
    """What `limit` bytes of a card leave for arrays: all but the CUDA context and libraries.

    used: bytes of the card that are taken by the driver's count, by this process or another. arrays: those among them
    that this process's arrays take, unused parts of pools included. If far more than a context is taken at the start,
    another process holds it; then the context counts as CONTEXT_BYTES and is not measured again.
    """

    def __init__(self, limit: int, used: int, arrays: int):
        self.limit = limit
        self._is_shared = used - arrays > 2 * CONTEXT_BYTES
        self.outside = 0
        self.measure(used, arrays)

    def measure(self, used: int, arrays: int) -> None:
        """Look again at context and libraries, which grow as kernels are loaded; what they once took counts on."""
        found = 0 if self._is_shared else used - arrays
        self.outside = max(self.outside, found, CONTEXT_BYTES)

    @property
    def nbytes(self) -> int:
        """For all arrays of this process."""
        return max(0, self.limit - self.outside)
