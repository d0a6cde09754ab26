"""Normal noise from a counter: each number by its seed and place, and the distribution."""

import math

import numpy as np
import pytest

from cukit.backend.numpy.random import fill_normal
from cukit.backend.numpy.sampling import _philox_words


@pytest.mark.parametrize("size", [0, 1, 5, 211, 100_000])
def test_noise_depends_on_seed_and_place_alone(size):
    whole = np.empty(size, np.float64)
    fill_normal(whole, 7, 2.0)
    longer = np.empty(size + 3, np.float32)
    fill_normal(longer, 7, 2.0)
    np.testing.assert_array_equal(longer[:size], whole.astype(np.float32))
    other = np.empty((1, size), np.float64)
    fill_normal(other, 7 + 2**32, 2.0)
    assert not size or not np.any(other[0] == whole)


def test_noise_is_normal_and_its_neighbours_are_not_related():
    x = np.empty(2**20, np.float64)
    fill_normal(x, 3, 1.0)
    n = len(x)
    assert abs(x.mean()) < 4 / n**0.5 and abs(x.var() - 1) < 4 * (2 / n) ** 0.5
    assert abs((x**3).mean()) < 4 * (15 / n) ** 0.5 and abs((x**4).mean() - 3) < 4 * (96 / n) ** 0.5
    for lag in (1, 2, 3, 4):
        assert abs((x[lag:] * x[:-lag]).mean()) < 4 / n**0.5
        assert abs((x[lag:] ** 2 * x[:-lag] ** 2).mean() - 1) < 4 * (8 / n) ** 0.5
    ordered = np.sort(x)
    for q in (0.001, 0.1, 0.5, 0.9, 0.999):
        value = ordered[int(q * n)]
        assert abs(0.5 * (1 + math.erf(value / 2**0.5)) - q) < 5 * (q * (1 - q) / n) ** 0.5


def test_noise_of_the_first_counter_is_philoxs():
    """The words of counter 0 under key 0 as Random123's kat_vectors give them."""
    check(0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8])


def test_the_generator_is_samplings():
    """Counters of position 0 in ascending order, under a key of 64 bits."""
    seed = 2**40 + 12345
    check(seed, _philox_words([seed], [0], 4 * 999)[0])


def check(seed, words):
    out = np.empty(len(words), np.float64)
    fill_normal(out, seed, 1.0)
    uniform = (np.array(words, np.float64) + 0.5) / 2**32
    radius, angle = np.sqrt(-2 * np.log(uniform[0::2])), 2 * np.pi * uniform[1::2]
    # float32 keeps 24 bits of a word: u is off by 2^-25, hence the radius by 2^-25 over itself
    expected = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)
    np.testing.assert_allclose(out, expected, atol=4e-6)
