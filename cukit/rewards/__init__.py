"""Built-in rewards and the loader of the user's own.

A reward is called as in TRL, by keyword: `f(prompts=, completions=, completion_ids=, **columns)` with one entry a
completion, and returns one float a completion, or None where it does not apply. A completion is text, or for
conversational rows a message list such as [{"role": "assistant", "content": "..."}].
"""

from cukit.rewards.answer import boxed, exact, gsm8k, gsm8k_strict
from cukit.rewards.loader import BUILTIN_REWARDS, call_reward, load_reward, reward_name

__all__ = [
    "BUILTIN_REWARDS",
    "boxed",
    "call_reward",
    "exact",
    "gsm8k",
    "gsm8k_strict",
    "load_reward",
    "reward_name",
]
