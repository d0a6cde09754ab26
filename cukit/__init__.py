"""cukit: train and run language models without PyTorch.

The public names load on first use, so that `import cukit` costs nothing and CPU use never imports CuPy.
"""

import importlib

__version__ = "0.1.0"

_PUBLIC_NAMES = {
    "LLM": "cukit.engine.llm",
    "SamplingParams": "cukit.engine.config",
    "GRPOConfig": "cukit.trainers.config",
    "GRPOTrainer": "cukit.trainers.grpo",
    "SFTConfig": "cukit.trainers.config",
    "SFTTrainer": "cukit.trainers.sft",
}
__all__ = list(_PUBLIC_NAMES)


def __getattr__(name: str):
    if name not in _PUBLIC_NAMES:
        raise AttributeError(f"module 'cukit' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
