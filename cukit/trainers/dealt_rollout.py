"""One rank's groups in its engine, while groups move between ranks (dealing.py)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..engine.config import SamplingParams
from ..engine.core import EngineCore
from ..engine.request import Begun, Request
from ..parallel.group import RankLost
from ..parallel.mailbox import Mailbox
from .dealing import Deal, Load, Move, best_group

LONGEST_PAUSE = 2e-3  # seconds between two looks at the messages of a rank without work


@dataclass
class Dealt:
    """What a rank has to know of a rollout. places: this rank's, to begin with."""

    mailbox: Mailbox
    places: range
    timeout: float  # seconds that a rank without work waits for the others
    num_given: int = 0  # groups that left this rank
    idle: float = 0.0  # seconds without work


class EngineTable:
    """The groups of one rank in its engine; see dealing.Table. prompts (ids), params: of all places."""

    def __init__(self, core: EngineCore, prompts: list, params: list[SamplingParams]):
        self.core, self.prompts, self.params = core, prompts, params
        self.running: dict[int, Request] = {}
        self.ended: dict[int, Request] = {}
        self._longest = max(map(len, prompts)) + params[0].n * params[0].max_tokens  # tokens of a group at its end

    def begin(self, place: int, begun: list[Begun] | None = None) -> None:
        params = self.params[place]
        ids, text = self.core.check_prompt(self.prompts[place], params, place)
        self.running[place] = self.core.add(ids, text, params, begun=begun)

    def step(self) -> None:
        self.core.step()
        for place in [place for place, request in self.running.items() if request.finished]:
            self.ended[place] = self.running.pop(place)

    def end(self) -> None:
        """Nothing goes on."""
        for request in self.running.values():
            self.core.abort(request)

    # ---- what Deal asks ----

    @property
    def num_ended(self) -> int:
        return len(self.ended)

    def load(self) -> Load:
        core, waiting = self.core, self._waiting()
        rows = core.rows.count + len(core.scheduler.prompts)
        running = [load_of(request) for place, request in self.running.items() if place not in waiting]
        free_rows, free_tokens = core.rows.capacity - rows, core.blocks.num_free * core.config.block_size
        room = 0
        if not waiting:
            room = min(free_rows // self.params[0].n, free_tokens // self._longest)
            room = max(room, not self.running)  # one always fits
        begun, tokens = sum(one.rows for one in running), sum(one.tokens for one in running)
        return Load(begun, tokens, len(waiting), room, free_rows, free_tokens)

    def give(self, move: Move) -> list[tuple[int, list[Begun] | None]]:
        """[(place, its samples so far)]."""
        waiting = self._waiting()
        if move.groups:
            chosen = waiting[-move.groups :]  # those that would begin last
        else:
            running = {place: load_of(request) for place, request in self.running.items() if place not in waiting}
            best = best_group(running, move)
            chosen = [] if best is None else [best]
        found = []
        for place in chosen:
            request = self.running.pop(place)
            self.core.abort(request)
            found.append((place, request.begun()))
        return found

    def take(self, groups: list[tuple[int, list[Begun] | None]]) -> None:
        for place, begun in groups:
            self.begin(place, begun)

    def _waiting(self) -> list[int]:
        """The groups of which nothing is computed, in the order in which they begin."""
        return [
            place
            for place, request in self.running.items()
            if not any(seq.num_generated or seq.block_table for seq in request.sequences)
        ]


def load_of(request: Request) -> Load:
    """What a running group adds to a load; the prompt's keys are held once."""
    going = [seq for seq in request.sequences if seq.finish_reason is None]
    tokens = len(request.prompt_ids) + sum(seq.num_generated for seq in going)
    return Load(len(going) + request.num_missing, tokens)


def play(
    core: EngineCore, prompts: list, params: list[SamplingParams], between_steps: Callable[[], None], dealt: Dealt
) -> dict[int, Request]:
    """The groups that ended on this rank, by their places."""
    table = EngineTable(core, prompts, params)
    deal = Deal(dealt.mailbox, table, len(prompts), params[0].n)
    pause, since = 0.0, time.monotonic()  # when this rank last had work
    try:
        for place in dealt.places:
            table.begin(place)
        while not deal.poll():
            if table.running:
                table.step()
                pause, since = 0.0, time.monotonic()
            else:
                before = time.monotonic()
                time.sleep(pause)
                pause = min(pause * 1.5 + 1e-6, LONGEST_PAUSE)
                dealt.idle += time.monotonic() - before
                if before - since > dealt.timeout:
                    raise RankLost(f"the rollout has waited {dealt.timeout:.0f} s (ddp_timeout) for another rank")
            between_steps()
    except BaseException:
        deal.leave()
        raise
    finally:
        table.end()
        dealt.num_given = deal.num_given
    return table.ended
