"""bench scale: groups that move between ranks."""

import numpy as np
import pytest

from cukit.bench import ScaleBench
from cukit.bench.scale import run
from cukit.bench.simulated_rollout import Player, Setting, draw_lengths, rollout_seconds
from cukit.bench.single_gpu import Shape, Times
from cukit.trainers.dealing import Load, Move

# launch + weights = 1, a row 0.1, a key 0.01; a FLOP of a prompt 1/1000 s
ROUND = Times(0.75, 0.25, 0.0, 0.1, 0.01, 1000.0, 100.0, 0.0, 0.5, 0.25)
SMALL = Shape("small", 30, 2, 4, 0, 10, 1, 1)  # 60 FLOPs a token


def setting(capacity=10**6, rows=99, samples=3):
    return Setting(7, SMALL, ROUND, capacity, rows, samples)


def rows(**options):
    return run(ScaleBench(**{"gpus": [8], "completions": "lognormal", "max_completion_length": 2048} | options))["rows"]


@pytest.mark.parametrize("seed", range(4))
def test_a_rollout_in_pieces_takes_as_long(seed):
    generator = np.random.default_rng(seed)
    lengths, most = generator.integers(1, 30, (9, 3)), int(generator.integers(3, 30))
    whole = rollout_seconds(lengths, 7, SMALL, ROUND, 300, most)
    player, now = Player(dict(enumerate(lengths)), setting(300, most)), 0.0
    while player.waiting or player.alive:
        now += generator.uniform(0.1, 9)
        player.advance(now)
    assert player.seconds == pytest.approx(whole) and player.held == player.keys == 0


def test_moves_by_hand():
    giver = Player({5: np.array([9, 2, 9]), 6: np.array([4, 4, 8]), 7: np.array([2, 2, 2])}, setting(rows=6))
    taker = Player({}, setting())
    assert taker.load(1000) == Load(0, 0, 0, 33, 99, 10**6) and giver.load(1000).waiting == 3
    giver.advance(1.5)  # one pass of two prompts, one decode step; a sample of 5 has ended
    assert giver.load(1000) == Load(5, 7 + 2 * 2 + 7 + 3 * 2, 1, 0, 1, 10**6 - (2 * 7 + 18 + 16))
    assert giver.give(Move(0, 1, 1), taker, 2.0) == 1 and taker.seconds == 2.0
    assert giver.load(1000).waiting == 0 and taker.load(1000).waiting == 1
    seconds, keys = giver.seconds, giver.keys
    assert giver.give(Move(0, 1, 0, gap=2 * (13 + 3 * 256), tokens=12), taker, 2.0) == 1, "6 has too many tokens"
    assert (giver.seconds, giver.keys, giver.held, len(giver.alive)) == (seconds, keys - 11, 7 + 16, 3)
    assert taker.seconds == pytest.approx(2.0 + max(1.0, 11 * 60 / 1000)) and (taker.keys, taker.held) == (11, 25)
    for player in (giver, taker):
        player.advance()
        assert player.keys == player.held == 0 and not player.alive and not player.waiting
    # what is left of 5: 7 steps on the taker, of which 7's two samples are in the first one
    assert taker.steps == 7 and giver.steps == 7


def test_equal_lengths_need_no_moves():
    for balance in ("none", "waiting", "running"):
        (row,) = rows(completions="fixed", balance=balance, max_completion_length=256)
        assert row["moved_groups"] == 0 and row["rollout_seconds"] == pytest.approx(row["rollout_mean_seconds"])


def test_moves_bring_the_slowest_to_the_mean():
    """Waiting groups where there are some; running ones where all decode at once."""
    for options in ({}, {"prompts_per_gpu": 128}):
        none, waiting, running = (rows(balance=one, **options)[0] for one in ("none", "waiting", "running"))
        gaps = [row["rollout_seconds"] / none["rollout_mean_seconds"] - 1 for row in (none, waiting, running)]
        assert gaps[2] < gaps[0] / 2 and running["moved_groups"] > 0
        if "prompts_per_gpu" in options:
            assert waiting["moved_groups"] > 0 and gaps[1] < gaps[0]
        else:
            assert waiting["moved_groups"] == 0 and gaps[1] == pytest.approx(gaps[0])


def test_correlated_lengths():
    """The same distribution; completions of a prompt are alike."""
    options = dict(completions="lognormal", max_completion_length=10**6, mean_completion_length=400.0)
    apart, alike = (draw_lengths(ScaleBench(completion_correlation=c, **options), 4000) for c in (0.0, 0.5))
    assert np.log(alike).mean() == pytest.approx(np.log(apart).mean(), abs=0.05)
    assert np.log(alike).std() == pytest.approx(1.0, abs=0.03)
    within = np.corrcoef(np.log(alike[:, 0]), np.log(alike[:, 1]))[0, 1]
    assert within == pytest.approx(0.5, abs=0.05)
    assert abs(np.corrcoef(np.log(apart[:, 0]), np.log(apart[:, 1]))[0, 1]) < 0.05
    with pytest.raises(ValueError, match="completion_correlation"):
        ScaleBench(completion_correlation=1.5)
