"""Writes model folders with FP8 weights, as llm-compressor and Qwen publish them."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from cukit.backend import e4m3

GOLDEN = Path(__file__).parents[1] / "golden"
TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint8": "F8_E4M3"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
}


def write_safetensors(tensors: dict, path: Path) -> None:
    """As the library does; uint8 arrays are E4M3 codes."""
    header, start = {"__metadata__": {"format": "pt"}}, 0
    for name, array in tensors.items():
        stop = start + array.nbytes
        header[name] = {"dtype": TYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(x.tobytes() for x in tensors.values()))


def compressed_config(strategy: str, block=None) -> dict:
    config = json.loads(json.dumps(COMPRESSED))
    config["config_groups"]["group_0"]["weights"] |= {"strategy": strategy, "block_structure": block}
    return config


def make_folder(target: Path, strategy="channel", block=(16, 8), scale_dtype="float32", name="qwen3_tiny", qwen=False):
    """A copy of a golden model with its linear weights in FP8. strategy: tensor, channel or block; qwen: with names
    and config.json as Qwen3's FP8 models. Returns {name: float64 numbers of its weights}.
    """
    shutil.copytree(GOLDEN / name, target)  # name may be an absolute path
    tensors, stored, numbers = load_file(target / "model.safetensors"), {}, {}
    for key, array in tensors.items():
        stored[key], numbers[key] = array, array.astype(np.float64)
        if "_proj.weight" not in key:
            continue
        wide = array.astype(np.float32)
        rows, columns = wide.shape
        height, width = {"tensor": (rows, columns), "channel": (1, columns), "block": block}[strategy]
        shape = -(-rows // height), -(-columns // width)
        padded = np.zeros((shape[0] * height, shape[1] * width), np.float32)
        padded[:rows, :columns] = wide
        scale = np.abs(padded).reshape(shape[0], height, shape[1], width).max(axis=(1, 3)) / 448
        scale = np.maximum(scale, 1e-6).astype(scale_dtype)
        spread = np.repeat(np.repeat(scale.astype(np.float32), height, 0)[:rows], width, 1)[:, :columns]
        stored[key] = e4m3.encode(wide / spread)
        kept = scale.reshape(1) if strategy == "tensor" else scale
        stored[key + ("_scale_inv" if qwen else "_scale")] = kept
        numbers[key] = e4m3.decode(stored[key], np.float64) * spread
    write_safetensors(stored, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    own = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    config["quantization_config"] = own if qwen else compressed_config(strategy, list(block))
    (target / "config.json").write_text(json.dumps(config))
    return numbers
