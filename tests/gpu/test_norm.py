"""RMSNorm kernels against NumPy. Run on a machine with a GPU: pytest -m gpu tests/gpu/test_norm.py"""

import numpy as np
import pytest
from check import DTYPES, Sum, check_kernel, normal, statistics

from cukit.backend import backend_for

pytestmark = pytest.mark.gpu
# one column, odd widths, a row of less than a vector, rows wider than a block's 512 vectors, an empty batch
SIZES = [(1, 8), (7, 1), (3, 13), (0, 16), (19, 1024), (989, 1000), (5, 2560), (2, 4104), (3, 8191)]


def inputs(rows, cols):
    x, w = normal(rows, cols), statistics(cols, around=1, scale=0.1)
    rstd = (1 / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6)).astype(np.float32)
    return x, w, rstd, normal(rows, cols, seed=2), normal(rows, cols, seed=3)


@pytest.mark.parametrize("rows, cols", SIZES)
def test_forward(rows, cols):
    x, w, _, residual, _ = inputs(rows, cols)
    check_kernel("rms_norm_forward", x, w, 1e-6)
    check_kernel("add_rms_norm_forward", x, residual, w, 1e-6)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("rows, cols", SIZES)
def test_forward_of_a_sum_of_parts(rows, cols, count):
    _, w, _, residual, _ = inputs(rows, cols)
    check_kernel("sum_add_rms_norm_forward", normal(count, rows, cols), residual, w, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 2.0**-125])
@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("rows, cols", SIZES)
def test_a_sum_of_parts_has_the_bits_of_the_sum_and_the_norm_apart(rows, cols, count, scale, dtype):
    """The sum is that of groups of ranks: in order, in float32, rounded once; subnormal numbers count in it."""
    be = backend_for("cuda")
    parts = (normal(count, rows, cols) * scale * 2.0 ** np.arange(count)[:, None, None]).astype(be.dtype_of(dtype))
    residual = be.array((normal(rows, cols, seed=2) * scale).astype(parts.dtype))
    w, total = be.array(statistics(cols, around=1, scale=0.1)), parts[0].astype(np.float32)
    for part in parts[1:]:
        total = total + part.astype(np.float32)
    apart = be.add_rms_norm_forward(be.array(total.astype(parts.dtype)), residual, w, 1e-6)
    for found, right in zip(be.sum_add_rms_norm_forward(be.array(parts), residual, w, 1e-6), apart, strict=True):
        assert found.dtype == right.dtype and be.to_numpy(found).tobytes() == be.to_numpy(right).tobytes()


@pytest.mark.parametrize("rows, cols", [*SIZES, (3001, 64)])
def test_backward(rows, cols):
    x, w, rstd, dy, dsummed = inputs(rows, cols)
    dw = Sum(statistics(cols, seed=4))
    check_kernel("rms_norm_backward", dw, dy, x, w, rstd)
    check_kernel("rms_norm_backward", None, dy, x, w, rstd)
    check_kernel("add_rms_norm_backward", dw, dy, dsummed, x, w, rstd)
    check_kernel("add_rms_norm_backward", dw, dy, None, x, w, rstd)
    check_kernel("add_rms_norm_backward_remade", dw, dy, dsummed, x, w, rstd, 1e-6)
    check_kernel("add_rms_norm_backward_remade", None, dy, None, x, w, rstd, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, cols", [*SIZES, (3001, 64)])
def test_what_is_remade_has_the_bits_of_the_forward_pass(rows, cols, dtype):
    """And the gradients those of the kernel that writes them alone."""
    be = backend_for("cuda")
    x, residual, dy, dsummed = (be.array(normal(rows, cols, seed=seed).astype(be.dtype_of(dtype))) for seed in range(4))
    w = be.array(statistics(cols, around=1, scale=0.1))
    y, summed, rstd = be.add_rms_norm_forward(x, residual, w, 1e-6)
    for other in (dsummed, None):
        dw, dw_alone = be.zeros((cols,), "float32"), be.zeros((cols,), "float32")
        dx, again = be.add_rms_norm_backward_remade(dw, dy, other, summed, w, rstd, 1e-6)
        alone = be.add_rms_norm_backward(dw_alone, dy, other, summed, w, rstd)
        for a, b in ((again, y), (dx, alone), (dw, dw_alone)):
            assert be.to_numpy(a).tobytes() == be.to_numpy(b).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, cols", [(1, 512), (3001, 576), (1500, 1000), (989, 1280), (700, 2048), (300, 4096)])
def test_aligned_gradients_have_the_bits_of_others(rows, cols, dtype):
    """Of aligned arrays a thread does several threads' work, but for float32 rows that are too wide."""
    be = backend_for("cuda")

    def array(seed, offset):
        padded = be.zeros((rows * cols + offset,), dtype)
        padded[offset:] = be.array(normal(rows, cols, seed=seed).astype(padded.dtype)).ravel()
        return padded[offset:].reshape(rows, cols)

    w = be.array(statistics(cols, around=1, scale=0.1))
    rstd = be.rms_norm_forward(array(1, 0), w, 1e-6)[1]
    for seed in (3, None):  # dsummed, or none
        results = []
        for offset in (0, 1):
            dy, x, dw = array(2, offset), array(1, offset), be.zeros((cols,), "float32")
            dsummed = None if seed is None else array(seed, offset)
            dx, y = be.add_rms_norm_backward_remade(dw, dy, dsummed, x, w, rstd, 1e-6)
            alone = be.add_rms_norm_backward(None, dy, dsummed, x, w, rstd)
            results.append([be.to_numpy(found).tobytes() for found in (dx, y, dw, alone)])
        assert results[0] == results[1] and results[0][0] == results[0][3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [13, 1024, 5120])
def test_a_row_alone_has_the_bits_of_the_row_in_a_batch(dtype, cols):
    """Also where the row alone is aligned and the row in the batch is not, and with the residual added before or
    inside.
    """
    be = backend_for("cuda")
    x, residual, w = (
        be.array(a.astype(be.dtype_of(dtype)))
        for a in (normal(301, cols), normal(301, cols, seed=1), normal(cols, seed=2))
    )
    w = w.astype(np.float32)
    y, summed, rstd = be.add_rms_norm_forward(x, residual, w, 1e-6)
    again, rstd_again = be.rms_norm_forward(summed, w, 1e-6)
    assert np.array_equal(be.to_numpy(y), be.to_numpy(again)) and np.array_equal(
        be.to_numpy(rstd), be.to_numpy(rstd_again)
    )
    dx = be.to_numpy(be.rms_norm_backward(None, residual, summed, w, rstd))
    for row in (0, 1, 150, 300):
        part = slice(row, row + 1)
        alone, _, _ = be.add_rms_norm_forward(x[part].copy(), residual[part].copy(), w, 1e-6)
        assert np.array_equal(be.to_numpy(alone), be.to_numpy(y)[part])
        alone = be.rms_norm_backward(None, residual[part].copy(), summed[part].copy(), w, rstd[part].copy())
        assert np.array_equal(be.to_numpy(alone), dx[part])


def test_wrong_inputs_are_refused():
    be = backend_for("cuda")
    x, w = be.zeros((4, 16), "float16"), be.zeros((16,), "float32")
    with pytest.raises(ValueError, match="C-contiguous"):
        be.rms_norm_forward(x[:, ::2], w[:8], 1e-6)
    with pytest.raises(ValueError, match=r"want \(16,\)"):
        be.rms_norm_forward(x, w[:8], 1e-6)
    with pytest.raises(ValueError, match=r"residual of shape \(4, 16\) does not fit parts of shape \(2, 16\)"):
        be.sum_add_rms_norm_forward(x.reshape(2, 2, 16), x, w, 1e-6)
    with pytest.raises(TypeError, match="wants float32, got float16"):
        be.rms_norm_forward(x, w.astype("float16"), 1e-6)
    with pytest.raises(ValueError, match="no float64 kernel"):
        be.rms_norm_forward(x.astype("float64"), w, 1e-6)
