"""Computes spans of prompts: one packed forward pass, and one draw for those that end.

What each of the two reads is one block of bytes, which one copy takes to the device. A device that launches kernels one
by one waits for the host in a pass of few tokens. So that is a step of fixed arrays, which a device with graphs replays
as one launch; numbers of spans and columns are rounded up, which makes few shapes of many.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from ..autograd import Tensor
from ..models.attend import PagedPrefill
from ..models.row_adapters import AllRows, choosing
from .adapters import in_order, number_of
from .copies import Inbox, Outbox, Results, layout, views
from .request import SEED_MASK
from .rows import SAMPLING
from .scheduler import Span
from .shapes import INPUT_BYTES, SHORT_TOKENS, ends_of_spans

MOST_PASSES = 256  # kept ready
PRECISE = [name for name in SAMPLING if name != "top_k"]


class Prefill:
    """Passes over spans, with the KV cache `kv`. graphs: makes short passes steps; None: they are called plainly."""

    def __init__(self, model, kv: list, precise: np.dtype, block_size: int, vocab_size: int, capacity: int, graphs):
        be = self.backend = model.backend
        self.model, self.kv, self._precise, self._graphs = model, kv, precise, graphs
        self._block_size, self._vocab_size = block_size, vocab_size
        self._passes: dict[tuple, tuple] = {}  # (tokens, spans, columns, adapter) -> (block, places, step)
        if graphs is not None:
            self._block = be.empty((INPUT_BYTES,), np.uint8)
            self._last = be.empty((ends_of_spans(capacity), model.config.hidden_size), model.dtype)
        self._inputs, self._settings = (Outbox(be, 1 << 14, np.uint8) for _ in range(2))
        self._inbox = Inbox(be, be.row_bucket(capacity), np.int32, precise)

    def launch(self, spans: list[Span]) -> Drawn:
        """Begin to compute spans, which are all of one adapter or sorted by it; adapters are on the device."""
        block, places, compute = self._pass_of(spans)
        self._inputs.send(block, packed(spans, places, len(block), self._block_size))
        last = compute()
        drawing = [(row, span) for row, span in enumerate(spans) if span.draws]
        return self._draw(last, *map(list, zip(*drawing, strict=True))) if drawing else Drawn([], None)

    # ---- the pass ----

    def _pass_of(self, spans: list[Span]) -> tuple:
        """(block, places, step) for these spans: their inputs go to the block, and the step gives the hidden states of
        their last rows, in order.
        """
        adapters = [span.sequence.request.adapter for span in spans]
        tokens, width = self.backend.row_bucket(sum(span.count for span in spans)), self._columns(spans)
        if self._graphs is not None and tokens <= SHORT_TOKENS and _last_as_long(adapters):
            key = tokens, power_of_two(len(spans)), power_of_two(width), adapters[0]
            if key[1] <= len(self._last) and inputs_of(*key[:3])[1] <= INPUT_BYTES:
                return self._kept(key)
        places, nbytes = inputs_of(tokens, len(spans), width)
        block = self.backend.empty((nbytes,), np.uint8)
        inputs, borders = views(block, places), np.cumsum([0, *(span.count for span in spans)])

        def compute():
            with choosing(in_order(adapters, borders)):
                return _last_states(self.model, self.kv, inputs)

        return block, places, compute

    def _columns(self, spans: list[Span]) -> int:
        """Of the block tables: as many as the longest context takes."""
        return -(-max(span.first + span.count for span in spans) // self._block_size)

    def _kept(self, key: tuple) -> tuple:
        found = self._passes.get(key)
        if found is None:
            if len(self._passes) == MOST_PASSES:
                self._passes.clear()
            found = self._passes[key] = self._make_pass(*key)
        return found

    def _make_pass(self, tokens: int, num_spans: int, width: int, adapter: Any) -> tuple:
        places, nbytes = inputs_of(tokens, num_spans, width)
        block, last = self._block[:nbytes], self._last[:num_spans]
        # not self, which holds the step: a cycle would keep the cache
        model, kv, inputs = self.model, self.kv, views(block, places)

        def step():
            with choosing(AllRows(adapter)):
                last[...] = _last_states(model, kv, inputs)  # a result of its own would stay in the memory of steps
            return last

        return block, places, self._graphs.graphed(step)

    # ---- the draw ----

    def _draw(self, last, rows: list[int], spans: list[Span]) -> Drawn:
        """Draw span.draws tokens after each span, from its row of `last`; draw j has the seed of sample j from the
        first on.
        """
        be, draws = self.backend, np.array([span.draws for span in spans])
        count, params = int(draws.sum()), [span.sequence.request.params for span in spans]
        fields = {"seeds": np.uint64, "draw_positions": np.int64, **dict.fromkeys(PRECISE, self._precise)}
        fields |= {"top_k": np.int32, "rows": np.int32}
        places, nbytes = layout((name, dtype, (count,)) for name, dtype in fields.items())
        host_block, block = np.empty(nbytes, np.uint8), be.empty((nbytes,), np.uint8)
        host, device = views(host_block, places), views(block, places)
        host.rows[:] = np.repeat(rows, draws)
        host.seeds[:] = [(span.sequence.seed + j) & SEED_MASK for span in spans for j in range(span.draws)]
        host.draw_positions[:] = np.repeat([len(span.sequence.ids) for span in spans], draws)
        for name in SAMPLING:
            getattr(host, name)[:] = np.repeat([getattr(one, name) for one in params], draws)
        self._settings.send(block, host_block)
        drawn = self._sample(last, device, self._bans_and_penalties(spans, draws))
        return Drawn(spans, self._inbox.fetch(*drawn))

    def _sample(self, last, device: SimpleNamespace, bans_and_penalties: tuple) -> tuple:
        logits = self.model.logits(Tensor(self.backend.embedding_forward(last, device.rows))).data
        settings = [getattr(device, name) for name in (*SAMPLING, "seeds", "draw_positions")]
        return self.backend.sample(logits, *settings, self._vocab_size, *bans_and_penalties)

    def _bans_and_penalties(self, spans: list[Span], draws: np.ndarray) -> tuple:
        """(banned (N, S), repetition_penalty (N,), seen (N, V)) of N draws, None where no span needs it."""
        be, banned, penalty, seen = self.backend, None, None, None
        sequences = [span.sequence for span in spans]
        early = [seq.num_generated < seq.request.params.min_tokens for seq in sequences]
        if any(early):
            ids = [sorted(seq.request.stop_ids) if is_early else [] for seq, is_early in zip(sequences, early)]
            rows = [one + [-1] * (max(map(len, ids)) - len(one)) for one in ids]
            banned = be.array(np.repeat(np.array(rows, np.int32), draws, axis=0))
        penalties = np.array([seq.request.params.repetition_penalty for seq in sequences], self._precise)
        if (penalties != 1).any():
            rows = np.zeros((len(spans), self.model.config.vocab_size), bool)
            for row, seq in zip(rows, sequences, strict=True):
                row[seq.ids] = seq.request.params.repetition_penalty != 1
            penalty, seen = be.array(np.repeat(penalties, draws)), be.array(np.repeat(rows, draws, axis=0))
        return banned, penalty, seen


class Drawn:
    """What spans draw, on its way to the host."""

    def __init__(self, spans: list[Span], results: Results | None):
        self._spans, self._results = spans, results

    def on_host(self) -> list[tuple[Span, np.ndarray, np.ndarray]]:
        """(span, tokens, logprobs) of each, once they are there."""
        if self._results is None:
            return []
        ends = np.cumsum([span.draws for span in self._spans])[:-1]
        parts = (np.split(values, ends) for values in self._results.on_host())
        return list(zip(self._spans, *parts, strict=True))


def inputs_of(tokens: int, spans: int, width: int) -> tuple[list, int]:
    """Where the inputs of a pass lie: (places, bytes)."""
    return layout(
        [
            ("slot_mapping", np.int64, (tokens,)),
            ("tokens", np.int32, (tokens,)),
            ("positions", np.int32, (tokens,)),
            ("block_tables", np.int32, (spans, width)),
            ("borders", np.int32, (spans + 1,)),
            ("context_lens", np.int32, (spans,)),
            ("last_rows", np.int32, (spans,)),
        ]
    )


def packed(spans: list[Span], places: list, nbytes: int, block_size: int) -> np.ndarray:
    """The inputs of a pass over `spans`, as bytes. Tokens beyond theirs have no slot; spans beyond them are empty, with
    the last token as their last row.
    """
    block, num_spans = np.zeros(nbytes, np.uint8), len(spans)
    inputs = views(block, places)
    firsts, counts = (np.array([getattr(span, name) for span in spans]) for name in ("first", "count"))
    borders = np.cumsum([0, *counts])
    total, of_span = borders[-1], np.repeat(np.arange(num_spans), counts)
    np.concatenate(
        [span.sequence.ids[span.first : span.first + span.count] for span in spans], out=inputs.tokens[:total]
    )
    positions = np.arange(total) + (firsts - borders[:-1])[of_span]
    for table, span in zip(inputs.block_tables, spans, strict=False):
        blocks = span.sequence.block_table[: len(table)]
        table[: len(blocks)] = blocks
    index, offset = np.divmod(positions, block_size)
    inputs.positions[:total] = positions
    inputs.slot_mapping[:total] = inputs.block_tables[of_span, index].astype(np.int64) * block_size + offset
    inputs.slot_mapping[total:] = -1
    inputs.borders[: num_spans + 1], inputs.borders[num_spans + 1 :] = borders, total
    inputs.context_lens[:num_spans] = firsts + counts
    inputs.last_rows[:] = inputs.borders[1:] - 1
    return block


def power_of_two(count: int) -> int:
    """The smallest that is at least `count`."""
    return 1 << (count - 1).bit_length()


def _last_states(model, kv: list, inputs: SimpleNamespace):
    """The hidden states (spans, C) of the last row of each span."""
    attend = PagedPrefill(kv, inputs.block_tables, inputs.borders, inputs.context_lens, inputs.slot_mapping)
    hidden = model.forward(inputs.tokens, inputs.positions, attend)
    return model.backend.embedding_forward(hidden.data, inputs.last_rows)


def _last_as_long(adapters: list) -> bool:
    """Whether all spans have one adapter, which stays: the model's own, or none."""
    first = adapters[0]
    return len(set(map(number_of, adapters))) == 1 and (first is None or not first.for_requests)
