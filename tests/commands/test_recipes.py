"""Every bundled recipe is one that its command takes."""

from pathlib import Path

import pytest

import cukit_cli
from cukit.commands.parser import make, resolve
from cukit.commands.train import TrainFiles
from cukit.trainers.config import SFTConfig
from cukit.trainers.grpo_config import GRPOConfig
from cukit.trainers.ppo_config import PPOConfig
from cukit.trainers.reward_config import RewardConfig

CONFIGS = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig, "grpo": GRPOConfig}
RECIPES = sorted((Path(__file__).parents[2] / "data" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_taken(path):
    name = next((name for name in CONFIGS if name in path.stem), "grpo")
    values = resolve(cukit_cli.COMMANDS[name], {"config": str(path)})
    files, args = make(TrainFiles, values), make(CONFIGS[name], values)
    assert files.model and files.data and args.max_steps > 0 and not args.output_dir
    text = path.read_text(encoding="utf-8")
    assert path.name.startswith("tiny") or f"--config data/recipes/{path.name}" in text
    assert path.name.startswith(("tiny", "smollm2")) or "unseen" in text, "say the result that was seen, or 'unseen'"


def test_there_are_recipes():
    assert {path.stem for path in RECIPES} >= {
        "tiny-grpo",
        "tiny-ppo",
        "tiny-sft",
        "tiny-reward",
        "smollm2-arithmetic",
        "qwen3-0.6b-gsm8k",
    }
