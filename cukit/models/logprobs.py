"""Log-probabilities of given sequences by the training forward pass: packing, and the pass itself."""

import numpy as np

from ..autograd import no_grad
from ..ops import index_rows, lm_head_logprobs
from .attend import PackedCausal


def pack(model, sequences):
    """Sequences (lists of ids) side by side, on the model's device: tokens (T,), positions (T,), PackedCausal.

    T may be larger than their tokens, for products without a copy: then a last sequence repeats the first token, whose
    numbers are as finite as that token's, and nobody reads it.
    """
    be = model.backend
    lengths = np.fromiter((len(s) for s in sequences), np.int32, len(sequences))
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    used = int(cu_seqlens[-1])
    rows = be.row_bucket(used)
    tokens, positions = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    tokens[:used] = np.fromiter((t for s in sequences for t in s), np.int32, used)
    positions[:used] = np.arange(used, dtype=np.int32) - np.repeat(cu_seqlens[:-1], lengths)
    if 0 < used < rows:
        tokens[used:] = tokens[0]
        cu_seqlens = np.append(cu_seqlens, np.int32(rows))
    return be.array(tokens), be.array(positions), PackedCausal(be.array(cu_seqlens))


def target_logprobs(model, sequences, wanted, temperature=1.0, vocab_size=None):
    """Log p of chosen tokens given all before them, and the entropy of the distributions they were drawn from.

    wanted: for each sequence a bool array (its length,); position 0 cannot be wanted (nothing precedes it).
    Returns Tensors (N,) float32, the wanted tokens in order, differentiable if the tape is on.
    """
    tokens, positions, attend = pack(model, sequences)
    rows = np.flatnonzero(np.concatenate(wanted)).astype(np.int32)
    be = model.backend
    rows_device = be.array(rows)
    hidden = model.forward(tokens, positions, attend)
    return lm_head_logprobs(
        index_rows(hidden, be.array(rows - 1)),
        model.lm_head.weight,
        tokens[rows_device],
        temperature,
        vocab_size or model.vocab_size,
    )


def token_logprobs(model, sequences, temperature=1.0, vocab_size=None, max_tokens_per_batch=16384):
    """log p(token t | tokens < t) for t ≥ 1 of each sequence: a list of float32 (float64 for a float64 model) host
    arrays.

    Each sequence must hold at least 1 token; a sequence of 1 token gives an empty array.
    """
    results = [None] * len(sequences)
    with no_grad():
        for batch in batches_by_tokens([len(s) for s in sequences], max_tokens_per_batch):
            chosen = [sequences[i] for i in batch]
            wanted = [np.arange(len(s)) > 0 for s in chosen]
            logprobs, _ = target_logprobs(model, chosen, wanted, temperature, vocab_size)
            borders = np.cumsum([len(s) - 1 for s in chosen])[:-1]
            for i, values in zip(batch, np.split(model.backend.to_numpy(logprobs.data), borders)):
                results[i] = values
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
