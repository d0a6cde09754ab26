"""ZeRO is the plain optimizer, bit for bit, with a share of its states on each rank; threads are the ranks."""

import numpy as np
import pytest

from cukit.backend import backend_for
from cukit.models.store import PIECES, Bucket
from cukit.optim import AdamW
from cukit.parallel.group import Group
from cukit.trainers.ranks import Ranks
from cukit.trainers.state import TrainedModel
from cukit.trainers.zero import Shard, ShardedAdamW

from . import run_trainer
from .threads import on_ranks

SETTINGS = dict(weight_decay=0.1, max_grad_norm=0.5, seed=3)


def stepped(group, dtype, form, steps=3, stage=0, state=None):
    """(model, optimizer, norm of the last) after steps with gradients that each rank has a part of."""
    model = run_trainer.model(dtype)
    store, ranks = model.trained_store, Ranks(group)
    frozen = model.named_parameters()["layers.1.mlp.down_proj.weight"]
    frozen.requires_grad = False  # a bucket that is trained in part
    options = SETTINGS | {"state_form": form}
    given = dict(group=group, host=group, stage=stage)
    optimizer = ShardedAdamW(store, 1e-2, **given, **options) if stage else AdamW(store, 1e-2, **options)
    if state is not None:
        optimizer.load_state_dict(state)
    for step in range(steps):

        def work(gradients, step=step):
            for number, parameter in enumerate(store.parameters):
                if parameter.requires_grad and number != 5 and (number + group.rank) % 2:
                    rng = np.random.default_rng([step, number, group.rank])
                    parameter.grad_buffer()[...] = rng.normal(size=parameter.shape)
            gradients.end_pass()
            return {}, True

        ranks.total(work, {"policy": TrainedModel("policy", model, optimizer)}, ["policy"], [["policy"]], False)
        assert stage < 2 or all(bucket.grad is None for bucket in store.buckets)
        norm, applied = optimizer.step()
        assert applied and np.isfinite(norm)
        assert all(bucket.grad is None and bucket.share is None for bucket in store.buckets)
    return model, optimizer, norm


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype, form", [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"),
                                         ("float16", "float32"), ("float64", "float32")])  # fmt: skip
def test_weights_norm_and_states_are_the_plain_ones(ranks, dtype, form, stage):
    def work(group):
        plain, optimizer, norm = stepped(group, dtype, form)
        shared, sharded, own_norm = stepped(group, dtype, form, stage=stage)
        assert own_norm == norm
        for name, array in plain.parts().items():
            np.testing.assert_array_equal(shared.parts()[name], array, err_msg=name)
        state, truth = sharded.state_dict(), optimizer.state_dict()
        if group.rank == 0:
            assert state.keys() == truth.keys()
            for name, array in truth.items():
                np.testing.assert_array_equal(state[name], array, err_msg=name)
        else:
            assert list(state) == ["optimizer.counters"]
        held = sum(array.nbytes for one in sharded._states.values() for array in one.arrays.values())
        whole = sum(array.nbytes for one in optimizer._states.values() for array in one.arrays.values())
        assert held * ranks == whole
        return truth

    for found in on_ranks(ranks, work):
        assert isinstance(found, dict), found


@pytest.mark.parametrize("dtype, form", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32")])
@pytest.mark.parametrize("stage", [1, 2])
def test_states_go_on_with_any_number_of_ranks(dtype, form, stage):
    """From a plain optimizer's state to three shares and back, with a step on the way."""

    def work(group):
        _, plain, _ = stepped(group, dtype, form)
        state = plain.state_dict()
        state = {name: np.array(array) for name, array in state.items()}
        one, first, _ = stepped(group, dtype, form, steps=1, state=state)
        two, second, _ = stepped(group, dtype, form, steps=1, stage=stage, state=state)
        for name, array in one.parts().items():
            np.testing.assert_array_equal(two.parts()[name], array, err_msg=name)
        found, truth = second.state_dict(), first.state_dict()
        if group.rank == 0:
            for name, array in truth.items():
                np.testing.assert_array_equal(found[name], array, err_msg=name)
        return True

    assert on_ranks(3, work) == [True] * 3


def test_a_share_of_a_bucket():
    bucket = Bucket(backend_for("cpu"), [run_trainer.model().embed_tokens.weight])
    shards = [Shard(bucket, rank, 3) for rank in range(3)]
    assert [shard.origin for shard in shards] == [0, bucket.size // 3, 2 * bucket.size // 3]
    assert shards[1].own(slice(0, bucket.size)) == slice(0, shards[1].size)
    third = bucket.size // 3
    assert shards[1].own(slice(third + 5, third + 9)) == slice(5, 9)
    assert shards[1].own(slice(third - 5, third + 9)) == slice(0, 9)
    empty = shards[1].own(slice(0, third))
    assert empty.start == empty.stop
    shards[2].data[...] = 7
    assert (bucket.data[2 * third :] == 7).all() and not (bucket.data[: 2 * third] == 7).all()
    with pytest.raises(ValueError, match="11 ranks do not divide a bucket's 20160 pieces"):
        Shard(bucket, 0, 11)
    assert PIECES % 7 == 0


def test_codes_are_refused():
    from cukit import SFTConfig

    with pytest.raises(ValueError, match="optimizer_state=int8 has blocks that zero_stage=2 would cut"):
        SFTConfig(zero_stage=2, optimizer_state="int8")
    with pytest.raises(ValueError, match="would cut the blocks of optimizer_state=int8"):
        ShardedAdamW(run_trainer.model().trained_store, group=Group(), host=Group(), state_form="int8")
    with pytest.raises(ValueError, match="zero_stage"):
        SFTConfig(zero_stage=4)
