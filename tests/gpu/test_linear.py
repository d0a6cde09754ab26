"""Matrix products by cuBLAS against NumPy, and the bits of rows. Run on a machine with a GPU: pytest -m gpu tests/gpu/test_linear.py"""

import numpy as np
import pytest
from check import Sum, check_kernel, normal, statistics, tensor_core_product, ulp

from cukit.backend import backend_for

pytestmark = pytest.mark.gpu
SIZES = [(1, 8, 8), (5, 13, 7), (0, 16, 8), (70, 24, 33), (3, 1, 1), (257, 1024, 512), (1000, 64, 96)]


@pytest.mark.parametrize("rows, ins, outs", SIZES)
def test_against_numpy(rows, ins, outs):
    x, w, dy = normal(rows, ins), normal(outs, ins, seed=1, scale=ins**-0.5), normal(rows, outs, seed=2)
    check_kernel("linear_forward", x, w)
    check_kernel("linear_forward", x, w, normal(outs, seed=3))
    check_kernel("linear_backward_input", dy, w)
    check_kernel("linear_backward_bias", Sum(statistics(outs)), dy)


def chain(dy, x):
    """dyᵀ x in float32, one term after the other: what FFMA gives."""
    total = np.zeros((dy.shape[1], x.shape[1]), np.float32)
    for dy_row, x_row in zip(dy, x):
        total += np.outer(dy_row, x_row)
    return total


@pytest.mark.parametrize("rows, ins, outs", SIZES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weight_gradient(rows, ins, outs, dtype):
    """The sum over rows stays in float32, so its order and rounding show: NumPy's many partial sums are no yardstick for it."""
    be, start = backend_for("cuda"), statistics(outs, ins)
    x, dy = (normal(rows, size, seed=size).astype(be.dtype_of(dtype)) for size in (ins, outs))
    true = start + dy.astype(np.float64).T @ x.astype(np.float64)
    near = start + (chain(dy, x) if dtype == "float32" else tensor_core_product(dy.T, x.T))
    got = []
    for _ in range(2):
        dw = be.array(start)
        be.linear_backward_weight(dw, be.array(dy), be.array(x))
        got.append(be.to_numpy(dw))
    assert got[0].tobytes() == got[1].tobytes()
    error, yardstick = np.abs(got[0] - true).max(), np.abs(near - true).max()
    assert error <= 2 * yardstick + ulp(np.abs(true).max(), "float32")


def test_float64():
    be = backend_for("cuda")
    x, w = normal(5, 7), normal(3, 7)
    assert np.allclose(be.to_numpy(be.linear_forward(be.array(x), be.array(w))), x @ w.T, rtol=1e-14)


# (out, in): the products of Qwen2.5-0.5B (with a bias) and Qwen3-0.6B, whose `down` cuBLAS splits when rows are few
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("outs, ins, biased", [(1152, 896, True), (896, 4864, False), (4096, 1024, False), (1024, 2048, False), (1024, 3072, False),
                                               (96, 64, False)])
def test_a_row_has_the_same_bits_at_every_row_count(outs, ins, biased, dtype):
    be = backend_for("cuda")
    generator = np.random.default_rng(0)
    x, w, bias = (be.array(generator.standard_normal(shape, dtype=np.float32).astype(be.dtype_of(dtype)))
                  for shape in ((5000, ins), (outs, ins), (outs,)))
    bias = bias if biased else None
    whole = be.to_numpy(be.linear_forward(x, w, bias)).view(np.uint16)
    for rows in (1, 2, 3, 7, 16, 33, 64, 65, 100, 128, 129, 255, 256, 300, 512, 1000, 2049, 4096):
        part = be.to_numpy(be.linear_forward(x[:rows], w, bias)).view(np.uint16)
        assert np.array_equal(part, whole[:rows]), f"{rows} rows: {np.count_nonzero(part != whole[:rows])} of {part.size} differ"


def test_captured_products_replay_with_the_same_bits():
    import cupy as cp

    be = backend_for("cuda")
    x, w = (be.array(normal(*shape).astype(be.dtype_of("bfloat16"))) for shape in ((8, 3072), (1024, 3072)))
    stream = cp.cuda.Stream(non_blocking=True)
    from cukit.backend.cuda.cublas import gemm

    y = be.empty((8, 1024), "bfloat16")
    be.synchronize()
    with stream:
        gemm(1, 0, 1024, 8, 3072, w, x, 0, y)
        stream.synchronize()
        before = be.to_numpy(y)
        y[...] = 0
        stream.synchronize()
        stream.begin_capture()
        gemm(1, 0, 1024, 8, 3072, w, x, 0, y)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    assert before.any() and np.array_equal(be.to_numpy(y), before)


def test_wrong_inputs_are_refused():
    be = backend_for("cuda")
    x, w = be.zeros((4, 16), "float16"), be.zeros((8, 16), "float16")
    with pytest.raises(ValueError, match="do not fit"):
        be.linear_forward(x, w.astype("float32"))
    with pytest.raises(ValueError, match="do not fit"):
        be.linear_forward(x[:, :8].copy(), w)
    with pytest.raises(ValueError, match="C-contiguous"):
        be.linear_backward_input(x[:, ::2], w)
    with pytest.raises(ValueError, match="bias"):
        be.linear_forward(x, w, be.zeros((9,), "float16"))
