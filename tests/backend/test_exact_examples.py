"""The inputs on which products are compared: sums that cancel, so that another order of adding shows."""

import numpy as np
import pytest

pytest.importorskip("cupy", reason="the CUDA shelf needs CuPy: pip install 'cukit[compile]'")

from cukit.backend.cuda.exact import _examples  # noqa: E402


@pytest.mark.parametrize("ins", [2, 5, 7, 8, 33, 96, 1024, 3073])
def test_every_other_row_cancels_also_where_the_number_of_products_is_odd(ins):
    x, w, _ = _examples(ins, np.dtype(np.float16))
    terms = x[:64, None].astype(np.float64) * w[None, :64].astype(np.float64)
    left = np.abs(terms.sum(2)).mean(1) / np.abs(terms).sum(2).mean(1)
    assert (left[::2] < 0.05).all() and (left[::2] > 0).all()
    assert left[1::2].mean() > 2 * left[::2].mean()
