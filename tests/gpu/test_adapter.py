"""The adapter kernels against NumPy. Run on a machine with a GPU: pytest -m gpu tests/gpu/test_adapter.py"""

import numpy as np
import pytest
from check import DTYPES, check_kernel, normal, statistics

from cukit.backend import backend_for

pytestmark = pytest.mark.gpu
# rows, ins, outs, rank: one of each, primes, more columns than a block has, a rank beyond one tile, an empty batch
SIZES = [(1, 1, 1, 1), (5, 13, 7, 3), (0, 16, 8, 4), (33, 519, 70, 33), (257, 1024, 512, 96), (64, 4096, 24, 8)]


@pytest.mark.parametrize("rows, ins, outs, rank", SIZES)
def test_merge(rows, ins, outs, rank):
    a, b = statistics(rank, ins), statistics(outs, rank, seed=1)
    check_kernel("merge_adapter", np.zeros((outs, ins)), normal(outs, ins), a, b, 0.37)


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_in_place_and_of_rows_that_are_not_aligned(dtype):
    be = backend_for("cuda")
    w, a, b = (normal(21, 13).astype(be.dtype_of(dtype)), statistics(5, 13), statistics(20, 5))
    whole = be.array(w)
    apart = be.merge_adapter(be.empty((20, 13), whole.dtype), be.array(w[1:]), be.array(a), be.array(b), 1.5)
    be.merge_adapter(whole[1:], whole[1:], be.array(a), be.array(b), 1.5)
    assert be.to_numpy(whole[1:]).tobytes() == be.to_numpy(apart).tobytes()
    assert be.to_numpy(whole[:1]).tobytes() == w[:1].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_adapter_of_zeros_changes_no_bit(dtype):
    be = backend_for("cuda")
    w, a = be.array(normal(64, 48).astype(be.dtype_of(dtype))), be.array(statistics(8, 48))
    out = be.merge_adapter(be.empty(w.shape, w.dtype), w, a, be.zeros((64, 8), "float32"), 2.0)
    assert be.to_numpy(out).tobytes() == be.to_numpy(w).tobytes()


@pytest.mark.parametrize("rows, ins, outs, rank", SIZES)
def test_products_beside(rows, ins, outs, rank):
    x, w = normal(rows, ins), normal(outs, ins, seed=1, scale=ins**-0.5)
    a, b = normal(rank, ins, seed=2, scale=ins**-0.5), normal(outs, rank, seed=3, scale=rank**-0.5)
    check_kernel("linear_beside_forward", x, w, a, b)
    check_kernel("linear_beside_forward", x, w, a, b, normal(outs, seed=4))
    check_kernel("linear_beside_backward_input", normal(rows, outs), w, normal(rows, rank, seed=5), a)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_at_every_row_count(dtype):
    """What stands beside adds in one order at every row count, as the base's product does (test_linear.py)."""
    be = backend_for("cuda")
    shapes = ((3000, 1024), (4096, 1024), (96, 1024), (4096, 96))
    x, w, a, b = (be.array(normal(*shape).astype(be.dtype_of(dtype))) for shape in shapes)
    whole = be.to_numpy(be.linear_beside_forward(x, w, a, b)[0])
    for rows in (1, 2, 3, 7, 16, 33, 64, 65, 100, 129, 256, 300, 1000, 2049):
        part = be.to_numpy(be.linear_beside_forward(x[:rows], w, a, b)[0])
        assert part.tobytes() == whole[:rows].tobytes(), f"{rows} rows"


ROWS = [(1, 1), (7, 13), (0, 16), (33, 519), (257, 512), (5, 4096)]  # rows, columns


@pytest.mark.parametrize("instead", [False, True])
@pytest.mark.parametrize("rows, cols", ROWS)
def test_rows_of_an_owner(rows, cols, instead):
    owners = np.random.default_rng(rows).integers(-1, 3, rows).astype(np.int32)
    check_kernel("change_rows", normal(rows, cols), normal(rows, cols, seed=1), owners, 1, instead)
    check_kernel("change_rows", normal(rows, cols), normal(rows, cols, seed=1), None, 0, instead)


@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
@pytest.mark.parametrize("cols", [13, 64])
@pytest.mark.parametrize("instead", [False, True])
def test_rows_of_others_keep_their_bits(dtype, cols, instead):
    """Whatever stands in the change; y may begin off an aligned address. Both shelves round once: the same bits."""
    host, device = backend_for("cpu"), backend_for("cuda")
    y, change = (normal(33, cols, seed=seed).astype(host.dtype_of(dtype)) for seed in (0, 1))
    owners = np.random.default_rng(cols).integers(-1, 3, 33).astype(np.int32)
    change[owners != 2] = np.nan
    expected = host.change_rows(y.copy(), change, owners, 2, instead)
    for shift in (0, 1):
        flat = device.zeros((shift + y.size,), y.dtype)
        flat[shift:] = device.array(y.reshape(-1))
        found = device.change_rows(
            flat[shift:].reshape(y.shape), device.array(change), device.array(owners), 2, instead
        )
        assert device.to_numpy(found).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_several_adapters_have_the_bits_of_each_alone(dtype):
    """As row_adapters computes them: by owner, and by segments that begin anywhere."""
    be = backend_for("cuda")
    x, w = (be.array(normal(*shape).astype(be.dtype_of(dtype))) for shape in ((300, 1024), (1536, 1024)))
    pairs = [
        [be.array(normal(*shape, seed=rank).astype(be.dtype_of(dtype))) for shape in ((rank, 1024), (1536, rank))]
        for rank in (8, 33, 96)
    ]
    alone = [be.to_numpy(be.linear_beside_forward(x, w, *pair)[0]) for pair in pairs]
    for rows in (1, 3, 17, 64, 300):
        owners = np.random.default_rng(rows).integers(-1, 3, rows).astype(np.int32)
        mixed, base = be.linear_forward(x[:rows], w), be.to_numpy(be.linear_forward(x, w))
        for number, (a, b) in enumerate(pairs):
            be.change_rows(mixed, be.linear_forward(be.linear_forward(x[:rows], a), b), be.array(owners), number)
        for row, (found, owner) in enumerate(zip(be.to_numpy(mixed), owners)):
            expected = base[row] if owner < 0 else alone[owner][row]
            assert found.tobytes() == expected.tobytes(), f"row {row} of {rows}, adapter {owner}"
    mixed = be.linear_forward(x, w)
    for number, rows in enumerate((slice(1, 18), slice(18, 131), slice(133, 300))):
        a, b = pairs[number]
        be.change_rows(mixed[rows], be.linear_forward(be.linear_forward(x[rows], a), b))
        assert be.to_numpy(mixed)[rows].tobytes() == alone[number][rows].tobytes(), f"segment {rows}"


def test_wrong_inputs_are_refused():
    be = backend_for("cuda")
    half, ids = be.zeros((3, 8), "float16"), be.zeros((4,), "int32")
    with pytest.raises(ValueError, match="do not fit, or not owners"):
        be.change_rows(half, half, ids, 1)
    with pytest.raises(ValueError, match="do not fit"):
        be.change_rows(half, be.zeros((3, 7), "float16"))
    with pytest.raises(ValueError, match="C-contiguous"):
        be.change_rows(be.zeros((3, 8), "float16")[:, :4], be.zeros((3, 4), "float16"))
    w, a, b = be.zeros((8, 16), "float16"), be.zeros((2, 16), "float32"), be.zeros((8, 2), "float32")
    with pytest.raises(ValueError, match="do not fit"):
        be.merge_adapter(w, w, a, b[:7].copy(), 1.0)
    with pytest.raises(ValueError, match="C-contiguous"):
        be.merge_adapter(w, w, be.zeros((16, 2), "float32").T, b, 1.0)
    with pytest.raises(ValueError, match="fit neither"):
        be.linear_beside_backward_input(be.zeros((3, 8), "float16"), w, be.zeros((3, 2), "float16"), a)


@pytest.mark.parametrize("shift_w, shift_a", [(0, 0), (1, 0), (0, 1)])
@pytest.mark.parametrize("outs, ins, rank", [(9, 16, 40), (8, 520, 33), (3, 13, 2)])
def test_merge_rounds_once(outs, ins, rank, shift_w, shift_a):
    """Sums of small whole numbers are exact in any order, so NumPy gives the same bits. w and a may begin some elements
    off an aligned address.
    """
    host, device = backend_for("cpu"), backend_for("cuda")
    generator = np.random.default_rng([outs, ins, rank])
    a, b = (generator.integers(-2, 3, shape).astype(np.float32) for shape in ((rank, ins), (outs, rank)))

    def shifted(x, shift):
        flat = device.zeros((shift + x.size,), x.dtype)
        flat[shift:] = device.array(x.reshape(-1))
        return flat[shift:].reshape(x.shape)

    for dtype in map(host.dtype_of, DTYPES):
        w = normal(outs, ins).astype(dtype)
        out = device.empty(w.shape, dtype)
        device.merge_adapter(out, shifted(w, shift_w), shifted(a, shift_a), device.array(b), 0.37)
        assert device.to_numpy(out).tobytes() == host.merge_adapter(np.empty_like(w), w, a, b, 0.37).tobytes()
