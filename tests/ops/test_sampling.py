"""Sampling on the NumPy shelf: filters against transformers' warpers, the generator's known answers, the draw."""

import json
from pathlib import Path

import numpy as np
import pytest
from check import BAD_ROWS

from cukit.backend.numpy import filter_logits, newest_tokens, sample
from cukit.backend.numpy.sampling import _philox4x32, _philox_words

GOLDEN = Path(__file__).parents[1] / "golden" / "sampling_filters.npz"


def draw(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=None, positions=None, vocab_size=None, **rest):
    """sample() with scalars repeated for every row and seeds 0, 1, 2, … by default."""
    rows, vocab = logits.shape
    full = lambda value, dtype: np.broadcast_to(np.asarray(value, dtype), (rows,))  # noqa: E731
    seeds = np.arange(rows, dtype=np.uint64) if seeds is None else seeds
    positions = np.zeros(rows, np.int64) if positions is None else positions
    return sample(
        logits, full(temperature, np.float32), full(top_k, np.int32), full(top_p, np.float32), full(min_p, np.float32),
        seeds, positions, vocab_size or vocab, **rest,
    )  # fmt: skip


def softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def test_filters_equal_transformers():
    golden = np.load(GOLDEN, allow_pickle=False)
    settings = json.loads(str(golden["settings"]))
    assert len(settings) == 22
    for index, setting in enumerate(settings):
        scaled = golden["logits"] / setting.get("temperature", 1.0)
        kept = filter_logits(scaled, setting.get("top_k", 0), setting.get("top_p", 1.0), setting.get("min_p", 0.0))
        np.testing.assert_array_equal(np.isfinite(kept), golden["kept"][index], err_msg=str(setting))
        np.testing.assert_allclose(softmax(kept), golden["probs"][index], rtol=1e-12, atol=1e-15, err_msg=str(setting))


def test_filters_of_mixed_rows_equal_those_of_each_row_alone():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(40, 1000)) * 3
    logits[::2] *= 0.05  # a flat row's nucleus exceeds the quick path's candidates
    top_k, top_p, min_p = rng.integers(0, 5, 40) * 100, rng.choice([1.0, 0.9, 0.5], 40), rng.choice([0.0, 0.3], 40)
    together = filter_logits(logits, top_k, top_p, min_p)
    for row in range(40):
        alone = filter_logits(logits[row : row + 1], top_k[row], top_p[row], min_p[row])
        np.testing.assert_array_equal(together[row], alone[0])


def test_philox_known_answers():
    """The three vectors of Random123's kat_vectors for philox4x32 with 10 rounds."""
    cases = [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ]
    for counter, key, expected in cases:
        words = [np.array([[int(word, 16)]], np.uint64) for word in (counter + " " + key).split()]
        assert [f"{int(word[0, 0]):08x}" for word in _philox4x32(words[:4], *words[4:])] == expected.split()
    assert [f"{word:08x}" for word in _philox_words([0], [0], 3)[0]] == ["6627e8d5", "e169c58d", "bc57ac4c"]
    wide = _philox_words(np.array([7, 1 << 40], np.uint64), [5, 9], 10)
    np.testing.assert_array_equal(wide[1:], _philox_words(np.array([1 << 40], np.uint64), [9], 10))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_draw_follows_the_distribution(dtype):
    rng = np.random.default_rng(0)
    logits = np.repeat(rng.normal(size=(1, 11)) * 2, 40_000, axis=0).astype(dtype)
    expected = softmax(filter_logits(logits[:1].astype(np.float64) / 0.8, 8, 0.95, 0.0))[0]
    tokens, _ = draw(logits, temperature=0.8, top_k=8, top_p=0.95, positions=np.arange(40_000))
    counts = np.bincount(tokens, minlength=11)
    assert not counts[expected == 0].any()
    live = expected > 0
    chi_square = (((counts - 40_000 * expected) ** 2)[live] / (40_000 * expected[live])).sum()
    assert chi_square < 30  # 7 degrees of freedom: chance 1e-4


def test_draws_of_neighbouring_seeds_and_positions_are_independent():
    """One seed along positions, and one position along seeds: neighbours are uniform over the 16 pairs of 4 tokens."""
    count = 20_000
    logits = np.zeros((count, 4), np.float32)
    along_positions, _ = draw(logits, seeds=np.full(count, 3, np.uint64), positions=np.arange(count))
    along_seeds, _ = draw(logits, positions=np.full(count, 3))
    for tokens in (along_positions, along_seeds):
        pairs = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
        expected = (count - 1) / 16
        assert ((pairs - expected) ** 2 / expected).sum() < 48  # 15 degrees of freedom: chance 3e-5


def test_same_draw_whatever_the_batch():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(33, 203)).astype(np.float32)
    seeds, positions = rng.integers(0, 2**63, 33).astype(np.uint64), rng.integers(0, 5000, 33)
    temperature = np.where(np.arange(33) % 3 == 0, 0, 0.9).astype(np.float32)
    tokens, logprobs = draw(logits, temperature=temperature, top_p=0.9, seeds=seeds, positions=positions)
    order = rng.permutation(33)[:20]
    shuffled, their_logprobs = draw(
        logits[order], temperature=temperature[order], top_p=0.9, seeds=seeds[order], positions=positions[order]
    )
    np.testing.assert_array_equal(shuffled, tokens[order])
    np.testing.assert_array_equal(their_logprobs, logprobs[order])
    for row in range(33):
        alone, _ = draw(
            logits[row : row + 1],
            temperature=temperature[row],
            top_p=0.9,
            seeds=seeds[row : row + 1],
            positions=positions[row : row + 1],
        )
        assert alone[0] == tokens[row]


def test_logprobs_are_before_filters_and_bans_at_the_rows_temperature():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(6, 20)) * 2
    temperature = np.array([0.0, 0.5, 1.0, 2.0, 0.7, 0.0], np.float32)
    banned = np.full((6, 2), -1, np.int32)
    banned[5, 0] = logits[5, :17].argmax()
    tokens, logprobs = draw(logits, temperature=temperature, top_k=3, vocab_size=17, banned=banned)
    scaled = logits[:, :17] / np.where(temperature == 0, 1.0, temperature.astype(np.float64))[:, None]
    expected = np.log(softmax(scaled))[np.arange(6), tokens]
    assert logprobs.dtype == np.float64
    np.testing.assert_allclose(logprobs, expected, rtol=1e-13)
    assert tokens[0] == logits[0, :17].argmax()
    assert tokens[5] == np.argsort(logits[5, :17])[-2]


def test_ids_beyond_the_tokenizer_are_never_drawn():
    logits = np.zeros((5000, 16), np.float32)
    logits[:, 13:] = 50
    tokens, logprobs = draw(logits, temperature=2.0, vocab_size=13)
    assert tokens.max() == 12
    np.testing.assert_allclose(logprobs, -np.log(13), rtol=1e-6)


def test_ties_go_to_the_lowest_id_and_greedy_ignores_filters():
    logits = np.array([[1.0, 3.0, 3.0, 0.0]], np.float32)
    assert draw(logits, temperature=0.0, top_k=1, top_p=0.1)[0][0] == 1


def test_repetition_penalty_as_transformers():
    """Seen tokens: a positive logit is divided, a negative one multiplied, before the temperature."""
    logits = np.array([[2.0, 1.5, -1.0, -1.2]])
    seen = np.array([[True, False, True, False]])
    tokens, logprobs = draw(logits, temperature=0.0, repetition_penalty=np.array([1.5]), seen=seen)
    assert tokens[0] == 1
    np.testing.assert_allclose(logprobs, np.log(softmax(logits))[0, 1])


def test_newest_tokens():
    tokens, drawn = np.array([1, 2, 3, 4], np.int32), np.array([50, 60, 70], np.int32)
    newest_tokens(tokens, np.array([2, -1, 0, 2], np.int32), drawn)
    assert tokens.tolist() == [70, 2, 50, 70]
    newest_tokens(tokens, np.full(4, -1, np.int32), drawn)
    assert tokens.tolist() == [70, 2, 50, 70]


def test_empty_batch():
    tokens, logprobs = draw(np.zeros((0, 7), np.float32))
    assert tokens.shape == logprobs.shape == (0,)


DRAWS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.9},
    {"min_p": 0.1},
    {"top_k": 7, "top_p": 0.5, "min_p": 0.2},
    {"repetition_penalty": 1.3},
]


@pytest.mark.parametrize("settings", DRAWS, ids=str)
@pytest.mark.parametrize("bad", BAD_ROWS)
def test_e4_a_row_that_is_not_finite_gives_an_id_and_nan_and_spoils_no_other(bad, settings, recwarn):
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(5, 700)).astype(np.float32)
    logits[::2] *= 0.01  # nuclei beyond the quick path of top_p
    settings = dict(settings)
    if "repetition_penalty" in settings:
        settings["repetition_penalty"] = np.full(5, settings["repetition_penalty"], np.float32)
        settings["seen"] = rng.random((5, 700)) < 0.3
    banned = np.full((5, 2), -1, np.int32)
    banned[:, 0] = 5
    for given in (settings, settings | {"banned": banned}):
        expected = draw(logits, vocab_size=690, **given)
        spoiled = logits.copy()
        BAD_ROWS[bad](spoiled[3])
        tokens, logprobs = draw(spoiled, vocab_size=690, **given)
        assert 0 <= tokens[3] < 690 and np.isnan(logprobs[3])
        for found, wanted in zip((tokens, logprobs), expected):
            np.testing.assert_array_equal(np.delete(found, 3), np.delete(wanted, 3))
    assert not recwarn.list
