"""Named sizes of the benchmarks' workloads: those that docs/BENCHMARKS.md and its tables of memory are about."""

from typing import Any

from ..options import nearest, require

# bench train: sequences of a step, tokens of each, its last tokens that the loss is taken on
TRAIN = {
    "T1": {"rows": 32, "tokens_per_row": 712, "completion": 512},
    "T2": {"rows": 16, "tokens_per_row": 2048, "completion": 2047},  # the first token is predicted by nothing
}
# bench grpo: prompts of a step, completions of each, tokens of a prompt and of a completion
GRPO = {
    "64x8x512": {"prompts": 64, "num_generations": 8, "prompt_length": 200, "max_completion_length": 512},
    "16x8x1024": {"prompts": 16, "num_generations": 8, "prompt_length": 512, "max_completion_length": 1024},
}


def with_preset(values: dict[str, Any], presets: dict[str, dict[str, int]]) -> dict[str, Any]:
    """The options' values with the sizes that their preset names, where none was given. ValueError for an unknown
    preset.
    """
    name = values.get("preset")
    if name is None:
        return values
    require(name in presets, f"preset must be one of {', '.join(presets)}, got {name!r}{nearest(str(name), presets)}")
    return presets[name] | values
