"""cukit: train and run language models without PyTorch.

The public names load on first use, so that `import cukit` costs nothing and CPU use never imports CuPy. For editors and
type checkers they stand in __init__.pyi.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC_NAMES = {
    "LLM": "cukit.engine.llm",
    "LoRARequest": "cukit.engine.calls",
    "EngineConfig": "cukit.engine.config",
    "SamplingParams": "cukit.engine.config",
    "GRPOConfig": "cukit.trainers.grpo_config",
    "GRPOTrainer": "cukit.trainers.grpo",
    "PPOConfig": "cukit.trainers.ppo_config",
    "PPOTrainer": "cukit.trainers.ppo",
    "RewardConfig": "cukit.trainers.reward_config",
    "RewardTrainer": "cukit.trainers.reward",
    "SFTConfig": "cukit.trainers.config",
    "SFTTrainer": "cukit.trainers.sft",
    "TrainerConfig": "cukit.trainers.config",
    "TrainerCallback": "cukit.trainers.trainer",
    "Environment": "cukit.trainers.environment",
    # what a loss of your own is made of
    "Tensor": "cukit.autograd",
    "policy_loss": "cukit.ops",
}
__all__ = list(_PUBLIC_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC_NAMES:
        raise AttributeError(f"module 'cukit' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
