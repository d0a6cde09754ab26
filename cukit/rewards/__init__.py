"""Built-in rewards and the loader of the user's own.

A reward is called as in TRL, by keyword: `f(prompts=, completions=, completion_ids=, **columns)` with one entry a
completion, and returns one float a completion, or None where it does not apply. A completion is text, or for
conversational rows a message list such as [{"role": "assistant", "content": "..."}].

Two more keywords are for rewards that take them (by name or by **kwargs): `prompt_ids`, the ids that the completion
continues, and `prompt_text`, the text of these ids with the special tokens in it. A chat template may begin the
answer itself (with `<think>`), which shows at the end of `prompt_text` and not in the completion.
"""

from cukit.rewards.final_box import boxed
from cukit.rewards.final_number import gsm8k, gsm8k_strict
from cukit.rewards.loader import BUILTIN_REWARDS, call_reward, load_reward, reward_name
from cukit.rewards.plain_text import exact, format

__all__ = [
    "BUILTIN_REWARDS",
    "boxed",
    "call_reward",
    "exact",
    "format",
    "gsm8k",
    "gsm8k_strict",
    "load_reward",
    "reward_name",
]
