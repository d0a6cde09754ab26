"""Completions for reinforcement learning: the engine on the trainer's weights, and the batch that training keeps."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np

from ..engine.config import SamplingParams
from ..engine.llm import LLM


@dataclass
class Samples:
    """Rows of completions, the n of a prompt side by side. Ids are the engine's own, never text tokenised again."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]  # the stop token included
    logprobs: list[np.ndarray]  # float32, of each completion token at the moment it was drawn
    finish_reasons: list[str]
    texts: list[str]  # without special tokens and stop strings

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(ids) for ids in self.completion_ids], np.int64)

    @property
    def truncated(self) -> np.ndarray:
        """(rows,) bool: not ended by a stop token or string."""
        return np.array([reason != "stop" for reason in self.finish_reasons], bool)


class Rollout:
    """An engine that shares the trainer's weights. Call weights_changed() after every update."""

    def __init__(self, model, tokenizer, **engine_options):
        self.llm = LLM.from_model(model, tokenizer, **engine_options)

    def generate(self, prompts: list[list[int]], sampling: SamplingParams, seeds: list[int] | None = None) -> Samples:
        """sampling.n completions of each prompt. seeds: one a prompt (sample j adds j); None for greedy."""
        params = [_seeded(sampling, None if seeds is None else seeds[i]) for i in range(len(prompts))]
        samples = Samples([], [], [], [], [])
        for prompt, request in zip(prompts, self.llm.generate(prompts, params), strict=True):
            for output in request.outputs:
                samples.prompt_ids.append(prompt)
                samples.completion_ids.append(list(output.token_ids))
                samples.logprobs.append(np.array(output.logprobs or [], np.float32))
                samples.finish_reasons.append(output.finish_reason)
                samples.texts.append(output.text)
        return samples

    def weights_changed(self):
        """Cached keys and values belong to the old weights: forget them."""
        self.llm.reset_prefix_cache()


def _seeded(sampling: SamplingParams, seed: int | None) -> SamplingParams:
    values = {name: getattr(sampling, name) for name in sampling.__dataclass_fields__}
    return SamplingParams(**(values | {"seed": seed}))


def prompt_seed(run_seed: int, step: int, row: int) -> int:
    """hash(run seed, step, prompt row), 62 bits: the same on every machine, and room for the samples' + j."""
    digest = hashlib.blake2b(struct.pack("<QQQ", run_seed, step, row), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


@dataclass
class GenerationBatch:
    """What training needs of a generation batch, one row a completion."""

    sequences: list[list[int]]  # prompt and completion
    prompt_lengths: np.ndarray  # (rows,)
    old_logps: list[np.ndarray]  # per row, (completion length,)
    ref_logps: list[np.ndarray] | None
    advantages: np.ndarray  # (rows,)
    counted: np.ndarray  # (rows,) bool: takes part in the loss

    def __len__(self):
        return len(self.sequences)

    @property
    def completion_lengths(self) -> np.ndarray:
        return np.array([len(ids) for ids in self.sequences], np.int64) - self.prompt_lengths

    def to_arrays(self) -> dict[str, np.ndarray]:
        """The batch as flat arrays, for a checkpoint in the middle of a generation batch."""
        arrays = {
            "tokens": np.concatenate(self.sequences).astype(np.int32),
            "lengths": np.array([len(ids) for ids in self.sequences]),
            "prompt_lengths": np.asarray(self.prompt_lengths),
            "old_logps": np.concatenate(self.old_logps),
            "advantages": self.advantages,
            "counted": self.counted.astype(np.uint8),
        }
        return arrays if self.ref_logps is None else arrays | {"ref_logps": np.concatenate(self.ref_logps)}

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> GenerationBatch:
        lengths, prompt_lengths = arrays["lengths"], arrays["prompt_lengths"]
        borders = np.cumsum(lengths - prompt_lengths)[:-1]
        ref = np.split(arrays["ref_logps"], borders) if "ref_logps" in arrays else None
        return cls(
            [ids.tolist() for ids in np.split(arrays["tokens"], np.cumsum(lengths)[:-1])],
            prompt_lengths,
            np.split(arrays["old_logps"], borders),
            ref,
            arrays["advantages"],
            arrays["counted"].astype(bool),
        )
