"""From a scheduled step to arrays, through the model, to drawn tokens.

Every running sequence has a row in host arrays (newest token, length, block table, sampling parameters) that change
only where the sequence changes. A decode step is a gather of rows into one buffer, one copy, one forward pass and one
draw, which a device with graphs replays as one launch; prompts are one more packed pass.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..autograd import Tensor, no_grad
from ..models.attend import PagedDecode, PagedPrefill
from .config import EngineConfig
from .decode_inputs import DecodeInputs
from .scheduler import Step
from .sequence import SEED_MASK, Sequence

CHUNK_KEYS = 256  # attention reads keys in chunks of this many; a step is made for a power of two of them
MOST_STEPS = 1024  # kept ready; a CPU, which rounds nothing up, meets more shapes than it is worth keeping
CPU_CACHE_BYTES = 4 << 30  # the KV cache of the CPU grows to this at most unless num_kv_blocks says otherwise


def fit_memory(config: EngineConfig, model) -> EngineConfig:
    """config with max_model_len and num_kv_blocks filled in; ValueError if max_model_len does not fit.

    By default the cache holds max_num_seqs sequences of max_model_len, or what gpu_memory_utilization of the free
    memory allows; a default max_model_len is the model's own limit, or less if the cache is smaller.
    """
    shape, block_size = model.config, config.block_size
    longest = shape.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ValueError(f"max_model_len={config.max_model_len} exceeds the model's max_position_embeddings={longest}")
    max_model_len = config.max_model_len or longest
    num_blocks = config.num_kv_blocks
    if num_blocks is None:
        token_bytes = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * model.dtype.itemsize
        budget = int(model.backend.memory_info()[0] * config.gpu_memory_utilization)
        if model.backend.name == "cpu":
            budget = min(budget, CPU_CACHE_BYTES)
        wanted = config.max_num_seqs * -(-max_model_len // block_size)
        num_blocks = min(wanted, max(1, budget // (token_bytes * block_size)))
    room = num_blocks * block_size
    if room < max_model_len and config.max_model_len is not None:
        raise ValueError(
            f"the KV cache has room for {room} tokens ({num_blocks} blocks of {block_size}), less than max_model_len="
            f"{max_model_len}: lower max_model_len, or raise num_kv_blocks or gpu_memory_utilization"
        )
    return replace(config, max_model_len=min(room, max_model_len), num_kv_blocks=num_blocks)


class ModelRunner:
    """Holds the KV cache and the rows. num_rows sequences run at once; max_model_len bounds each."""

    def __init__(
        self,
        model,
        num_rows: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        enforce_eager: bool = False,
    ):
        self.model, self.backend, self.vocab_size = model, model.backend, vocab_size
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enforce_eager = enforce_eager
        self.kv: list | None = None
        precise = self.backend.accumulator(model.dtype)
        self.tokens = np.zeros(num_rows, np.int32)  # the newest token of a row, not computed yet
        self.lengths = np.zeros(num_rows, np.int32)  # tokens of a row, the newest included
        self.block_tables = np.zeros((num_rows, -(-max_model_len // block_size)), np.int32)
        self.temperature = np.zeros(num_rows, precise)
        self.top_k = np.zeros(num_rows, np.int32)
        self.top_p = np.zeros(num_rows, precise)
        self.min_p = np.zeros(num_rows, precise)
        self.seeds = np.zeros(num_rows, np.uint64)
        self.repetition_penalty = np.ones(num_rows, precise)
        self.min_lengths = np.zeros(num_rows, np.int32)  # below this length the stop ids are banned
        self.stop_ids = np.full((num_rows, 1), -1, np.int32)
        self.seen: np.ndarray | None = None  # (rows, V) tokens that occurred; made when a request first needs it
        self._inputs = DecodeInputs(
            self.backend, precise, self.backend.row_bucket(num_rows), self.block_tables.shape[1]
        )
        self._steps: dict[tuple[int, int], tuple] = {}  # (rows, blocks) -> (host views, device views, the step)
        self._graphs = self.backend.Graphs()
        self.allocate_cache()

    def allocate_cache(self) -> None:
        """Make the KV cache: for each layer K and V of (num_blocks, block_size, K, D)."""
        config = self.model.config
        shape = (self.num_blocks, self.block_size, config.num_key_value_heads, config.head_dim)
        zeros, dtype = self.backend.zeros, self.model.dtype
        self.kv = [(zeros(shape, dtype), zeros(shape, dtype)) for _ in range(config.num_hidden_layers)]

    def free_cache(self) -> None:
        self.kv = None
        self._steps.clear()  # they write into it
        self._graphs = self.backend.Graphs()

    # ---- rows ----

    def set_row(self, seq: Sequence) -> None:
        """Write everything about a sequence into its row."""
        row, params = seq.row, seq.request.params
        self.tokens[row], self.lengths[row] = seq.token_ids[-1], len(seq.token_ids)
        self.block_tables[row, : len(seq.block_table)] = seq.block_table
        self.temperature[row], self.top_k[row] = params.temperature, params.top_k
        self.top_p[row], self.min_p[row], self.seeds[row] = params.top_p, params.min_p, seq.seed
        self.repetition_penalty[row] = params.repetition_penalty
        self.min_lengths[row] = seq.prompt_length + params.min_tokens
        if params.min_tokens:
            self._set_stop_ids(row, sorted(seq.stop_ids))
        if params.repetition_penalty != 1 and self.seen is None:
            self.seen = np.zeros((len(self.tokens), self.model.config.vocab_size), bool)
        if self.seen is not None:
            self.seen[row] = False
            self.seen[row, seq.token_ids] = params.repetition_penalty != 1

    def _set_stop_ids(self, row: int, stop_ids: list[int]) -> None:
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(stop_ids)] = stop_ids

    # ---- a step ----

    def run(self, step: Step) -> tuple[tuple[list[int], list[float]], list[tuple[Sequence, list[int], list[float]]]]:
        """Compute a step.

        Returns the (tokens, logprobs) of step.decodes, in order, and (sequence, tokens, logprobs) for each prompt that
        was completed: one token for it and one for each of its forks.
        """
        for seq in step.admitted:
            self.set_row(seq)
        for seq in step.changed:
            last = len(seq.block_table) - 1
            self.block_tables[seq.row, last] = seq.block_table[last]
        if step.copies:
            source, target = np.array(step.copies, np.int32).T
            self.backend.copy_blocks(self.kv, self.backend.array(source), self.backend.array(target))
        with no_grad():
            decoded = self._decode(step.decodes) if step.decodes else ([], [])
            return decoded, self._prefill(step.prefills) if step.prefills else []

    def _decode(self, sequences: list[Sequence]) -> tuple[list[int], list[float]]:
        rows = np.fromiter((seq.row for seq in sequences), np.int64, len(sequences))
        host, device, step = self._step_for(rows)
        host.upload()
        if self._draws_plainly(rows):
            tokens, logprobs = self._on_host(*step(), len(rows))
        else:
            logits = _decode_logits(self.model, self.kv, device)[: len(rows)]
            tokens, logprobs = self._draw(logits, rows, self.seeds[rows], self.lengths[rows])
        self.tokens[rows] = tokens
        self.lengths[rows] += 1
        if self.seen is not None:
            self.seen[rows, tokens] = self.repetition_penalty[rows] != 1
        return tokens.tolist(), logprobs.tolist()

    def _step_for(self, rows: np.ndarray) -> tuple:
        """(host views, device views, step) for these rows, the host views filled."""
        count, lengths = len(rows), self.lengths[rows]
        block_indices, offsets = np.divmod(lengths - 1, self.block_size)
        chunks = 1 << (int(lengths.max() - 1) // CHUNK_KEYS).bit_length()
        blocks = min(-(-chunks * CHUNK_KEYS // self.block_size), self.block_tables.shape[1])
        key = self.backend.row_bucket(count), blocks
        if key not in self._steps:
            if len(self._steps) == MOST_STEPS:
                self._steps.clear()
            self._steps[key] = self._make_step(*self._inputs.views(*key))
        host, device, step = self._steps[key]
        host.slot_mapping[:count] = self.block_tables[rows, block_indices].astype(np.int64) * self.block_size + offsets
        host.positions[:count] = lengths - 1
        host.context_lens[:count] = host.draw_positions[:count] = lengths
        host.block_tables[:count] = self.block_tables[rows, :blocks]
        for name in ("tokens", "seeds", "temperature", "top_k", "top_p", "min_p"):
            getattr(host, name)[:count] = getattr(self, name)[rows]
        if count < key[0]:
            self._fill_up(host, count)
        return host, device, step

    def _make_step(self, host, device) -> tuple:
        model, kv, vocab_size = (
            self.model,
            self.kv,
            self.vocab_size,
        )  # not self, which holds the step: a cycle would keep the cache

        def step():
            parameters = (
                device.temperature,
                device.top_k,
                device.top_p,
                device.min_p,
                device.seeds,
                device.draw_positions,
            )
            return model.backend.sample(_decode_logits(model, kv, device), *parameters, vocab_size)

        return host, device, step if self.enforce_eager else self._graphs.graphed(step)

    @staticmethod
    def _fill_up(host, count: int) -> None:
        """Rows from count on do nothing: no context, no slot, a greedy draw that nobody reads."""
        for name, values in vars(host).items():
            if name not in ("block_tables", "upload"):
                values[count:] = -1 if name == "slot_mapping" else 0

    def _draws_plainly(self, rows: np.ndarray) -> bool:
        """Whether the draw needs nothing but the filters: no row bans a stop id or has a penalty."""
        penalised = self.seen is not None and (self.repetition_penalty[rows] != 1).any()
        return not penalised and not (self.lengths[rows] < self.min_lengths[rows]).any()

    def _prefill(self, chunks) -> list[tuple[Sequence, list[int], list[float]]]:
        be = self.backend
        rows = np.array([seq.row for seq, _, _ in chunks])
        starts, counts = (np.array(values, np.int32) for values in zip(*(chunk[1:] for chunk in chunks), strict=True))
        ends = starts + counts
        borders = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions = np.arange(borders[-1], dtype=np.int32) - np.repeat(borders[:-1] - starts, counts)
        tokens = np.concatenate([seq.token_ids[start : start + count] for seq, start, count in chunks]).astype(np.int32)
        block_indices, offsets = np.divmod(positions, self.block_size)
        slots = self.block_tables[np.repeat(rows, counts), block_indices].astype(np.int64) * self.block_size + offsets
        filling = be.row_bucket(len(tokens)) - len(tokens)
        tokens, positions = np.pad(tokens, (0, filling)), np.pad(positions, (0, filling))
        slots = np.pad(slots, (0, filling), constant_values=-1)
        tables = self.block_tables[rows, : int(block_indices.max()) + 1]
        attend = PagedPrefill(self.kv, be.array(tables), be.array(borders), be.array(ends), be.array(slots))
        hidden = self.model.forward(be.array(tokens), be.array(positions), attend)
        last_rows = [(seq, int(border) - 1) for (seq, _, _), border in zip(chunks, borders[1:], strict=True)]
        completed = [pair for pair, end in zip(last_rows, ends, strict=True) if end == len(pair[0].token_ids)]
        return self._sample_prompts(hidden, completed) if completed else []

    def _sample_prompts(self, hidden, completed) -> list[tuple[Sequence, list[int], list[float]]]:
        """Draw from the last row of each completed prompt, once a sample. completed: (sequence, its last row) pairs."""
        shares = np.array([1 + seq.pending_forks for seq, _ in completed])
        rows = np.repeat([seq.row for seq, _ in completed], shares)
        seeds = [(seq.seed + j) & SEED_MASK for seq, _ in completed for j in range(1 + seq.pending_forks)]
        last = self.backend.array(np.repeat([row for _, row in completed], shares))
        logits = self.model.logits(Tensor(hidden.data[last])).data
        tokens, logprobs = self._draw(logits, rows, np.array(seeds, np.uint64), self.lengths[rows])
        firsts = np.cumsum(shares) - shares
        for (seq, _), first in zip(completed, firsts, strict=True):
            self.tokens[seq.row] = tokens[first]
            self.lengths[seq.row] += 1
            if self.seen is not None:
                self.seen[seq.row, tokens[first]] = seq.request.params.repetition_penalty != 1
        return [
            (seq, tokens[first : first + share].tolist(), logprobs[first : first + share].tolist())
            for (seq, _), first, share in zip(completed, firsts, shares, strict=True)
        ]

    def _draw(self, logits, rows, seeds, lengths) -> tuple[np.ndarray, np.ndarray]:
        """Draw from logits (B, V) with the parameters of rows (B); the drawn tokens will stand at lengths (B).

        Returns tokens and log-probs (B) on the host.
        """
        be = self.backend
        is_early = lengths < self.min_lengths[rows]
        banned = be.array(np.where(is_early[:, None], self.stop_ids[rows], -1)) if is_early.any() else None
        penalty = seen = None
        if self.seen is not None and (self.repetition_penalty[rows] != 1).any():
            penalty, seen = be.array(self.repetition_penalty[rows]), be.array(self.seen[rows])
        filters = (self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])
        parameters = map(be.array, (*filters, seeds, lengths.astype(np.int64)))
        return self._on_host(*be.sample(logits, *parameters, self.vocab_size, banned, penalty, seen), len(rows))

    def _on_host(self, tokens, logprobs, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The first `count` of each as host arrays; ValueError if a log-prob is not finite."""
        tokens, logprobs = self.backend.to_numpy(tokens)[:count], self.backend.to_numpy(logprobs)[:count]
        if not np.isfinite(logprobs).all():
            raise ValueError(
                "the model's logits are not finite (NaN or infinity): the weights are damaged or training diverged;"
                " load an earlier checkpoint"
            )
        return tokens, logprobs


def _decode_logits(model, kv, inputs):
    """Logits (rows, V) of a decode step on the device."""
    attend = PagedDecode(kv, inputs.block_tables, inputs.context_lens, inputs.slot_mapping)
    return model.logits(model.forward(inputs.tokens, inputs.positions, attend)).data
