"""Log-probabilities of given sequences, each with its adapter: what LLM.score() checks and computes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np

from ..models.logprobs import token_logprobs
from ..models.row_adapters import AllRows, choosing


def checked_sequences(core: Any, sequences: Iterable[Iterable[int]], temperature: float) -> list[np.ndarray]:
    """The ids of each sequence; ValueError in one line for one that has no score."""
    given: object = temperature
    is_number = isinstance(given, (int, float, np.number)) and not isinstance(given, bool)
    if not (is_number and math.isfinite(temperature) and temperature > 0):
        raise ValueError(
            f"temperature must be a finite number above 0, got {temperature!r} (the log-probs of greedy "
            f"completions are those of temperature=1)"
        )
    longest = core.model.config.max_position_embeddings
    checked = [core.check_ids(ids, f"sequence {number}") for number, ids in enumerate(sequences)]
    for number, ids in enumerate(checked):
        if len(ids) > longest:
            raise ValueError(f"sequence {number} has {len(ids)} tokens, the model's limit is {longest}: shorten it")
        if (ids[1:] >= core.vocab_size).any():
            wrong = next(token for token in ids[1:].tolist() if token >= core.vocab_size)
            raise ValueError(
                f"sequence {number} has the token id {wrong}, which the tokenizer does not have (its ids end at "
                f"{core.vocab_size - 1}), so it is never drawn: leave it out, or score without a tokenizer "
                f"(LLM.from_model(llm.model))"
            )
    return checked


def adapter_scores(core: Any, sequences: list[np.ndarray], adapters: list, temperature: float) -> list[np.ndarray]:
    """token_logprobs() of each sequence with its adapter, one adapter after the other."""
    found: list[np.ndarray] = [np.empty(0)] * len(sequences)
    for adapter in dict.fromkeys(adapters):
        places = [place for place, one in enumerate(adapters) if one is adapter]
        chosen = [sequences[place] for place in places]
        moves = adapter is not None and adapter.for_requests
        with core.paused() if moves else nullcontext(), choosing(AllRows(adapter)):
            if moves:
                core.load_adapters([adapter])
            most = core.config.max_num_batched_tokens
            scores = token_logprobs(core.model, chosen, temperature, core.vocab_size, most)
        for place, one in zip(places, scores, strict=True):
            found[place] = one
    return found
