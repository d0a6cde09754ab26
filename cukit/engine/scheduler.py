"""Which sequences compute which tokens in a step.

Every step decodes one token of each sequence that is past its prompt, then spends what is left of the token budget on
prompts, in order of arrival and in chunks. Without a free block the sequence that arrived last is preempted: it gives
its blocks back and computes its tokens anew later. The oldest sequence is never preempted for another, and each fits
the pool alone, so every step makes progress.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from .block_manager import BlockManager
from .sequence import Sequence


@dataclass(slots=True)
class Step:
    """What the model runner does: copy blocks, then compute."""

    decodes: list[Sequence] = field(default_factory=list)  # one token each: their newest
    prefills: list[tuple[Sequence, int, int]] = field(default_factory=list)  # (sequence, first token, number of tokens)
    admitted: list[Sequence] = field(default_factory=list)  # got a row: all of its values must be written
    changed: list[Sequence] = field(default_factory=list)  # block table changed at its end
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to); read every source before writing any


class Scheduler:
    def __init__(self, blocks: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.blocks = blocks
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)  # a step must be able to decode every sequence
        self.waiting: list[Sequence] = []  # by order of arrival, preempted and forked sequences included
        self.running: list[Sequence] = []  # likewise
        self._free_rows = list(range(self.max_num_seqs - 1, -1, -1))
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # given by the prefix cache instead of computed

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; a fork brings the blocks that it shares."""
        insort(self.waiting, seq, key=_order)

    def schedule(self) -> Step:
        step = Step()
        self._admit_forks(step)
        preemptions_before = self.num_preemptions
        unfinished_prompts = self._schedule_decodes(step)
        budget = self.max_num_batched_tokens - len(step.decodes)
        for seq in unfinished_prompts:
            if budget > 0 and seq.row >= 0:  # else it was preempted just now
                budget -= self._schedule_chunk(step, seq, budget)
        if self.num_preemptions == preemptions_before:
            self._admit_prompts(step, budget)
        else:
            step.admitted = [seq for seq in step.admitted if seq.row >= 0]  # a fork may have lost its row again
        assert step.decodes or step.prefills or not self.has_work, "the scheduler found nothing to do"
        return step

    def fork(self, leader: Sequence, make_text) -> list[Sequence]:
        """The other samples of a leader whose prompt is now computed; they share its blocks and are not queued yet."""
        count, leader.pending_forks = leader.pending_forks, 0
        forks = [leader.fork(index, make_text()) for index in range(1, count + 1)]
        for seq in forks:
            self.blocks.share(seq.block_table)
        leader.may_share_tail = count > 0
        return forks

    def computed(self, seq: Sequence, count: int) -> None:
        """`count` more tokens of seq have their KV: offer blocks that became whole to the prefix cache."""
        seq.num_computed += count
        whole = seq.num_computed // self.blocks.block_size
        if whole > seq.num_registered:
            self.blocks.register(seq.token_ids, seq.digests, seq.block_table, seq.num_registered, whole)
            seq.num_registered = whole

    def remove(self, seq: Sequence) -> None:
        """Take a finished or aborted sequence out, wherever it is."""
        if seq.row >= 0:
            self._leave_row(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        self._release(seq)

    # ---- parts of a step ----

    def _admit_forks(self, step: Step) -> None:
        """Sequences that wait with their KV in place need only a row."""
        while self.waiting and self._free_rows and self.waiting[0].block_table:
            self._enter_row(step, self.waiting.pop(0))

    def _schedule_decodes(self, step: Step) -> list[Sequence]:
        """Give each decoding sequence a place for its newest token; returns the sequences that are not that far yet."""
        block_size, counts = self.blocks.block_size, self.blocks.reference_counts
        unfinished_prompts = []
        for seq in list(self.running):
            if not seq.is_decoding:
                unfinished_prompts.append(seq)
                continue
            if seq.row < 0:  # preempted for one before it
                continue
            needs_block = len(seq.block_table) * block_size <= seq.num_computed
            if needs_block or (seq.may_share_tail and counts[seq.block_table[-1]] > 1):
                if not self._make_room(seq):
                    continue
                if needs_block:
                    seq.block_table.append(self.blocks.allocate())
                    step.changed.append(seq)
                elif counts[seq.block_table[-1]] > 1:  # making room may have preempted the other owners
                    self._copy_tail(step, seq)
            seq.may_share_tail = False
            step.decodes.append(seq)
        return unfinished_prompts

    def _copy_tail(self, step: Step, seq: Sequence) -> None:
        """Copy on write: the last block becomes this sequence's own."""
        shared, own = seq.block_table[-1], self.blocks.allocate()
        step.copies.append((shared, own))
        step.changed.append(seq)
        seq.block_table[-1] = own
        self.blocks.release([shared])

    def _schedule_chunk(self, step: Step, seq: Sequence, budget: int) -> int:
        count = min(budget, len(seq.token_ids) - seq.num_computed)
        step.prefills.append((seq, seq.num_computed, count))
        return count

    def _admit_prompts(self, step: Step, budget: int) -> None:
        """Admit waiting sequences in order of arrival while there are rows, blocks and budget."""
        blocks = self.blocks
        # The samples that prompts in progress are about to fork will want rows too.
        reserved = sum(seq.pending_forks for seq in self.running)
        while self.waiting and budget > 0 and len(self._free_rows) > reserved:
            seq = self.waiting[0]
            if seq.block_table:  # a fork: it waits for _admit_forks
                break
            cached = blocks.match(seq.token_ids, seq.digests)
            wanted = blocks.blocks_for(len(seq.token_ids)) - len(cached)
            # Running sequences soon want blocks: without a margin the newcomer would be preempted right away.
            margin = -(-len(self.running) // 4)
            if wanted + margin > blocks.num_free - blocks.num_free_among(cached):
                if self.running or not self._take_from_waiting():
                    break
                continue
            self._take_blocks(seq, cached, wanted)
            self._enter_row(step, self.waiting.pop(0))
            reserved += seq.pending_forks
            budget -= self._schedule_chunk(step, seq, budget)

    def _take_from_waiting(self) -> bool:
        """Release the blocks of the waiting sequence that arrived last and has some; False if none has."""
        holders = [seq for seq in self.waiting if seq.block_table]
        if holders:
            self._preempt(holders[-1])
        return bool(holders)

    def _take_blocks(self, seq: Sequence, cached: list[int], wanted: int) -> None:
        self.blocks.share(cached)
        seq.block_table = cached + [self.blocks.allocate() for _ in range(wanted)]
        seq.num_computed = len(cached) * self.blocks.block_size
        seq.num_registered = len(cached)
        self.num_cached_tokens += seq.num_computed
        if len(seq.token_ids) == seq.prompt_length and seq.index == 0:
            seq.request.num_cached_tokens = seq.num_computed

    # ---- preemption ----

    def _make_room(self, seq: Sequence) -> bool:
        """Make sure a block is free, preempting whoever arrived last; False if that was `seq` itself."""
        while self.blocks.num_free == 0:
            holders = [self.running[-1], *(other for other in self.waiting if other.block_table)]
            victim = max(holders, key=_order)
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.num_preemptions += 1
        if seq.row >= 0:
            self._leave_row(seq)
            self.add(seq)
        self._release(seq)

    def _release(self, seq: Sequence) -> None:
        self.blocks.release(seq.block_table)
        seq.block_table = []
        seq.num_computed = seq.num_registered = 0
        seq.may_share_tail = False

    def _enter_row(self, step: Step, seq: Sequence) -> None:
        seq.row = self._free_rows.pop()
        insort(self.running, seq, key=_order)
        step.admitted.append(seq)

    def _leave_row(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._free_rows.append(seq.row)
        seq.row = -1


def _order(seq: Sequence) -> tuple[int, int]:
    return seq.order
