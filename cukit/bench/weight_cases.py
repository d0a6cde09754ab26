"""The array functions that read and update whole weights, as cases of `bench kernels`: products and the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ..backend.states import BLOCK
from ..models.store import PIECES, padded_size
from .workbench import DECODE_ROWS, FLOAT, HEAD_ROWS, Case, Workbench


def optimizer_cases(b: Workbench) -> Iterator[Case]:
    weights, layers = b.weights, b.config.num_hidden_layers
    # bytes an element of a parameter and its master: both read and written if the master is a remainder
    own = {"bfloat16": 8, "float16": 10}.get(b.dtype.name, 2 * FLOAT)
    for name in ("gate_up_proj", "lm_head"):
        outs, ins = weights[name]

        def arguments(outs=outs, ins=ins, moments=None):
            param, kind = b.random(outs, ins), {"bfloat16": "int16"}.get(b.dtype.name, b.statistics)
            master = param if b.dtype == b.statistics else b.backend.zeros((outs, ins), kind)
            moments = [b.zeros(outs, ins) for _ in range(2)] if moments is None else moments(outs * ins)
            grad = b.random(outs, ins, dtype=b.statistics)
            return (master, *moments, grad, param, 1e-6, 0.9, 0.999, 1e-8, 0.0, 1, 1.0)

        def lean(dtype, *sizes):
            return lambda count: [b.backend.zeros((-(-count // size),), dtype) for size in sizes]

        shape, rest = f"{name} {outs} x {ins}", FLOAT + own  # the gradient is read
        yield Case("adamw_step", shape, arguments, outs * ins * (4 * FLOAT + rest))
        half, codes = lean("bfloat16", 1, 1), lean("uint8", 1, 1, BLOCK, BLOCK)
        half, codes = (partial(arguments, moments=moments) for moments in (half, codes))
        yield Case("adamw_step", f"{shape}, moments in bfloat16", half, outs * ins * (8 + rest))
        yield Case("adamw_step_blocks", shape, codes, outs * ins * (4 + rest))
    sizes = {name: outs * ins for name, (outs, ins) in weights.items()}
    head = sizes.pop("lm_head")
    buckets = [padded_size(sum(sizes.values()))] * layers + [padded_size(head)] * (2 - b.config.tie_word_embeddings)
    yield Case(
        "sums_of_squares",
        f"{sum(buckets) / 1e6:.1f} M in {len(buckets)} buckets",
        lambda: ([b.random(size, dtype=b.statistics) for size in buckets], PIECES),
        FLOAT * sum(buckets),
    )


def linear_cases(b: Workbench) -> Iterator[Case]:
    for name, (outs, ins) in b.weights.items():
        rows = min(b.tokens, HEAD_ROWS) if name == "lm_head" else b.tokens
        biased = b.config.attention_bias and name == "qkv_proj"

        def forward(rows, outs=outs, ins=ins, biased=biased):
            return b.random(rows, ins), b.weight(outs, ins), b.random(outs) if biased else None

        def moved(rows, outs=outs, ins=ins):
            return b.size * (rows * ins + outs * ins + rows * outs)

        for count in dict.fromkeys([rows, *DECODE_ROWS]):
            yield Case(
                "linear_forward",
                f"{name} {count} x {ins} -> {outs}",
                lambda count=count, forward=forward: forward(count),
                moved(count) + biased * outs * b.size,
                2 * count * ins * outs,
            )
        shape = f"{name} {rows} x {ins} -> {outs}"
        yield Case(
            "linear_backward_input",
            shape,
            lambda rows=rows, outs=outs, ins=ins: (b.random(rows, outs), b.weight(outs, ins)),
            moved(rows),
            2 * rows * ins * outs,
        )
        # dw, in float32, is read and written
        yield Case(
            "linear_backward_weight",
            shape,
            lambda rows=rows, outs=outs, ins=ins: (b.zeros(outs, ins), b.random(rows, outs), b.random(rows, ins)),
            b.size * rows * (ins + outs) + 2 * FLOAT * ins * outs,
            2 * rows * ins * outs,
        )
