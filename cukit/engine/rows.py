"""The sequences that decode, one a row, and everything about a row that a step reads.

Rows 0 … count - 1 are in use: a sequence that leaves is replaced by the last one. The step's
input is one block of host memory: settings are written there when a row changes, positions are counted up in place, and
one copy takes all of it to the device. Block tables stay on the device; only their changes are sent.

A step may be in flight: launched, its tokens not on the host. The inputs are then those of the step after it, for which
only the tokens are missing, and the device has those; a sequence grows when its token arrives.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np

from .adapters import number_of
from .copies import Outbox, layout, views
from .request import Sequence

# Name -> dtype of one entry a row; float stands for the model's accumulator. The widest first, so that each is aligned.
FIELDS = {
    "slot_mapping": np.int64,  # where the newest token's keys and values go; -1: nowhere
    "seeds": np.uint64,
    "draw_positions": np.int64,  # where in its sequence the drawn token will stand: how long it is for the device
    "temperature": float,
    "top_p": float,
    "min_p": float,
    "top_k": np.int32,
    "tokens": np.int32,  # the newest token; its KV is not computed yet
    "sources": np.int32,  # the row's place in the step in flight, which draws the newest token; -1: `tokens` has it
    "positions": np.int32,
    "context_lens": np.int32,  # 0: a row that only fills the step up
    "owners": np.int32,  # the number of the row's adapter; -1: it has none
}
UNUSED = {"slot_mapping": -1, "sources": -1, "owners": -1}  # else 0
COUNTED = ("slot_mapping", "draw_positions", "positions", "context_lens")  # one more each step
SAMPLING = ("temperature", "top_k", "top_p", "min_p")  # as in SamplingParams


class Rows:
    """Room for `capacity` sequences of at most max_model_len tokens, in blocks of block_size.

    host.NAME, device.NAME: the FIELDS, over capacity rounded up to the device's row bucket; block_tables (rows, blocks)
    int32 lies on the device. Unused rows have context 0, slot and source -1, and 0 elsewhere.
    """

    def __init__(self, backend, precise, capacity: int, max_model_len: int, block_size: int, vocab_size: int):
        self._backend, self.capacity, self._block_size, self._vocab_size = backend, capacity, block_size, vocab_size
        self._precise = np.dtype(precise)
        self.count, self.sequences = 0, []
        self._adapters: Counter[Any] = Counter()  # those of the rows, None for the base -> how many rows have it
        self.adapters: tuple = ()  # those of the rows, by their numbers; None, the base, first
        padded = backend.row_bucket(capacity)
        kinds = {name: self._precise if dtype is float else np.dtype(dtype) for name, dtype in FIELDS.items()}
        places, nbytes = layout((name, dtype, (padded,)) for name, dtype in kinds.items())
        self._host_bytes, self._device_bytes = np.zeros(nbytes, np.uint8), backend.empty((nbytes,), np.uint8)
        self._inputs = Outbox(backend, nbytes, np.uint8)
        self.host, self.device = views(self._host_bytes, places), views(self._device_bytes, places)
        for name, value in UNUSED.items():
            getattr(self.host, name)[:] = value
        self._counted = [getattr(self.host, name) for name in COUNTED]
        # On the host only:
        self._numbers = np.arange(padded)
        self._lengths = np.zeros(padded, np.int64)  # tokens that are on the host
        self._history = np.empty((padded, max_model_len), np.int32)  # tokens by position
        self._drawn = np.empty((padded, max_model_len), self._precise)  # log-prob of the token at that position
        self._room = np.zeros(padded, np.int64)  # tokens for which the row's blocks have room
        self._limits = np.zeros(padded, np.int64)
        self._min_lengths = np.zeros(padded, np.int64)  # below this length the stop ids are banned
        self._penalty = np.ones(padded, self._precise)
        self._watched = np.zeros(padded, bool)  # its text is looked at after each token
        self._stop_ids = np.full((padded, 1), -1, np.int32)
        self._seen: np.ndarray | None = None  # (rows, V) tokens that occurred; made when a request first needs it
        self._num_penalised = self._num_delayed = 0  # rows with a repetition penalty, with min_tokens
        self.block_tables = backend.zeros((padded, -(-max_model_len // block_size)), np.int32)
        self._stale: dict[Sequence, int] = {}  # sequence -> first column of its table that the device does not have
        self._entries, self._device_entries = (
            Outbox(backend, 3 * padded, np.int32),
            backend.empty((3 * padded,), np.int32),
        )

    # ---- coming and going ----

    def enter(self, *entering: Sequence) -> None:
        """Give sequences with a drawn token at their ends the next rows."""
        first, host = self.count, self.host
        rows = slice(first, first + len(entering))
        self.count = rows.stop
        self.sequences += entering
        for row, seq in enumerate(entering, first):
            length, params = len(seq.ids), seq.request.params
            self._history[row, :length] = seq.ids
            self._drawn[row, seq.prompt_length : length] = seq.drawn
            index, offset = divmod(length - 1, self._block_size)
            if index < len(seq.block_table):  # else give_blocks() comes before the next step
                host.slot_mapping[row] = seq.block_table[index] * self._block_size + offset
            self._set_seen(row, seq.ids, params.repetition_penalty != 1)
            self._count_kinds(params, 1)
            self._count_adapter(seq.request.adapter, 1)
            self._stale[seq] = 0
        requests = [seq.request for seq in entering]
        settings = [request.params for request in requests]
        self._set_stop_ids(rows, [sorted(request.stop_ids) for request in requests])
        host.tokens[rows] = [seq.ids[-1] for seq in entering]
        self._lengths[rows] = [len(seq.ids) for seq in entering]
        host.positions[rows] = self._lengths[rows] - 1
        host.context_lens[rows] = host.draw_positions[rows] = self._lengths[rows]
        host.sources[rows] = -1
        host.seeds[rows] = [seq.seed for seq in entering]
        host.owners[rows] = [number_of(request.adapter) for request in requests]
        for name in SAMPLING:
            getattr(host, name)[rows] = [getattr(params, name) for params in settings]
        self._room[rows] = [len(seq.block_table) * self._block_size for seq in entering]
        self._limits[rows] = [request.limit for request in requests]
        self._min_lengths[rows] = [seq.prompt_length + seq.request.params.min_tokens for seq in entering]
        self._penalty[rows] = [params.repetition_penalty for params in settings]
        self._watched[rows] = [seq.text is not None for seq in entering]
        for row, seq in enumerate(entering, first):  # last, since from now on its tokens are those of the row
            seq.row, seq.rows = row, self

    def leave(self, *leaving: Sequence) -> None:
        """Take sequences out, with their tokens, as if one after the other: each time the last row moves up."""
        staying, before = self.sequences.copy(), self.count
        moved: dict[Sequence, int] = {}  # -> its new row
        for seq in leaving:
            place, last = moved.pop(seq, seq.row), staying.pop()
            if last is not seq:
                staying[place], moved[last] = last, place
        for seq in leaving:
            self._give_tokens(seq)
            self._count_kinds(seq.request.params, -1)
            self._count_adapter(seq.request.adapter, -1)
        if moved:
            self._move(moved)
        self.sequences, self.count = staying, len(staying)
        self._empty(slice(self.count, before))

    def drop_newest(self, seq: Sequence) -> None:
        """Forget the token that was drawn last; the sequence leaves after this."""
        self._lengths[seq.row] -= 1

    def clear(self) -> None:
        """Take all out, after an interrupted step."""
        for seq in self.sequences:
            if seq.rows is self:  # else the interrupt came while it entered or left, and it has its tokens
                self._give_tokens(seq)
            seq.row = -1
        self.sequences, self.count = [], 0
        self._empty(slice(None))
        self._stale.clear()
        self._adapters.clear()
        self.adapters = ()
        self._num_penalised = self._num_delayed = 0

    def _give_tokens(self, seq: Sequence) -> None:
        """Back to a sequence that leaves."""
        row, length = seq.row, seq.length
        seq.ids = self._history[row, :length].copy()
        seq.drawn = self._drawn[row, seq.prompt_length : length].copy()
        seq.num_computed = length - 1
        seq.rows, seq.row = None, -1
        self._stale.pop(seq, None)

    def _empty(self, rows: slice) -> None:
        for name in FIELDS:
            getattr(self.host, name)[rows] = UNUSED.get(name, 0)

    def _move(self, places: dict[Sequence, int]) -> None:
        """Each sequence to its new place, which is one of a row that has left."""
        sources, targets = np.array([seq.row for seq in places]), np.array([*places.values()])
        longest = int(self._lengths[sources].max())
        own = [self._lengths, self._room, self._limits, self._min_lengths, self._penalty, self._watched, self._stop_ids]
        tokens = [self._history[:, :longest], self._drawn[:, :longest]]
        for values in [*vars(self.host).values(), *own, *tokens, *([] if self._seen is None else [self._seen])]:
            values[targets] = values[sources]
        for seq, place in places.items():
            seq.row = place
            self._stale[seq] = 0

    def _count_kinds(self, params, change: int) -> None:
        self._num_penalised += change * (params.repetition_penalty != 1)
        self._num_delayed += change * (params.min_tokens > 0)

    def _count_adapter(self, adapter: Any, change: int) -> None:
        before, self._adapters[adapter] = self._adapters[adapter], self._adapters[adapter] + change
        if self._adapters[adapter] == 0:
            del self._adapters[adapter]
        elif before:
            return
        self.adapters = tuple(sorted(self._adapters, key=number_of))

    def _set_stop_ids(self, rows: slice, stop_ids: list[list[int]]) -> None:
        missing = max(map(len, stop_ids), default=0) - self._stop_ids.shape[1]
        if missing > 0:
            self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        shape = len(stop_ids), self._stop_ids.shape[1]  # maybe of no row
        self._stop_ids[rows] = np.reshape([ids + [-1] * (shape[1] - len(ids)) for ids in stop_ids], shape)

    def _set_seen(self, row: int, ids: np.ndarray, penalised: bool) -> None:
        if penalised and self._seen is None:
            self._seen = np.zeros((len(self._numbers), self._vocab_size), bool)
        if self._seen is not None:
            self._seen[row] = False
            self._seen[row, ids] = penalised

    # ---- blocks ----

    def without_place(self) -> list[Sequence]:
        """The sequences that have no block for their newest token, and will compute it in the next step."""
        n, host = self.count, self.host
        (found,) = ((host.positions[:n] >= self._room[:n]) & (host.context_lens[:n] > 0)).nonzero()
        return [self.sequences[row] for row in found.tolist()]

    def has_place(self, seq: Sequence) -> bool:
        return bool(self.host.positions[seq.row] < self._room[seq.row])

    def give_blocks(self, sequences: list[Sequence], blocks: list[int]) -> None:
        """One more block at the end of each sequence; its blocks are full."""
        rows = [seq.row for seq in sequences]
        self.host.slot_mapping[rows] = np.array(blocks) * self._block_size
        self._room[rows] += self._block_size
        for seq, block in zip(sequences, blocks, strict=True):
            self._stale.setdefault(seq, len(seq.block_table))
            seq.block_table.append(block)

    def replace_last_block(self, seq: Sequence, block: int) -> None:
        """Copy on write: the newest token goes to `block`, which gets the contents of the last one."""
        self.host.slot_mapping[seq.row] += (block - seq.block_table[-1]) * self._block_size
        seq.block_table[-1] = block
        self._stale.setdefault(seq, len(seq.block_table) - 1)

    # ---- a step ----

    @property
    def longest(self) -> int:
        return int(self.host.context_lens[: self.count].max())

    def views(self, rows: int) -> SimpleNamespace:
        """What a step of `rows` rows reads on the device: the fields and block_tables (all columns)."""
        fields = {name: values[:rows] for name, values in vars(self.device).items()}
        return SimpleNamespace(**fields, block_tables=self.block_tables[:rows])

    def upload(self) -> None:
        """Bring the inputs of the next step to the device."""
        self._inputs.send(self._device_bytes, self._host_bytes)
        if self._stale:
            self._send_block_tables()

    def count_on(self) -> None:
        """The step with these inputs is in flight, and draws a token for each row: on to the inputs of the next one."""
        n, host = self.count, self.host
        host.sources[:n] = self._numbers[:n]
        for values in self._counted:
            values[:n] += 1

    def places(self) -> np.ndarray:
        """The place of each row in the step in flight, (count,). Sequences that have left since have no row."""
        return self.host.sources[: self.count].copy()

    def leave_out_ended(self) -> bool:
        """Make rows that the step in flight ends by their length fill the next step up; False if no other row is left.

        They leave when their token arrives.
        """
        n, host = self.count, self.host
        ending = host.draw_positions[:n] >= self._limits[:n]
        host.context_lens[:n][ending], host.slot_mapping[:n][ending] = 0, -1
        return not ending.all()

    def append(self, tokens: np.ndarray, logprobs: np.ndarray, is_newest: bool = True) -> np.ndarray:
        """Append to each of the first rows the token that a step drew; returns those to look at, since they end now or
        have a growing text. is_newest: no further step is in flight.
        """
        n = len(tokens)
        if is_newest:
            self.host.tokens[:n], self.host.sources[:n] = tokens, -1
        rows, lengths = self._numbers[:n], self._lengths[:n]
        self._history[rows, lengths] = tokens
        self._drawn[rows, lengths] = logprobs
        look = (self._stop_ids[:n] == tokens[:, None]).any(axis=1)
        look |= self._watched[:n]
        look |= ~np.isfinite(logprobs)
        if self._num_penalised:
            self._seen[rows, tokens] = self._penalty[:n] != 1
        lengths += 1
        look |= lengths >= self._limits[:n]
        return look.nonzero()[0]

    def advance(self, tokens: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """count_on() and append(), for a step with its results at hand."""
        self.count_on()
        return self.append(tokens, logprobs)

    @property
    def draw_plainly(self) -> bool:
        """Whether the draw needs nothing but the filters: no row bans a stop id or has a penalty."""
        return not self._num_penalised and not (self._num_delayed and self._early.any())

    @property
    def _early(self) -> np.ndarray:
        return self.host.draw_positions[: self.count] < self._min_lengths[: self.count]

    def draw_settings(self) -> tuple:
        """(banned (count, S), repetition_penalty (count,), seen (count, V)) on the host, None where no row needs it."""
        n, early = self.count, self._early
        banned = np.where(early[:, None], self._stop_ids[:n], -1) if early.any() else None
        return banned, *((self._penalty[:n], self._seen[:n]) if self._num_penalised else (None, None))

    # ---- what a sequence reads ----

    def length(self, row: int) -> int:
        return int(self._lengths[row])

    def token_ids(self, row: int) -> np.ndarray:
        return self._history[row, : self.length(row)].copy()

    def logprobs(self, row: int, start: int) -> np.ndarray:
        return self._drawn[row, start : self.length(row)].copy()

    # ---- block tables ----

    def _send_block_tables(self) -> None:
        """Send the changed entries as (row, column, block) and write them into the tables."""
        rows: list[int] = []
        columns: list[int] = []
        blocks: list[int] = []
        for seq, first in self._stale.items():
            changed = seq.block_table[first:]
            rows += [seq.row] * len(changed)
            columns += range(first, first + len(changed))
            blocks += changed
        self._stale.clear()
        count = len(rows)
        if 3 * count > len(self._device_entries):
            self._device_entries = self._backend.empty((6 * count,), np.int32)
        self._entries.send(self._device_entries[: 3 * count], rows + columns + blocks)
        entries = (self._device_entries[part * count : (part + 1) * count] for part in range(3))
        self._backend.update_block_tables(self.block_tables, *entries)
