"""A rank's rollout as bench scale simulates it: completions with drawn lengths, played over the rows that are alive."""

from __future__ import annotations

import heapq
import math

import numpy as np

from . import ScaleBench
from .single_gpu import Shape, Times


def draw_lengths(options: ScaleBench, prompts: int) -> np.ndarray:
    """(prompts, num_generations) tokens of completions."""
    generator, most = np.random.default_rng(options.seed), options.max_completion_length
    size = (prompts, options.num_generations)
    if options.completions == "fixed":
        return np.full(size, most)
    if options.completions == "uniform":
        return generator.integers(1, most + 1, size)
    spread = options.completion_spread
    middle = math.log(options.mean_completion_length or most / 3) - spread**2 / 2
    return np.clip(np.ceil(generator.lognormal(middle, spread, size)), 1, most).astype(np.int64)


def rollout_seconds(
    lengths: np.ndarray, prompt: int, shape: Shape, times: Times, capacity: int, most_rows: int
) -> float:
    """Seconds for completions of these lengths (prompts, samples). capacity: tokens that the cache holds, at least one
    prompt and its longest completion.

    Samples start in order while the cache has room for their whole length; a pass of new prompts gives their first
    tokens; then all rows decode together until one ends. A prompt's keys are held and read once for all of its samples
    that are alive.
    """
    prefill = prompt * (shape.work(prompt) / times.prefill_flops + times.token_waits)
    waiting = [(group, int(length)) for group, row in enumerate(lengths) for length in row][::-1]
    alive: list[tuple[int, int, int]] = []  # (decode step after which it ends, group, length)
    members = [0] * len(lengths)  # of each group, alive
    steps = held = keys = 0  # decode steps so far; tokens that have room; keys that the next decode step reads
    seconds = 0.0
    while waiting or alive:
        before, passes = len(alive), 0
        while waiting and len(alive) < most_rows:
            group, length = waiting[-1]
            new = 0 if members[group] else prompt
            if held + new + length > capacity:
                break
            waiting.pop()
            heapq.heappush(alive, (steps + length - 1, group, length))
            members[group] += 1
            held, keys, passes = held + new + length, keys + new + 1, passes + bool(new)
        if len(alive) > before:
            seconds += max(times.step, passes * prefill)
        rows, count = len(alive), alive[0][0] - steps
        read = count * keys + rows * count * (count - 1) // 2
        seconds += count * (times.step + rows * times.row) + read * times.key
        steps, keys = steps + count, keys + rows * count
        while alive and alive[0][0] == steps:
            _, group, length = heapq.heappop(alive)
            members[group] -= 1
            gone = length if members[group] else length + prompt
            held, keys = held - gone, keys - gone
    return seconds
