"""What a config.json says of FP8 weights (their tensors: fp8_files.py).

Read are `compressed-tensors` with the format float-quantized (a scale a tensor, an output channel or a block), and
`quant_method` fp8 (Qwen3's: a scale a block of 128 x 128). Both hold E4M3 codes; a weight is code · scale. What they
say of activations is not used: products are those of the model's dtype.
"""

from dataclasses import dataclass

from ..options import require

FP8_KEYS = ("quantization_config", "compression_config")  # of config.json
STORED = "F8_E4M3"
SCALES = ("weight_scale", "weight_scale_inv")  # both multiply
UNUSED = ("input_scale", "output_scale", "k_scale", "v_scale", "q_scale")  # of activations and of a cache
WAY_OUT = "take the model's own folder, with --quantization int8 or fp8 for 8 bits in the engine"


@dataclass(frozen=True)
class Fp8Files:
    """What a config.json says of its FP8 weights. block: (rows, columns) that share a scale, where it says so."""

    method: str
    block: tuple[int, int] | None = None

    def take_scales(self, sources: dict) -> dict[str, str]:
        """Name of each tensor of codes -> name of its scale. Takes the scales, and what is not used, out of sources
        (name -> (file, shape, stored dtype)). ValueError for codes without a scale and for a scale without codes.
        """
        found: dict[str, str] = {}
        for name in [name for name, (_, _, dtype) in sources.items() if dtype == STORED]:
            stem, _, kind = name.rpartition(".")
            scales = [f"{stem}.{scale}" for scale in SCALES if kind == "weight" and f"{stem}.{scale}" in sources]
            require(len(scales) == 1, f"{name} holds FP8 codes and has no {stem}.{SCALES[0]}")
            found[name] = scales[0]
        known = set(found.values())
        for name in list(sources):
            kind = name.rpartition(".")[2]
            require(kind not in SCALES or name in known, f"{name} is the scale of a weight that is not {STORED}")
            if name in known or kind in UNUSED:
                del sources[name]
        return found


def read_fp8(config: dict) -> Fp8Files | None:
    """From a config.json: None for a model that is not quantised; ValueError in one line for another method."""
    given = {name: config[name] for name in FP8_KEYS if config.get(name) is not None}
    if not given:
        return None
    name, found = next(iter(given.items()))
    require(isinstance(found, dict), f"config.json: {name}={found!r:.80} must be an object")
    method = found.get("quant_method", "compressed-tensors" if name == "compression_config" else None)
    if method == "fp8":
        require(
            found.get("fmt", "e4m3") == "e4m3", f"config.json: {name}: fmt={found.get('fmt')!r} is not read; e4m3 is"
        )
        return Fp8Files("fp8", _block(name, found.get("weight_block_size")))
    require(
        method == "compressed-tensors",
        f"config.json: {name}: quant_method={method!r} is not supported (compressed-tensors and fp8 are); {WAY_OUT}",
    )
    layout = found.get("format")
    require(
        layout == "float-quantized",
        f"config.json: {name}: format={layout!r} of compressed-tensors is not read (float-quantized is); {WAY_OUT}",
    )
    block = None
    for group in _object(found, "config_groups").values():
        weights = _object(group, "weights")
        bits = weights.get("num_bits", 8), weights.get("type", "float"), weights.get("symmetric", True)
        require(bits == (8, "float", True), f"config.json: {name}: weights of {bits!r} are not read; FP8 is; {WAY_OUT}")
        if weights.get("strategy") == "block":
            block = _block(name, weights.get("block_structure"))
        else:
            known = weights.get("strategy", "tensor") in ("tensor", "channel")
            require(known, f"config.json: {name}: strategy={weights.get('strategy')!r} is not read; {WAY_OUT}")
    return Fp8Files("compressed-tensors", block)


def _object(holder, name: str) -> dict:
    """holder[name], {} where that is no object."""
    value = holder.get(name) if isinstance(holder, dict) else None
    return value if isinstance(value, dict) else {}


def _block(name, sizes) -> tuple[int, int] | None:
    if sizes is None:
        return None
    fine = isinstance(sizes, list) and len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)
    require(fine, f"config.json: {name}: a block must be two whole numbers above 0, got {sizes!r}")
    return sizes[0], sizes[1]
