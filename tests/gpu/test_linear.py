"""Matrix products by cuBLAS against NumPy, and the bits of rows. Run on a machine with a GPU: pytest -m gpu
tests/gpu/test_linear.py
"""

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
    """The sum over rows stays in float32, so its order and rounding show: NumPy's many partial sums are no yardstick
    for it.
    """
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


# (out, in): the products of Qwen2.5-0.5B (with a bias) and Qwen3-0.6B; cuBLAS splits Qwen3's `down` when rows are few
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "outs, ins, biased",
    [
        (1152, 896, True),
        (896, 4864, False),
        (4096, 1024, False),
        (1024, 2048, False),
        (1024, 3072, False),
        (96, 64, False),
        (211, 48, False),
        (33, 24, True),
        (7, 13, False),
        (1, 1000, True),
    ],
)
def test_a_row_has_the_same_bits_at_every_row_count(outs, ins, biased, dtype):
    be = backend_for("cuda")
    generator = np.random.default_rng(0)
    x, w, bias = (
        be.array(generator.standard_normal(shape, dtype=np.float32).astype(be.dtype_of(dtype)))
        for shape in ((5000, ins), (outs, ins), (outs,))
    )
    bias = bias if biased else None
    integers = f"uint{8 * x.itemsize}"
    whole = be.to_numpy(be.linear_forward(x, w, bias)).view(integers)
    for rows in (1, 2, 3, 7, 16, 33, 64, 65, 100, 128, 129, 255, 256, 300, 512, 1000, 2049, 4096):
        part = be.to_numpy(be.linear_forward(x[:rows], w, bias)).view(integers)
        assert np.array_equal(part, whole[:rows]), (
            f"{rows} rows: {np.count_nonzero(part != whole[:rows])} of {part.size} differ"
        )


@pytest.mark.parametrize("rows, ins, outs", SIZES)
def test_product_in_order_against_numpy(rows, ins, outs):
    """float32 runs on it in test_against_numpy; half types run on it only where cuBLAS does not add in order."""
    from cukit.backend.cuda.exact import in_order_product

    be, host = backend_for("cuda"), backend_for("cpu")
    for dtype in map(be.dtype_of, ("bfloat16", "float16")):
        x, w, b = (
            a.astype(dtype)
            for a in (normal(rows, ins), normal(outs, ins, seed=1, scale=ins**-0.5), normal(outs, seed=3))
        )
        for bias in (None, b):
            true = x.astype(np.float64) @ w.astype(np.float64).T + (0 if bias is None else bias.astype(np.float64))
            near = host.linear_forward(x, w, bias).astype(np.float64)
            got = be.to_numpy(in_order_product(be.array(x), be.array(w), None if bias is None else be.array(bias)))
            assert got.shape == near.shape and got.dtype == dtype
            if rows:
                assert np.abs(got.astype(np.float64) - true).max() <= 2 * np.abs(near - true).max() + ulp(
                    np.abs(true).max(), dtype
                )


def shifted(be, shape, shift, **more):
    """Random bfloat16 or float16 numbers that begin `shift` elements behind an aligned address."""
    dtype = be.dtype_of(more.pop("dtype"))
    flat = normal(shift + int(np.prod(shape)), **more)
    return be.array(flat.astype(dtype))[shift:].reshape(shape)


def equal_in_every_tile(x, w, bias):
    """The bits of the product in order, which all tiles must share."""
    from cukit.backend.cuda.exact import TILES, in_order_product

    be = backend_for("cuda")
    large = be.to_numpy(in_order_product(x, w, bias, TILES[-1])).view(np.uint16)
    for tile in (*TILES[:-1], None):
        small = be.to_numpy(in_order_product(x, w, bias, tile)).view(np.uint16)
        assert np.array_equal(small, large), (
            f"{x.shape} {w.shape} {x.dtype} {bias is not None} {tile}: {np.count_nonzero(small != large)} differ"
        )
    return large


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("seed", range(6))
def test_the_product_in_order_has_the_same_bits_in_every_tile(seed, dtype):
    be, generator = backend_for("cuda"), np.random.default_rng(seed)
    for _ in range(3):
        rows, outs = int(generator.choice([1, 2, 9, 16, 17, 33, 64])), int(generator.integers(1, 150))
        # from no ins to more than all slices on their way, whole pieces and steps or not
        ins = int(generator.choice([generator.integers(40), 16 * generator.integers(9), generator.integers(2200)]))
        x_shift, w_shift = (int(generator.choice([0, 0, 1, 8])) for _ in range(2))
        x = shifted(be, (rows, ins), x_shift, dtype=dtype, seed=seed)
        w = shifted(be, (outs, ins), w_shift, dtype=dtype, seed=seed + 1, scale=max(ins, 1) ** -0.5)
        bias = be.array(normal(outs, seed=seed + 2).astype(be.dtype_of(dtype))) if generator.integers(2) else None
        equal_in_every_tile(x, w, bias)


@pytest.mark.parametrize("outs, ins", [(2048, 12288), (2048, 4096), (4096, 4096), (32, 4096), (8, 12288), (12288, 40)])
def test_the_product_in_order_has_the_same_bits_in_every_tile_at_real_sizes(outs, ins):
    be = backend_for("cuda")
    x, w = (be.array(normal(*shape).astype(be.dtype_of("bfloat16"))) for shape in ((130, ins), (outs, ins)))
    whole = equal_in_every_tile(x, w, None)
    for rows in (1, 3, 16, 17, 64):
        assert np.array_equal(equal_in_every_tile(x[:rows], w, None), whole[:rows])


def test_a_rows_bits_do_not_depend_on_the_tile_that_its_row_count_gets():
    from cukit.backend.cuda.exact import in_order_product, in_order_tile

    be = backend_for("cuda")
    x, w = (be.array(normal(*shape).astype(be.dtype_of("bfloat16"))) for shape in ((600, 72), (1030, 72)))
    whole, tiles = be.to_numpy(in_order_product(x, w)).view(np.uint16), set()
    for rows in (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 130, 300):
        assert np.array_equal(be.to_numpy(in_order_product(x[:rows], w)).view(np.uint16), whole[:rows])
        tiles.add(in_order_tile(rows, len(w)))
    assert len(tiles) >= 4, "the row counts take several tiles"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "outs, ins, biased",
    [(896, 4864, False), (4096, 1024, False), (1024, 3072, False), (6144, 1024, False), (1152, 896, False)],
)
def test_product_in_order_has_the_bits_of_cublas(outs, ins, biased, dtype):
    """On a card where this fails the exact path still holds (exact.py), but more products run on our own kernel."""
    from cukit.backend.cuda import exact

    assert exact._is_equal((outs, ins, backend_for("cuda").dtype_of(dtype), biased), "in order")


@pytest.mark.parametrize("adds_in_order", [True, False])
def test_our_own_product_takes_over_where_cublas_does_not_add_in_order(monkeypatch, tmp_path, adds_in_order):
    """A cuBLAS that gives the reference's bits above 100 rows only, on a card with or without the reference's chain."""
    from cukit.backend.cuda import exact
    from cukit.backend.cuda.verdicts import Verdicts

    monkeypatch.setattr(exact, "_chosen", {})
    monkeypatch.setattr(exact, "_equal", {})
    monkeypatch.setattr(exact, "card_verdicts", lambda: Verdicts(tmp_path / "kept"))
    monkeypatch.setattr(exact, "LARGEST_RAISE", 64)
    monkeypatch.setattr(
        exact,
        "_compare",
        lambda outs, ins, dtype, biased, bucket: adds_in_order if bucket == "in order" else bucket > 100,
    )
    ways = [exact.choose_product(rows, 640, 96, np.dtype(np.float16), False) for rows in (3, 60, 1000)]
    large = (1024, exact.cublas_product) if adds_in_order else (1000, exact.in_order_product)
    assert ways == [
        (3, exact.in_order_product),
        (128, exact.cublas_product) if adds_in_order else (60, exact.in_order_product),
        large,
    ]


@pytest.mark.parametrize("outs, product", [(32, "in_order_product"), (640, "cublas_product")])
def test_our_own_product_takes_over_for_thin_weights(monkeypatch, tmp_path, outs, product):
    """A cuBLAS that splits the sums in one way up to 4,096 rows and in another beyond."""
    from cukit.backend.cuda import exact
    from cukit.backend.cuda.verdicts import Verdicts

    monkeypatch.setattr(exact, "_chosen", {})
    monkeypatch.setattr(exact, "_equal", {})
    monkeypatch.setattr(exact, "card_verdicts", lambda: Verdicts(tmp_path / "kept"))
    monkeypatch.setattr(exact, "_policy", "auto")
    monkeypatch.setattr(exact, "_compare", lambda *args: args[-1] != "in order" and args[-1] <= 4096)
    ways = [exact.choose_product(rows, outs, 3072, np.dtype(np.float16), False) for rows in (3, 8192)]
    assert [way[1] for way in ways] == [getattr(exact, product)] * 2


@pytest.mark.parametrize(
    "outs, ins",
    [
        (32, 3072),
        (96, 1024),
        (64, 576),
        (16, 12288),
        (5, 1024),
        (5, 3072),
        (4096, 5),
        (1024, 5),
        (6144, 5),
        (4096, 64),
        (4096, 2),
        (6144, 8),
    ],
)
def test_an_adapters_products_have_the_same_bits_at_every_row_count(outs, ins):
    be = backend_for("cuda")
    x, w = (be.array(normal(*shape).astype(be.dtype_of("bfloat16"))) for shape in ((8192, ins), (outs, ins)))
    whole = be.to_numpy(be.linear_forward(x, w)).view(np.uint16)
    for rows in (*range(1, 40), 64, 500, 2048, 4096, 6144, 7000):
        assert np.array_equal(be.to_numpy(be.linear_forward(x[:rows], w)).view(np.uint16), whole[:rows])
    for rows in (1, 2, 13):  # sums of few products seldom tell two orders apart, so all rows
        parts = [be.linear_forward(x[start : start + rows].copy(), w) for start in range(0, len(x), rows)]
        found = np.concatenate([be.to_numpy(part) for part in parts]).view(np.uint16)
        assert np.array_equal(found, whole), f"{rows} rows: {np.count_nonzero(found != whole)} differ"


def test_a_comparison_that_is_kept_is_not_made_again(monkeypatch, tmp_path):
    from cukit.backend.cuda import exact
    from cukit.backend.cuda.verdicts import Verdicts

    compared, weight = [], (640, 64, np.dtype(np.float16), False)
    monkeypatch.setattr(exact, "card_verdicts", lambda: Verdicts(tmp_path / "kept"))
    monkeypatch.setattr(exact, "_compare", lambda *args: compared.append(args[-1]) or args[-1] == 64)
    for _ in range(2):
        monkeypatch.setattr(exact, "_equal", {})
        assert [exact._is_equal(weight, bucket) for bucket in (64, 128, "in order")] == [True, False, False]
    assert compared == [64, 128, "in order"]


def test_exact_policies(monkeypatch):
    from cukit.backend.cuda import exact

    be = backend_for("cuda")
    monkeypatch.setattr(exact, "_policy", "auto")
    monkeypatch.setattr(exact, "_in_use", False)
    with pytest.raises(ValueError, match="choose auto, true or false"):
        be.set_exact("yes")
    be.set_exact("false")
    be.set_exact("auto")
    be.linear_forward(be.zeros((1, 8), "float32"), be.zeros((4, 8), "float32"))
    be.set_exact("true")
    be.set_exact("auto")
    assert exact._policy == "true", "another engine's default must not take a promise away"
    with pytest.raises(ValueError, match="exact=false comes after products with exact=true"):
        be.set_exact("false")


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
