"""Which sequences compute which tokens in a step.

A step decodes one token of each row (a sequence past its prompt), then spends what is left of the token budget on spans
of prompts, in order of arrival. If no block is free, the sequence that arrived last is preempted: it gives its blocks
back and computes its tokens anew later. The oldest sequence is never preempted for another, and each fits the pool
alone, so every step makes progress.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from itertools import takewhile

from .adapters import cache_key
from .blocks import BlockManager
from .request import Request, Sequence
from .rows import Rows


@dataclass(slots=True)
class Span:
    """The tokens first … first + count - 1 of a sequence, computed in one step; `draws` tokens are drawn after the last
    of them: none inside a prompt; at its end one for the sequence and one for each sample that will fork from it.
    """

    sequence: Sequence
    first: int
    count: int
    draws: int


@dataclass(slots=True)
class Step:
    """What the runner does: copy blocks, then compute all rows (one token each) and the spans."""

    num_rows: int = 0
    spans: list[Span] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to); read every source before writing any


class Scheduler:
    def __init__(self, blocks: BlockManager, rows: Rows, max_num_batched_tokens: int, max_loras: int = 1):
        self.blocks, self.rows = blocks, rows
        self.max_num_batched_tokens, self.max_loras = max_num_batched_tokens, max_loras
        self.waiting: list[Sequence] = []  # by order of arrival, preempted and forked sequences included
        self.prompts: list[Sequence] = []  # admitted, but not computed to their end; likewise
        self.held: list[Sequence] = []  # finished, with their KV kept for a continuation; oldest first
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # not computed, since their KV was there
        self._sharing: list[Sequence] = []  # have a row; their last block may belong to other samples too

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prompts or self.rows.count)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; a fork brings the blocks that it shares, a continuation those that it took over."""
        if not self.waiting or _order(self.waiting[-1]) < _order(seq):
            self.waiting.append(seq)
        else:
            insort(self.waiting, seq, key=_order)

    def schedule(self) -> Step:
        step = Step()
        self._admit_ready()
        preemptions_before = self.num_preemptions
        self._give_places(step, self.rows.without_place())
        step.num_rows = self.rows.count
        budget = self.max_num_batched_tokens - step.num_rows
        for seq in self.prompts:
            if budget > 0:
                budget -= self._add_span(step, seq, budget)
        if self.num_preemptions == preemptions_before:
            self._admit_prompts(step, budget)
        assert step.num_rows or step.spans or not self.has_work, "the scheduler found nothing to do"
        return step

    def schedule_ahead(self) -> Step | None:
        """The step after one whose tokens are not known, if it is a token of each row, without bans and penalties, and
        takes no sequence's blocks; else None.

        A row that turns out to have ended computes once too often: the KV of the token that ended it, into a block of
        its own. That block and those before it may be released, kept or registered meanwhile: only blocks that are
        whole without that token are registered, and a new owner writes later, since the device computes in order.
        """
        self._admit_ready()
        full = self.rows.without_place()
        has_blocks = len(full) + len(self._sharing) <= self.blocks.num_free
        if self.prompts or not has_blocks or not self.rows.draw_plainly or self._may_admit:
            return None
        step = Step(self.rows.count)
        self._give_places(step, full)
        return step

    # ---- what became of a step ----

    def computed(self, seq: Sequence, count: int) -> None:
        """`count` more tokens of a prompt have their KV: offer blocks that became whole to the prefix cache."""
        seq.num_computed += count
        self._register(seq)

    def end_prompt(self, seq: Sequence) -> list[Sequence]:
        """The samples of a prompt that is computed now, seq first; they share its blocks and stand nowhere yet."""
        self.prompts.remove(seq)
        forks = [seq.fork() for _ in range(num_forks(seq))]
        for fork in forks:
            self.blocks.share(fork.block_table)
        return [seq, *forks]

    def enter_rows(self, *sequences: Sequence) -> None:
        self.rows.enter(*sequences)
        self._sharing += [seq for seq in sequences if seq.may_share_tail]

    def remove(self, *sequences: Sequence) -> None:
        """Take finished sequences out, wherever they are."""
        self._take_out(*sequences)
        for seq in sequences:
            if seq.request.keeps_cache and seq.finish_reason in ("stop", "length"):
                self.held.append(seq)
            else:
                self._release(seq)

    def hand_over(self, old: Sequence, new: Sequence) -> None:
        """`new`, which begins with all of `old`'s tokens, goes on with old's KV, if that is still there."""
        if old in self.held:
            self.held.remove(old)
            num_kept = old.num_computed
            if old.may_share_tail and self.blocks.reference_counts[old.block_table[-1]] > 1:
                num_kept -= num_kept % self.blocks.block_size  # another sample's tokens follow in the last block
            kept = num_kept // self.blocks.block_size if num_kept < old.num_computed else len(old.block_table)
            new.block_table, old.block_table = old.block_table[:kept], old.block_table[kept:]
            new.digests, new.num_registered, new.num_computed = old.digests, old.num_registered, num_kept
            new.request.num_cached_tokens = num_kept
            self.num_cached_tokens += num_kept
            self._release(old)

    def drop_held(self, owner: Request | Sequence | None = None) -> None:
        """Release the KV that a finished sample keeps, that all of a request's keep, or (None) that all keep."""
        for seq in [seq for seq in self.held if owner is None or owner in (seq, seq.request)]:
            self.held.remove(seq)
            self._release(seq)

    def restart(self, requests: list[Request]) -> None:
        """After an interrupted step: all blocks are free, unfinished sequences wait to compute their tokens anew."""
        self.rows.clear()
        self.waiting, self.prompts, self.held, self._sharing = [], [], [], []
        self.blocks.reset()
        for request in requests:
            leader = request.sequences[0]
            if leader.finish_reason or leader.num_generated:  # too late to fork
                while request.num_missing:
                    request.new_sequence()
            for seq in request.sequences:
                seq.block_table, seq.digests = [], []
                self._release(seq)
                if seq.finish_reason is None:
                    seq.catch_up()
                if seq.finish_reason is None:
                    self.add(seq)

    # ---- parts of a step ----

    def _admit_ready(self) -> None:
        """Sequences that wait with their KV in place need only a row."""
        if not self.waiting or not self.waiting[0].is_ready:
            return
        room = max(self.rows.capacity - self._num_running, 0)
        ready = list(takewhile(lambda seq: seq.is_ready, self.waiting[:room]))
        del self.waiting[: len(ready)]
        self.enter_rows(*ready)

    def _has_adapter(self, seq: Sequence) -> bool:
        """Whether the sequence's adapter may be on the device beside those of all that run. A sequence that is ready
        may always go on: what arrived after it waits behind it, and what arrived before it has run.
        """
        adapter = seq.request.adapter
        if adapter is None or not adapter.for_requests:
            return True
        running = {*self.rows.adapters, *(other.request.adapter for other in self.prompts)}
        others = [one for one in running if one not in (None, adapter) and one.for_requests]
        return len(others) < self.max_loras

    @property
    def _num_running(self) -> int:
        """Sequences that have a row, or will when their prompt is computed."""
        return self.rows.count + len(self.prompts)

    @property
    def _may_admit(self) -> bool:
        """Whether schedule() would admit the prompt that waits first."""
        if not self.waiting or self._num_running >= self.rows.capacity or not self._has_adapter(self.waiting[0]):
            return False
        return bool(self.held) or self._has_room(*self._wanted(self.waiting[0]))

    def _give_places(self, step: Step, full: list[Sequence]) -> None:
        """Make sure that each row has a block of its own for its newest token; those of `full` have none."""
        if len(full) <= self.blocks.num_free and not self._sharing:
            if full:
                self.rows.give_blocks(full, self.blocks.allocate_many(len(full)))
            return
        wanting = {seq: None for seq in [*full, *self._sharing]}
        for seq in sorted(wanting, key=_order):
            self._give_place(step, seq)
            seq.may_share_tail = False
        self._sharing.clear()

    def _give_place(self, step: Step, seq: Sequence) -> None:
        """What the sequence needs is asked again after each preemption, which may have taken the need away."""
        while seq.row >= 0:
            full = not self.rows.has_place(seq)
            if not full and not (seq.may_share_tail and self.blocks.reference_counts[seq.block_table[-1]] > 1):
                return
            if self.blocks.num_free == 0:
                self._make_room()
            elif full:
                self.rows.give_blocks([seq], [self.blocks.allocate()])
            else:
                self._copy_tail(step, seq)

    def _copy_tail(self, step: Step, seq: Sequence) -> None:
        """Copy on write: the last block becomes this sequence's own."""
        shared, own = seq.block_table[-1], self.blocks.allocate()
        step.copies.append((shared, own))
        self.rows.replace_last_block(seq, own)
        self.blocks.release([shared])

    def _add_span(self, step: Step, seq: Sequence, budget: int) -> int:
        left = len(seq.ids) - seq.num_computed
        count = min(budget, left)
        draws = 1 + num_forks(seq) if count == left else 0
        step.spans.append(Span(seq, seq.num_computed, count, draws))
        return count

    def _admit_prompts(self, step: Step, budget: int) -> None:
        """Admit waiting sequences in order of arrival while there are rows, blocks and budget."""
        # The samples that prompts in progress are about to fork will want rows too.
        reserved = sum(map(num_forks, self.prompts))
        while self.waiting and budget > 0 and self.rows.capacity - self._num_running > reserved:
            seq = self.waiting[0]
            if seq.is_ready or not self._has_adapter(seq):  # it waits for _admit_ready, or for another's end
                break
            cached, wanted = self._wanted(seq)
            if not self._has_room(cached, wanted):
                if self.held:
                    self._release(self.held.pop(0))
                elif self._num_running or not self._preempt_waiting():
                    break
                continue
            self._take_blocks(seq, cached, wanted)
            self.prompts.append(self.waiting.pop(0))
            self.prompts.sort(key=_order)
            reserved += num_forks(seq)
            budget -= self._add_span(step, seq, budget)

    def _wanted(self, seq: Sequence) -> tuple[list[int], int]:
        """The blocks that the prefix cache has for a waiting sequence, and how many more it needs."""
        cached = [] if seq.block_table else self.blocks.match(seq.ids, seq.digests, cache_key(seq.request.adapter))
        return cached, self.blocks.blocks_for(len(seq.ids)) - len(seq.block_table) - len(cached)

    def _has_room(self, cached: list[int], wanted: int) -> bool:
        """Running sequences soon want blocks: without a margin the newcomer would be preempted right away."""
        margin = -(-self._num_running // 4)
        return wanted + margin <= self.blocks.num_free - self.blocks.num_free_among(cached)

    def _preempt_waiting(self) -> bool:
        """Release the blocks of the waiting sequence that arrived last and has some; False if none has."""
        holders = [seq for seq in self.waiting if seq.block_table]
        if holders:
            self._preempt(holders[-1])
        return bool(holders)

    def _take_blocks(self, seq: Sequence, cached: list[int], wanted: int) -> None:
        self.blocks.share(cached)
        seq.block_table += cached + [self.blocks.allocate() for _ in range(wanted)]
        if cached:
            seq.num_computed = len(cached) * self.blocks.block_size
            seq.num_registered = len(cached)
            self.num_cached_tokens += seq.num_computed
            if len(seq.ids) == seq.prompt_length and seq.index == 0:
                seq.request.num_cached_tokens = seq.num_computed

    # ---- preemption ----

    def _make_room(self) -> None:
        """Release the blocks of a sequence that is only held, else of the one that arrived last."""
        if self.held:
            self._release(self.held.pop(0))
        else:
            waiting = (seq for seq in self.waiting if seq.block_table)
            self._preempt(max([*self.rows.sequences, *self.prompts, *waiting], key=_order))

    def _preempt(self, seq: Sequence) -> None:
        self.num_preemptions += 1
        if seq.row >= 0 or seq in self.prompts:
            self._take_out(seq)
            self.add(seq)
        self._release(seq)

    def _take_out(self, *sequences: Sequence) -> None:
        """Out of their rows or lists; the blocks that they computed are offered to the prefix cache."""
        in_rows, others = ([seq for seq in sequences if (seq.row >= 0) == wanted] for wanted in (True, False))
        for seq in others:
            for place in (self.prompts, self.waiting):
                if seq in place:
                    place.remove(seq)
        if in_rows:
            self.rows.leave(*in_rows)
        for seq in in_rows:
            if seq.finish_reason != "error":
                self._register(seq)
            if seq in self._sharing:
                self._sharing.remove(seq)

    def _register(self, seq: Sequence) -> None:
        whole = seq.num_computed // self.blocks.block_size
        if whole > seq.num_registered:
            root = cache_key(seq.request.adapter)
            self.blocks.register(seq.ids, seq.digests, seq.block_table, seq.num_registered, whole, root)
            seq.num_registered = whole

    def _release(self, seq: Sequence) -> None:
        self.blocks.release(seq.block_table)
        seq.block_table = []
        seq.num_computed = seq.num_registered = 0
        seq.may_share_tail = False


def num_forks(seq: Sequence) -> int:
    """Samples that will share a prompt's blocks when it is computed: the first sample computes it for all."""
    return seq.request.num_missing if seq.index == 0 else 0


def _order(seq: Sequence) -> tuple[int, int]:
    return seq.order
