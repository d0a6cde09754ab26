"""Which product a shape runs on, where no card is asked."""

import numpy as np
import pytest

pytest.importorskip("cupy", reason="the CUDA shelf needs CuPy: pip install 'cukit[compile]'")

from cukit.backend.cuda import exact  # noqa: E402


@pytest.mark.parametrize("rows", [1, 48, 20_000])
@pytest.mark.parametrize("ins", [1, 5, 32, 64])
def test_short_sums_are_our_own_at_every_row_count(ins, rows, monkeypatch):
    """A comparison could not judge them (docs/LOG.md), so none is made."""
    monkeypatch.setattr(exact, "_compare", lambda *shape: pytest.fail(f"compared {shape}"))
    monkeypatch.setattr(exact, "_policy", "auto")
    assert exact.choose_product(rows, 6144, ins, np.dtype(np.float16), False) == (rows, exact.in_order_product)


def test_longer_sums_are_compared(monkeypatch):
    monkeypatch.setattr(exact, "_policy", "auto")
    monkeypatch.setattr(exact, "_chosen", {})
    monkeypatch.setattr(exact, "_is_equal", lambda weight, bucket: True)
    assert exact.choose_product(64, 6144, 65, np.dtype(np.float16), False) == (64, exact.cublas_product)
