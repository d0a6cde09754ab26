"""Options of runs of several processes, and how many there are."""

import os
from collections.abc import Mapping
from typing import Any

from ..options import Options, check_range, option, require

# What launchers tell a process: how many there are, its place among all of them, and its place on its own host. Open
# MPI's mpirun; the mpiexec of MPICH, Intel and others; srun (SLURM_NTASKS also stands in a batch script, one process).
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "SLURM_LOCALID")


class TensorOptions(Options):
    """How many processes share a model (tensor parallelism)."""

    group = "several processes"
    tensor_parallel_size: int = option(
        1, "processes that share each model: its heads, the columns of its MLP and its ids are shared out among them"
    )
    tensor_parallel_invariant: bool = option(
        False, "add nothing up across these processes in the forward pass, at the price of gathering more"
    )

    def __post_init__(self) -> None:
        check_range(self, "tensor_parallel_size", 1)


class ParallelOptions(TensorOptions):
    """For a run that mpirun or srun started as several processes; others they do not touch."""

    fast_reduction: bool = option(
        False, "add gradients up in the library's own order; the default, in order of ranks, repeats bit for bit"
    )
    zero_stage: int = option(
        0,
        "ZeRO: what a process keeps of its share of the weights alone; 1: AdamW's states; 2: gradients too; 3: while "
        "training runs the weights too; 0: nothing",
    )
    ddp_timeout: int = option(1800, "seconds that a process waits for the others before the run ends")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "ddp_timeout", 1)
        check_range(self, "zero_stage", 0, 3)
        require(
            self.tensor_parallel_size == 1 or not self.zero_stage,
            f"tensor_parallel_size={self.tensor_parallel_size} shares the optimizer's states out already, and "
            f"zero_stage={self.zero_stage} does not know its parts: leave one of them out",
        )


def num_processes(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes mpirun or srun started as this run; 1 without them."""
    return max(_first(SIZES, environment, 1), 1)


def launched_rank(environment: Mapping[str, str] = os.environ) -> int:
    """This process's place among them, as the launcher says."""
    return _first(RANKS, environment, 0) if num_processes(environment) > 1 else 0


def local_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """This process's place among those of its host, None where the launcher does not say."""
    return _first(LOCAL_RANKS, environment, None)


def _first(names: tuple[str, ...], environment: Mapping[str, str], default: Any) -> Any:
    return next((int(environment[name]) for name in names if environment.get(name, "").isdigit()), default)
