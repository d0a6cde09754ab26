"""Built-in rewards and the loader of the user's own.

A reward is called as in TRL, by keyword: `f(prompts=, completions=, completion_ids=, **columns)` with one entry a
completion, and returns one float a completion, or None where it does not apply; it may be `async def`. A completion is
text, or for conversational rows a message list such as [{"role": "assistant", "content": "..."}].

More keywords are for rewards that take them (by name or by **kwargs). `prompt_ids` are the ids that the completion
continues, and `prompt_text` is the text of these ids with the special tokens in it: a chat template may begin the
answer itself (with `<think>`), which shows at the end of `prompt_text` and not in the completion. `trainer_state`,
`log_extra` and `log_metric` are TRL's (see log.py).

A function given in Python runs in the trainer's process; `file.py:function` in a process of its own (see worker.py).
"""

from cukit.rewards.calling import RewardBatch, call_reward, call_rewards
from cukit.rewards.final_box import boxed, boxed_partial
from cukit.rewards.final_number import gsm8k, gsm8k_strict
from cukit.rewards.loader import BUILTIN_REWARDS, load_reward, reward_name, runs_in_a_process
from cukit.rewards.log import RewardLog, TrainerState
from cukit.rewards.plain_text import exact, format
from cukit.rewards.worker import RewardWorker, workers_are_possible

__all__ = [
    "BUILTIN_REWARDS",
    "RewardBatch",
    "RewardLog",
    "RewardWorker",
    "TrainerState",
    "boxed",
    "boxed_partial",
    "call_reward",
    "call_rewards",
    "exact",
    "format",
    "gsm8k",
    "gsm8k_strict",
    "load_reward",
    "reward_name",
    "runs_in_a_process",
    "workers_are_possible",
]
