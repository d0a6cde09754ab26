"""What is measured: a model's shape (or folder), a device and a dtype."""

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

from ..backend import backend_for
from ..engine.memory import hold_memory
from ..models.adapters import Adapter
from ..models.config import ModelConfig
from ..models.decoder import Decoder
from ..models.tensor_parallel import TensorParallel
from ..models.weights import load_config, load_model
from ..options import require
from ..trainers.lora_config import LoraOptions

QWEN3 = dict(
    architectures=["Qwen3ForCausalLM"],
    vocab_size=151936,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    tie_word_embeddings=True,
)
SHAPES = {
    "qwen3-0.6b": QWEN3 | dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28),
    "qwen3-1.7b": QWEN3 | dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28),
    "qwen3-4b": QWEN3 | dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32),
    "qwen3-8b": QWEN3
    | dict(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=False,
    ),
    "qwen3-32b": QWEN3
    | dict(
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=64,
        num_attention_heads=64,
        tie_word_embeddings=False,
    ),
    "smollm2-135m": dict(
        architectures=["LlamaForCausalLM"],
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    ),
    # data/tiny-qwen3
    "tiny": dict(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=True,
    ),
}


@dataclass(frozen=True)
class Subject:
    """A shape on a device; folder is None where the weights are random."""

    name: str
    config: ModelConfig
    folder: str | None
    backend: ModuleType
    dtype: np.dtype

    @property
    def weights(self) -> str:
        return "random" if self.folder is None else self.folder


def choose_subject(options) -> Subject:
    """The subject that model, device and dtype of the options name; ValueError if there is none."""
    backend = backend_for(options.device)
    hold_memory(backend, options.memory.nbytes)
    dtype = backend.dtype_of(options.dtype)
    name = options.model or ("tiny" if backend.name == "cpu" else "qwen3-0.6b")
    return Subject(name, config_of(name), None if name in SHAPES else name, backend, dtype)


def config_of(name: str) -> ModelConfig:
    """Of a shape or a model folder; ValueError if it is neither."""
    if name in SHAPES:
        return ModelConfig.from_json(SHAPES[name])
    if "/" not in name and not Path(name).is_dir():
        raise ValueError(f"model {name!r} is neither a shape ({', '.join(SHAPES)}) nor a folder: choose one of these")
    return load_config(name)


def build_model(
    subject: Subject, seed: int, lora: LoraOptions | None = None, tensor: TensorParallel | None = None
) -> Decoder:
    """The folder's model, or one of this shape with random weights; with a new adapter if that is asked for. tensor:
    the ranks that share it.
    """
    if subject.folder is not None:
        model = load_model(subject.folder, subject.backend.name, subject.dtype.name, tensor=tensor)
    else:
        model = Decoder(subject.config, subject.backend, subject.dtype, tensor=tensor)
        model.init_weights(seed)
    if lora is not None and lora.use_peft:
        require(tensor is None, "use_peft adapts whole models: leave out tensor_parallel_size")
        Adapter(model, lora.adapter(None), lora.lora_way, seed, lora.lora_base_on_host)
    return model


def scale_of(options, subject: Subject) -> float:
    """The options' scale; by default what a laptop can do."""
    return options.scale or (0.1 if subject.backend.name == "cpu" else 1.0)


def scaled(number: int, scale: float) -> int:
    return max(1, round(number * scale))


def check_length(subject: Subject, length: int, way_out: str) -> None:
    longest = subject.config.max_position_embeddings
    if length > longest:
        raise ValueError(f"{length} tokens a sequence exceed the {longest} positions of {subject.name}: {way_out}")
