"""From a scheduled step to arrays, through the model, to drawn tokens.

Every running sequence has a row in host arrays (newest token, length, block table, sampling parameters) that change
only where the sequence changes. A decode step is a gather of rows, one forward pass and one draw; prompts are one more
packed pass.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..autograd import Tensor, no_grad
from ..config import EngineConfig
from ..models.attend import PagedDecode, PagedPrefill
from .scheduler import Step
from .sequence import SEED_MASK, Sequence

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

    def __init__(self, model, num_rows: int, max_model_len: int, num_blocks: int, block_size: int, vocab_size: int):
        self.model, self.backend, self.vocab_size = model, model.backend, vocab_size
        self.num_blocks, self.block_size = num_blocks, block_size
        self.kv: list | None = None
        self.tokens = np.zeros(num_rows, np.int32)  # the newest token of a row, not computed yet
        self.lengths = np.zeros(num_rows, np.int32)  # tokens of a row, the newest included
        self.block_tables = np.zeros((num_rows, -(-max_model_len // block_size)), np.int32)
        self.temperature = np.zeros(num_rows, np.float64)
        self.top_k = np.zeros(num_rows, np.int32)
        self.top_p = np.zeros(num_rows, np.float64)
        self.min_p = np.zeros(num_rows, np.float64)
        self.seeds = np.zeros(num_rows, np.uint64)
        self.repetition_penalty = np.ones(num_rows, np.float64)
        self.min_lengths = np.zeros(num_rows, np.int32)  # below this length the stop ids are banned
        self.stop_ids = np.full((num_rows, 1), -1, np.int32)
        self.seen: np.ndarray | None = None  # (rows, V) tokens that occurred; made when a request first needs it
        self.allocate_cache()

    def allocate_cache(self) -> None:
        """Make the KV cache: for each layer K and V of (num_blocks, block_size, K, D)."""
        config = self.model.config
        shape = (self.num_blocks, self.block_size, config.num_key_value_heads, config.head_dim)
        zeros, dtype = self.backend.zeros, self.model.dtype
        self.kv = [(zeros(shape, dtype), zeros(shape, dtype)) for _ in range(config.num_hidden_layers)]

    def free_cache(self) -> None:
        self.kv = None

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
        be, lengths = self.backend, self.lengths[rows]
        positions = lengths - 1
        block_indices, offsets = np.divmod(positions, self.block_size)
        slots = self.block_tables[rows, block_indices].astype(np.int64) * self.block_size + offsets
        tables = self.block_tables[rows, : int(block_indices.max()) + 1]
        attend = PagedDecode(self.kv, be.array(tables), be.array(lengths), be.array(slots))
        hidden = self.model.forward(be.array(self.tokens[rows]), be.array(positions), attend)
        tokens, logprobs = self._sample(hidden, rows, self.seeds[rows], lengths)
        self.tokens[rows] = tokens
        self.lengths[rows] += 1
        if self.seen is not None:
            self.seen[rows, tokens] = self.repetition_penalty[rows] != 1
        return tokens.tolist(), logprobs.tolist()

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
        tokens, logprobs = self._sample(Tensor(hidden.data[last]), rows, np.array(seeds, np.uint64), self.lengths[rows])
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

    def _sample(self, hidden, rows, seeds, lengths) -> tuple[np.ndarray, np.ndarray]:
        """Head and draw for hidden (B, C), with the parameters of rows (B); the drawn tokens will stand at lengths (B).

        Returns tokens and log-probs (B) on the host.
        """
        be = self.backend
        logits = self.model.logits(hidden).data
        is_early = lengths < self.min_lengths[rows]
        banned = be.array(np.where(is_early[:, None], self.stop_ids[rows], -1)) if is_early.any() else None
        penalty = seen = None
        if self.seen is not None and (self.repetition_penalty[rows] != 1).any():
            penalty, seen = be.array(self.repetition_penalty[rows]), be.array(self.seen[rows])
        filters = (self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])
        parameters = map(be.array, (*filters, seeds, lengths.astype(np.int64)))
        tokens, logprobs = be.sample(logits, *parameters, self.vocab_size, banned, penalty, seen)
        tokens, logprobs = be.to_numpy(tokens), be.to_numpy(logprobs)
        if not np.isfinite(logprobs).all():
            raise ValueError(
                "the model's logits are not finite (NaN or infinity): the weights are damaged or training diverged;"
                " load an earlier checkpoint"
            )
        return tokens, logprobs
