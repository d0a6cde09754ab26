"""Which rows come next: packing, each row once an epoch, exact resume."""

import json
import random

import numpy as np
import pytest

from cukit.datasets.sampler import EpochSampler, batches_an_epoch, pack_bins


def test_pack_bins():
    rng = random.Random(0)
    for count, limit in [(0, 5), (1, 7), (97, 31), (1000, 256)]:
        lengths = [rng.randint(1, limit) for _ in range(count)]
        bins = pack_bins(lengths, limit)
        assert sorted(index for members in bins for index in members) == list(range(count))
        assert all(sum(lengths[index] for index in members) <= limit for members in bins)
        assert bins == pack_bins(lengths, limit)
        if count > 90:
            assert len(bins) <= 1.1 * sum(lengths) / limit + 1
    assert pack_bins([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]
    with pytest.raises(ValueError, match="sequence 1 has 11 tokens, more than max_tokens_per_batch=10"):
        pack_bins([1, 11], 10)


def test_e14_an_epoch_is_each_row_once():
    """Any number of rows, any batch: epochs of batches_an_epoch() calls, each a permutation; only the last is short."""
    rng = np.random.default_rng(14)
    for num_rows, count in [(3, 64), (10, 4), (10, 5), (1, 1), *rng.integers(1, 60, (20, 2)).tolist()]:
        sampler = EpochSampler(num_rows, seed=3)
        epochs = []
        for epoch in range(1, 4):
            batches = [sampler.take(count) for _ in range(batches_an_epoch(num_rows, count))]
            assert all(len(batch) == count for batch in batches[:-1]) and 0 < len(batches[-1]) <= count
            epochs.append(sum(batches, []))
            assert sorted(epochs[-1]) == list(range(num_rows)) and sampler.epochs_done == epoch
        assert num_rows < 10 or epochs[0] != epochs[1]
    assert EpochSampler(10, seed=3).take(10) != EpochSampler(10, seed=4).take(10)
    plain = EpochSampler(3, shuffle=False)
    assert [plain.take(2) for _ in range(4)] == [[0, 1], [2], [0, 1], [2]]


def test_the_sampler_resumes():
    sampler = EpochSampler(7, seed=1)
    for count in (1, 3, 3, 5):  # the third ends the epoch
        sampler.take(count)
        resumed = EpochSampler(7, seed=1)
        resumed.load_state(json.loads(json.dumps(sampler.state_dict())))
        expected = EpochSampler(7, seed=1)
        expected.load_state(sampler.state_dict())
        assert [resumed.take(4) for _ in range(5)] == [expected.take(4) for _ in range(5)]
    straight = EpochSampler(7, seed=1)
    assert [straight.take(count) for count in (1, 3, 3, 5, 9)][-1] == sampler.take(9)
    with pytest.raises(ValueError, match="written with num_rows=7, this run has 8"):
        EpochSampler(8, seed=1).load_state(sampler.state_dict())


def test_a_state_of_commit_21bede1_is_taken():
    """Its fields are the same; what is left of its epoch comes next."""
    state = {"num_rows": 7, "seed": 1, "shuffle": True, "epoch": 2, "position": 5}
    sampler, whole = EpochSampler(7, seed=1), EpochSampler(7, seed=1)
    sampler.load_state(state)
    for _ in range(2):
        whole.take(7)
    assert sampler.take(4) == whole.take(7)[5:]
