"""Which CuPy package is in use, the CUDA libraries that it finds, and the driver; for `cukit doctor` and run.json."""

import importlib
import importlib.util
import re
from importlib import metadata
from pathlib import Path

CUPY_PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
WHEELS = {
    "NVRTC": ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc"),
    "cuBLAS": ("nvidia-cublas-cu12", "nvidia-cublas"),
}


def library_versions() -> dict[str, str]:
    """{"CuPy": …, "NVRTC": …, "cuBLAS": …, "driver": …}: versions as the libraries themselves say, or why not."""
    packages = {name: f"{name} {found}" for name in CUPY_PACKAGES if (found := _installed(name))}
    in_use = next((name for name in packages if _is_imported(name)), None)
    cupy = packages.pop(in_use, "a package of an unknown name")
    if packages:
        others = ", ".join(packages.values())
        cupy += f" (also installed: {others}; only one may be: uninstall all of them, then install one)"
    return {
        "CuPy": cupy,
        "NVRTC": _asked("NVRTC", _nvrtc_version),
        "cuBLAS": _asked("cuBLAS", _cublas_version),
        "driver": driver_version(),
    }


def driver_version(about: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The driver's own version where the system tells it (Linux), and the newest CUDA that it serves."""
    found = []
    try:
        found += re.findall(r"Kernel Module(?: for \S+)?\s+(\d[\d.]+)", about.read_text(errors="replace"))[:1]
    except OSError:
        pass
    try:
        number = importlib.import_module("cupy_backends.cuda.api.runtime").driverGetVersion()
        found += [f"CUDA {number // 1000}.{number % 1000 // 10}"] if number else []
    except Exception:  # what CuPy raises depends on what is missing
        pass
    return ", ".join(found) or "not found"


def _is_imported(package: str) -> bool:
    """Whether `import cupy` takes the files of this package."""
    spec = importlib.util.find_spec("cupy")
    folder = Path(str(metadata.distribution(package).locate_file("cupy")))
    return spec is not None and spec.origin is not None and Path(spec.origin).parent.resolve() == folder.resolve()


def _nvrtc_version() -> str:
    return ".".join(map(str, importlib.import_module("cupy_backends.cuda.libs.nvrtc").getVersion()))


def _cublas_version() -> str:
    cublas = importlib.import_module("cupy_backends.cuda.libs.cublas")
    handle = cublas.create()  # fails without a card
    try:
        number = cublas.getVersion(handle)
    finally:
        cublas.destroy(handle)
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"  # 120901 is 12.9.1


def _asked(name: str, version) -> str:
    try:
        return version()
    except Exception as error:  # what CuPy raises depends on what is missing; the wheel still says what is installed
        wheel = next((f"{package} {found}" for package in WHEELS[name] if (found := _installed(package))), None)
        return f"{wheel} (installed; not asked: no card)" if wheel else f"not found ({type(error).__name__})"


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
