"""Which row counts give a matrix product's rows the same bits: what makes decoding and training compute the same numbers.

cuBLAS chooses a kernel by the shape. Most choices add along K in one order and so give a row the same bits at every row count;
some split K when rows are few (measured: the `down` projection below 65 to 256 rows). So the forward product runs at row counts
from a short list, each compared once with a product of REFERENCE_ROWS rows, and a count whose bits differ is raised to the next.
"""

import sys

import cupy as cp
import numpy as np

from .cublas import linear_product

REFERENCE_ROWS = 4096
LARGEST_RAISE = 512  # how far a small row count is raised in search of equal bits
_BLOCK_ROWS = 512  # test matrices repeat this many random rows

_policy = "auto"
_raised: dict[tuple, int] = {}  # (out, in, dtype, biased, bucket asked for) -> bucket to run; 0: no bucket is exact, run as it is
_equal: dict[tuple, bool] = {}  # (out, in, dtype, biased, bucket) -> same bits as the reference


def set_policy(policy):
    """"auto": say so in one line where no row count is exact, and go on. True: raise ValueError there. False: no checks, no padding."""
    global _policy
    if policy not in ("auto", True, False):
        raise ValueError(f"exact={policy!r} is not known: choose auto, True or False")
    _policy = policy
    _raised.clear()


def next_bucket(rows: int) -> int:
    """The smallest row count of the list that is at least `rows`: powers of two to 64, then steps of 64, 128, 256 and 1024."""
    if rows <= 64:
        return 1 << max(rows - 1, 0).bit_length()
    step = 64 if rows <= 256 else 128 if rows <= 1024 else 256 if rows <= 4096 else 1024
    return -(-rows // step) * step


def rows_to_run(rows: int, out_features: int, in_features: int, dtype, biased: bool) -> int:
    """How many rows the product of `rows` rows must be run with; the first time for a bucket this compares bits on the device."""
    if rows == 0 or dtype.itemsize != 2 or _policy is False:  # nothing is promised in float32
        return rows
    key = (out_features, in_features, dtype, biased, next_bucket(rows))
    found = _raised.get(key)
    if found is None:
        found = _raised[key] = _search(*key)
    return found or rows


def exact_rows(weight_shape, dtype, biased=False, largest=LARGEST_RAISE) -> list[int]:
    """The buckets up to `largest` whose bits are the reference's, for a weight (O, I). Empty where nothing is promised (float32, float64)."""
    out_features, in_features = weight_shape
    dtype, found, bucket = np.dtype(dtype), [], 1
    while dtype.itemsize == 2 and bucket <= largest:
        if _is_equal(out_features, in_features, dtype, biased, bucket):
            found.append(bucket)
        bucket = next_bucket(bucket + 1)
    return found


def summary() -> list[str]:
    """One line a checked product: for `doctor` and for bug reports."""
    lines = {}
    for (out_features, in_features, dtype, biased, bucket), equal in sorted(_equal.items(), key=lambda item: (str(item[0]), item[1])):
        lines.setdefault((out_features, in_features, dtype.name, biased), {True: [], False: []})[equal].append(bucket)
    return [f"weight ({o}, {i}) {dtype}{' with bias' if biased else ''}: same bits at {sorted(found[True])} rows, others at {sorted(found[False])}"
            for (o, i, dtype, biased), found in lines.items()]


def _search(out_features, in_features, dtype, biased, first):
    bucket = first
    while not _is_equal(out_features, in_features, dtype, biased, bucket):
        bucket = next_bucket(bucket + 1)
        if bucket > max(LARGEST_RAISE, 2 * first):
            message = (f"no row count from {first} to {bucket} gives the product with a weight ({out_features}, {in_features}) in {dtype.name} "
                       f"the bits it has at {REFERENCE_ROWS} rows")
            if _policy is True:
                raise ValueError(f"exact=True cannot be kept: {message}; use exact='auto'")
            print(f"exact: {message}; log-probs of decoding and of training may differ in their last bits", file=sys.stderr)
            return 0
    return bucket


def _is_equal(*key) -> bool:
    """Whether `bucket` rows give the bits of the reference, for the other entries of the key (out, in, dtype, biased, bucket)."""
    found = _equal.get(key)
    if found is None:
        if cp.cuda.get_current_stream().is_capturing():
            raise RuntimeError(f"the product (out, in, dtype, bias, rows) = {key} was not checked before the capture: run it once outside first")
        found = _equal[key] = _compare(*key)
    return found


def _compare(out_features, in_features, dtype, biased, bucket):
    generator = np.random.default_rng(0)
    w = _repeated(_weights(generator, in_features, dtype), out_features)
    bias = cp.array(generator.standard_normal(out_features).astype(dtype)) if biased else None
    reference_rows = REFERENCE_ROWS if out_features <= 1 << 15 else REFERENCE_ROWS // 4
    inputs = _repeated(_inputs(generator, in_features, dtype), max(bucket, reference_rows))
    reference = linear_product(inputs[:reference_rows], w, bias)
    if bucket == reference_rows:
        return True
    if bucket > reference_rows:
        product = linear_product(inputs, w, bias)
        parts = [product[start:start + reference_rows] for start in range(0, bucket, reference_rows)]
        return all(_same_bits(part, reference[:len(part)]) for part in parts)  # reference_rows is a multiple of _BLOCK_ROWS
    starts = range(0, min(reference_rows - bucket, 16 * max(bucket, 16)) + 1, max(bucket, 16))
    return all(_same_bits(linear_product(inputs[start:start + bucket], w, bias), reference[start:start + bucket]) for start in starts)


def _inputs(generator, in_features, dtype):
    """Rows whose second half is minus the first."""
    half = generator.standard_normal((_BLOCK_ROWS, in_features - in_features // 2)).astype(np.float32)
    return np.concatenate([half, -half[:, :in_features // 2]], axis=1).astype(dtype)


def _weights(generator, in_features, dtype):
    """Rows whose second half is nearly the first: with `_inputs` the sums cancel, so that another order of adding shows in the rounded result."""
    half = generator.standard_normal((_BLOCK_ROWS, in_features - in_features // 2)).astype(np.float32)
    near = half[:, :in_features // 2] * (1 + generator.standard_normal((_BLOCK_ROWS, in_features // 2)).astype(np.float32) / 64)
    return np.concatenate([half, near], axis=1).astype(dtype)


def _repeated(block, rows):
    """block's rows over and over, on the device."""
    source, out = cp.array(block), cp.empty((rows, block.shape[1]), block.dtype)
    for start in range(0, rows, len(block)):
        stop = min(start + len(block), rows)
        out[start:stop] = source[:stop - start]
    return out


def _same_bits(a, b) -> bool:
    return bool((a.view(np.uint16) == b.view(np.uint16)).all())
