"""Products that give a row the same bits at every row count, so that decoding and training compute the same numbers.

cuBLAS chooses a kernel by the shape. Most of its kernels add along I in one order, which gives a row the same bits at
every row count. Some split the sum where rows are few (measured: `down` projections below 65 to 256 rows). So a forward
product runs at row counts from a short list, the buckets. A comparison on the device decides once for each weight
shape, dtype and bucket, at its first use:

1. No rows, float64, or the policy "false": cuBLAS at the given rows, nothing compared.
2. float32, and sums of at most SHORT products: our own product in order at the given rows. In float32 its sums lose
   fewer digits. Few products of half types add up mostly exactly in float32: of 33 million sums of five, 33 told two of
   cuBLAS's kernels apart, and no comparison did.
3. Half types, and cuBLAS at this bucket has the bits of cuBLAS at REFERENCE_ROWS rows: cuBLAS at this bucket.
4. It has not, but a larger bucket has, up to LARGEST_RAISE or twice this bucket, whichever is larger: cuBLAS there.
5. No such bucket has, but our own product has the reference's bits: our own product.
6. Our own product has not (cuBLAS does not add in order even at REFERENCE_ROWS), and case 4 finds nothing for some
   small bucket, or the weight is thin (at most THIN rows, as an adapter's): our own product for every row count of this
   weight. cuBLAS splits the sums of thin weights at most row counts, and not in one way.
7. Our own product has not, the weight is not thin, every small bucket has a case 3 or 4, but this large one has none:
   the policy "true" raises ValueError; "auto" says so in one line and runs cuBLAS at the given rows.

A decision stays, so bits never change within a process. Comparisons are kept on disk (verdicts.py), so that the next
process need not make them.
"""

import functools
import logging

import cupy as cp
import numpy as np

from ..card import next_bucket
from .constants import source_constant
from .cublas import gemm
from .device import empty
from .loader import load
from .pool import malloc
from .repeated import repeated_rows
from .verdicts import card_verdicts

logger = logging.getLogger(__name__)
TILE, THREADS = source_constant("linear", "TILE"), source_constant("linear", "THREADS")
SMALL_SHARED = source_constant("linear_few", "SMALL_SHARED")
# (rows, outs) of a block; the last is linear_in_order's, the others linear_in_order_small's.
TILES = (16, 8), (16, 16), (16, 32), (16, 64), (32, 32), (32, 64), (TILE, TILE)
# What the choice among them reckons with; only speed depends on it.
MULTIPROCESSORS = 132  # of an H100 or H200
RESIDENT = 2  # blocks of SMALL_SHARED bytes that a multiprocessor has at a time
CHAIN = 21  # rows of x and w that a multiprocessor reads while one chain of mma along I runs
REFERENCE_ROWS = 4096
THIN, SHORT = 256, 64
COMPARED = 1 << 25  # elements at a time: a large head's products are some hundred MB without what compares them
LARGEST_RAISE = 512  # how far a small row count is raised in search of equal bits

_policy, _in_use = "auto", False
# A weight is (out, in, dtype, biased).
_chosen: dict[tuple, tuple] = {}  # (weight, bucket asked for) -> (rows to run or 0 for as many as there are, product)
_equal: dict[tuple, bool] = {}  # (weight, bucket or "in order" for our own product) -> has the reference's bits


def set_policy(policy: str):
    """auto: one line on stderr where no product is exact; true: ValueError there; false: plain cuBLAS, no comparison.

    For the whole process: auto leaves an earlier true as it is, and once a product was made false can neither come nor
    go.
    """
    global _policy
    if policy not in ("auto", "true", "false"):
        raise ValueError(f"exact={policy!r} is not known: choose auto, true or false")
    if policy == _policy or (policy == "auto" and _policy == "true"):
        return
    if _in_use and "false" in (policy, _policy):
        raise ValueError(
            f"exact={policy} comes after products with exact={_policy}, and bits may differ: choose it before the "
            f"first model runs in a process, or keep exact={_policy}"
        )
    _policy = policy


def choose_product(rows: int, out_features: int, in_features: int, dtype, biased: bool):
    """(rows to run, product function) for `rows` rows; the first time for a bucket this compares bits on the device."""
    global _in_use
    _in_use = True
    if rows == 0 or dtype.itemsize == 8 or _policy == "false":
        return rows, cublas_product
    if dtype.itemsize == 4 or in_features <= SHORT:
        return rows, in_order_product
    key = (out_features, in_features, dtype, biased), next_bucket(rows)
    found = _chosen.get(key)
    if found is None:
        found = _chosen[key] = _choose(*key)
    return found[0] or rows, found[1]


def _choose(weight, bucket):
    thin = weight[0] <= THIN
    if not _is_equal(weight, "in order") and (thin or not all(_raised(weight, small) for small in _small_buckets())):
        return 0, in_order_product
    raised = _raised(weight, bucket)
    if raised:
        return raised, cublas_product
    if _is_equal(weight, "in order"):
        return 0, in_order_product
    outs, ins, dtype, _ = weight
    message = f"{bucket} rows and a weight ({outs}, {ins}) in {dtype.name} do not give the bits of a large product"
    if _policy == "true":
        raise ValueError(f"exact=true cannot be kept: {message}; use exact=auto")
    logger.warning("exact: %s; log-probs of decoding and of training may differ in their last bits", message)
    return 0, cublas_product


def _raised(weight, bucket) -> int:
    """The first bucket from `bucket` on that has the reference's bits, 0 if none is near."""
    limit = max(LARGEST_RAISE, 2 * bucket)
    while not _is_equal(weight, bucket):
        bucket = next_bucket(bucket + 1)
        if bucket > limit:
            return 0
    return bucket


def _small_buckets():
    bucket = 1
    while bucket <= LARGEST_RAISE:
        yield bucket
        bucket = next_bucket(bucket + 1)


def _is_equal(weight, bucket) -> bool:
    found = _equal.get((weight, bucket))
    if found is None:
        outs, ins, dtype, biased = weight
        key, kept = (outs, ins, dtype.name, biased, bucket), card_verdicts()
        found = kept.get(key)
        if found is None:
            found = _compare_now(weight, bucket)
            kept.add(key, found)
        _equal[weight, bucket] = found
    return found


def _compare_now(weight, bucket) -> bool:
    if cp.cuda.get_current_stream().is_capturing():
        raise RuntimeError(
            f"the product with a weight {weight} was not checked at {bucket} rows before the capture: run "
            f"it once outside first"
        )
    # not from the memory of a captured step, which would keep what is needed once
    with cp.cuda.Stream.null, cp.cuda.using_allocator(malloc):
        return _compare(*weight, bucket)


def _compare(out_features, in_features, dtype, biased, bucket):
    inputs, weights, numbers = _examples(in_features, dtype)
    w = repeated_rows(weights, out_features)
    bias = None
    if biased:  # every other one so small that it does not hide a sum's bits
        scales = np.where(np.arange(out_features) % 2, 1, 64)
        bias = cp.array((np.resize(numbers, out_features) / scales).astype(dtype))
    reference_rows = REFERENCE_ROWS if out_features <= 1 << 15 else REFERENCE_ROWS // 4
    inputs = repeated_rows(inputs, reference_rows if bucket == "in order" else max(bucket, reference_rows))
    reference = cublas_product(inputs[:reference_rows], w, bias)
    if bucket == "in order":
        return _same_bits(in_order_product(inputs, w, bias), reference)
    if bucket == reference_rows:
        return True
    if bucket > reference_rows:
        product = cublas_product(inputs, w, bias)
        # reference_rows is a multiple of the rows that are repeated
        parts = [product[start : start + reference_rows] for start in range(0, bucket, reference_rows)]
        return all(_same_bits(part, reference[: len(part)]) for part in parts)
    starts = range(0, min(reference_rows - bucket, 16 * max(bucket, 16)) + 1, max(bucket, 16))
    return all(
        _same_bits(cublas_product(inputs[start : start + bucket], w, bias), reference[start : start + bucket])
        for start in starts
    )


@functools.lru_cache(maxsize=2)  # a weight's buckets are compared one after the other
def _examples(in_features, dtype):
    """Rows of x, rows of w and a row of numbers, on the host.

    In every other row of x the second half is minus the first half; in the rows of w it is nearly the first half. So
    the sums cancel, and another order of adding shows in the rounded result; what stands between the halves would not
    cancel and is 0. Short sums seldom tell two orders apart, so they get more rows.
    """
    generator, half = np.random.default_rng(0), in_features // 2
    x = generator.standard_normal((512 if in_features > 256 else 1024, in_features), dtype=np.float32)
    x[::2, half:] = 0
    x[::2, in_features - half :] = -x[::2, :half]
    w = generator.standard_normal((512, in_features), dtype=np.float32)
    w[:, in_features - half :] = w[:, :half] * (1 + w[:, in_features - half :] / 64)
    return x.astype(dtype), w.astype(dtype), generator.standard_normal(4099, dtype=np.float32)


def _same_bits(a, b) -> bool:
    a, b = a.view(np.uint16), b.view(np.uint16)
    step = max(1, COMPARED // a.shape[1])
    return all(bool((a[start : start + step] == b[start : start + step]).all()) for start in range(0, len(a), step))


# ---- the two products: y (T, O) = x (T, I) wᵀ + bias (O,) with w (O, I), at exactly the given number of rows ----


def cublas_product(x, w, bias=None):
    """By cuBLAS; its order of adding may depend on the number of rows."""
    (rows, ins), outs = x.shape, w.shape[0]
    y = empty((rows, outs), x.dtype)
    if not rows:
        return y
    if bias is not None:  # as the product's starting value, so that the sum is rounded once
        load("linear", x.dtype).broadcast_row(rows, 128, y, bias, outs)
    gemm(1, 0, outs, rows, ins, w, x, bias is not None, y)
    return y


def in_order_product(x, w, bias=None, tile=None):
    """By sums over I in one order, for half types on tensor cores: a row's bits never depend on the other rows, nor on
    the tile, one of TILES (None: the best one for the shape).
    """
    (rows, ins), outs = x.shape, w.shape[0]
    y = empty((rows, outs), x.dtype)
    tile = tile or (in_order_tile(rows, outs) if x.itemsize == 2 else TILES[-1])
    grid, given = (-(-outs // tile[1]), -(-rows // tile[0])), (y, x, w, bias, rows, ins, outs)
    if tile == TILES[-1]:
        load("linear", x.dtype).linear_in_order(grid, THREADS, *given)
    else:
        load("linear_few", x.dtype).linear_in_order_small(grid, THREADS, *given, *tile, shared=SMALL_SHARED)
    return y


@functools.lru_cache(maxsize=4096)
def in_order_tile(rows: int, outs: int) -> tuple[int, int]:
    """The tile with which the busiest multiprocessor is done first: what it reads takes time, and so do the chains of
    the blocks that come one after the other.
    """

    def time(tile):
        blocks = -(-(-(-rows // tile[0]) * -(-outs // tile[1])) // MULTIPROCESSORS)
        reads = blocks * (min(rows, tile[0]) + min(outs, tile[1]))
        return max(reads, -(-blocks // RESIDENT) * CHAIN), reads

    return min(TILES, key=time)
