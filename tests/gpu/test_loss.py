"""Log-probabilities, entropy and their gradient over the vocabulary, on the GPU."""

import numpy as np
import pytest
from check import DTYPES, check_kernel, normal, statistics

from cukit.backend import backend_for

pytestmark = pytest.mark.gpu

# rows, width of a row of logits, ids that count, temperature
CASES = [
    (1, 1, 1, 1.0),
    (5, 211, 211, 1.0),
    (3, 211, 200, 0.7),
    (7, 1024, 1024, 1.3),
    (2, 4104, 4099, 0.6),
    (4, 49152, 49152, 1.0),
    (3, 151936, 151665, 0.9),
    (0, 64, 64, 1.0),
]


def inputs(rows, width, vocab_size, seed=0):
    targets = np.random.default_rng(seed).integers(0, vocab_size, rows).astype(np.int32)
    return normal(rows, width, seed=seed, scale=3.0), targets


@pytest.mark.parametrize("rows, width, vocab_size, temperature", CASES)
def test_forward(rows, width, vocab_size, temperature):
    check_kernel("token_logprobs_forward", *inputs(rows, width, vocab_size), temperature, vocab_size)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("rows, width, vocab_size, temperature", CASES)
def test_backward(rows, width, vocab_size, temperature, with_entropy):
    logits, targets = inputs(rows, width, vocab_size)
    scaled = logits[:, :vocab_size] / temperature
    lse = np.log(np.exp(scaled).sum(1)).astype(np.float32)
    entropy, dlogprobs, dentropy = (statistics(rows, seed=seed) for seed in (1, 2, 3))
    dentropy = dentropy if with_entropy else None
    check_kernel("token_logprobs_backward", logits, targets, lse, entropy, dlogprobs, dentropy, temperature, vocab_size)


@pytest.mark.parametrize("width", [211, 2051, 32768])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_alone_has_the_bits_of_the_row_in_a_batch(dtype, width):
    """Rows of odd width begin at any alignment in the batch, and at 16 bytes alone."""
    cuda = backend_for("cuda")
    logits, targets = inputs(9, width, width)
    logits = cuda.array(logits.astype(cuda.dtype_of(dtype)))
    together = [cuda.to_numpy(x) for x in cuda.token_logprobs_forward(logits, cuda.array(targets), 0.8, width)]
    for row in range(9):
        alone = cuda.token_logprobs_forward(
            cuda.array(logits[row : row + 1]), cuda.array(targets[row : row + 1]), 0.8, width
        )
        for whole, single in zip(together, alone):
            assert whole[row : row + 1].tobytes() == cuda.to_numpy(single).tobytes()


def test_extreme_logits_and_wrong_targets():
    """Logits of -inf count as probability 0, huge ones do not overflow, and a target outside the row gives NaN, not a
    stray read.
    """
    cuda = backend_for("cuda")
    logits = np.zeros((4, 16), np.float32)
    logits[0, 3:] = -np.inf
    logits[1, 0], logits[1, 1:] = 3e4, -3e4
    targets = np.array([2, 1, 16, -1], np.int32)
    logprobs, entropy, lse = (
        cuda.to_numpy(x) for x in cuda.token_logprobs_forward(cuda.array(logits), cuda.array(targets), 1.0, 16)
    )
    np.testing.assert_allclose(logprobs, [-np.log(3), -6e4, np.nan, np.nan], rtol=1e-6)
    np.testing.assert_allclose(entropy, [np.log(3), 0, np.log(16), np.log(16)], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(lse, [np.log(3), 3e4, np.log(16), np.log(16)], rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width, vocab_size", [(16, 11), (4104, 4001), (5003, 3)])
def test_e6_a_target_beyond_the_tokenizer_has_probability_0(width, vocab_size, dtype):
    """-inf; other rows and statistics keep their bits; the gradient is NumPy's, finite, 0 beyond the tokenizer."""
    cuda, cpu = backend_for("cuda"), backend_for("cpu")
    rows = 9
    logits, targets = inputs(rows, width, vocab_size)
    logits = logits.astype(cpu.dtype_of(dtype))
    beyond = targets.copy()
    beyond[[1, 4, 8]] = [vocab_size, width - 1, (vocab_size + width) // 2]
    expected, found = (
        [cuda.to_numpy(x) for x in cuda.token_logprobs_forward(cuda.array(logits), cuda.array(t), 0.7, vocab_size)]
        for t in (targets, beyond)
    )
    near = cpu.token_logprobs_forward(logits, beyond, 0.7, vocab_size)
    assert np.isneginf(found[0][[1, 4, 8]]).all() and np.isneginf(near[0][[1, 4, 8]]).all()
    others = np.delete(np.arange(rows), [1, 4, 8])
    assert found[0][others].tobytes() == expected[0][others].tobytes()
    assert found[1].tobytes() == expected[1].tobytes() and found[2].tobytes() == expected[2].tobytes()
    upstream, entropy_upstream = statistics(rows, seed=2), statistics(rows, seed=3)
    rest = (found[2], found[1], upstream, entropy_upstream)
    check_kernel("token_logprobs_backward", logits.astype(float), beyond, *rest, 0.7, vocab_size, dtypes=[dtype])
    gradient = cuda.token_logprobs_backward(
        *map(cuda.array, (logits, beyond, found[2], found[1], upstream, entropy_upstream)), 0.7, vocab_size
    )
    gradient = cuda.to_numpy(gradient).astype(np.float32)
    assert np.isfinite(gradient).all() and not gradient[:, vocab_size:].any()


def test_e6_targets_outside_the_row_read_and_write_nothing_else():
    """For compute-sanitizer: targets far outside, forward and backward."""
    cuda = backend_for("cuda")
    logits = cuda.array(normal(4, 37).astype(np.float32))
    targets = cuda.array(np.array([37, -1, 2**31 - 1, -(2**31)], np.int32))
    logprobs, entropy, lse = cuda.token_logprobs_forward(logits, targets, 1.0, 30)
    assert np.isnan(cuda.to_numpy(logprobs)).all() and np.isfinite(cuda.to_numpy(entropy)).all()
    dlogits = cuda.token_logprobs_backward(logits, targets, lse, entropy, entropy, None, 1.0, 30)
    assert np.isfinite(cuda.to_numpy(dlogits)).all()


def test_a_nan_logit_comes_through():
    cuda = backend_for("cuda")
    logits = np.zeros((1, 300), np.float32)
    logits[0, 77] = np.nan
    outputs = cuda.token_logprobs_forward(cuda.array(logits), cuda.array(np.zeros(1, np.int32)), 1.0, 300)
    assert all(np.isnan(cuda.to_numpy(x)).all() for x in outputs)


@pytest.mark.slow
def test_more_than_2_to_31_logits():
    cuda, cpu = backend_for("cuda"), backend_for("cpu")
    rows, width = 14_200, 151_936
    logits = cuda.empty((rows, width), cuda.dtype_of("bfloat16"))
    sample = normal(64, width, scale=3.0).astype(logits.dtype)
    for start in range(0, rows, 64):
        count = min(64, rows - start)
        logits[start : start + count] = cuda.array(sample[:count])
    targets = np.random.default_rng(0).integers(0, width, rows).astype(np.int32)
    outputs = cuda.token_logprobs_forward(logits, cuda.array(targets), 1.0, width)
    dlogprobs = statistics(rows)
    dlogits = cuda.token_logprobs_backward(
        logits, cuda.array(targets), outputs[2], outputs[1], cuda.array(dlogprobs), None, 1.0, width
    )
    for row in (0, 7000, 14_133, 14_134, rows - 1):
        near = cpu.token_logprobs_forward(sample[row % 64 : row % 64 + 1], targets[row : row + 1], 1.0, width)
        for got, expected in zip(outputs, near):
            np.testing.assert_allclose(cuda.to_numpy(got[row : row + 1]), expected, rtol=1e-5)
        gradient = cpu.token_logprobs_backward(
            sample[row % 64 : row % 64 + 1],
            targets[row : row + 1],
            near[2],
            near[1],
            dlogprobs[row : row + 1],
            None,
            1.0,
            width,
        )
        np.testing.assert_allclose(
            cuda.to_numpy(dlogits[row]).astype(np.float32), gradient[0].astype(np.float32), rtol=1e-2, atol=1e-8
        )
