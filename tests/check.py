"""The one harness of the op tests. Inputs say their role by dtype:

float64 arrays are in the model's dtype (rounded to it first), float32 arrays stay float32 statistics (norm weights,
tables), integers and bools stay as they are. Sum(array) marks a float32 buffer that the function adds into.
"""

from dataclasses import dataclass

import numpy as np

from cukit.autograd import Parameter, Tensor
from cukit.backend import backend_for

DTYPES = ("bfloat16", "float16", "float32")  # of the kernels

# What damaged weights make of a row of logits, by functions that write into it.
BAD_ROWS = {
    "one NaN": lambda row: row.__setitem__(5, np.nan),
    "all NaN": lambda row: row.fill(np.nan),
    "+inf": lambda row: row.__setitem__(5, np.inf),
    "several +inf": lambda row: row.__setitem__(slice(3, 9), np.inf),
    "NaN and both infinities": lambda row: row.__setitem__([0, 1, 2], [np.inf, -np.inf, np.nan]),
    "all -inf": lambda row: row.fill(-np.inf),
}


@dataclass
class Sum:
    """A gradient buffer that the function adds into."""

    start: np.ndarray


def normal(*shape, seed=0, scale=1.0):
    """Seeded float64 noise: an input in the model's dtype."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape) * scale


def statistics(*shape, seed=0, around=0.0, scale=1.0):
    """Seeded float32 noise: an input that is float32 in every dtype of model."""
    return (around + normal(*shape, seed=seed + 1, scale=scale)).astype(np.float32)


# ---- gradients -----------------------------------------------------------------------------------------------------


def check_gradient(op, *inputs, eps=1e-5, rtol=2e-6, seed=0):
    """Compare op's backward with a central difference along one random direction, in float64.

    op(*Tensors or constants) -> Tensor or tuple of Tensors; float arrays become Parameters, everything else is passed
    on.
    """
    generator = np.random.default_rng(seed)
    is_float = [isinstance(x, np.ndarray) and x.dtype.kind == "f" for x in inputs]
    values = [x.astype(np.float64) if f else x for x, f in zip(inputs, is_float)]
    directions = [generator.standard_normal(x.shape) if f else None for x, f in zip(values, is_float)]

    def run(shift):
        arguments = [Parameter(x + shift * d) if f else x for x, d, f in zip(values, directions, is_float)]
        outputs = op(*arguments)
        return arguments, outputs if isinstance(outputs, tuple) else (outputs,)

    arguments, outputs = run(0.0)
    weights = [generator.standard_normal(out.shape) for out in outputs]
    total = None
    for out, weight in zip(outputs, weights):
        term = (out * Tensor(weight)).sum()
        total = term if total is None else total + term
    total.backward()
    analytic = sum(float((a.grad * d).sum()) for a, d, f in zip(arguments, directions, is_float) if f)

    def value(shift):
        return sum(float((out.data * weight).sum()) for out, weight in zip(run(shift)[1], weights))

    numeric = (value(eps) - value(-eps)) / (2 * eps)
    scale = max(abs(numeric), abs(analytic), 1e-3)
    assert abs(analytic - numeric) <= rtol * scale, f"backward gives {analytic!r}, finite differences {numeric!r}"


# ---- the NumPy shelf against a formula ----


def check_formula(name, formula, *args):
    """Compare the NumPy shelf's function `name` in float64 with `formula`, another way to compute the same; inputs stay
    as they were. In the smaller types, results have the model's dtype or float32.
    """
    host = backend_for("cpu")
    kept = [x.copy() if isinstance(x, np.ndarray) else x for x in args]
    found, expected = getattr(host, name)(*args), formula(*args)
    found, expected = (x if isinstance(x, tuple) else (x,) for x in (found, expected))
    assert len(found) == len(expected)
    for index, (a, b) in enumerate(zip(found, expected)):
        if a is not None or b is not None:
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14, err_msg=f"{name}[{index}]")
    for before, after in zip(kept, args):
        np.testing.assert_array_equal(before, after)
    for dtype in map(host.dtype_of, DTYPES):
        outputs = getattr(host, name)(*(_in_dtype(x, dtype) for x in args))
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            assert output is None or output.dtype in (dtype, np.float32)


def _in_dtype(x, dtype):
    """A matrix of float64 in the model's dtype, a vector of it in float32 (weights of norms, statistics)."""
    if not isinstance(x, np.ndarray) or x.dtype != np.float64:
        return x
    return x.astype(dtype if x.ndim > 1 else np.float32)


# ---- a kernel against NumPy ------------------------------------------------------------------------------------------


def check_kernel(name, *args, dtypes=DTYPES, exact=(), twice=True, yardsticks=None):
    """Run the function `name` of both shelves for each dtype and compare.

    Truth: NumPy in float64 on the rounded inputs. Yardstick: NumPy in the model's own dtype. Required: the errors that
    check_errors allows, shapes and dtypes equal, the same bits on a second call. `exact`: indices of outputs that must
    equal the yardstick (integers). `yardsticks`: output index -> function of the NumPy dtype that gives a float32
    yardstick for half types, where a sum on tensor cores stays float32 (see tensor_core_product).
    """
    host, device = backend_for("cpu"), backend_for("cuda")
    for dtype in dtypes:
        model_dtype = host.dtype_of(dtype)
        truth = _call(host, name, args, model_dtype, precise=True)
        yardstick = _call(host, name, args, model_dtype)
        if dtype != "float32":
            for index, function in (yardsticks or {}).items():
                yardstick[index] = function(model_dtype)
        kernel = _call(device, name, args, model_dtype)
        assert len(kernel) == len(yardstick), f"{name}: {len(kernel)} outputs on cuda, {len(yardstick)} on numpy"
        for index, (got, near, true) in enumerate(zip(kernel, yardstick, truth)):
            _compare(f"{name}[{index}] in {dtype}", got, near, true, index in exact)
        if twice:
            for index, (first, second) in enumerate(zip(kernel, _call(device, name, args, model_dtype))):
                assert first.tobytes() == second.tobytes(), f"{name}[{index}] in {dtype}: two calls differ"


def _call(backend, name, args, dtype, precise=False):
    """Outputs and then the Sum buffers, as host arrays."""
    buffers, passed = [], []
    for x in args:
        start = x.start if isinstance(x, Sum) else x
        if isinstance(start, np.ndarray) and start.dtype.kind == "f":
            start = start.astype(np.float32 if isinstance(x, Sum) or start.dtype == np.float32 else dtype)
            start = backend.array(start.astype(np.float64) if precise else start)
        elif isinstance(start, np.ndarray):
            start = backend.array(start)
        if isinstance(x, Sum):
            buffers.append(start)
        passed.append(start)
    outputs = getattr(backend, name)(*passed)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [backend.to_numpy(x) for x in (*outputs, *buffers) if x is not None]


def _compare(what, got, near, true, exact):
    assert got.shape == near.shape and got.dtype == near.dtype, (
        f"{what}: {got.shape} {got.dtype}, NumPy {near.shape} {near.dtype}"
    )
    if exact or got.dtype.kind in "iub":
        assert np.array_equal(got, near), (
            f"{what}: differs from NumPy in {np.count_nonzero(got != near)} of {got.size} places"
        )
        return
    if not got.size:
        return
    got64, near64 = got.astype(np.float64), near.astype(np.float64)
    assert np.array_equal(np.isfinite(got64), np.isfinite(near64)), (
        f"{what}: non-finite values where NumPy has none, or the reverse"
    )
    finite = np.isfinite(true)
    if finite.any():
        check_errors(what, got64[finite], near64[finite], true[finite].astype(np.float64), got.dtype)


def check_errors(what, got, near, true, dtype):
    """Assert that `got`, stored in `dtype`, is about as near to the truth as the yardstick `near`; all are float64.

    The maximum: max|error| ≤ 2 · the yardstick's + one ulp at the largest value. In bfloat16 that ulp is up to 0.8 % of
    the largest value, for every element, however small. So what is stored in a half type must also hold in the mean:
    rms(error) ≤ 2 · rms(yardstick's error) + c · rms(ulp), the ulp being that of each element, with
    c = 1/√12 + (1 − 1/√12)/√n. Rounding exact results to nearest gives errors spread evenly over ± ulp/2. Their rms is
    ulp/√12: c is that for many elements. The mean square of few elements scatters, by 1/√n of itself; for one element
    the rule is the maximum's.

    In float32 an ulp is 1e-7 of the largest value: there the maximum says enough, and errors, those of long sums, are
    alike along a row, so that their mean square is one of few numbers.
    """
    error, yardstick = np.abs(got - true), np.abs(near - true)
    allowed = 2 * yardstick.max() + ulp(np.abs(true).max(), dtype)
    assert error.max() <= allowed, f"{what}: error {error.max():.3e}, allowed {allowed:.3e}"
    if np.dtype(dtype).itemsize == 2:
        one_rounding = 12**-0.5 + (1 - 12**-0.5) * true.size**-0.5
        allowed = 2 * rms(yardstick) + one_rounding * rms(ulp(np.abs(true), dtype))
        assert rms(error) <= allowed, f"{what}: rms error {rms(error):.3e}, allowed {allowed:.3e}"


def rms(x) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def tensor_core_product(a, b):
    """a bᵀ over the last axis as a tensor core sums it: one float32 accumulator over k in ascending steps of 16,
    truncated at each step.

    a (…, M, K), b (…, N, K) -> (…, M, N) float32. Fasi et al. 2021, "Numerical behavior of NVIDIA tensor cores".
    NumPy's product keeps many partial sums and rounds, which no tensor core does: where a sum is not rounded to the
    model's dtype afterwards, this is the yardstick.
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    total = np.zeros((*a.shape[:-1], b.shape[-2]), np.float32)
    for k in range(0, a.shape[-1], 16):
        exact = total + a[..., k : k + 16] @ np.swapaxes(b[..., k : k + 16], -1, -2)
        total = exact.astype(np.float32)
        total = np.where(np.abs(total) > np.abs(exact), np.nextafter(total, np.float32(0)), total)
    return total


def ulp(value, dtype):
    """The spacing of `dtype`'s normal numbers at `value`, a positive number or an array of them."""
    bits = {"bfloat16": 7, "float16": 10, "float32": 23, "float64": 52}[np.dtype(dtype).name]
    return 2.0 ** (np.floor(np.log2(np.maximum(value, 1e-30))) - bits)
