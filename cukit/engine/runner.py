"""Runs a scheduled step: makes its arrays, calls the model, draws tokens.

The rows' inputs stand ready in one buffer (rows.py). So a decode step is one copy, one forward pass and one draw; a
device with graphs replays it as one launch. The spans of prompts take one more packed pass (prefill.py).

What was drawn stays on the device, too: the step after the one in flight takes its tokens from there.
"""

from __future__ import annotations

import numpy as np

from ..autograd import no_grad
from ..models.adapters import weights_in_use
from ..models.attend import PagedDecode
from ..models.quantized import QuantizedWeights
from ..models.row_adapters import choosing
from .adapters import RequestAdapters, by_owner, number_of
from .config import EngineConfig
from .copies import Inbox, Results
from .prefill import Drawn, Prefill
from .rows import SAMPLING, Rows
from .scheduler import Span, Step
from .shapes import CHUNK_KEYS, block_bytes, cache_dtype

MOST_STEPS = 1024  # kept ready; a CPU, which rounds nothing up, meets more shapes than it is worth keeping


class ModelRunner:
    """Holds the KV cache and computes steps of `rows`."""

    def __init__(
        self,
        model,
        rows: Rows,
        config: EngineConfig,
        vocab_size: int,
        adapters: RequestAdapters,
        step_bytes: int,
    ):
        """step_bytes: the temporary memory that captured steps share."""
        self._adapters, self._takes_adapters = adapters, config.enable_lora
        self.model, self.backend, self.rows, self.vocab_size = model, model.backend, rows, vocab_size
        self.num_blocks, self.block_size = config.num_kv_blocks, config.block_size
        self.enforce_eager = config.enforce_eager
        self.max_context_len = rows.block_tables.shape[1] * config.block_size
        dtype = cache_dtype(config, model.dtype)
        self._memory = self.backend.Reservation(
            self.num_blocks * block_bytes(model.own_config, dtype, config.block_size)
        )
        self._caches = _cache_arrays(self._memory, model.own_config, dtype, self.num_blocks, self.block_size)
        self.kv = list(zip(self._caches[::2], self._caches[1::2], strict=True))
        self._precise = self.backend.accumulator(model.dtype)
        self._wide = None  # copies of the weights as they were at the first step after weights_changed()
        self._quantization, self._quantized = config.quantization, None  # these stay, and are made anew in place
        self._steps: dict[tuple, tuple] = {}  # (rows, longest context, adapters) -> (device views, the step)
        self._graphs = self.backend.Graphs(step_bytes)
        self._inbox = Inbox(self.backend, self.backend.row_bucket(rows.capacity), np.int32, self._precise)
        given = self._precise, self.block_size, vocab_size, rows.capacity
        self._prefill = Prefill(model, self.kv, *given, None if self.enforce_eager else self._graphs)

    @property
    def cache_bytes(self) -> int:
        """Of the KV cache when the engine is awake."""
        return self._memory.nbytes

    @property
    def is_awake(self) -> bool:
        return self._memory.resident

    def _require_awake(self) -> None:
        """A stream may have been made, or a thread may have come, before the engine was put to sleep."""
        if not self._memory.resident:
            raise ValueError("the engine sleeps: call wake_up() first")

    def weights_changed(self) -> None:
        """Forget copies of the weights."""
        self._wide = None

    def allocate_cache(self) -> None:
        """Take memory for the KV cache again, at the addresses that captured steps know."""
        self._memory.restore()

    def free_cache(self) -> None:
        """Give the memory of the KV cache to the device's other processes; its addresses stay."""
        self.weights_changed()
        self._memory.release()

    def run(self, step: Step) -> tuple[tuple | None, list[tuple[Span, np.ndarray, np.ndarray]]]:
        """Compute a step.

        Returns (tokens, logprobs) of the rows, (num_rows,) on the host, None without rows; and (span, tokens, logprobs)
        for each span that draws.
        """
        flight = self.launch(step) if step.num_rows else None
        if flight is None:
            self._require_awake()
            self._copy_blocks(step)
        drawn = self._launch_spans(step.spans) if step.spans else None
        found = [] if drawn is None else drawn.on_host()
        if flight is None:
            return None, found
        tokens, logprobs = flight.on_host()
        return (tokens[: step.num_rows], logprobs[: step.num_rows]), found

    def _launch_spans(self, spans: list[Span]) -> Drawn:
        spans = sorted(spans, key=lambda span: number_of(span.sequence.request.adapter))
        self.load_adapters([span.sequence.request.adapter for span in spans])
        with no_grad(), self._weights():
            return self._prefill.launch(spans)

    def launch(self, step: Step, before: Results | None = None) -> Results:
        """Begin to compute the rows of a step; returns its tokens and logprobs, (num_rows or more,) each, which the
        device keeps until the next launch, and the host until the one after that. before: the results of the step in
        flight, which draws the newest tokens.
        """
        self._require_awake()
        self._copy_blocks(step)
        rows = self.rows
        self.load_adapters(rows.adapters)
        device, compute = self._step_for(step.num_rows, rows.longest)
        rows.upload()
        if before is not None:
            self.backend.newest_tokens(rows.device.tokens, rows.device.sources, before.on_device[0])
        with no_grad(), self._weights():
            drawn = compute() if rows.draw_plainly else self._decode_with_settings(device, step.num_rows)
        return self._inbox.fetch(*drawn)

    def load_adapters(self, adapters) -> None:
        """Bring adapters to the device; steps that know one that has to go are forgotten."""
        if self._takes_adapters and (gone := set(self._adapters.load(adapters))):
            self._steps = {key: step for key, step in self._steps.items() if gone.isdisjoint(map(number_of, key[2]))}

    def _copy_blocks(self, step: Step) -> None:
        if step.copies:
            pairs = np.ascontiguousarray(np.array(step.copies, np.int64).T)
            self.backend.copy_blocks(self._caches, *self.backend.array(pairs))

    def _weights(self):
        """Within it the forward pass may use copies of the weights."""
        if self._wide is None:
            self._wide = self.backend.WideCopies(self._copy_weights())
        if self._quantized is None:
            return self._wide
        self._quantized.others = self._wide
        return self._quantized

    def _copy_weights(self) -> list:
        """Quantise the weights if that is asked for; returns those that stay in use as they are."""
        in_use = weights_in_use(self.model)
        if self._quantization is None:
            return in_use
        if self._quantized is None:
            self._quantized = QuantizedWeights(self.model, self._quantization)
        else:
            self._quantized.refresh()
        replaced = self._quantized.replaced()
        return [weight for weight in in_use if id(weight) not in replaced]

    # ---- rows ----

    def _decode_with_settings(self, device, count: int) -> tuple:
        """(tokens, logprobs) of a step in which some row bans a stop id or has a penalty, which no graph holds."""
        rows = self.rows
        on_device = [None if x is None else self.backend.array(x) for x in rows.draw_settings()]
        settings = [getattr(device, name)[:count] for name in (*SAMPLING, "seeds", "draw_positions")]
        with choosing(by_owner(rows.adapters, device.owners)):
            logits = _decode_logits(self.model, self.kv, device, self.max_context_len)[:count]
        return self.backend.sample(logits, *settings, self.vocab_size, *on_device)

    def _step_for(self, count: int, longest: int) -> tuple:
        """(device views, step) for `count` rows of at most `longest` tokens, with the adapters that they have; made for
        a power of two of chunks.
        """
        context = (1 << ((longest - 1) // CHUNK_KEYS).bit_length()) * CHUNK_KEYS
        key = self.backend.row_bucket(count), min(context, self.max_context_len), self.rows.adapters
        if key not in self._steps:
            if len(self._steps) == MOST_STEPS:
                self._steps.clear()
            self._steps[key] = self._make_step(*key)
        return self._steps[key]

    def _make_step(self, rows: int, max_context_len: int, adapters: tuple) -> tuple:
        device = self.rows.views(rows)
        # not self, which holds the step: a cycle would keep the cache
        model, kv, vocab_size = self.model, self.kv, self.vocab_size
        settings = [getattr(device, name) for name in (*SAMPLING, "seeds", "draw_positions")]
        of_rows = by_owner(adapters, device.owners)

        def step():
            with choosing(of_rows):
                logits = _decode_logits(model, kv, device, max_context_len)
            return model.backend.sample(logits, *settings, vocab_size)

        return device, step if self.enforce_eager else self._graphs.graphed(step)


def _cache_arrays(memory, config, dtype, num_blocks: int, block_size: int):
    """(2 · layers, num_blocks, block_size, K, D): a layer's keys, its values, the next layer's keys, …"""
    shape = (num_blocks, block_size, config.num_key_value_heads, config.head_dim)
    return memory.array(0, (2 * config.num_hidden_layers, *shape), dtype)


def _decode_logits(model, kv, inputs, max_context_len: int):
    """Logits (rows, V) of a decode step on the device."""
    attend = PagedDecode(kv, inputs.block_tables, inputs.context_lens, inputs.slot_mapping, max_context_len)
    return model.logits(model.forward(inputs.tokens, inputs.positions, attend)).data
