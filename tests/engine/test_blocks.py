"""The block pool: counts, sharing, and the prefix cache's order of eviction."""

import numpy as np

from cukit.engine.blocks import BlockManager


def match(manager, tokens, digests=None):
    return manager.match(np.array(tokens, np.int32), [] if digests is None else digests)


def store(manager, tokens):
    """Allocate and register the whole blocks of `tokens`, as a sequence would; returns its blocks and digests."""
    digests = []
    blocks = [manager.allocate() for _ in range(manager.blocks_for(len(tokens)))]
    manager.register(np.array(tokens, np.int32), digests, blocks, 0, len(tokens) // manager.block_size)
    return blocks, digests


def test_allocate_share_release():
    manager = BlockManager(4, 2)
    blocks = [manager.allocate() for _ in range(3)]
    assert len(set(blocks)) == 3 and manager.num_free == 1
    manager.share(blocks[:2])
    manager.release(blocks)
    assert manager.num_free == 2 and manager.reference_counts[blocks[0]] == 1
    manager.release(blocks[:2])
    assert manager.num_free == 4


def test_match_leaves_the_last_token_to_compute():
    for length, expected in ((3, 0), (4, 0), (5, 1), (7, 1), (8, 1), (9, 2)):
        manager = BlockManager(8, 4)
        tokens = list(range(length))
        blocks, _ = store(manager, tokens)
        assert match(manager, tokens) == blocks[:expected]


def test_a_block_matches_only_after_the_same_beginning():
    manager = BlockManager(8, 2)
    store(manager, [1, 2, 3, 4])
    assert len(match(manager, [1, 2, 3, 4, 5])) == 2
    assert match(manager, [9, 9, 3, 4, 5]) == []
    assert len(match(manager, [1, 2, 9, 4, 5])) == 1


def test_equal_hashes_of_different_tokens_do_not_match():
    manager = BlockManager(8, 2)
    _, digests = store(manager, [1, 2, 3, 4])
    forged = [digests[0]]
    assert match(manager, [7, 7, 3, 4, 5], forged) == []


def test_least_recently_used_is_evicted_first_and_ends_before_beginnings():
    manager = BlockManager(4, 2)
    first, _ = store(manager, [1, 2, 3, 4])
    second, _ = store(manager, [5, 6, 7, 8])
    manager.release(second)
    manager.release(first)
    assert manager.num_free == 4
    assert [manager.allocate() for _ in range(2)] == [second[1], second[0]]
    assert match(manager, [5, 6, 7, 8, 0]) == []
    hit = match(manager, [1, 2, 3, 4, 0])
    assert hit == first and manager.num_free_among(hit) == 2
    manager.share(hit)
    assert manager.num_free == 0


def test_reset_frees_what_has_no_owner_and_forgets_the_rest():
    manager = BlockManager(4, 2)
    owned, _ = store(manager, [1, 2, 3, 4])
    idle, _ = store(manager, [5, 6])
    manager.release(idle)
    manager.reset_prefix_cache()
    assert match(manager, [1, 2, 3]) == match(manager, [5, 6, 7]) == []
    manager.release(owned)
    assert manager.num_free == 4 and len({manager.allocate() for _ in range(4)}) == 4


def test_without_prefix_caching_nothing_matches():
    manager = BlockManager(4, 2, enable_prefix_caching=False)
    store(manager, [1, 2, 3, 4])
    assert match(manager, [1, 2, 3, 4]) == []
