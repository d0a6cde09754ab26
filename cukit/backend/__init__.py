"""The backend of an array or a device. No other code asks where arrays live.

A backend is a package of array functions, numpy/ or cuda/; each is called a shelf. CONTRACT lists what each offers.
"""

import ctypes.util
import glob
import importlib.util
import logging
import os
import shutil
from importlib import import_module
from types import ModuleType

logger = logging.getLogger(__name__)
INSTALL_CUPY = "pip install 'cukit[cuda13]' (driver 580 or newer) or 'cukit[cuda12]'"
_said: set[str] = set()
# File of a shelf -> the public names in it. A function has one signature on both shelves (tests/test_architecture.py).
CONTRACT = {
    "activation": ("silu_mul_backward", "silu_mul_backward_remade", "silu_mul_forward"),
    "adapter": ("change_rows", "linear_beside_backward_input", "linear_beside_forward", "merge_adapter"),
    "attention": ("attention_backward", "attention_forward"),
    "device": (
        "Event",
        "SideCopies",
        "accumulator",
        "array",
        "default_dtype",
        "device_name",
        "download",
        "dtype_of",
        "empty",
        "host_buffer",
        "is_asynchronous",
        "name",
        "synchronize",
        "to_numpy",
        "upload",
        "zeros",
    ),
    "embedding": ("embedding_backward", "embedding_forward"),
    "graph": ("Graphs",),
    "linear": (
        "WideCopies",
        "linear_backward_bias",
        "linear_backward_input",
        "linear_backward_weight",
        "linear_forward",
        "row_bucket",
        "set_exact",
    ),
    "loss": ("token_logprobs_backward", "token_logprobs_forward"),
    "memory": (
        "Reservation",
        "free_unused_memory",
        "limit_memory",
        "memory_info",
        "memory_limit",
        "memory_taken",
    ),
    "norm": (
        "add_rms_norm_backward",
        "add_rms_norm_backward_remade",
        "add_rms_norm_forward",
        "rms_norm_backward",
        "rms_norm_forward",
        "sum_add_rms_norm_forward",
    ),
    "optimizer": ("AdamWSteps", "adamw_step", "adamw_step_blocks", "store_weights", "sum_in_order", "sums_of_squares"),
    "paged_attention": (
        "copy_blocks",
        "paged_decode_attention",
        "paged_prefill_attention",
        "qk_norm_rope_store",
        "rope_paged_decode_attention",
        "store_kv",
        "update_block_tables",
    ),
    "policy_loss": ("policy_loss_forward",),
    "ppo_loss": ("ppo_loss_forward",),
    "quantized": ("dequantize_weight", "quantize_weight", "quantized_linear_forward"),
    "random": ("fill_normal",),
    "returns": ("gae", "token_rewards", "whiten"),
    "rope": ("qk_norm_rope_backward", "qk_norm_rope_forward"),
    "sampling": ("filter_logits", "newest_tokens", "sample"),
    "score": ("score_backward", "score_forward"),
}

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
        problem = cuda_problem()
        if problem and card_present():
            _say_once(f"the CPU is used although an NVIDIA card is present: {problem}")
        device = "cpu" if problem else "cuda"
    elif device == "cuda" and (problem := cuda_problem()):
        raise ValueError(f"device 'cuda' cannot be used: {problem}; use --device cpu")
    return _load(device)


def cuda_problem() -> str | None:
    """Why the CUDA backend cannot run here in one phrase, or None if it can. Does not import CuPy unless there is a
    driver.
    """
    if importlib.util.find_spec("cukit.backend.cuda") is None:
        return "this version has no CUDA kernels yet"
    if not _driver_present():
        return "no NVIDIA driver was found (libcuda.so.1)"
    if importlib.util.find_spec("cupy") is None:
        return f"CuPy is not installed: {INSTALL_CUPY}"
    try:
        return _load("cuda").problem()
    except Exception as error:  # CuPy raises what its libraries raise: ImportError, OSError, RuntimeError, …
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return f"CuPy is installed but does not work ({reason}): {INSTALL_CUPY}"


def card_present() -> bool:
    """Whether this machine has an NVIDIA card that the user has not hidden, asked without CuPy."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    files = (*glob.glob("/dev/nvidia[0-9]*"), *glob.glob("/proc/driver/nvidia/gpus/*"))
    return bool(files) or shutil.which("nvidia-smi") is not None


def _driver_present() -> bool:
    if ctypes.util.find_library("cuda") or ctypes.util.find_library("nvcuda"):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")  # find_library() asks programs that a small container lacks
    except OSError:
        return False
    return True


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        logger.warning(text)


def kernel_compiler() -> ModuleType:
    """The module that compiles kernels/*.cu (no GPU needed). ValueError where CuPy or NVRTC is missing."""
    try:
        return import_module("cukit.backend.cuda.compile")
    except ImportError as error:
        raise ValueError(
            f"compiling kernels needs CuPy and NVRTC ({error}): pip install 'cukit[compile]', or "
            f"'cukit[cuda12]' with a GPU"
        ) from None


def cuda_versions() -> dict[str, str]:
    """The CuPy package in use and the versions of NVRTC and cuBLAS; {} where CuPy cannot be imported."""
    try:
        return import_module("cukit.backend.cuda.versions").library_versions()
    except Exception:  # cuda_problem() says what is wrong
        return {}


def nccl() -> ModuleType:
    """The module of exchanges between the GPUs of several processes. ValueError where CuPy finds no NCCL."""
    module = import_module("cukit.backend.cuda.nccl")
    module.check()
    return module


def shelf_names(shelf: str) -> dict:
    """Public name -> object, of the files of a shelf ("cukit.backend.numpy"). AttributeError where one is missing."""
    return {
        name: getattr(module, name)
        for file, names in CONTRACT.items()
        for module in [import_module(f"{shelf}.{file}")]
        for name in names
    }


def _load(device: str) -> ModuleType:
    return import_module({"cpu": "cukit.backend.numpy", "cuda": "cukit.backend.cuda"}[device])
