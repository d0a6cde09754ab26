"""Draw the next token of every sequence: penalty, bans, temperature, filters, Gumbel-max with a counter generator.

The draw of a row depends on its logits, its parameters, its seed and its position alone: Philox4x32-10 with key = seed
and counter = (position, id // 4, 0, 0) gives the noise of token `id` in word id % 4. So results do not depend on the
batch, on the order of admission, on preemption or on replays.
"""

from __future__ import annotations

import numpy as np

from ..dtypes import accumulator

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_NOISE_ELEMENTS = 1 << 20  # rows are drawn in groups of about this many logits, to bound the memory of the noise
_TOP_P_CANDIDATES = 256


def sample(
    logits, temperature, top_k, top_p, min_p, seeds, positions, vocab_size,
    banned=None, repetition_penalty=None, seen=None,
):  # fmt: skip
    """Sample one token a row.

    logits (B, V) in the model's dtype; temperature (B) with 0 = greedy; top_k (B) with 0 = off; top_p (B) with 1 = off;
    min_p (B) with 0 = off; seeds (B) uint64; positions (B): where in its sequence the drawn token will stand. Ids from
    vocab_size on are neither drawn nor counted in the normaliser. banned (B, S) int32 or None: ids not to be drawn, -1
    = none. repetition_penalty (B) or None, with seen (B, V) bool: tokens that occurred. Returns tokens (B) int32 and
    logprobs (B): log softmax(logits / temperature) of the token before penalty, bans and filters (temperature 1 for
    greedy rows), in float32 (float64 for float64 logits); NaN, with some id below vocab_size, for a row that holds NaN
    or +inf or no finite logit.
    """
    logits = np.asarray(logits)[:, :vocab_size]
    logits = logits.astype(accumulator(logits.dtype), copy=False)
    temperature = np.asarray(temperature, logits.dtype)
    greedy = temperature == 0
    divisor = np.where(greedy, logits.dtype.type(1), temperature)[:, None]
    scaled = logits / divisor
    adjusted = scaled
    if repetition_penalty is not None:
        penalty = np.asarray(repetition_penalty, logits.dtype)[:, None]
        penalised = np.where(logits > 0, logits / penalty, logits * penalty) / divisor
        adjusted = np.where(seen[:, :vocab_size], penalised, scaled)
    if banned is not None:
        adjusted = _ban(adjusted, np.asarray(banned), copy=adjusted is scaled)
    tokens = np.empty(len(logits), np.int64)
    drawn = np.flatnonzero(~greedy)
    if len(drawn) < len(logits):
        tokens[greedy] = adjusted[greedy].argmax(axis=1)
    if len(drawn):
        picked = adjusted if len(drawn) == len(logits) else adjusted[drawn]
        picked = filter_logits(picked, np.asarray(top_k)[drawn], np.asarray(top_p)[drawn], np.asarray(min_p)[drawn])
        tokens[drawn] = _gumbel_argmax(picked, np.asarray(seeds)[drawn], np.asarray(positions)[drawn])
    maximum = scaled.max(axis=1)
    total = _weights(scaled, maximum[:, None]).sum(axis=1)
    with np.errstate(invalid="ignore"):
        logprobs = scaled[np.arange(len(tokens)), tokens] - maximum - np.log(total)
    return tokens.astype(np.int32), logprobs


def newest_tokens(tokens, sources, drawn):
    """tokens[i] = drawn[sources[i]], in place, where sources[i] is not -1; all int32, tokens and sources (n)."""
    taken = sources >= 0
    tokens[taken] = drawn[sources[taken]]


def filter_logits(scaled_logits, top_k, top_p, min_p):
    """Set filtered entries of scaled_logits (B, V) to -inf: by top-k, then top-p of the rest, then min-p of the rest.

    top_k (B) int, 0 = off, ties with the k-th value are kept; top_p (B), 1 = off: a token stays while the probability
    of those above it is below top_p (so at least one does), tokens equal to the last one stay; min_p (B), 0 = off: a
    token stays if its probability is at least min_p times the largest. Scalars hold for every row. Returns a new array,
    or the one given if nothing is filtered.
    """
    num_rows, vocab_size = scaled_logits.shape
    top_k, top_p, min_p = (np.broadcast_to(np.asarray(value), (num_rows,)) for value in (top_k, top_p, min_p))
    use_k, use_p, use_min = (top_k > 0) & (top_k < vocab_size), top_p < 1, min_p > 0
    if not (use_k.any() or use_p.any() or use_min.any()):
        return scaled_logits
    logits = scaled_logits.copy()
    for k in np.unique(top_k[use_k]):
        rows = np.flatnonzero(use_k & (top_k == k))
        _keep_from(logits, rows, np.partition(logits[rows], vocab_size - k, axis=1)[:, vocab_size - k])
    if use_p.any():
        rows = np.flatnonzero(use_p)
        _keep_from(logits, rows, _top_p_threshold(logits[rows], top_p[rows]))
    if use_min.any():
        rows = np.flatnonzero(use_min)
        part = logits[rows]
        maximum = part.max(axis=1, keepdims=True)
        weights = _weights(part, maximum)
        probabilities = weights / weights.sum(axis=1, keepdims=True)
        part[probabilities < min_p[rows, None] * probabilities.max(axis=1, keepdims=True)] = -np.inf
        logits[rows] = part
    return logits


def _weights(logits, maximum):
    """exp(logits − maximum): NaN, without a warning, in a row with +inf or without a finite logit."""
    with np.errstate(invalid="ignore"):
        return np.exp(logits - maximum)


def _keep_from(logits, rows, threshold):
    """Set entries of `rows` below their threshold (n) to -inf, in place."""
    part = logits[rows]
    part[part < threshold[:, None]] = -np.inf
    logits[rows] = part


def _top_p_threshold(logits, top_p):
    """The smallest logit that stays, (n): the first one in descending order with which the mass reaches top_p."""
    vocab_size = logits.shape[1]
    total = _weights(logits, logits.max(axis=1, keepdims=True)).sum(axis=1)
    threshold = np.empty(len(logits), logits.dtype)
    pending = np.arange(len(logits))
    width = _TOP_P_CANDIDATES
    # The nucleus is nearly always among the first few hundred: sort these, and a whole row only if it is not.
    while len(pending):
        part = logits[pending]
        if width < vocab_size:
            part = np.partition(part, vocab_size - width, axis=1)[:, vocab_size - width :]
        descending = -np.sort(-part, axis=1)
        mass = np.cumsum(_weights(descending, descending[:, :1]), axis=1) / total[pending, None]
        reached = mass >= top_p[pending, None]
        found = reached.any(axis=1)
        if width >= vocab_size:  # top_p may exceed the rounded sum of all
            found[:] = True
            reached[:, -1] = True
        threshold[pending[found]] = descending[found, reached[found].argmax(axis=1)]
        pending = pending[~found]
        width = vocab_size
    return threshold


def _ban(logits, banned, copy):
    """logits with the ids of banned (B, S) at -inf; entries < 0 or beyond the vocabulary ban nothing."""
    rows, columns = np.nonzero((banned >= 0) & (banned < logits.shape[1]))
    if not len(rows):
        return logits
    logits = logits.copy() if copy else logits
    logits[rows, banned[rows, columns]] = -np.inf
    return logits


def _gumbel_argmax(logits, seeds, positions):
    """argmax over ids of logits - log(-log(1 - v)), ties to the lowest id; logits (n, V) -> (n)."""
    num_rows, vocab_size = logits.shape
    tokens = np.empty(num_rows, np.int64)
    step = max(1, _NOISE_ELEMENTS // vocab_size)
    almost_one = 1 - np.finfo(logits.dtype).eps / 2
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        words = _philox_words(seeds[rows], positions[rows], vocab_size)
        # Rounding may give 1, and its noise would be -inf. The winners are near 0: no bit that matters is lost there.
        uniform = (words.astype(logits.dtype) + logits.dtype.type(0.5)) * logits.dtype.type(2.0**-32)
        uniform = np.minimum(uniform, almost_one)
        noise = np.log(-np.log1p(-uniform))
        tokens[rows] = (logits[rows] - noise).argmax(axis=1)
    return tokens


def _philox_words(seeds, positions, count):
    """Random words (B, count) uint32: word i of row b is word i % 4 of counter (positions[b], i // 4, 0, 0)."""
    seeds = np.asarray(seeds).astype(np.uint64).reshape(-1, 1)
    positions = np.asarray(positions).astype(np.uint64).reshape(-1, 1) & _LOW
    blocks = -(-count // 4)
    zero = np.zeros((1, 1), np.uint64)
    shape = (len(seeds), blocks)
    indices = np.broadcast_to(np.arange(blocks, dtype=np.uint64), shape)
    counter = (np.broadcast_to(positions, shape), indices, zero, zero)
    words = np.empty((*shape, 4), np.uint32)
    for index, word in enumerate(_philox4x32(counter, seeds & _LOW, seeds >> _SHIFT)):
        words[:, :, index] = word
    return words.reshape(len(seeds), -1)[:, :count]


def _philox4x32(counter, key_0, key_1):
    """The four output words of Philox4x32-10 (Salmon et al. 2011); every word is a uint64 array below 2^32."""
    word_0, word_1, word_2, word_3 = counter
    for _ in range(10):
        product_0, product_1 = word_0 * _MULTIPLIERS[0], word_2 * _MULTIPLIERS[1]
        word_0, word_1, word_2, word_3 = (
            (product_1 >> _SHIFT) ^ word_1 ^ key_0,
            product_1 & _LOW,
            (product_0 >> _SHIFT) ^ word_3 ^ key_1,
            product_0 & _LOW,
        )
        key_0, key_1 = (key_0 + _KEY_STEPS[0]) & _LOW, (key_1 + _KEY_STEPS[1]) & _LOW
    return word_0, word_1, word_2, word_3
