"""A reward model as a reward: its score of a prompt with its completion, by the forward pass of training.

What it reads ends as its training rows did (datasets/preferences.py): a conversation as the chat template ends it, a
text with the end token. Where its tokenizer is the policy's, it reads the ids that were sampled; else the text, in its
own chat template and tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..datasets.demonstrations import check_ids, with_end
from ..datasets.preferences import turn_end
from ..engine.shapes import ModelUse
from ..hub import parse_name
from ..models.adapter_files import is_adapter
from ..models.decoder import Decoder
from ..models.scores import sequence_scores, set_padding
from ..models.weights import load_config, load_model, model_folder, tokenizer_folders
from ..rewards.loader import is_reward_name
from ..runs.checkpoint import newest_model
from ..tokenizer import Tokenizer
from ..user_code import names_a_file

Ids = list[int]


def is_model_name(spec: Any) -> bool:
    """Whether a reward is given as a folder or a name of the hub (owner/name)."""
    if not isinstance(spec, str) or not spec.strip() or is_reward_name(spec) or names_a_file(spec):
        return False
    return Path(spec).is_dir() or ("/" in spec and parse_name(spec) is not None)


def reward_models(*groups: Any) -> dict[str, RewardModel]:
    """The reward models among rewards, each once, by what they are given as. groups: what reward_funcs may be, None
    too.
    """
    lists = [[group] if isinstance(group, str) or callable(group) else group or [] for group in groups]
    for group in lists:
        if not isinstance(group, Iterable):
            raise ValueError(f"rewards are names or functions, or a list of them, got {group!r:.100}")
    return {spec: RewardModel(spec) for spec in dict.fromkeys(filter(is_model_name, itertools.chain(*lists)))}


def with_models(reward_funcs: Any, models: dict[str, RewardModel]) -> Any:
    """reward_funcs with the reward models in place of their names."""
    if isinstance(reward_funcs, str):
        return models.get(reward_funcs, reward_funcs)
    if reward_funcs is None or callable(reward_funcs):
        return reward_funcs
    return [models.get(spec, spec) if isinstance(spec, str) else spec for spec in reward_funcs]


class RewardModel:
    """The reward of a folder, a run folder or a name of the hub; load() must come before it is called.

    ValueError in one line if that holds no reward model.
    """

    def __init__(self, name: str):
        path = Path(name)
        self.source = (newest_model(path) or path) if path.is_dir() else name
        self.config = load_config(self.source)
        if self.config.head != "score":
            raise ValueError(
                f"reward model {name!r} is no classifier: its config.json says {self.config.architecture}; make one by "
                f"`cukit reward --model {name}`, or give another reward"
            )
        self.__name__ = path.resolve().name if path.is_dir() else name.partition("@")[0].rpartition("/")[2]
        self.model: Decoder | None = None

    def use(self, dtype: Any) -> ModelUse:
        """What it takes on the device in this dtype, for the planner."""
        return ModelUse(f"reward model {self.__name__}", self.config, dtype, head=False)

    def load(
        self, policy: Decoder, tokenizer: Tokenizer, max_tokens: int, chat_template_kwargs: dict | None = None
    ) -> None:
        """Read the weights onto the policy's device, in its dtype. tokenizer: the policy's; max_tokens: of a pass."""
        folder = model_folder(self.source)
        self.tokenizer, self.max_tokens = Tokenizer.from_folder(*tokenizer_folders(folder)), max_tokens
        self.template_arguments = chat_template_kwargs or {}
        self.shares_ids = self.tokenizer.same_as(tokenizer)
        self.model = load_model(folder, policy.backend.name, policy.dtype, "score")
        if is_adapter(folder) and (pad := self.tokenizer.pad_token_id) is not None:
            set_padding(self.model, pad)  # as in its training; its base's configuration may not say so
        self._turn_end: Ids | None = None

    def __call__(
        self,
        prompts: Sequence,
        completions: Sequence,
        completion_ids: Sequence[Ids],
        prompt_ids: Sequence[Ids],
        tools: Iterable | None = None,
        **columns: Any,
    ) -> list[float]:
        assert self.model is not None, "load() comes first"
        if self.shares_ids:
            rows = zip(prompts, prompt_ids, completion_ids, strict=True)
            sequences = [self._closed([*start], [*ids], not isinstance(prompt, str)) for prompt, start, ids in rows]
        else:
            schemas = tools or [None] * len(prompts)
            sequences = [self._encoded(*row) for row in zip(prompts, completions, schemas, strict=True)]
        context = self.config.max_position_embeddings
        for index, ids in enumerate(sequences):
            check_ids(ids, self.config.vocab_size, f"completion {index}")
            if len(ids) > context:
                raise ValueError(
                    f"completion {index} has {len(ids)} tokens with its prompt, and the context of the reward model "
                    f"holds {context}: lower max_completion_length or max_prompt_length"
                )
        return sequence_scores(self.model, sequences, self.max_tokens).astype(float).tolist()

    def _closed(self, prompt: Ids, completion: Ids, is_conversation: bool) -> Ids:
        """The sampled ids, with what ends a row of the reward model's training in place of the sampled end token."""
        if not is_conversation:
            return with_end(prompt + completion, self.tokenizer)
        if self._turn_end is None:
            self._turn_end = turn_end(self.tokenizer, self.template_arguments)
        if completion and completion[-1] in self.tokenizer.eos_token_ids:
            completion = completion[:-1]
        return prompt + completion + self._turn_end

    def _encoded(self, prompt: Any, completion: Any, tools: list[dict] | None) -> Ids:
        if isinstance(prompt, str):
            return with_end(self.tokenizer.encode(prompt + completion, True), self.tokenizer)
        text = self.tokenizer.render_chat([*prompt, *completion], False, tools, **self.template_arguments)
        return self.tokenizer.encode(text)
