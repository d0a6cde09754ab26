"""A pass in which a prompt's tokens stand once for neighbouring rows that begin with it, as the completions of a group.

The shared prefix is the prompt without its last token. That one predicts the first token of a completion, so each row
has its own. Attention alone must know of it: everything else works token by token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

WORTHWHILE = 1 / 16  # of a pass's tokens, which sharing must save
# Tokens after which a prompt stands anew: the gradient of a prompt's keys is a sum over all rows that share it, and one
# block of threads makes it.
LONGEST = 4096


@dataclass
class SharedPrompts:
    """Which of the T tokens of a pass stand in it, and as what sequences: prefixes, and what is left of the rows."""

    kept: np.ndarray  # (K,) places among the T
    places: np.ndarray  # (T,) where a kept token stands among the K
    cu_seqlens: np.ndarray  # (S + 1,) borders of the sequences
    prefixes: np.ndarray  # (S, 3): see ops.attention


def same_prompts(ids: np.ndarray, mask: np.ndarray, cu_seqlens: np.ndarray, prompt_lengths: np.ndarray) -> np.ndarray:
    """(B,) bool: whether a row begins with the prompt of the row before it, and neither of the prompts is learnt.

    ids, mask (T,) of the rows with borders cu_seqlens (B + 1,).
    """
    starts, count = cu_seqlens[:-1], len(prompt_lengths)
    row, place = _rows_and_places(cu_seqlens)
    in_prompt = place < prompt_lengths[row]
    is_learnt, same = np.zeros(count, bool), np.zeros(count, bool)
    is_learnt[row[in_prompt & mask]] = True
    same[1:] = (prompt_lengths[1:] == prompt_lengths[:-1]) & ~is_learnt[1:] & ~is_learnt[:-1]
    token = np.flatnonzero(in_prompt & same[row])
    differs = ids[token] != ids[starts[row[token] - 1] + place[token]]
    same[row[token[differs]]] = False
    return same


def share_prompts(cu_seqlens: np.ndarray, same: np.ndarray, prompt_lengths: np.ndarray) -> SharedPrompts | None:
    """For a pass over rows with borders cu_seqlens (B + 1,) from 0 on; None where it saves too little."""
    numbers, row_lengths = np.arange(len(same)), np.diff(cu_seqlens)
    begins = ~same
    begins[:1] = True
    first = np.maximum.accumulate(np.where(begins, numbers, 0))  # the row with which a row's group begins
    part = (cu_seqlens[:-1] - cu_seqlens[first]) // LONGEST
    begins[1:] |= part[1:] != part[:-1]
    first = np.maximum.accumulate(np.where(begins, numbers, 0))
    group = np.cumsum(begins) - 1
    prefix = np.where(np.bincount(group)[group] > 1, np.maximum(prompt_lengths - 1, 0), 0)
    row, place = _rows_and_places(cu_seqlens)
    is_kept = begins[row] | (place >= prefix[row])
    if len(row) - is_kept.sum() < WORTHWHILE * len(row):
        return None
    leads = begins & (prefix > 0)
    own = numbers + np.cumsum(leads)  # a row's sequence; a prefix stands before that of its first row
    lengths = np.zeros(len(same) + leads.sum(), np.int32)
    lengths[own], lengths[own[leads] - 1] = row_lengths - prefix, prefix[leads]
    borders = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    prefixes = np.zeros((len(lengths), 3), np.int32)
    prefixes[:, 2] = borders[1:]
    shared = prefix > 0
    of_prefix = (own - 1)[first]
    prefixes[own, 1] = prefix
    prefixes[own[shared], 0] = borders[of_prefix[shared]]
    np.maximum.at(prefixes[:, 2], of_prefix[shared], borders[own[shared] + 1])
    kept, places = np.flatnonzero(is_kept), np.cumsum(is_kept) - 1
    return SharedPrompts(kept.astype(np.int32), places.astype(np.int32), borders, prefixes)


def _rows_and_places(cu_seqlens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The row of each token, and its place within it."""
    row = np.repeat(np.arange(len(cu_seqlens) - 1), np.diff(cu_seqlens))
    return row, np.arange(len(row)) - (cu_seqlens[:-1] - cu_seqlens[0])[row]
