"""doctor's line about CuPy: which package is in use where two are installed."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def package(folder: Path, name: str, version: str) -> Path:
    """A folder for sys.path with an empty `cupy` of this package."""
    (folder / "cupy").mkdir(parents=True)
    (folder / "cupy" / "__init__.py").write_text("")
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def cupy_line(*folders: Path) -> str:
    source = str(ROOT / "cukit/backend/cuda/versions.py")
    code = (
        "import runpy, sys; sys.path[:0] = sys.argv[1:];"
        f"print(runpy.run_path({source!r})['library_versions']()['CuPy'])"
    )
    run = [sys.executable, "-I", "-S", "-c", code, *map(str, folders)]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()


def test_the_package_in_use_is_the_one_that_is_imported(tmp_path):
    twelve = package(tmp_path / "12", "cupy-cuda12x", "14.2.0")
    thirteen = package(tmp_path / "13", "cupy-cuda13x", "14.3.0")
    assert cupy_line(twelve) == "cupy-cuda12x 14.2.0"
    both = cupy_line(thirteen, twelve)
    assert both.startswith("cupy-cuda13x 14.3.0 (also installed: cupy-cuda12x 14.2.0; only one may be")
    assert cupy_line(twelve, thirteen).startswith("cupy-cuda12x 14.2.0 (also installed: cupy-cuda13x 14.3.0")


@pytest.mark.parametrize(
    "text, version",
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (a)\n", "580.95.05"),
        ("something else 12\n", None),
    ],
)
def test_the_drivers_version_is_what_the_system_says(tmp_path, text, version):
    about = tmp_path / "version"
    about.write_text(text)
    driver_version = runpy.run_path(str(ROOT / "cukit/backend/cuda/versions.py"))["driver_version"]
    first = driver_version(about).split(", ")[0]
    assert first == version if version else re.fullmatch(r"CUDA \d+\.\d|not found", first)
