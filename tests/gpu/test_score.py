"""The score kernels against NumPy. Run on a machine with a GPU: pytest -m gpu tests/gpu/test_score.py"""

from pathlib import Path

import numpy as np
import pytest
from check import DTYPES, Sum, check_kernel, normal, statistics

from cukit.backend import backend_for
from cukit.models.logprobs import pack_tokens
from cukit.models.scores import packed_scores, score_rows
from cukit.models.weights import load_model

GOLDEN = Path(__file__).parents[1] / "golden"
pytestmark = pytest.mark.gpu
# one column, odd widths, less than a vector, a block's columns and one more, an empty batch, many runs of rows
SIZES = [(1, 1), (1, 8), (7, 1), (3, 13), (0, 16), (19, 1024), (989, 1000), (5, 257), (2, 8191), (20011, 64)]


@pytest.mark.parametrize("rows, cols", SIZES)
def test_forward(rows, cols):
    check_kernel("score_forward", normal(rows, cols), statistics(1, cols))


@pytest.mark.parametrize("rows, cols", SIZES)
def test_backward(rows, cols):
    hidden, weight, dscores = normal(rows, cols), statistics(1, cols), statistics(rows, seed=2)
    check_kernel("score_backward", Sum(statistics(1, cols, seed=3)), dscores, hidden, weight)
    check_kernel("score_backward", None, dscores, hidden, weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [13, 1024, 5120])
def test_a_row_alone_has_the_bits_of_the_row_in_a_batch(dtype, cols):
    """Also where the row alone is aligned and the row in the batch is not."""
    be = backend_for("cuda")
    hidden, weight = be.array(normal(301, cols).astype(be.dtype_of(dtype))), be.array(statistics(1, cols))
    together = be.to_numpy(be.score_forward(hidden, weight))
    for row in (0, 1, 150, 300):
        alone = be.to_numpy(be.score_forward(hidden[row : row + 1].copy(), weight))
        assert alone.tobytes() == together[row : row + 1].tobytes()


@pytest.mark.slow
def test_more_than_2_to_31_elements():
    cuda, cpu = backend_for("cuda"), backend_for("cpu")
    rows, cols = 2_100_000, 1024
    hidden, weight = cuda.empty((rows, cols), cuda.dtype_of("bfloat16")), statistics(1, cols)
    sample = normal(1000, cols).astype(hidden.dtype)
    for start in range(0, rows, 1000):
        hidden[start : start + 1000] = cuda.array(sample)
    scores = cuda.to_numpy(cuda.score_forward(hidden, cuda.array(weight)))
    expected = cpu.score_forward(sample, weight)
    np.testing.assert_allclose(scores.reshape(-1, 1000), np.tile(expected, (rows // 1000, 1)), rtol=1e-4, atol=1e-4)
    dscores, dweight = np.full(rows, 2.0**-10, np.float32), cuda.zeros((1, cols), "float32")
    dhidden = cuda.score_backward(dweight, cuda.array(dscores), hidden, cuda.array(weight))
    last = cpu.score_backward(None, dscores[-1000:], sample, weight)
    np.testing.assert_array_equal(cuda.to_numpy(dhidden[-1000:]), last)
    total = sample.astype(np.float64).sum(0) * (rows // 1000) * 2.0**-10
    np.testing.assert_allclose(cuda.to_numpy(dweight)[0], total, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_reward_model_scores_and_learns_as_on_the_cpu(dtype):
    """Scores and gradients of packed sequences, on both devices, against float64."""
    rows = [[5, 9, 30, 7], [8], list(range(3, 40))]
    found = {}
    for device, kind in (("cuda", dtype), ("cpu", dtype), ("cpu", "float64")):
        model = load_model(GOLDEN / "qwen3_reward", device, kind, "score")
        be = model.backend
        (scores,) = packed_scores(model, pack_tokens(be, rows), be.array(score_rows(rows)))
        scores.backward(be.array(np.array([1, -2, 3], scores.dtype)))
        grads = model.store.part_views(lambda bucket: bucket.grad)
        found[device, kind] = [be.to_numpy(x) for x in (scores.data, grads["score.weight"])]
    for got, near, true in zip(*(found[key] for key in (("cuda", dtype), ("cpu", dtype), ("cpu", "float64")))):
        error, yardstick = np.abs(got - true).max(), np.abs(near - true).max()
        assert error <= 4 * yardstick + 1e-5 * np.abs(true).max()
