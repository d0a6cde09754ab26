"""Log-probabilities of given tokens by the training forward pass, on packed arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..autograd import no_grad
from ..ops import index_rows, lm_head_logprobs
from .attend import PackedCausal


@dataclass(slots=True)
class PackedTokens:
    """Whole sequences side by side on the model's device, and the wanted tokens: those that need a log-probability.

    ids, positions (T,) int32. cu_seqlens (S + 1,) int32 from 0 to T. predictors (N,) int32: the row before each wanted
    token; its hidden state predicts that token. targets (N,) int32: the wanted tokens. prefixes (S, 3) int32, where
    sequences share them (ops.attention), or None. Rows that no predictor names may be filling: their numbers must be
    finite and are not read.
    """

    ids: Any
    positions: Any
    cu_seqlens: Any
    predictors: Any
    targets: Any
    prefixes: Any = None


def concatenated(sequences) -> tuple[np.ndarray, np.ndarray]:
    """Lists or arrays of ids -> (ids (T,) int32, cu_seqlens (B + 1,) int32)."""
    arrays = [np.asarray(ids, np.int32) for ids in sequences]
    cu_seqlens = np.zeros(len(arrays) + 1, np.int32)
    np.cumsum([len(ids) for ids in arrays], out=cu_seqlens[1:])
    return np.concatenate([*arrays, np.zeros(0, np.int32)]), cu_seqlens


def positions_in(cu_seqlens: np.ndarray) -> np.ndarray:
    """(T,) int32: the place of each token in its own sequence."""
    positions = np.arange(cu_seqlens[-1], dtype=np.int32)
    return positions - np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens)).astype(np.int32)


def pack_tokens(backend, sequences, wanted=None) -> PackedTokens:
    """Sequences of ids on a device. wanted: for each sequence a bool array (its length,); default: none.

    T is rounded up to the backend's row bucket, for products without a copy: then a last sequence repeats the first
    token.
    """
    ids, cu_seqlens = concatenated(sequences)
    positions, used = positions_in(cu_seqlens), len(ids)
    chosen = np.zeros(0, np.int32)
    if wanted is not None and len(wanted):
        chosen = np.flatnonzero(np.concatenate(wanted)).astype(np.int32)
    targets = ids[chosen]
    filling = backend.row_bucket(used) - used
    if used and filling:
        ids, positions = np.append(ids, np.repeat(ids[:1], filling)), np.append(positions, np.zeros(filling, np.int32))
        cu_seqlens = np.append(cu_seqlens, np.int32(used + filling))
    return PackedTokens(*map(backend.array, (ids, positions, cu_seqlens, chosen - 1, targets)))


def pack(model, sequences):
    """(tokens (T,), positions (T,), PackedCausal) of sequences, as Decoder.forward takes them; see pack_tokens."""
    packed = pack_tokens(model.backend, sequences)
    return packed.ids, packed.positions, PackedCausal(packed.cu_seqlens)


def predicting_states(model, packed: PackedTokens):
    """Hidden states (N, C) that predict the wanted tokens, a Tensor."""
    hidden = model.forward(packed.ids, packed.positions, PackedCausal(packed.cu_seqlens, packed.prefixes))
    return index_rows(hidden, packed.predictors)


def packed_logprobs(model, packed: PackedTokens, temperature=1.0, vocab_size=None):
    """Log p of the wanted tokens given all before them, and the entropy of the distributions they were drawn from.

    Tensors (N,) float32 (float64 for a float64 model), differentiable if the tape is on. Ids from vocab_size on
    (default: the model's) count neither in the normaliser nor in the entropy.
    """
    hidden = predicting_states(model, packed)
    head, count = model.lm_head, vocab_size or model.vocab_size
    return lm_head_logprobs(hidden, head.weight, packed.targets, temperature, count, columns=head.columns)


def target_logprobs(model, sequences, wanted, temperature=1.0, vocab_size=None):
    """packed_logprobs of sequences that are packed for this one call.

    wanted: for each sequence a bool array (its length,); position 0 cannot be wanted (nothing precedes it).
    """
    return packed_logprobs(model, pack_tokens(model.backend, sequences, wanted), temperature, vocab_size)


def token_logprobs(model, sequences, temperature=1.0, vocab_size=None, max_tokens_per_batch=16384):
    """log p(token t | tokens < t) for t ≥ 1 of each sequence: a list of float32 (float64 for a float64 model) host
    arrays.

    Each sequence must hold at least 1 token; a sequence of 1 token gives an empty array.
    """
    results = []
    with no_grad():
        for batch in batches_by_tokens([len(s) for s in sequences], max_tokens_per_batch):
            chosen = sequences[batch[0] : batch[-1] + 1]
            wanted = [np.arange(len(s)) > 0 for s in chosen]
            logprobs, _ = target_logprobs(model, chosen, wanted, temperature, vocab_size)
            borders = np.cumsum([len(s) - 1 for s in chosen])[:-1]
            results += np.split(model.backend.to_numpy(logprobs.data), borders)
    return results


def batches_by_tokens(lengths, max_tokens):
    """Indices 0…n-1 in order, cut into lists of at most max_tokens tokens in all (a longer single one stands alone)."""
    batch, total = [], 0
    for index, length in enumerate(lengths):
        if batch and total + length > max_tokens:
            yield batch
            batch, total = [], 0
        batch.append(index)
        total += length
    if batch:
        yield batch
