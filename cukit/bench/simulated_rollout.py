"""Rollouts of ranks as bench scale simulates them: completions with drawn lengths, played over the rows that are alive,
and groups that move between ranks by the rules of trainers/dealing.py.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from ..trainers.dealing import PERIOD, Load, Move, best_group, moves
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
    drawn = generator.lognormal(middle, spread, size)
    if share := options.completion_correlation:
        own = (drawn / math.exp(middle)) ** math.sqrt(1 - share)
        drawn = math.exp(middle) * own * generator.lognormal(0.0, spread * math.sqrt(share), (prompts, 1))
    return np.clip(np.ceil(drawn), 1, most).astype(np.int64)


@dataclass(frozen=True)
class Setting:
    """What all ranks have in common. capacity: tokens that a rank's cache holds, at least one prompt and its longest
    completion.
    """

    prompt: int
    shape: Shape
    times: Times
    capacity: int
    most_rows: int
    samples: int  # of a group

    def prefill(self, tokens: int, length: float) -> float:
        """Seconds for the keys of so many tokens of rows of this length."""
        return tokens * (self.shape.work(length) / self.times.prefill_flops + self.times.token_waits)


class Player:
    """One rank. groups: their lengths (samples,).

    Samples start in order while the cache has room for their whole length; a pass of new prompts gives their first
    tokens; then all rows decode together until one ends. A prompt's keys are held and read once for all of its samples
    that are alive.
    """

    def __init__(self, groups: dict[int, np.ndarray], setting: Setting):
        self.setting, self.seconds = setting, 0.0
        self.waiting = [(name, int(length)) for name, row in groups.items() for length in row][::-1]
        self.alive: list[tuple[int, int, int]] = []  # (decode step after which it ends, group, length)
        self.members = dict.fromkeys(groups, 0)  # of each group, alive
        self.steps = self.held = self.keys = 0  # decode steps so far; tokens with room; keys that a decode step reads

    def advance(self, until: float = math.inf) -> None:
        """Play on until that time, or to the end."""
        while (self.waiting or self.alive) and self.seconds < until:
            self._start()
            self._decode(until)

    def _start(self) -> None:
        setting, before, passes = self.setting, len(self.alive), 0
        while self.waiting and len(self.alive) < setting.most_rows:
            group, length = self.waiting[-1]
            new = 0 if self.members[group] else setting.prompt
            if self.held + new + length > setting.capacity:
                break
            self.waiting.pop()
            heapq.heappush(self.alive, (self.steps + length - 1, group, length))
            self.members[group] += 1
            self.held, self.keys, passes = self.held + new + length, self.keys + new + 1, passes + bool(new)
        if len(self.alive) > before:
            prefill = setting.prefill(setting.prompt, setting.prompt)
            self.seconds += max(setting.times.step(), passes * prefill)

    def _decode(self, until: float) -> None:
        times, rows = self.setting.times, len(self.alive)
        step, count = times.step(rows), self.alive[0][0] - self.steps
        if count and until < math.inf:
            count = min(count, max(1, math.ceil((until - self.seconds) / (step + self.keys * times.key))))
        read = count * self.keys + rows * count * (count - 1) // 2
        self.seconds += count * step + read * times.key
        self.steps, self.keys = self.steps + count, self.keys + rows * count
        while self.alive and self.alive[0][0] == self.steps:
            _, group, length = heapq.heappop(self.alive)
            self.members[group] -= 1
            gone = length if self.members[group] else length + self.setting.prompt
            self.held, self.keys = self.held - gone, self.keys - gone

    # ---- groups that move ----

    def load(self, group_tokens: int) -> Load:
        """group_tokens: the most that a group may come to."""
        setting, whole = self.setting, len(self._whole())
        rows, tokens = setting.most_rows - len(self.alive), setting.capacity - self.held
        room = 0 if self.waiting else max(min(rows // setting.samples, tokens // group_tokens), not self.alive)
        return Load(len(self.alive), self.keys, whole, room, rows, tokens)

    def give(self, move: Move, taker: Player, now: float) -> int:
        """Carry an order out; returns how many groups have moved."""
        if move.groups:
            chosen = self._whole()[: move.groups]
            taker.waiting = [one for one in self.waiting if one[0] in chosen] + taker.waiting
            self.waiting = [one for one in self.waiting if one[0] not in chosen]
            for group in chosen:
                taker.members[group] = self.members.pop(group)
        else:
            best = best_group(self._running(), move)
            chosen = [] if best is None else [best]
            for group in chosen:
                self._give_running(group, taker, now)
        if chosen:
            taker.seconds = max(taker.seconds, now)
        return len(chosen)

    def _give_running(self, group: int, taker: Player, now: float) -> None:
        rows, setting = [one for one in self.alive if one[1] == group], self.setting
        keys, held = self._running()[group].tokens, setting.prompt + sum(length for *_, length in rows)
        self.alive = [one for one in self.alive if one[1] != group]
        heapq.heapify(self.alive)
        taker.waiting += [one for one in self.waiting if one[0] == group]
        self.waiting = [one for one in self.waiting if one[0] != group]
        taker.members[group] = self.members.pop(group)
        for end, _, length in rows:
            heapq.heappush(taker.alive, (taker.steps + end - self.steps, group, length))
        self.keys, self.held = self.keys - keys, self.held - held
        taker.keys, taker.held = taker.keys + keys, taker.held + held
        taker.seconds = max(taker.seconds, now) + max(setting.times.step(), setting.prefill(keys, keys / len(rows)))

    def _whole(self) -> list[int]:
        """The groups of which no sample has started, the last first."""
        samples: dict[int, int] = {}
        for group, _ in self.waiting:
            samples[group] = samples.get(group, 0) + 1
        return [group for group, count in samples.items() if count == self.setting.samples]

    def _running(self) -> dict[int, Load]:
        found: dict[int, list[int]] = {}
        for end, group, length in self.alive:
            found.setdefault(group, []).append(length - (end - self.steps))
        return {group: Load(len(tokens), self.setting.prompt + sum(tokens)) for group, tokens in found.items()}


def rollout_seconds(
    lengths: np.ndarray, prompt: int, shape: Shape, times: Times, capacity: int, most_rows: int
) -> float:
    """Seconds of one rank for completions of these lengths (prompts, samples); see Setting and Player."""
    player = Player(dict(enumerate(lengths)), Setting(prompt, shape, times, capacity, most_rows, lengths.shape[1]))
    player.advance()
    return player.seconds


def balanced_seconds(
    lengths: np.ndarray, borders: list[int], setting: Setting, running: bool, longest: int
) -> tuple[list[float], int]:
    """(seconds of each rank, groups that moved). borders: of the ranks' groups at first. running: not only groups that
    wait. longest: tokens of a completion, at most.
    """
    players = [Player({group: lengths[group] for group in range(a, b)}, setting) for a, b in zip(borders, borders[1:])]
    moved, now, group_tokens = 0, 0.0, setting.prompt + setting.samples * longest
    while any(player.waiting or player.alive for player in players):
        now += PERIOD
        for player in players:
            player.advance(now)
        loads = {rank: player.load(group_tokens) for rank, player in enumerate(players)}
        for move in moves(loads, setting.samples):
            if move.groups or running:
                moved += players[move.giver].give(move, players[move.taker], now)
    return [player.seconds for player in players], moved
