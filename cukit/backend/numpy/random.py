"""Normal noise from a counter: number i depends on the seed and on i alone, on every device."""

import numpy as np

from .sampling import _philox4x32

CHUNK = 1 << 18  # counters worked on at a time


def fill_normal(out, seed, scale):
    """out (contiguous) = scale · normal noise. Philox4x32-10 with key = seed (64 bits) and counter = (b >> 32, b, 0, 0)
    gives the numbers 4b … 4b + 3: Box and Muller's two pairs from words (0, 1) and (2, 3).
    """
    flat = out.reshape(-1)
    key = np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)
    for start in range(0, -(-flat.size // 4), CHUNK):
        blocks = np.arange(start, min(start + CHUNK, -(-flat.size // 4)), dtype=np.uint64)
        zero = np.zeros(1, np.uint64)
        words = _philox4x32((blocks >> np.uint64(32), blocks & np.uint64(0xFFFFFFFF), zero, zero), *key)
        numbers = np.empty((len(blocks), 4))
        for pair in (0, 2):
            first, second = (_uniform(word) for word in words[pair : pair + 2])
            radius, angle = np.sqrt(-2 * np.log(first)), 2 * np.pi * second
            numbers[:, pair], numbers[:, pair + 1] = radius * np.cos(angle), radius * np.sin(angle)
        part = flat[4 * start : 4 * (start + len(blocks))]
        part[...] = (numbers.reshape(-1)[: part.size] * scale).astype(out.dtype)


def _uniform(words):
    """In (0, 1], rounded where the kernel rounds."""
    return ((words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)).astype(np.float64)
