"""Scores of whole sequences by a model with a score head: the number at the last token of each packed row."""

from dataclasses import replace

import numpy as np

from ..autograd import Tensor, no_grad
from ..ops import index_rows
from .attend import PackedCausal
from .logprobs import PackedTokens, batches_by_tokens, pack_tokens


def last_tokens(sequences, pad_token_id: int | None = None) -> list[int]:
    """For each sequence the place of the token that its score is read at: the last one that is not padding.

    So transformers reads it: trailing tokens of the model's own pad_token_id do not count, even where that id is also
    the end of a turn. A sequence of nothing else is read at its first token.
    """
    if pad_token_id is None:
        return [len(ids) - 1 for ids in sequences]
    return [int(np.flatnonzero(np.asarray(ids) != pad_token_id).max(initial=0)) for ids in sequences]


def set_padding(model, pad_token_id: int) -> None:
    """Say in the model's configuration which trailing tokens do not count."""
    raw = model.config.raw | {"pad_token_id": pad_token_id}
    model.config = replace(model.config, pad_token_id=pad_token_id, raw=raw)


def packed_scores(model, packed: PackedTokens, *rows) -> tuple[Tensor, ...]:
    """Scores at tokens of the packed sequences: for each array (N,) int32 of their places a Tensor (N,), float32
    (float64 for a float64 model), differentiable if the tape is on.
    """
    hidden = model.forward(packed.ids, packed.positions, PackedCausal(packed.cu_seqlens))
    return tuple(model.scores(index_rows(hidden, places)) for places in rows)


def score_rows(sequences, pad_token_id: int | None = None) -> np.ndarray:
    """(B,) int32: last_tokens() as places among the tokens of all sequences side by side."""
    starts = np.cumsum([0, *(len(ids) for ids in sequences)])[:-1]
    return (starts + last_tokens(sequences, pad_token_id)).astype(np.int32)


def sequence_scores(model, sequences, max_tokens_per_batch: int = 16384) -> np.ndarray:
    """(B,) host array: the score of each sequence of ids, none of them empty, in passes of at most so many tokens."""
    pad, found = model.config.pad_token_id, [np.zeros(0, model.score.weight.dtype)]
    with no_grad():
        for batch in batches_by_tokens([len(ids) for ids in sequences], max_tokens_per_batch):
            chosen = sequences[batch[0] : batch[-1] + 1]
            rows = model.backend.array(score_rows(chosen, pad))
            found.append(model.backend.to_numpy(packed_scores(model, pack_tokens(model.backend, chosen), rows)[0].data))
    return np.concatenate(found)
