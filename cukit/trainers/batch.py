"""The packed batch: rows of tokens side by side, in one form from the engine to the loss.

Three kinds of columns. A column of the tokens has one value for each of the T tokens. A column of the learnt tokens
has one for each of the N tokens that the mask marks, in order: what a loss reads needs no gathering. A column of the
rows has one for each of the B rows. A row is a prompt and its completion, a demonstration, or a conversation of many
turns; the mask of a conversation has holes. Nothing here loops over tokens.

A batch is built once, in the order in which it is trained on, and put on the device once (`to`). Rows are views of it
(`Rows`). A checkpoint saves its flat arrays as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ..backend import backend_of
from ..models.logprobs import PackedTokens, concatenated, positions_in
from .shared_prompts import share_prompts, shared_lengths

# The order of the codes in PackedBatch.finish_reasons.
FINISH_REASONS = ("stop", "length", "abort", "error")
ALIGNED = 256  # bytes: where a column may begin on a device


@dataclass
class PackedBatch:
    """See the module. The columns of tokens and of learnt tokens lie where `to` put them, the others on the host.

    A learnt token is never the first of its row: nothing comes before it.
    """

    # ---- borders, on the host ----
    cu_seqlens: np.ndarray  # (B + 1,) int32: row b holds the tokens cu_seqlens[b] … cu_seqlens[b + 1] − 1
    cu_learnt: np.ndarray  # (B + 1,) int32: likewise in the columns of learnt tokens
    slices: np.ndarray  # (S + 1,) int32: rows slices[s] … slices[s + 1] − 1 are optimizer batch s

    # ---- columns of the tokens ----
    ids: Any  # int32
    positions: Any  # int32
    mask: np.ndarray  # bool: learnt; stays on the host, since predictors and targets say it on the device
    weights_versions: Any = None  # int32: updates made before the token was drawn
    adapter_ids: Any = None  # int32

    # ---- columns of the learnt tokens ----
    predictors: Any = None  # int32: the token before it
    targets: Any = None  # int32: its id
    weights: Any = None  # in the loss
    logprobs: Any = None  # old ones: the sampler's, at the moment the token was drawn, unless `sampled` is there
    sampled: Any = None  # the sampler's, where `logprobs` are the trainer's
    ref_logprobs: Any = None
    corrections: Any = None  # constant factors of the policy term (importance correction)
    chosen: Any = None  # likewise: 1 where a token learns (top_entropy_quantile), 0 elsewhere
    advantages: Any = None
    values: Any = None
    returns: Any = None

    # ---- columns of the rows, on the host ----
    has_gradient: np.ndarray | None = None  # bool: False where the loss is known to have none
    prompt_lengths: np.ndarray | None = None  # int32
    rewards: np.ndarray | None = None  # float64, NaN where there is none
    finish_reasons: np.ndarray | None = None  # int8: places in FINISH_REASONS
    groups: np.ndarray | None = None  # int32: the prompt that a row answers; groups may differ in size

    _borders: tuple | None = None  # cu_seqlens (filling included) and cu_learnt on the device
    _shared: np.ndarray | None = None  # (B,) shared_lengths, where prompt_lengths are known

    @classmethod
    def build(
        cls, sequences: Sequence, mask: np.ndarray, slices: Sequence[int] | None = None, **columns
    ) -> PackedBatch:
        """A batch on the host. sequences: ids of each row, arrays or lists; mask: (T,), over all rows.

        columns: any others by name. slices: borders of the optimizer batches; default: one batch.
        """
        ids, cu_seqlens = concatenated(sequences)
        mask = np.array(mask, bool)
        mask[cu_seqlens[:-1][np.diff(cu_seqlens) > 0]] = False
        learnt = np.flatnonzero(mask).astype(np.int32)
        return cls(
            cu_seqlens,
            np.searchsorted(learnt, cu_seqlens).astype(np.int32),
            np.asarray([0, len(sequences)] if slices is None else slices, np.int32),
            ids,
            positions_in(cu_seqlens),
            mask,
            predictors=learnt - 1,
            targets=ids[learnt],
            **columns,
        )

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def lengths(self) -> np.ndarray:
        """(B,) tokens of each row."""
        return np.diff(self.cu_seqlens)

    @property
    def num_learnt(self) -> np.ndarray:
        """(B,) learnt tokens of each row."""
        return np.diff(self.cu_learnt)

    @property
    def num_slices(self) -> int:
        return len(self.slices) - 1

    def to(self, backend) -> PackedBatch:
        """This batch on a device: everything a forward pass or a loss reads is there from now on.

        A pass is rounded up to the backend's row bucket by reading on into the rows that follow. Behind the last row
        lies a filling row, as long as any pass can need.
        """
        total = self.num_tokens
        rest = total - np.unique(self.cu_seqlens)
        room = max((backend.row_bucket(int(n)) - int(n) for n in rest if n), default=0)
        ids, positions, borders = self.ids, self.positions, self.cu_seqlens
        if room:
            ids = np.append(ids, np.full(room, ids[0], np.int32))
            positions = np.append(positions, np.zeros(room, np.int32))
            borders = np.append(borders, np.int32(total + room))
        columns = dict(self._columns(ON_DEVICE)) | {"ids": ids, "positions": positions}
        moved = _sent(backend, columns | {"cu_seqlens": borders, "cu_learnt": self.cu_learnt})
        shared = None
        if self.prompt_lengths is not None:
            shared = shared_lengths(self.ids, self.mask, self.cu_seqlens, self.prompt_lengths)
        return replace(self, _borders=(moved.pop("cu_seqlens"), moved.pop("cu_learnt")), _shared=shared, **moved)

    def micro_batches(
        self,
        index: int,
        max_tokens: int,
        share: Callable | None = None,
        riding: int = 0,
        shares_prompts: bool = False,
    ) -> list[Rows]:
        """The rows of optimizer batch `index` in passes of at most max_tokens tokens (a longer row stands alone).

        Rows with a gradient run apart from those without; of the two the one with more tokens comes first, so that the
        host is ahead when it comes to small passes. At most `riding` tokens without a gradient join the others.
        share(lengths) -> (first, last + 1): which of some rows are this rank's. shares_prompts: the passes take
        shared_tokens.
        """
        found = []
        first, last = self.slices[index : index + 2].tolist()
        middle = last if self.has_gradient is None else first + int(self.has_gradient[first:last].sum())
        kinds = [(first, middle, True), (middle, last, False)]
        sizes = self.lengths - self._shared if shares_prompts and self._shared is not None else self.lengths
        if first < middle < last and sizes[middle:last].sum() <= riding:
            kinds = [(first, last, True)]
        for start, stop, has_gradient in sorted(kinds, key=lambda kind: -sizes[kind[0] : kind[1]].sum()):
            if share is not None:
                own = share(self.lengths[start:stop])
                start, stop = start + own[0], start + own[1]
            found += [Rows(self, a, b, has_gradient) for a, b in self.cut(max_tokens, start, stop, shares_prompts)]
        return found

    def cut(
        self, max_tokens: int, first: int = 0, last: int | None = None, shares_prompts: bool = False
    ) -> Iterator[tuple[int, int]]:
        """Borders of passes over the rows first … last − 1 of at most max_tokens tokens each."""
        last = len(self) if last is None else last
        shared = self._shared if shares_prompts and self._shared is not None else np.zeros(len(self), np.int32)
        begin, total = first, 0
        for row, length, less in zip(
            range(first, last), self.lengths[first:last].tolist(), shared[first:last].tolist()
        ):
            if row > begin and total + length - less > max_tokens:
                yield begin, row
                begin, total = row, 0
            total += length - (less if row > begin else 0)
        if first < last:
            yield begin, last

    def to_arrays(self) -> dict[str, Any]:
        """Its columns as flat arrays, for a checkpoint in the middle of a generation batch."""
        arrays = dict(self._columns(SAVED))
        return arrays | {name: arrays[name][: self.num_tokens] for name in ("ids", "positions")}

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> PackedBatch:
        """The batch (on the host) that to_arrays() gave."""
        if "ids" not in arrays or set(arrays) - set(SAVED):
            raise ValueError(
                "the checkpoint lies in the middle of a generation batch, in the form of another version of cukit: "
                "resume from a checkpoint where a generation batch begins"
            )
        return cls(**arrays)

    def _columns(self, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        for name in names:
            if (column := getattr(self, name)) is not None:
                yield name, column


LEARNT_COLUMNS = (
    "predictors",
    "targets",
    "weights",
    "logprobs",
    "sampled",
    "ref_logprobs",
    "corrections",
    "chosen",
    "advantages",
    "values",
    "returns",
)
ON_DEVICE = ("ids", "positions", "weights_versions", "adapter_ids", *LEARNT_COLUMNS)
SAVED = tuple(field.name for field in fields(PackedBatch) if not field.name.startswith("_"))


def _sent(backend, columns: dict[str, np.ndarray]) -> dict[str, Any]:
    """The columns on the device, in one copy: each costs the host more than the few bytes of a column."""
    places, end = {}, 0
    for name, column in columns.items():
        places[name] = slice(end, end + column.nbytes)
        end += -(-column.nbytes // ALIGNED) * ALIGNED
    host = np.zeros(end, np.uint8)
    for name, column in columns.items():
        host[places[name]] = np.ascontiguousarray(column).view(np.uint8)
    sent = backend.array(host)
    return {name: sent[places[name]].view(column.dtype) for name, column in columns.items()}


@dataclass
class Rows:
    """Rows first … last − 1 of a batch that is on its device: what one forward pass takes. Nothing is copied.

    Columns of the learnt tokens are attributes: rows.advantages, rows.weights, …, each (N,).
    """

    batch: PackedBatch
    first: int
    last: int
    has_gradient: bool = True
    serves: str | None = None  # the one model that this pass trains, of several
    within: slice | None = None  # see part()

    def __getattr__(self, name):
        if name not in LEARNT_COLUMNS:
            raise AttributeError(f"Rows has no {name!r}")
        column = getattr(self.batch, name)
        return None if column is None else self.of(column)

    def of(self, column):
        """These rows' part of a column of learnt tokens."""
        return column[self._learnt]

    def part(self, within: slice | None) -> Rows:
        """Some of the learnt tokens, for their columns alone; None: all of them."""
        return replace(self, within=within)

    @property
    def _learnt(self) -> slice:
        start, stop = self.batch.cu_learnt[[self.first, self.last]].tolist()
        return slice(start, stop) if self.within is None else slice(start + self.within.start, start + self.within.stop)

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def num_learnt(self) -> int:
        """N, the learnt tokens of these rows."""
        return self._learnt.stop - self._learnt.start

    @property
    def cu_learnt(self):
        """(rows + 1,) borders of the rows within their columns of learnt tokens, on the device."""
        return self.batch._borders[1][self.first : self.last + 1] - self._learnt.start

    @property
    def tokens(self) -> PackedTokens:
        """The rows as a forward pass takes them, with what follows as filling up to the row bucket."""
        batch = self.batch
        start, stop = batch.cu_seqlens[[self.first, self.last]].tolist()
        borders, _ = batch._borders
        backend = backend_of(borders)
        size = backend.row_bucket(stop - start)
        through = self.last
        if size > stop - start:  # the first border at or behind the end, the filling's own included
            through = min(int(np.searchsorted(batch.cu_seqlens, start + size)), len(batch) + 1)
        cu_seqlens = np.minimum(borders[self.first : through + 1] - start, size)
        seen = slice(start, start + size)
        return PackedTokens(batch.ids[seen], batch.positions[seen], cu_seqlens, self.predictors - start, self.targets)

    @property
    def shared_tokens(self) -> PackedTokens:
        """The rows as a forward pass takes them, in which prompts stand once for neighbours that have the same; in
        memory of its own. The learnt tokens are those of `tokens`, in the same order.
        """
        batch, rows = self.batch, slice(self.first, self.last)
        start, stop = batch.cu_seqlens[[self.first, self.last]].tolist()
        borders = batch.cu_seqlens[self.first : self.last + 1] - start
        found = None if batch._shared is None else share_prompts(borders, batch._shared[rows])
        if found is None:
            return self.tokens
        backend = backend_of(batch.ids)
        kept, cu_seqlens, prefixes = found.kept, found.cu_seqlens, found.prefixes
        if filling := backend.row_bucket(len(kept)) - len(kept):  # a sequence of first tokens
            kept, end = np.append(kept, np.zeros(filling, np.int32)), np.int32(len(kept) + filling)
            cu_seqlens, prefixes = np.append(cu_seqlens, end), np.append(prefixes, [[0, 0, end]], axis=0)
        parts = [part.reshape(-1).astype(np.int32) for part in (kept, cu_seqlens, prefixes, found.places)]
        ends, device = np.cumsum(list(map(len, parts))), backend.array(np.concatenate(parts))
        kept, cu_seqlens, prefixes, places = (device[end - len(part) : end] for part, end in zip(parts, ends))
        ids, positions = (column[start:stop][kept] for column in (batch.ids, batch.positions))
        given = places[self.predictors - start], self.targets, prefixes.reshape(-1, 3)
        return PackedTokens(ids, positions, cu_seqlens, *given)
