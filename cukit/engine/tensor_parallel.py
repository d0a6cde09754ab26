"""An engine of several ranks that share a model: each of them runs the same program (SPMD).

Every rank makes the same calls with the same arguments, from one thread. What a step does follows from the requests,
the seeds, the number of blocks and the tokens drawn; all of them are the same on each rank, so that all plan the same
steps and meet in the same exchanges. No seed needs to be sent: a request without one gets it from config.seed. The
number of blocks is planned for the rank with the least memory.
"""

from __future__ import annotations

from typing import Any

from ..models.tensor_parallel import TensorParallel
from ..options import require
from ..parallel.config import TensorOptions, num_processes
from ..parallel.world import world


def take_tensor(options: dict[str, Any]) -> TensorParallel | None:
    """All processes of this run as the ranks of one model, None where each model is one process's; TensorOptions are
    taken out of the options. ValueError in one line unless there are tensor_parallel_size processes.
    """
    taken = TensorOptions(**{name: options.pop(name) for name in TensorOptions.options() if name in options})
    size, found = taken.tensor_parallel_size, num_processes()
    if size == 1:
        return None
    require(
        found == size, f"tensor_parallel_size={size} needs {size} processes, and this run has {found}: {start(size)}"
    )
    return TensorParallel(world(), taken.tensor_parallel_invariant)


def start(size: int) -> str:
    """How a run of so many processes is started."""
    return f"start it with mpirun -n {size}"


def least_memory(tensor: TensorParallel | None, backend: Any) -> dict[str, Any]:
    """free_bytes and total_bytes for plan_memory: those of the rank that has least. Every rank calls it."""
    if tensor is None:
        return {}
    found = tensor.group.gather_values(backend.memory_info(), "plan of memory")
    return {name: min(values) for name, values in zip(("free_bytes", "total_bytes"), zip(*found), strict=True)}
