"""Completions for reinforcement learning: the engine on the trainer's weights, and its samples as arrays."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..engine.config import SamplingParams
from ..engine.llm import LLM
from .advantage import token_weights
from .batch import FINISH_REASONS, PackedBatch


@dataclass
class Samples:
    """Rows of completions, those of a prompt side by side. Ids are the engine's own, never text tokenised again."""

    token_ids: list[np.ndarray]  # int32, prompt and completion, the stop token included
    prompt_lengths: np.ndarray  # (rows,) int32
    groups: np.ndarray  # (rows,) int32, the place of the row's prompt among the prompts
    logprobs: list[np.ndarray]  # of each completion token at the moment it was drawn; empty unless asked for
    finish_reasons: list[str]
    texts: list[str]  # without special tokens and stop strings

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def lengths(self) -> np.ndarray:
        """(rows,) tokens of each completion."""
        return np.fromiter(map(len, self.token_ids), np.int64, len(self)) - self.prompt_lengths

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
        finite = np.fromiter((np.isfinite(values).all() for values in self.logprobs), bool, len(self))
        return np.array([reason == "error" for reason in self.finish_reasons], bool) | ~finite

    def rows(self, chosen) -> Samples:
        """Those of the given places only."""
        chosen = np.asarray(chosen)
        lists = (self.token_ids, self.logprobs, self.finish_reasons, self.texts)
        token_ids, logprobs, reasons, texts = ([values[i] for i in chosen.tolist()] for values in lists)
        return Samples(token_ids, self.prompt_lengths[chosen], self.groups[chosen], logprobs, reasons, texts)


class Rollout:
    """An engine that shares the trainer's weights. Call weights_changed() after every update.

    sleeps: the KV cache is given back between rollouts, for the memory that training needs.
    """

    def __init__(self, model, tokenizer, sleeps: bool = False, **engine_options):
        self.llm, self.sleeps = LLM.from_model(model, tokenizer, **engine_options), sleeps

    def generate(
        self,
        prompts: list,
        sampling: SamplingParams,
        seeds: list[int] | None = None,
        between_steps: Callable[[], None] | None = None,
        more: Callable[[list[int], Samples], list[tuple]] | None = None,
    ) -> Samples:
        """sampling.n completions of each prompt (ids). seeds: one a prompt (sample j adds j); None for greedy.

        between_steps is called after every engine step; if it raises, no request is left behind. more(places, samples)
        is called with the completions of prompts that have ended; the (prompt, seed) pairs that it returns join the
        others. ValueError if the model's numbers are finite in no completion at all.
        """
        params = [replace(sampling, seed=None if seeds is None else seeds[i]) for i in range(len(prompts))]

        def further(places, requests):
            return [(ids, replace(sampling, seed=seed)) for ids, seed in more(places, _samples(self.llm, requests))]

        self.llm.wake_up()
        requests = self.llm.run(prompts, params, between_steps, None if more is None else further)
        samples = _samples(self.llm, requests)
        if self.sleeps:
            self.llm.sleep()
        if len(samples) and samples.failed.all():
            raise ValueError(
                f"the model's logits are not finite in any of {len(samples)} completions: its weights are damaged; go "
                "back to an earlier checkpoint, with a lower learning_rate if they broke in training"
            )
        return samples

    def weights_changed(self):
        """Cached keys and values belong to the old weights: forget them."""
        self.llm.reset_prefix_cache()


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


def pack_samples(samples: Samples, rewards, advantages, args, num_slices: int, generation: int, dtype) -> PackedBatch:
    """The generation batch as training takes it, in num_slices optimizer batches; args: GRPOConfig.

    Rows are shuffled if several updates share the batch, so that each sees samples of all prompts. Within an update
    rows with a gradient come first, then those without. Rows that failed, and cut ones if mask_truncated_completions
    says so, are no part of it: nothing computes with them, and the loss counts them as empty rows.
    """
    dtype = np.float64 if dtype == np.float64 else np.float32
    counted = ~samples.failed & ~(samples.truncated & args.mask_truncated_completions)
    has_gradient = (advantages.astype(dtype) != 0) | args.loss_options.all_rows_learn
    order = np.arange(len(samples))
    if num_slices > 1:
        order = np.random.default_rng([args.seed, generation]).permutation(len(order))
    lengths, weights, chosen, borders = samples.lengths, np.zeros(len(samples)), [], [0]
    for part in np.split(order, np.arange(1, num_slices) * len(order) // num_slices):
        if len(part):
            learnt = np.where(counted, lengths, 0)[part]
            weights[part] = token_weights(args.loss_type, learnt, args.loss_scale_factor or args.max_completion_length)
        part = part[counted[part]]
        chosen += [part[has_gradient[part]], part[~has_gradient[part]]]
        borders.append(borders[-1] + len(part))
    chosen = np.concatenate(chosen)
    kept, learnt = samples.rows(chosen), lengths[chosen]
    runs = np.stack([kept.prompt_lengths, learnt], axis=1).ravel()  # of prompt tokens and completion tokens in turn
    return PackedBatch.build(
        kept.token_ids,
        np.repeat(np.tile([False, True], len(chosen)), runs),
        borders,
        weights=np.repeat(weights[chosen], learnt).astype(dtype),
        logprobs=np.concatenate([*kept.logprobs, np.zeros(0, dtype)]).astype(dtype),
        advantages=np.repeat(advantages[chosen], learnt).astype(dtype),
        has_gradient=has_gradient[chosen],
        prompt_lengths=kept.prompt_lengths,
        rewards=rewards[chosen],
        finish_reasons=np.array([FINISH_REASONS.index(reason) for reason in kept.finish_reasons], np.int8),
        groups=kept.groups,
    )


def prompt_seed(run_seed: int, step: int, row: int) -> int:
    """hash(run seed, step, prompt row), 62 bits: the same on every machine, and room for the samples' + j."""
    digest = hashlib.blake2b(struct.pack("<QQQ", run_seed, step, row), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
