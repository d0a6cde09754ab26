"""Where arrays live: the only place that asks. A backend is a module; numpy/ and cuda/ have equal public names."""

from importlib import import_module
from types import ModuleType

_module_of_type: dict[type, ModuleType] = {}


def backend_of(array) -> ModuleType:
    """The backend module that owns `array` (by its type, cached)."""
    kind = type(array)
    module = _module_of_type.get(kind)
    if module is None:
        library = kind.__module__.partition(".")[0]
        if library not in ("numpy", "cupy"):
            raise TypeError(f"expected a numpy or cupy array, got {kind.__module__}.{kind.__name__}")
        module = _module_of_type[kind] = _load("cpu" if library == "numpy" else "cuda")
    return module


def backend_for(device: str) -> ModuleType:
    """The backend module for a device name: "cpu", "cuda", or "auto" (cuda where a GPU and CuPy are present).

    Raises ValueError for another name, or for "cuda" where it cannot run.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device {device!r} is not known: choose auto, cpu or cuda")
    if device == "auto":
        device = "cpu" if cuda_problem() else "cuda"
    elif device == "cuda" and (problem := cuda_problem()):
        raise ValueError(f"device 'cuda' cannot be used: {problem}; use --device cpu")
    return _load(device)


def cuda_problem() -> str | None:
    """Why the CUDA backend cannot run here in one phrase, or None if it can. Does not import CuPy unless there is a
    driver.
    """
    import ctypes.util
    import importlib.util

    if importlib.util.find_spec("cukit.backend.cuda") is None:
        return "this version has no CUDA kernels yet"
    if ctypes.util.find_library("cuda") is None:
        return "no NVIDIA driver was found"
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed (pip install 'cukit[cuda12]' or 'cukit[cuda13]')"
    return _load("cuda").problem()


def kernel_compiler() -> ModuleType:
    """The module that compiles kernels/*.cu (no GPU needed). ValueError where CuPy or NVRTC is missing."""
    try:
        return import_module("cukit.backend.cuda.compile")
    except ImportError as error:
        raise ValueError(
            f"compiling kernels needs CuPy and NVRTC ({error}): pip install 'cukit[compile]', or "
            f"'cukit[cuda12]' with a GPU"
        ) from None


def _load(device: str) -> ModuleType:
    return import_module({"cpu": "cukit.backend.numpy", "cuda": "cukit.backend.cuda"}[device])
