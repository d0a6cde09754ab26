"""Packings in which sequences share the rows of a prefix, and the same sequences without sharing."""

from typing import NamedTuple

import numpy as np


class Packing(NamedTuple):
    """cu_seqlens and prefixes as ops.attention takes them. Unshared, the rows are `rows` of the shared packing, with
    borders whole_cu_seqlens: each prefix, and each sequence with its prefix before it. own: rows that are no copy of a
    prefix's. positions: of the shared rows.
    """

    cu_seqlens: np.ndarray
    prefixes: np.ndarray
    rows: np.ndarray
    whole_cu_seqlens: np.ndarray
    own: np.ndarray
    positions: np.ndarray

    def summed(self, unshared):
        """Each row of the shared packing: the sum over its copies."""
        total = np.zeros((self.cu_seqlens[-1], *unshared.shape[1:]))
        np.add.at(total, self.rows, unshared)
        return total


def packing(groups) -> Packing:
    """groups: (rows of the prefix, [rows of each sequence that sees it]); prefix 0: sequences without one."""
    borders, prefixes, wholes, own, positions = [0], [], [], [], []

    def add(first, prefix, length, end):
        prefixes.append([first, prefix, end])
        wholes.append(np.r_[first : first + prefix, borders[-1] : borders[-1] + length])
        own.append(np.arange(prefix + length) >= prefix)
        positions.append(prefix + np.arange(length))
        borders.append(borders[-1] + length)

    for prefix, lengths in groups:
        first = borders[-1]
        if prefix:
            add(0, 0, prefix, first + prefix + sum(lengths))
        for length in lengths:
            add(first, prefix, length, borders[-1] + length)
    numbers = borders, prefixes, np.concatenate(wholes), np.cumsum([0, *map(len, wholes)]), np.concatenate(positions)
    cu_seqlens, table, rows, whole_cu_seqlens, places = (np.array(x, np.int32) for x in numbers)
    return Packing(cu_seqlens, table, rows, whole_cu_seqlens, np.concatenate(own), places)


def random_groups(seed, longest=300):
    """Up to four groups with prefixes of 0 to `longest` rows, each of up to five sequences, some of them empty."""
    draw = np.random.default_rng(seed)
    groups = []
    for _ in range(draw.integers(1, 5)):
        prefix = int(draw.integers(1, longest + 1)) if draw.random() < 0.8 else 0
        lengths = draw.integers(0, longest // 3 + 1, draw.integers(0, 6)) * (draw.random() < 0.9)
        groups.append((prefix, lengths.tolist()))
    return [*groups, (0, [1])]
