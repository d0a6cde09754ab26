"""The CUDA backend: the same names as the NumPy shelf (backend.CONTRACT), launching kernels/*.cu and cuBLAS through
CuPy. One process drives one card.

CUKIT_CHECK=1 runs every call on the NumPy shelf too and compares; CUKIT_LOG=1 writes each launch to stderr before it
happens.
"""

import os

from .. import shelf_names

_names = shelf_names(__name__)
globals().update(_names)
__all__ = sorted(_names)


def problem() -> str | None:
    """Why kernels cannot run on this machine, in one phrase, or None if they can."""
    import cupy

    try:
        if not cupy.cuda.runtime.getDeviceCount():
            return "no GPU is visible (is CUDA_VISIBLE_DEVICES set?)"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"the driver refuses: {error}"
    capability = cupy.cuda.Device().compute_capability
    if int(capability) < 80:
        return f"the GPU's compute capability {capability[:-1]}.{capability[-1]} is below 8.0 (A100)"
    return None


if os.environ.get("CUKIT_CHECK") == "1":
    from . import checked

    checked.wrap(globals())
