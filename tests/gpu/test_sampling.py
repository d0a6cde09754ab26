"""The sampler on the GPU: filters against transformers' golden numbers, draws against the NumPy shelf, log-probs
against the loss.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from check import BAD_ROWS, DTYPES, normal

from cukit.backend import backend_for
from cukit.backend.numpy import filter_logits as numpy_filter
from cukit.backend.numpy.sampling import _philox_words

pytestmark = pytest.mark.gpu
GOLDEN = Path(__file__).parents[1] / "golden" / "sampling_filters.npz"
NEAR = 1e-5  # scores this close may be ordered differently by float32 functions of other rounding


def settings(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=None, positions=None):
    """The arrays of sample() on the host, scalars repeated for every row."""
    seeds = np.arange(rows) + (1 << 40) if seeds is None else seeds
    given = (
        (temperature, np.float32),
        (top_k, np.int32),
        (top_p, np.float32),
        (min_p, np.float32),
        (seeds, np.uint64),
        (np.arange(rows) * 7 if positions is None else positions, np.int64),
    )
    return [np.ascontiguousarray(np.broadcast_to(np.asarray(value, dtype), (rows,))) for value, dtype in given]


def draw(logits, given, vocab_size=None, device="cuda", **rest):
    """Tokens and log-probabilities as host arrays."""
    backend = backend_for(device)
    rest = {name: backend.array(value) for name, value in rest.items()}
    outputs = backend.sample(backend.array(logits), *map(backend.array, given), vocab_size or logits.shape[1], **rest)
    return [backend.to_numpy(x) for x in outputs]


def assert_same_draws(logits, given, **rest):
    """The kernel's tokens are NumPy's in float32, except where the two best scores of the row lie within NEAR of each
    other in float64.
    """
    tokens, logprobs = draw(logits, given, **rest)
    expected, expected_logprobs = draw(logits, given, device="cpu", **rest)
    assert tokens.dtype == np.int32 and logprobs.dtype == np.float32
    same = tokens == expected
    np.testing.assert_allclose(logprobs[same], expected_logprobs[same], rtol=2e-6, atol=2e-6)
    temperature, top_k, top_p, min_p, seeds, positions = given
    for row in np.flatnonzero(~same):
        assert temperature[row] > 0, f"greedy row {row}: {tokens[row]}, NumPy {expected[row]}"
        scaled = logits[row : row + 1].astype(np.float64) / temperature[row]
        words = _philox_words(seeds[row : row + 1], positions[row : row + 1], scaled.shape[1])[0].astype(np.float64)
        scores = numpy_filter(scaled, top_k[row], top_p[row], min_p[row])[0] - np.log(
            -np.log1p(-(words + 0.5) * 2.0**-32)
        )
        gap = scores.max() - scores[tokens[row]]
        assert gap < NEAR * max(1.0, abs(scores.max())), (
            f"row {row}: {tokens[row]}, NumPy {expected[row]}, {gap:.2e} below the best score"
        )
    assert np.count_nonzero(~same) <= max(2, len(tokens) // 500), (
        f"{np.count_nonzero(~same)} of {len(tokens)} draws differ"
    )
    again = draw(logits, given, **rest)
    assert again[0].tobytes() == tokens.tobytes() and again[1].tobytes() == logprobs.tobytes()
    return tokens, logprobs


def test_filters_equal_transformers():
    cuda, golden = backend_for("cuda"), np.load(GOLDEN, allow_pickle=False)
    for index, setting in enumerate(json.loads(str(golden["settings"]))):
        scaled = (golden["logits"] / setting.get("temperature", 1.0)).astype(np.float32)
        kept = cuda.filter_logits(
            cuda.array(scaled), setting.get("top_k", 0), setting.get("top_p", 1.0), setting.get("min_p", 0.0)
        )
        kept = cuda.to_numpy(kept)
        np.testing.assert_array_equal(np.isfinite(kept), golden["kept"][index], err_msg=str(setting))
        np.testing.assert_array_equal(kept[np.isfinite(kept)], scaled[golden["kept"][index]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [3.0, 0.05])
@pytest.mark.parametrize("width", [1, 7, 211, 5003, 32000])
def test_filters_equal_numpy(width, scale, dtype):
    """Flat rows keep more values than fit in shared memory; half types have many ties."""
    cuda = backend_for("cuda")
    rng = np.random.default_rng(width)
    logits = normal(24, width, scale=scale).astype(cuda.dtype_of(dtype))
    top_k = rng.choice([0, 1, 5, 50, width - 1, width, width + 5], 24).clip(0).astype(np.int32)
    top_p = rng.choice([1.0, 0.9, 0.5, 0.01, 0.0, 0.999], 24).astype(np.float32)
    min_p = rng.choice([0.0, 0.0, 0.05, 0.5, 1.0], 24).astype(np.float32)
    kept = cuda.to_numpy(cuda.filter_logits(cuda.array(logits), *map(cuda.array, (top_k, top_p, min_p))))
    expected = numpy_filter(logits.astype(np.float64), top_k, top_p, min_p)
    different = np.isfinite(kept) != np.isfinite(expected)
    # a float32 probability may fall on the other side of top_p or min_p for one value (and its equals) of a row
    assert np.count_nonzero(different.any(axis=1)) <= 1, f"rows {np.flatnonzero(different.any(axis=1))}"
    for row in np.flatnonzero(different.any(axis=1)):
        assert len(np.unique(logits[row][different[row]].astype(np.float64))) == 1
    np.testing.assert_array_equal(kept[np.isfinite(kept)], logits[np.isfinite(kept)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_draws_equal_numpys(temperature, dtype):
    logits = normal(500, 1003, scale=2.0).astype(backend_for("cpu").dtype_of(dtype))
    assert_same_draws(logits, settings(500, temperature=temperature))


@pytest.mark.parametrize("dtype", DTYPES)
def test_filtered_draws_equal_numpys(dtype):
    """Every row another mix, greedy rows included."""
    rng = np.random.default_rng(5)
    logits = normal(300, 2000, scale=3.0).astype(backend_for("cpu").dtype_of(dtype))
    logits[::3] = (logits[::3].astype(np.float32) * 0.02).astype(logits.dtype)
    given = settings(
        300,
        temperature=rng.choice([0.0, 0.6, 1.0, 1.5], 300),
        top_k=rng.choice([0, 1, 20, 1500], 300),
        top_p=rng.choice([1.0, 0.95, 0.3], 300),
        min_p=rng.choice([0.0, 0.02], 300),
        seeds=rng.integers(0, 2**63, 300),
    )
    assert_same_draws(logits, given)


def test_a_full_vocabulary():
    rng = np.random.default_rng(6)
    logits = normal(24, 151_936, scale=2.5).astype(backend_for("cpu").dtype_of("bfloat16"))
    logits[12:] = (logits[12:].astype(np.float32) * 0.1).astype(logits.dtype)  # nuclei of tens of thousands
    given = settings(
        24,
        temperature=rng.choice([0.0, 0.6, 1.0], 24),
        top_k=rng.choice([0, 0, 50, 5000], 24),
        top_p=rng.choice([1.0, 0.95], 24),
        min_p=rng.choice([0.0, 0.01], 24),
    )
    tokens, _ = assert_same_draws(logits, given)
    limited, _ = draw(logits, given, vocab_size=151_665)
    assert limited.max() < 151_665 and tokens.max() < 151_936


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width, vocab_size", [(1, 1), (211, 211), (4099, 4001), (49_152, 49_152)])
def test_the_logprob_of_a_draw_has_the_bits_of_the_loss(width, vocab_size, dtype):
    cuda = backend_for("cuda")
    logits = cuda.array(normal(16, width, scale=3.0).astype(cuda.dtype_of(dtype)))
    for temperature in (0.0, 1.0, 0.6, 1.7):
        for filters in ({}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.1}):
            given = [cuda.array(x) for x in settings(16, temperature=temperature, **filters)]
            tokens, logprobs = cuda.sample(logits, *given, vocab_size)
            # the loss takes its temperature as a float32, like the row's
            expected, _, _ = cuda.token_logprobs_forward(logits, tokens, temperature or 1.0, vocab_size)
            assert cuda.to_numpy(logprobs).tobytes() == cuda.to_numpy(expected).tobytes(), (temperature, filters)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [203, 8192])
def test_same_draw_whatever_the_batch(width, dtype):
    rng = np.random.default_rng(2)
    logits = normal(33, width, scale=2.0).astype(backend_for("cpu").dtype_of(dtype))
    temperature = np.where(np.arange(33) % 3 == 0, 0, 0.9)
    given = settings(33, temperature=temperature, top_p=rng.choice([1.0, 0.9], 33), top_k=rng.choice([0, 10], 33))
    tokens, logprobs = draw(logits, given)
    order = rng.permutation(33)[:20]
    shuffled, their_logprobs = draw(logits[order], [x[order] for x in given])
    np.testing.assert_array_equal(shuffled, tokens[order])
    np.testing.assert_array_equal(their_logprobs, logprobs[order])
    for row in range(33):
        alone, logprob = draw(logits[row : row + 1], [x[row : row + 1] for x in given])
        assert alone[0] == tokens[row] and logprob[0] == logprobs[row]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_penalty_and_bans_equal_numpys(temperature):
    rng = np.random.default_rng(9)
    logits = normal(60, 501, scale=2.0).astype(np.float32)
    banned = np.full((60, 3), -1, np.int32)
    banned[::2, 0], banned[::4, 2] = logits[::2].argmax(axis=1), rng.integers(0, 600, 15)
    given = settings(60, temperature=temperature, top_k=np.where(np.arange(60) % 3, 0, 15))
    seen, penalty = rng.random((60, 501)) < 0.3, np.where(np.arange(60) % 5, 1.3, 1.0).astype(np.float32)
    bans, penalties = {"banned": banned}, {"seen": seen, "repetition_penalty": penalty}
    for rest in (bans, penalties, bans | penalties):
        tokens, _ = draw(logits, given, vocab_size=499, **rest)
        expected, _ = draw(logits, given, vocab_size=499, device="cpu", **rest)
        np.testing.assert_array_equal(tokens, expected)
        if "banned" in rest:
            assert not (tokens[:, None] == banned).any()


@pytest.mark.parametrize("count", [1, 7, 255, 256, 257, 3001])
def test_newest_tokens(count):
    rng = np.random.default_rng(count)
    given = [rng.integers(0, 99, count), rng.integers(-1, 2 * count, count), rng.integers(0, 10**6, 2 * count)]
    found = []
    for device in ("cuda", "cpu"):
        backend = backend_for(device)
        tokens, sources, drawn = (backend.array(x, np.int32) for x in given)
        backend.newest_tokens(tokens, sources, drawn)
        found.append(backend.to_numpy(tokens).tolist())
    assert found[0] == found[1]


def test_edges():
    """Ties go to the lowest id, greedy ignores filters, a row of which nothing is left gives id 0, an empty batch is
    empty.
    """
    logits = np.array([[1.0, 3.0, 3.0, 0.0]], np.float32)
    assert draw(logits, settings(1, temperature=0.0, top_k=1, top_p=0.1))[0][0] == 1
    everything = np.arange(4, dtype=np.int32)[None]
    for temperature in (0.0, 1.0):
        assert draw(logits, settings(1, temperature=temperature), banned=everything)[0][0] == 0
        assert draw(logits, settings(1, temperature=temperature, top_k=2, top_p=0.5), banned=everything)[0][0] == 0
    tokens, logprobs = draw(np.zeros((0, 16), np.float32), settings(0))
    assert tokens.shape == logprobs.shape == (0,)
    nan = np.full((2, 40), np.nan, np.float32)
    tokens, logprobs = draw(nan, settings(2, top_k=[0, 3], top_p=[1.0, 0.5]))
    assert (tokens >= 0).all() and (tokens < 40).all() and np.isnan(logprobs).all()


def test_draws_follow_the_distribution():
    """40,000 draws of one row at 40,000 positions."""
    logits = np.repeat(normal(1, 11, scale=2.0), 40_000, axis=0).astype(np.float32)
    kept = numpy_filter(logits[:1].astype(np.float64) / 0.8, 8, 0.95, 0.0)[0]
    expected = np.exp(kept - kept.max()) / np.exp(kept - kept.max()).sum()
    tokens, _ = draw(
        logits, settings(40_000, temperature=0.8, top_k=8, top_p=0.95, seeds=3, positions=np.arange(40_000))
    )
    counts, live = np.bincount(tokens, minlength=11), expected > 0
    assert not counts[~live].any()
    assert (
        ((counts - 40_000 * expected) ** 2)[live] / (40_000 * expected[live])
    ).sum() < 30  # 7 degrees of freedom: chance 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [33, 5000])
@pytest.mark.parametrize("bad", BAD_ROWS)
def test_e4_a_row_that_is_not_finite_gives_an_id_and_nan_and_spoils_no_other(bad, width, dtype):
    """Under every mix of filters; the rows beside it keep their bits."""
    rng = np.random.default_rng(11)
    rows, vocab_size = 64, width - 2
    logits = normal(rows, width, scale=2.0).astype(backend_for("cpu").dtype_of(dtype))
    given = settings(
        rows,
        temperature=rng.choice([0.0, 0.7, 1.0], rows),
        top_k=rng.choice([0, 1, 20], rows),
        top_p=rng.choice([1.0, 0.9, 0.3], rows),
        min_p=rng.choice([0.0, 0.1], rows),
    )
    banned = np.full((rows, 2), -1, np.int32)
    banned[::3, 1] = 5
    rest = {"banned": banned, "seen": rng.random(logits.shape) < 0.3}
    rest["repetition_penalty"] = rng.choice([1.0, 1.3], rows).astype(np.float32)
    expected = draw(logits, given, vocab_size, **rest)
    spoiled = logits.copy()
    for row in range(0, rows, 2):
        BAD_ROWS[bad](spoiled[row])
    tokens, logprobs = draw(spoiled, given, vocab_size, **rest)
    assert (tokens >= 0).all() and (tokens < vocab_size).all() and np.isnan(logprobs[::2]).all()
    np.testing.assert_array_equal(tokens[1::2], expected[0][1::2])
    assert logprobs[1::2].tobytes() == expected[1][1::2].tobytes()


@pytest.mark.slow
def test_more_than_2_to_31_logits():
    cuda = backend_for("cuda")
    rows, width = 14_200, 151_936
    logits = cuda.zeros((rows, width), cuda.dtype_of("bfloat16"))
    for row in (0, 7000, 14_134, rows - 1):
        logits[row, row] = 100.0
    tokens, logprobs = (cuda.to_numpy(x) for x in cuda.sample(logits, *map(cuda.array, settings(rows)), width))
    for row in (0, 7000, 14_134, rows - 1):
        assert tokens[row] == row and logprobs[row] == 0
    np.testing.assert_allclose(logprobs[1], -np.log(width), rtol=1e-6)
