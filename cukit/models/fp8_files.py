"""Tensors of checkpoints with FP8 weights, as numbers (what config.json says of them: fp8_config.py)."""

import json
import struct
from pathlib import Path

import numpy as np

from ..backend.e4m3 import VALUES
from ..options import require
from .fp8_config import STORED

FLOATS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def decoded(name: str, codes: np.ndarray, scale: np.ndarray, block: tuple[int, int] | None) -> np.ndarray:
    """codes (O, I) uint8 times their scale, float32: one number, one a row ((O,) or (O, 1)), or one a block."""
    rows, columns = codes.shape
    if scale.size == 1:
        factors = scale.reshape(1, 1)
    elif scale.shape in ((rows,), (rows, 1)):
        factors = scale.reshape(rows, 1)
    else:
        height, width = block or (0, 0)
        fits = block is not None and scale.shape == (-(-rows // height), -(-columns // width))
        require(fits, f"{name} has shape {[rows, columns]}, its scale {list(scale.shape)}, with blocks of {block}")
        factors = np.repeat(np.repeat(scale, height, axis=0)[:rows], width, axis=1)[:, :columns]
    return VALUES[codes] * factors.astype(np.float32)


def read_raw(path: Path, name: str) -> np.ndarray:
    """A tensor of a safetensors file: uint8 codes of FP8, which the library's NumPy reader does not know, or float32.

    The library has opened the file before: its header is sound.
    """
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        entry = json.loads(file.read(size))[name]
        start, stop = entry["data_offsets"]
        file.seek(8 + size + start)
        data = file.read(stop - start)
    if entry["dtype"] == STORED:
        return np.frombuffer(data, np.uint8).reshape(entry["shape"])
    require(entry["dtype"] in FLOATS, f"{name} is stored as {entry['dtype']}; a scale is F32, F16 or BF16")
    values = np.frombuffer(data, FLOATS[entry["dtype"]])
    if entry["dtype"] == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32).reshape(entry["shape"])
