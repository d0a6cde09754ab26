"""Normal noise from a counter: each number by its seed and place, and the distribution."""

import math

import numpy as np
import pytest

from cukit.backend.numpy.random import fill_normal


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


def test_noise_of_the_first_counters_is_philoxs():
    """The words of counter 0 under key 0 as Random123's kat_vectors give them."""
    out = np.empty(4, np.float64)
    fill_normal(out, 0, 1.0)
    u = (np.array([0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]) + 0.5) / 2**32
    for pair in (0, 2):
        radius = math.sqrt(-2 * math.log(u[pair]))
        expected = radius * math.cos(2 * math.pi * u[pair + 1]), radius * math.sin(2 * math.pi * u[pair + 1])
        np.testing.assert_allclose(out[pair : pair + 2], expected, rtol=1e-6)
