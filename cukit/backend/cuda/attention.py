"""Causal attention of packed sequences: launches kernels/attention.cu, and where sequences share prefixes
kernels/attention_prefix.cu. Same functions as the NumPy shelf.

kernels/attention.cuh says how keys are reduced; decoding reduces them in the same way.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from .constants import source_constant
from .device import empty
from .loader import Module, load

LOG2_E = math.log2(math.e)
DELTA_ROWS = source_constant("attention", "DELTA_ROWS")
DELTA_THREADS = source_constant("attention", "DELTA_THREADS")
MAX_HEAD_DIM = source_constant("attention", "MAX_HEAD_DIM")


class _Geometry(NamedTuple):
    """What a variant of the kernels fixes (attention_geometry in attention.cuh): tile height, threads a block, bytes of
    dynamic shared memory.
    """

    query_tile: int
    threads: int
    forward_shared: int
    query_gradient_shared: int
    key_gradient_shared: int


@functools.cache
def _kernels(family, dtype, head_dim, **defines) -> tuple[Module, _Geometry]:
    """A family's kernels for head_dim, and their geometry."""
    module = load(family, dtype, HEAD_DIM=head_dim, **defines)
    return module, _Geometry(*module.constants("attention_geometry", len(_Geometry._fields)))


def _head_dim(qkv, num_heads, num_kv_heads) -> int:
    """D of qkv (T, (H + 2K)·D), checked."""
    if qkv.ndim != 2 or num_heads % num_kv_heads or qkv.shape[1] % (num_heads + 2 * num_kv_heads):
        raise ValueError(
            f"attention: qkv of shape {qkv.shape} does not hold {num_heads} query and {num_kv_heads} key heads: "
            "it must be (T, (H + 2K)·D) with K dividing H"
        )
    head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    if head_dim % 4 or not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"attention: head_dim {head_dim} is not supported on cuda: a multiple of 4 up to {MAX_HEAD_DIM}, or "
            f"device cpu"
        )
    return head_dim


def _pieces(total_tokens, num_seqs, rows) -> int:
    """How many piece numbers cover any packing of total_tokens tokens into num_seqs sequences (find_piece in
    attention.cuh).
    """
    return total_tokens // rows + num_seqs + 1


def _variant(qkv, head_dim, cu_seqlens, prefixes) -> tuple[Module, str, _Geometry, tuple]:
    """Kernels, the beginning of their names, their geometry, and the arrays that tell them where sequences are."""
    if prefixes is None:
        kernels, geometry = _kernels("attention", qkv.dtype, head_dim)
        return kernels, "attention", geometry, (cu_seqlens,)
    if prefixes.shape != (len(cu_seqlens) - 1, 3):
        raise ValueError(f"attention: prefixes {prefixes.shape} for {len(cu_seqlens) - 1} sequences: want 3 a sequence")
    kernels, geometry = _kernels("attention_prefix", qkv.dtype, head_dim)
    return kernels, "attention_prefix", geometry, (cu_seqlens, prefixes)


def attention_forward(qkv, cu_seqlens, num_heads, num_kv_heads, prefixes=None):
    """Returns o (T, H·D) and lse (T, H), the base-e log-sum-exp of the scaled scores. Rows from cu_seqlens[-1] on are
    0.

    prefixes (B, 3) int32: see ops.attention. The rows of a sequence have the bits that they have in one sequence of its
    prefix and its own rows.
    """
    head_dim, total, num_seqs = _head_dim(qkv, num_heads, num_kv_heads), len(qkv), len(cu_seqlens) - 1
    o, lse = empty((total, num_heads * head_dim), qkv.dtype), empty((total, num_heads), np.float32)
    if total:
        kernels, name, geometry, where = _variant(qkv, head_dim, cu_seqlens, prefixes)
        getattr(kernels, f"{name}_forward")(
            _pieces(total, num_seqs, geometry.query_tile) * num_heads,
            geometry.threads,
            o,
            lse,
            qkv,
            *where,
            total,
            num_seqs,
            num_heads,
            num_kv_heads,
            LOG2_E * head_dim**-0.5,
            shared=geometry.forward_shared,
        )
    return o, lse


def attention_backward(do, qkv, o, lse, cu_seqlens, num_heads, num_kv_heads, prefixes=None):
    """dqkv like qkv. P is rebuilt from lse; P and dS are rounded to the model's dtype before their products (Dao 2023,
    FlashAttention-2).
    """
    head_dim, total, num_seqs = _head_dim(qkv, num_heads, num_kv_heads), len(qkv), len(cu_seqlens) - 1
    dqkv, delta = empty(qkv.shape, qkv.dtype), empty((total, num_heads), np.float32)
    if do.shape != o.shape or o.shape != (total, num_heads * head_dim) or lse.shape != delta.shape:
        raise ValueError(
            f"attention: do {do.shape}, o {o.shape}, lse {lse.shape} do not fit qkv {qkv.shape}: "
            f"they must be ({total}, {num_heads * head_dim}) twice and ({total}, {num_heads})"
        )
    if total:
        delta_kernels, _ = _kernels("attention", qkv.dtype, head_dim)
        delta_kernels.attention_delta(
            -(-total * num_heads // DELTA_ROWS), DELTA_THREADS, delta, do, o, total * num_heads
        )
        kernels, name, geometry, where = _variant(qkv, head_dim, cu_seqlens, prefixes)
        pieces = _pieces(total, num_seqs, geometry.query_tile)
        rest = (dqkv, do, qkv, lse, delta, *where, total, num_seqs, num_heads, num_kv_heads, head_dim**-0.5)
        halves = 1 if prefixes is None else 2  # of the grid: prefixes go first
        getattr(kernels, f"{name}_backward_kv")(
            pieces * num_kv_heads * halves, geometry.threads, *rest, shared=geometry.key_gradient_shared
        )
        getattr(kernels, f"{name}_backward_q")(
            pieces * num_heads, geometry.threads, *rest, shared=geometry.query_gradient_shared
        )
    return dqkv
