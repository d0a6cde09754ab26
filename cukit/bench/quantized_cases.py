"""The array functions of weights of 8 bits as cases of `bench kernels`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .cases import FLOAT, Case, Workbench

KINDS = {"int8": np.int8, "fp8": np.uint8}
ROWS = (1, 8, 16, 32, 64, 256, 512)


def quantized_cases(b: Workbench) -> Iterator[Case]:
    for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
        outs, ins = b.weights[name]
        for kind, dtype in KINDS.items():

            def weight(outs=outs, ins=ins, dtype=dtype):
                q, scale = b.backend.zeros((outs, ins), dtype), b.backend.zeros((outs,), np.float32)
                w = b.weight(outs, ins)
                b.backend.quantize_weight(q, scale, w)
                return q, scale, w

            for rows in dict.fromkeys([*ROWS, b.tokens]):

                def forward(rows=rows, ins=ins, weight=weight):
                    return b.random(rows, ins), *weight()[:2]

                moved = outs * ins + FLOAT * outs + b.size * rows * (ins + outs)
                shape = f"{name} {rows} x {ins} -> {outs}, {kind}"
                yield Case("quantized_linear_forward", shape, forward, moved, 2 * rows * outs * ins)
            moved = outs * ins * (1 + b.size) + FLOAT * outs
            yield Case("quantize_weight", f"{name} {outs} x {ins}, {kind}", weight, moved)

            def back(weight=weight):
                q, scale, w = weight()
                return w, q, scale

            yield Case("dequantize_weight", f"{name} {outs} x {ins}, {kind}", back, moved)
