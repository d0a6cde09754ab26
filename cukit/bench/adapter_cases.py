"""The array functions of adapters, of rank RANK for each part of a fused weight, as cases of `bench kernels`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .workbench import DECODE_ROWS, FLOAT, Case, Workbench

RANK = 32
PARTS = {"qkv_proj": 3, "o_proj": 1, "gate_up_proj": 2, "down_proj": 1}


def adapter_cases(b: Workbench) -> Iterator[Case]:
    for name, parts in PARTS.items():
        outs, ins = b.weights[name]
        rank = parts * RANK

        def forward(rows, outs=outs, ins=ins, rank=rank):
            return b.random(rows, ins), b.weight(outs, ins), b.weight(rank, ins), b.weight(outs, rank)

        def backward(rows, outs=outs, ins=ins, rank=rank):
            return b.random(rows, outs), b.weight(outs, ins), b.random(rows, rank), b.weight(rank, ins)

        def merge(outs=outs, ins=ins):
            weight = b.weight(outs, ins)
            factors = b.random(RANK, ins, dtype=b.statistics), b.random(outs, RANK, dtype=b.statistics)
            return weight, weight, *factors, 2.0

        weights = outs * ins + rank * (outs + ins)
        for rows in dict.fromkeys([b.tokens, *DECODE_ROWS]):
            moved = b.size * (rows * (ins + outs + rank) + weights)
            shape = f"{name} {rows} x {ins} -> {outs}, rank {rank}"
            flops = 2 * rows * weights
            yield Case("linear_beside_forward", shape, lambda rows=rows, forward=forward: forward(rows), moved, flops)
        shape = f"{name} {b.tokens} x {outs} -> {ins}, rank {rank}"
        moved = b.size * (b.tokens * (ins + outs + rank) + outs * ins + rank * ins)
        flops = 2 * b.tokens * (outs * ins + rank * ins)
        yield Case("linear_beside_backward_input", shape, lambda backward=backward: backward(b.tokens), moved, flops)
        for rows in DECODE_ROWS:

            def change(rows=rows, outs=outs):
                owners = b.backend.array(np.arange(rows, dtype=np.int32) % 4)
                return b.random(rows, outs), b.random(rows, outs), owners, 0

            changed = rows // 4 * outs or outs
            yield Case(
                "change_rows", f"{name} {rows} x {outs}, every fourth row", change, 3 * b.size * changed, changed
            )
        moved = 2 * b.size * outs * ins + FLOAT * RANK * (outs + ins)
        yield Case("merge_adapter", f"{name} {outs} x {ins}, rank {RANK}", merge, moved, 2 * outs * ins * RANK)
