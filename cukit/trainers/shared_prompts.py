"""A pass in which a prompt's tokens stand once for neighbouring rows that begin with it, as the completions of a group.

The shared prefix is the prompt without its last token. That one predicts the first token of a completion, so each row
has its own. Attention alone must know of it: everything else works token by token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

WORTHWHILE = 1 / 16  # of a batch's tokens, which sharing must save
# Tokens of completions after which a prompt stands anew: the gradient of a prompt's keys is a sum over all rows that
# share it, and one block of threads makes it.
LONGEST = 4096


@dataclass
class SharedPrompts:
    """Which of the T tokens of a pass stand in it, and as what sequences: prefixes, and what is left of the rows."""

    kept: np.ndarray  # (K,) places among the T
    places: np.ndarray  # (T,) where a kept token stands among the K
    cu_seqlens: np.ndarray  # (S + 1,) borders of the sequences
    prefixes: np.ndarray  # (S, 3): see ops.attention


def shared_lengths(ids: np.ndarray, mask: np.ndarray, cu_seqlens: np.ndarray, prompt_lengths: np.ndarray) -> np.ndarray:
    """(B,) int32: how many of a row's first tokens need not stand again where the row before it is in the same pass;
    0 where it has another prompt, or where some of the prompts is learnt. All 0 where that saves too little.

    ids, mask (T,) of the rows with borders cu_seqlens (B + 1,).
    """
    starts, numbers = cu_seqlens[:-1], np.arange(len(prompt_lengths))
    row, place = _rows_and_places(cu_seqlens)
    in_prompt = place < prompt_lengths[row]
    is_learnt, same = np.zeros(len(numbers), bool), np.zeros(len(numbers), bool)
    is_learnt[row[in_prompt & mask]] = True
    same[1:] = (prompt_lengths[1:] == prompt_lengths[:-1]) & ~is_learnt[1:] & ~is_learnt[:-1]
    token = np.flatnonzero(in_prompt & same[row])
    differs = ids[token] != ids[starts[row[token] - 1] + place[token]]
    same[row[token[differs]]] = False
    first = np.maximum.accumulate(np.where(same, 0, numbers))  # the row with which a row's group begins
    own = np.diff(cu_seqlens) - prompt_lengths
    before = np.cumsum(own) - own
    part = (before - before[first]) // LONGEST
    same[1:] &= part[1:] == part[:-1]
    lengths = np.where(same, np.maximum(prompt_lengths - 1, 0), 0).astype(np.int32)
    return lengths if lengths.sum() >= WORTHWHILE * len(row) else np.zeros_like(lengths)


def share_prompts(cu_seqlens: np.ndarray, shared: np.ndarray) -> SharedPrompts | None:
    """For a pass over rows with borders cu_seqlens (B + 1,) from 0 on and shared_lengths (B,), of which the first row's
    does not count; None where nothing is shared.
    """
    follows = shared > 0
    follows[:1] = False
    if not follows.any():
        return None
    numbers = np.arange(len(shared))
    leads = ~follows & np.append(follows[1:], False)
    prefix = np.where(follows, shared, np.where(leads, np.append(shared[1:], 0), 0))  # rows of the prefix before a row
    row, place = _rows_and_places(cu_seqlens)
    is_kept = ~follows[row] | (place >= prefix[row])
    own = numbers + np.cumsum(leads)  # a row's sequence; a prefix stands before that of its first row
    lengths = np.zeros(len(shared) + leads.sum(), np.int32)
    lengths[own], lengths[own[leads] - 1] = np.diff(cu_seqlens) - prefix, prefix[leads]
    borders = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    prefixes = np.zeros((len(lengths), 3), np.int32)
    prefixes[:, 2] = borders[1:]
    prefixed = prefix > 0
    of_prefix = (own - 1)[np.maximum.accumulate(np.where(follows, 0, numbers))][prefixed]
    prefixes[own[prefixed], 0], prefixes[own[prefixed], 1] = borders[of_prefix], prefix[prefixed]
    np.maximum.at(prefixes[:, 2], of_prefix, borders[own[prefixed] + 1])
    kept, places = np.flatnonzero(is_kept), np.cumsum(is_kept) - 1
    return SharedPrompts(kept.astype(np.int32), places.astype(np.int32), borders, prefixes)


def _rows_and_places(cu_seqlens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The row of each token, and its place within it."""
    row = np.repeat(np.arange(len(cu_seqlens) - 1), np.diff(cu_seqlens))
    return row, np.arange(len(row)) - (cu_seqlens[:-1] - cu_seqlens[0])[row]
