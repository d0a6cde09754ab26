"""The inputs on which products are compared: sums that cancel, so that another order of adding shows."""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cupy", reason="the CUDA shelf needs CuPy: pip install 'cukit[compile]'")

from cukit.backend.cuda.exact import _examples  # noqa: E402

FEW = [4, 5, 7, 8, 33, 96, 256]


@pytest.mark.parametrize("ins", [257, 1024, 3073])
def test_every_other_row_cancels_also_where_the_number_of_products_is_odd(ins):
    x, w, _ = _examples(ins, np.dtype(np.float16))
    terms = x[:64, None].astype(np.float64) * w[None, :64].astype(np.float64)
    left = np.abs(terms.sum(2)).mean(1) / np.abs(terms).sum(2).mean(1)
    assert (left[::2] < 0.05).all() and (left[::2] > 0).all()
    assert left[1::2].mean() > 2 * left[::2].mean()


@pytest.mark.parametrize("ins", FEW)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_few_products_cancel_and_leave_what_rounding_has_left(ins, dtype):
    """Added up one by one, or 16 at a time with the last digits of the smaller ones cut off, as tensor cores do."""
    x, w, _ = _examples(ins, np.dtype(dtype))
    terms = x[:64, None].astype(np.float64) * w[None, :64].astype(np.float64)
    assert not terms[::2].sum(2).any() and np.abs(terms[1::2].sum(2)).max() < np.finfo(np.float16).max / 2
    one_by_one, blocks = np.zeros((64, 64), np.float32), np.zeros((64, 64))
    for k in range(ins):
        one_by_one = (one_by_one + terms[:, :, k]).astype(np.float32)
    for k in range(0, ins, 16):
        added = np.concatenate([blocks[..., None], terms[:, :, k : k + 16]], 2)
        _, exponents = np.frexp(np.abs(added).max(2, keepdims=True))
        last = np.exp2(exponents - 25.0)
        blocks = (np.trunc(added / last) * last).sum(2).astype(np.float32).astype(np.float64)
    bits = [sums.astype(dtype).view(np.uint16) for sums in (one_by_one, blocks)]
    assert (bits[0] != bits[1])[::2].mean() > 0.02 and np.isfinite(one_by_one).all()
