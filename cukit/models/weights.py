"""Hugging Face checkpoints: safetensors (one file or sharded) <-> a Decoder's parameters, every key accounted for."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy, which safetensors needs
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..backend import backend_for
from ..options import say_once
from .adapter_files import adapter_config, base_of, is_adapter, merge_into, save_adapter
from .config import ModelConfig
from .decoder import Decoder
from .fp8_files import decoded, read_raw
from .hub import INDEX, WEIGHTS, fetch_model
from .tensor_parallel import TensorParallel

logger = logging.getLogger(__name__)
STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
GIVE_CAUSAL = "give a causal model here, and reward models as reward_funcs"
EMBEDDING = "model.embed_tokens.weight"


def load_config(folder, head: str | None = None) -> ModelConfig:
    """ModelConfig of a checkpoint folder; of an adapter's folder that of its base. ValueError in one line if it is
    missing, unreadable or not supported.

    head: the shape of the model that load_model(folder, head=head) gives; None: of the folder's own.
    """
    source = model_folder(folder, weights=False)
    if is_adapter(source):
        with_score = adapter_config(source).with_score
        if with_score and head == "lm_head":
            raise ValueError(f"{folder} holds the adapter of a reward model: {GIVE_CAUSAL}")
        return load_config(base_of(source), "score" if with_score else head)
    path = source / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no config.json: give the folder of a Hugging Face model")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    config = ModelConfig.from_json(raw)
    if head == "lm_head" and config.head == "score":
        raise ValueError(
            f"{folder} holds a reward model ({config.architecture}), which has no language-model head: {GIVE_CAUSAL}"
        )
    return config.as_classifier() if head == "score" else config


def load_model(
    folder,
    device="cpu",
    dtype="auto",
    head="lm_head",
    score_seed: int | None = None,
    tensor: TensorParallel | None = None,
) -> Decoder:
    """A Decoder with the weights of `folder` (config.json and safetensors), on `device` in `dtype` (auto: bfloat16 on
    cuda, float32 on cpu).

    head="score" gives a reward model or critic. The folder may then hold one (…ForSequenceClassification with one
    label), or a causal model: its language-model head is left, and the score head is new, drawn from score_seed or,
    without one, zeros. A classifier's folder is refused as a causal model.

    The folder of an adapter (PEFT's format) gives its base with the adapter merged into the weights.

    tensor: the ranks that share the model. Each reads its own rows and columns alone (of FP8 codes the whole tensor).

    Tensors are read one at a time, straight into the model's memory; float32 becomes bfloat16 as in an update. Raises
    one ValueError that names every tensor that is missing, unexpected or of the wrong shape, or holds NaN or infinity.
    """
    if is_adapter(source := model_folder(folder, weights=False)):
        load_config(source, head)
        if tensor is not None:
            raise ValueError(
                f"{folder} is an adapter's folder, and tensor_parallel_size={tensor.size} shares a whole model out: "
                "merge the adapter first"
            )
        model = load_model(base_of(source), device, dtype, head, score_seed)
        merge_into(model, source)
        return model
    config, backend = load_config(folder, head), backend_for(device)
    sources = _tensor_sources(model_folder(folder))
    codes = _fp8_codes(folder, config, sources)
    model = Decoder(config, backend, dtype, head, tensor)
    targets = model.parts()
    if load_config(folder).head != head:
        model.score.init_weights(score_seed)
        del targets["score.weight"]
        sources.pop("lm_head.weight", None)
    expected = dict(targets)
    if config.tie_word_embeddings and "lm_head.weight" in sources and head == "lm_head":
        # some files store the head again: it must be the same
        expected["lm_head.weight"] = targets[EMBEDDING]
    shapes = {name: model.whole_shape(name if name in targets else EMBEDDING) for name in expected}
    _check_names_and_shapes(folder, sources, shapes, codes)
    _read_all(model, targets, sources, codes, shapes)
    _check_finite(folder, model)
    if expected.keys() != targets.keys():
        head, embedding = (_read_tensor(sources[name][0], name) for name in ("lm_head.weight", EMBEDDING))
        if not np.array_equal(head, embedding):
            raise ValueError(
                f"{folder}: lm_head.weight differs from the embedding although tie_word_embeddings is true; "
                "set it to false in config.json"
            )
    return model


def _read_all(model: Decoder, targets: dict, sources: dict, codes: dict, shapes: dict) -> None:
    """Fill the targets, views of the model's parts, file by file; of parts that ranks share out, this one's share."""
    backend, config, tensor = model.backend, model.config, model.tensor
    for path in {path: None for path, _, _ in sources.values()}:
        with safe_open(path, framework="np") as file:
            for name in file.keys():
                if name not in targets:
                    continue
                if name in codes:
                    scale = read_raw(*codes[name])
                    numbers = decoded(name, read_raw(path, name), scale, config.fp8.block)
                    numbers = numbers if tensor is None else numbers[tensor.own(name, shapes[name])]
                    backend.store_weights(targets[name], backend.array(numbers, model.backend.accumulator(model.dtype)))
                elif tensor is None:
                    _fill(backend, targets[name], file.get_tensor(name))
                else:
                    _fill(backend, targets[name], file.get_slice(name)[tensor.own(name, shapes[name])])


def _check_finite(folder, model: Decoder) -> None:
    """ValueError on every rank, with the weights of all."""
    wrong = model.store.non_finite()
    if model.tensor is not None:
        wrong = list(dict.fromkeys(sum(model.tensor.group.gather_values(wrong, "loading"), [])))
    if wrong:
        raise ValueError(
            f"{folder}: weights are not finite in {model.dtype}: {'; '.join(wrong)}; load an earlier checkpoint, or in "
            "another dtype if the file's own numbers are finite"
        )


def _fp8_codes(folder, config: ModelConfig, sources: dict) -> dict[str, tuple[Path, str]]:
    """Name of each tensor of FP8 codes -> (file, name) of its scale; the scales are taken out of sources."""
    if config.fp8 is None:
        return {}
    files = {name: path for name, (path, _, _) in sources.items()}
    scales = config.fp8.take_scales(sources)
    if scales:
        say_once(
            logger,
            f"{folder}: FP8 weights ({config.fp8.method}) are brought to the model's dtype; activations are not "
            "quantised",
        )
    return {name: (files[scale], scale) for name, scale in scales.items()}


def _fill(backend, target, stored):
    if target.dtype == stored.dtype:
        backend.upload(target, stored)
    else:
        backend.store_weights(target, backend.array(stored))


class WholeModel:
    """A model that ranks share, as save_model takes it: all of its weights, on the first rank's host."""

    adapter = None

    def __init__(self, model: Decoder, parts: dict[str, np.ndarray]):
        self.config, self.dtype, self.backend, self._parts = model.config, model.dtype, backend_for("cpu"), parts

    def parts(self) -> dict[str, np.ndarray]:
        return self._parts


def whole_model(model: Any) -> Any:
    """The model itself or, if ranks share it, a WholeModel on the first of them, an empty one on the others. All of
    them call it.
    """
    if getattr(model, "tensor", None) is None:
        return model
    return WholeModel(model, whole_parts(model, model.parts()))


def whole_parts(model: Decoder, arrays: dict, part_of: Callable[[str], str] = lambda name: name) -> dict:
    """Arrays in the shapes of parts (weights, an optimizer's states) as wholes on the host of the first of the ranks
    that share a model; {} on the others. part_of(name): which part's shape an array has.
    """
    wholes = {}
    for name, array in arrays.items():
        part, own = part_of(name), model.backend.to_numpy(array)
        whole = model.tensor.whole(part, own, model.whole_shape(part))
        if whole is not None:
            wholes[name] = whole
    return wholes


def save_model(model: Decoder | WholeModel, folder, dtype=None):
    """Write config.json and model.safetensors as Hugging Face does: its names, the tied head once, loadable by
    transformers. Of a model with an adapter, the adapter alone, as PEFT does.

    Each tensor keeps its dtype in memory (norm weights are float32), so that nothing is lost; `dtype` casts all of
    them. A model that the folder held is replaced: its index and shards, which would be read instead, go last. Whenever
    it is interrupted, the folder loads as the old model or the new one, or is refused. Of a model that ranks share,
    save whole_model() of it, on the first one.
    """
    if getattr(model, "adapter", None) is not None:
        save_adapter(model.adapter, folder)
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    be = model.backend
    stored = be.dtype_of(dtype or model.dtype)
    tensors = {name: _on_host(be, view, stored if dtype else view.dtype) for name, view in model.parts().items()}
    raw = dict(model.config.raw)
    raw["dtype" if "dtype" in raw else "torch_dtype"] = stored.name
    config, weights = (folder / name for name in ("config.json", WEIGHTS))
    new_config, new_weights = (path.with_name(path.name + ".tmp") for path in (config, weights))
    save_file(tensors, new_weights, metadata={"format": "pt"})
    new_weights.chmod(0o644)  # safetensors makes it readable by the owner alone
    new_config.write_text(json.dumps(raw, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    shadows = _shadows(folder)
    if config.is_file() and config.read_bytes() != new_config.read_bytes():
        config.unlink()  # without it nothing loads: the old one would give the new weights another meaning
    os.replace(new_weights, weights)
    os.replace(new_config, config)
    for path in shadows:
        path.unlink(missing_ok=True)


def _on_host(backend, view, dtype):
    host = np.ascontiguousarray(backend.to_numpy(view))
    if host.dtype == dtype:
        return host
    cast = np.empty(host.shape, dtype)
    backend_for("cpu").store_weights(cast, host)
    return cast


def _shadows(folder: Path) -> list[Path]:
    """The index of a sharded model and its shards, in the order in which they can go."""
    if not (folder / INDEX).is_file():
        return []
    try:
        shards = set(_shards(folder))
    except ValueError:  # damaged: what is named like a shard
        shards = set()
    return [folder / INDEX, *sorted((shards | set(folder.glob("model-*-of-*.safetensors"))) - {folder / WEIGHTS})]


def model_folder(folder, weights: bool = True, option: str = "") -> Path:
    """The folder itself, or the local copy of a model of the hub: `owner/name[@revision]`, without its weights if they
    are not wanted. option: the one that named it, for an error.
    """
    path = Path(folder)
    try:
        return path if path.is_dir() else fetch_model(str(folder), weights)
    except ValueError as error:
        raise ValueError(f"{option}: {error}" if option else str(error)) from None


def tokenizer_folders(folder) -> tuple[Path, Path]:
    """(the folder with a model's tokenizer, the folder with its config.json): the same, but for an adapter, which may
    have brought its base's tokenizer along or not.
    """
    folder = Path(folder)
    if not is_adapter(folder):
        return folder, folder
    tokenizer, config = tokenizer_folders(model_folder(base_of(folder), weights=False))
    return (folder if (folder / "tokenizer.json").is_file() else tokenizer), config


def _tensor_sources(folder: Path) -> dict:
    """Tensor name -> (file, shape, stored dtype), for a single file or the shards of an index."""
    single = folder / WEIGHTS
    if (folder / INDEX).is_file():
        files = _shards(folder)
        if single.is_file() and single not in files:
            raise ValueError(
                f"{folder} holds two models: {WEIGHTS}, and the shards that {INDEX} names; remove the one not meant"
            )
    elif single.is_file():
        files = {single: None}
    else:
        hint = "; .bin checkpoints are not read: convert to safetensors" if list(folder.glob("*.bin")) else ""
        raise ValueError(f"{folder} holds neither {WEIGHTS} nor {INDEX}{hint}")
    sources = {}
    for path, expected in files.items():
        try:
            with safe_open(path, framework="np") as file:
                found = {
                    name: (path, tuple(file.get_slice(name).get_shape()), file.get_slice(name).get_dtype())
                    for name in file.keys()
                }
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read (truncated or not safetensors): {error}") from None
        if expected is not None and expected != set(found):
            raise ValueError(f"{path} and {INDEX} disagree on: {_some(expected ^ set(found))}")
        sources.update(found)
    return sources


def _shards(folder: Path) -> dict:
    """Shard file -> the names that the index places in it. Files must lie in the folder itself."""
    try:
        weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        files: dict = {}
        for name, file in weight_map.items():
            files.setdefault(file, set()).add(name)
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(f"{folder / INDEX} is not a safetensors index (an object with weight_map)") from None
    for file in files:
        if not isinstance(file, str) or Path(file).name != file or not (folder / file).is_file():
            raise ValueError(f"{folder / INDEX} names {file!r}, which is not a file of this folder")
    return {folder / file: names for file, names in files.items()}


def _check_names_and_shapes(folder, sources, shapes, codes):
    ignored = {name for name in sources if name.endswith("rotary_emb.inv_freq")}
    problems = []
    if missing := shapes.keys() - sources.keys():
        problems.append(f"missing: {_some(missing)}")
    if unexpected := sources.keys() - shapes.keys() - ignored:
        problems.append(f"unexpected: {_some(unexpected)}")
    for name in sorted(shapes.keys() & sources.keys()):
        _, shape, dtype = sources[name]
        if shape != shapes[name]:
            problems.append(f"{name} has shape {list(shape)}, config.json says {list(shapes[name])}")
        if dtype not in STORED_DTYPES and name not in codes:
            problems.append(f"{name} is stored as {dtype}; F32, F16 and BF16 are read")
    if problems:
        raise ValueError(
            f"{folder}: the weights do not fit config.json: "
            + "; ".join(problems[:12])
            + (f"; and {len(problems) - 12} more" if len(problems) > 12 else "")
        )


def _some(names, limit=8):
    names = sorted(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _read_tensor(path, name):
    with safe_open(path, framework="np") as file:
        return file.get_tensor(name)
