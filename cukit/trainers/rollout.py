"""Completions for reinforcement learning: the engine on the trainer's weights, and its samples as arrays."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np

from ..engine.config import SamplingParams
from ..engine.llm import LLM
from .batch import FINISH_REASONS, PackedBatch
from .dealt_rollout import Dealt, play
from .environment import Made
from .episodes import Episode, Episodes


@dataclass
class Samples:
    """Rows of completions, those of a prompt side by side. Ids are the engine's own, never text tokenised again."""

    token_ids: list[np.ndarray]  # int32, prompt and completion, the stop token included
    prompt_lengths: np.ndarray  # (rows,) int32
    groups: np.ndarray  # (rows,) int32, the place of the row's prompt among the prompts
    logprobs: list[np.ndarray]  # of each completion token at the moment it was drawn; empty unless asked for
    finish_reasons: list[str]
    texts: list[str]  # without special tokens and stop strings; of an episode with them, so that its turns can be told
    # ---- of episodes with an environment, else None ----
    masks: list[np.ndarray] | None = None  # bool, of each completion token: the model drew it
    messages: list[list[dict]] | None = None  # after the prompt: what rewards get as the completion
    environments: list[Made] | None = None
    recorded: dict[str, list] = field(default_factory=dict)  # column -> a value a row: what rewards recorded of them

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def lengths(self) -> np.ndarray:
        """(rows,) tokens of each completion, without those that an environment wrote."""
        if self.masks is not None:
            return np.array([mask.sum() for mask in self.masks], np.int64)
        return np.fromiter(map(len, self.token_ids), np.int64, len(self)) - self.prompt_lengths

    @property
    def drawn(self) -> np.ndarray:
        """(tokens of all rows,) bool: the model drew it. Prompts and what environments wrote are not."""
        lengths = np.fromiter(map(len, self.token_ids), np.int64, len(self))
        runs = np.stack([self.prompt_lengths, lengths - self.prompt_lengths], axis=1).ravel()
        found = np.repeat(np.tile([False, True], len(self)), runs)
        if self.masks is not None:
            found[found] = np.concatenate([*self.masks, np.zeros(0, bool)])
        return found

    @cached_property
    def prompt_ids(self) -> list[list[int]]:
        """The prompt of each row as rewards get it; rows of a prompt share a list."""
        prompts: dict[int, list[int]] = {}
        for group, ids, length in zip(self.groups.tolist(), self.token_ids, self.prompt_lengths, strict=True):
            if group not in prompts:
                prompts[group] = ids[:length].tolist()
        return [prompts[group] for group in self.groups.tolist()]

    @cached_property
    def completion_ids(self) -> list[list[int]]:
        """The completion of each row as rewards get it."""
        return [ids[length:].tolist() for ids, length in zip(self.token_ids, self.prompt_lengths, strict=True)]

    @property
    def truncated(self) -> np.ndarray:
        """(rows,) bool: not ended by a stop token or string."""
        return np.array([reason != "stop" for reason in self.finish_reasons], bool)

    @property
    def failed(self) -> np.ndarray:
        """(rows,) bool: ended because the model's numbers were not finite."""
        found = np.array([reason == "error" for reason in self.finish_reasons], bool)
        lengths, values = list(map(len, self.logprobs)), np.concatenate([*self.logprobs, np.zeros(0, np.float32)])
        found[np.repeat(np.arange(len(self)), lengths)[~np.isfinite(values)]] = True
        return found

    def rows(self, chosen) -> Samples:
        """Those of the given places only."""
        chosen = np.asarray(chosen)
        picked = {
            item.name: [values[i] for i in chosen.tolist()] if isinstance(values, list) else values
            for item in fields(self)
            for values in [getattr(self, item.name)]
        }
        picked |= {name: picked[name][chosen] for name in ("prompt_lengths", "groups")}
        recorded = {name: [values[i] for i in chosen.tolist()] for name, values in self.recorded.items()}
        return Samples(**picked | {"recorded": recorded})


class Rollout:
    """An engine that shares the trainer's weights. Call weights_changed() after every update.

    sleeps: the KV cache is given back between rollouts, for the memory that training needs. quiet_plan: the run's plan
    has said what does not fit. episodes: set it to play with environments.
    """

    def __init__(self, model, tokenizer, sleeps: bool = False, quiet_plan: bool = False, **engine_options):
        self.llm, self.sleeps = LLM.from_model(model, tokenizer, quiet_plan=quiet_plan, **engine_options), sleeps
        self.episodes: Episodes | None = None

    def generate(
        self,
        prompts: list,
        sampling: SamplingParams,
        seeds: list[int] | None = None,
        between_steps: Callable[[], None] | None = None,
        more: Callable[[list[int], Samples], list[tuple]] | None = None,
        row_of: Callable[[int], dict] | None = None,
        dealt: Dealt | None = None,
    ) -> Samples:
        """sampling.n completions of each prompt (ids). seeds: one a prompt (sample j adds j); None for greedy.

        between_steps is called after every engine step; if it raises, no request is left behind. more(places, samples)
        is called with the completions of prompts that have ended; the (prompt, seed) pairs that it returns join the
        others. row_of(place): the data row of a prompt, for environments. dealt: prompts are those of all ranks, and
        the completions those of the groups that ended on this one. ValueError if the model's numbers are finite in no
        completion at all.
        """
        params = [sampling.with_seed(seed) for seed in seeds or [None] * len(prompts)]

        def further(places, ended):
            samples = _samples(self.llm, ended) if self.episodes is None else _samples_of(self.llm, ended)
            return [(ids, sampling.with_seed(seed)) for ids, seed in more(places, samples)]

        self.llm.wake_up()
        if dealt is not None:
            ended = play(self.llm.core, prompts, params, between_steps or (lambda: None), dealt)
            places = np.array(sorted(ended), np.int32)
            samples = _samples(self.llm, [ended[place] for place in places.tolist()])
            samples.groups = places[samples.groups]
        elif self.episodes is None:
            requests = self.llm.run(prompts, params, between_steps, None if more is None else further)
            samples = _samples(self.llm, requests)
            for request in requests:  # it and its samples name one another: they would wait for a collection
                request.sequences.clear()
        else:
            assert row_of is not None
            groups = self.episodes.play(prompts, row_of, params, between_steps, None if more is None else further)
            samples = _samples_of(self.llm, groups)
        if self.sleeps:
            self.llm.sleep()
        if dealt is None:
            refuse_damaged(samples)
        return samples

    def weights_changed(self):
        """Cached keys and values belong to the old weights: forget them."""
        self.llm.reset_prefix_cache()


def refuse_damaged(samples: Samples) -> None:
    """ValueError if the model's numbers are finite in no completion."""
    if len(samples) and samples.failed.all():
        raise ValueError(
            f"the model's logits are not finite in any of {len(samples)} completions: its weights are damaged; go "
            "back to an earlier checkpoint, with a lower learning_rate if they broke in training"
        )


def _samples(llm, requests) -> Samples:
    """What finished requests hold."""
    sequences = [sequence for request in requests for sequence in request.sequences]
    counts = [len(request.sequences) for request in requests]
    return Samples(
        [np.asarray(sequence.token_ids, np.int32) for sequence in sequences],
        np.array([sequence.prompt_length for sequence in sequences], np.int32),
        np.repeat(np.arange(len(requests), dtype=np.int32), counts),
        [np.asarray(sequence.logprobs) for sequence in sequences],
        [sequence.finish_reason for sequence in sequences],
        [llm.text_of(sequence) for sequence in sequences],
    )


def _samples_of(llm, groups: list[list[Episode]]) -> Samples:
    """What played episodes hold."""
    episodes = [episode for group in groups for episode in group]
    token_ids = [np.asarray(episode.token_ids, np.int32) for episode in episodes]
    lengths = [episode.prompt_length for episode in episodes]
    return Samples(
        token_ids,
        np.array(lengths, np.int32),
        np.repeat(np.arange(len(groups), dtype=np.int32), [len(group) for group in groups]),
        [episode.logprobs for episode in episodes],
        [episode.finish_reason for episode in episodes],
        [
            llm.tokenizer.decode(ids[length:], skip_special_tokens=False)
            for ids, length in zip(token_ids, lengths, strict=True)
        ],
        [episode.mask for episode in episodes],
        [episode.messages for episode in episodes],
        [episode.made for episode in episodes],
    )


def shuffled_slices(count: int, num_slices: int, seed: int, generation: int) -> list[np.ndarray]:
    """The rows 0 … count - 1 of each optimizer batch: shuffled if there are several, so that each sees samples of all
    prompts.
    """
    order = np.arange(count)
    if num_slices > 1:
        order = np.random.default_rng([seed, generation]).permutation(count)
    return np.split(order, np.arange(1, num_slices) * count // num_slices)


def pack_samples(
    samples: Samples, slices: list[np.ndarray], rewards, has_gradient: np.ndarray, dtype, columns: dict[str, np.ndarray]
) -> PackedBatch:
    """The generation batch as training takes it: the rows of each optimizer batch, those with a gradient first.

    rewards, has_gradient and the columns (rows,): one number a row; the columns' stand at each of its tokens.
    """
    parts = [part[flags] for part in slices for flags in (has_gradient[part], ~has_gradient[part])]
    chosen, borders = np.concatenate(parts), np.cumsum([0, *map(len, slices)])
    kept, learnt = samples.rows(chosen), samples.lengths[chosen]
    return PackedBatch.build(
        kept.token_ids,
        kept.drawn,
        borders,
        logprobs=np.concatenate([*kept.logprobs, np.zeros(0, dtype)]).astype(dtype),
        has_gradient=has_gradient[chosen],
        prompt_lengths=kept.prompt_lengths,
        rewards=rewards[chosen],
        finish_reasons=np.array([FINISH_REASONS.index(reason) for reason in kept.finish_reasons], np.int8),
        groups=kept.groups,
        **{name: np.repeat(values[chosen], learnt).astype(dtype) for name, values in columns.items()},
    )


def prompt_seed(run_seed: int, step: int, row: int) -> int:
    """hash(run seed, step, prompt row), 62 bits: the same on every machine, and room for the samples' + j."""
    digest = hashlib.blake2b(struct.pack("<QQQ", run_seed, step, row), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
