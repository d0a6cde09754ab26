"""Shapes and a card of numbers for the tests of the planner."""

from types import SimpleNamespace

from cukit.backend import backend_for
from cukit.bench.subject import SHAPES
from cukit.engine.memory import Plan
from cukit.engine.shapes import CONTEXT_BYTES
from cukit.models.config import ModelConfig

cpu = backend_for("cpu")
GB = 10**9
SHAPE = ModelConfig.from_json(SHAPES["qwen3-0.6b"])


def bucket_of_a_card(rows: int) -> int:
    """row_bucket of the CUDA shelf, which needs CuPy."""
    step = next(
        step for limit, step in ((64, 64), (256, 64), (1024, 128), (4096, 256), (1 << 60, 512)) if rows <= limit
    )
    return 1 << max(rows - 1, 0).bit_length() if rows <= 64 else -(-rows // step) * step


def card(total: int = 80 * GB, free: int | None = None):
    """A backend for shapes alone."""
    return SimpleNamespace(
        name="cuda",
        row_bucket=bucket_of_a_card,
        dtype_of=cpu.dtype_of,
        accumulator=cpu.accumulator,
        memory_info=lambda: (total - CONTEXT_BYTES if free is None else free, total),
        memory_limit=lambda: None,
    )


def bytes_of(plan: Plan, name: str) -> int:
    return sum(item.nbytes for item in plan.items if name in item.name)
