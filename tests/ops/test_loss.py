"""Log-probabilities of tokens on the NumPy shelf: the formula, targets of probability 0, logits that are not finite."""

import numpy as np
import pytest
from check import check_formula, normal

from cukit import ops
from cukit.autograd import Parameter
from cukit.backend.numpy import token_logprobs_backward, token_logprobs_forward


def formula(logits, targets, temperature, vocab_size):
    scaled = logits[:, :vocab_size] / temperature
    lse = np.log(np.exp(scaled).sum(axis=1))
    p = np.exp(scaled - lse[:, None])
    return scaled[np.arange(len(targets)), targets] - lse, -(p * np.log(p)).sum(axis=1), lse


@pytest.mark.parametrize("rows, width, vocab_size, temperature", [(1, 1, 1, 1.0), (0, 4, 4, 1.0), (5, 13, 11, 0.7)])
def test_logprobs_against_their_formula(rows, width, vocab_size, temperature):
    targets = np.arange(rows, dtype=np.int32) % vocab_size
    check_formula("token_logprobs_forward", formula, normal(rows, width), targets, temperature, vocab_size)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("seed", range(5))
def test_e6_a_target_beyond_the_tokenizer_has_probability_0(dtype, seed):
    """Its log-probability is -inf, the other rows and statistics are untouched, its gradient is the normaliser's."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(8, 16)).astype(dtype)
    targets = rng.integers(0, 11, 8).astype(np.int32)
    beyond = targets.copy()
    beyond[[1, 6]] = [11, 15]
    expected, found = (token_logprobs_forward(logits, t, 0.7, 11) for t in (targets, beyond))
    assert np.isneginf(found[0][[1, 6]]).all()
    others = [0, 2, 3, 4, 5, 7]
    np.testing.assert_array_equal(found[0][others], expected[0][others])
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_array_equal(found[2], expected[2])

    upstream, entropy_upstream = (rng.normal(size=8).astype(dtype) for _ in range(2))
    gradient = token_logprobs_backward(logits, beyond, found[2], found[1], upstream, entropy_upstream, 0.7, 11)
    whole = token_logprobs_backward(logits, targets, found[2], found[1], upstream, entropy_upstream, 0.7, 11)
    whole[[1, 6], targets[[1, 6]]] -= upstream[[1, 6]] / dtype(0.7)
    assert np.isfinite(gradient).all() and not gradient[:, 11:].any()
    np.testing.assert_allclose(gradient, whole, rtol=1e-5, atol=1e-6)


def test_e6_a_target_outside_the_row_is_nan_and_reads_nothing():
    logprobs, entropy, lse = token_logprobs_forward(np.zeros((3, 16)), np.array([16, -1, 15]), 1.0, 12)
    np.testing.assert_array_equal(logprobs, [np.nan, np.nan, -np.inf])
    np.testing.assert_allclose([entropy, lse], np.log(12), rtol=1e-12)


def test_e6_the_differentiable_function_gives_minus_infinity_too():
    hidden, weight = Parameter(normal(3, 5)), Parameter(normal(9, 5, seed=1))
    logprobs, _ = ops.lm_head_logprobs(hidden, weight, np.array([1, 8, 2], np.int32), 1.0, 7)
    assert np.isneginf(logprobs.data[1]) and np.isfinite(logprobs.data[[0, 2]]).all()
    ops.index_rows(logprobs, np.array([0, 2])).sum().backward()
    assert np.isfinite(hidden.grad).all() and np.isfinite(weight.grad).all() and not weight.grad[7:].any()


def test_logits_of_minus_infinity_are_ids_of_probability_0():
    """As ids beyond the vocabulary; they leave the entropy and its gradient finite, as on the GPU."""
    logits = normal(2, 9)
    logits[:, 6:] = -np.inf
    targets, ones = np.array([2, 7], np.int32), np.ones(2)
    found = token_logprobs_forward(logits, targets, 1.0, 9)
    expected = token_logprobs_forward(logits, targets, 1.0, 6)
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, rtol=1e-14)
    gradient = token_logprobs_backward(logits, targets, found[2], found[1], ones, ones, 1.0, 9)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_logit_that_is_not_finite_spoils_its_row_alone(bad, recwarn):
    logits = normal(3, 9)
    expected = token_logprobs_forward(logits, np.array([1, 2, 3]), 1.0, 9)
    logits[1, 5] = bad
    found = token_logprobs_forward(logits, np.array([1, 2, 3]), 1.0, 9)
    for a, b in zip(found, expected):
        assert np.isnan(a[1]) and (a[[0, 2]] == b[[0, 2]]).all()
    assert not recwarn.list
