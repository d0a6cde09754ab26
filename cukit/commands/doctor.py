"""doctor: versions and devices, for a bug report."""

import os
import platform
from importlib import metadata
from typing import Any

import cukit

LIBRARIES = ("numpy", "ml_dtypes", "safetensors", "tokenizers", "pyyaml", "jinja2", "rich", "threadpoolctl", "psutil")


def doctor(values: dict[str, Any]) -> None:
    from ..backend import backend_for, card_present, cuda_problem, cuda_versions

    print(f"cukit {cukit.__version__}, Python {platform.python_version()}, {platform.platform()}")
    for name in LIBRARIES:
        try:
            print(f"  {name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            print(f"  {name} is not installed")
    versions = cuda_versions() or {"CuPy": "not installed (needed for GPUs)"}
    print("  " + "; ".join(f"{name}: {version}" for name, version in versions.items()))
    cpu_free, cpu_total = backend_for("cpu").memory_info()
    print(f"cpu: {os.cpu_count()} cores, {cpu_free / 2**30:.1f} of {cpu_total / 2**30:.1f} GiB free")
    if problem := cuda_problem():
        print(f"cuda: {'an NVIDIA card is present, but ' if card_present() else ''}{problem}")
    else:
        cuda = backend_for("cuda")
        free, total = cuda.memory_info()
        print(f"cuda: {cuda.device_name()}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    print(f"device auto means {backend_for('auto').name}")
