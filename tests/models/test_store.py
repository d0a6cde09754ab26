"""Flat buckets: layout, parts, shards, gradients that come and go, freezing."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cukit.autograd import Parameter, Tensor
from cukit.backend import backend_for
from cukit.models.config import LEVELS
from cukit.models.logprobs import target_logprobs
from cukit.models.store import ALIGNMENT, PIECES, VECTOR, Store, padded_size
from cukit.models.weights import load_model, save_model
from cukit.optim import AdamW

GOLDEN = Path(__file__).parents[1] / "golden"
ROWS = [[5, 9, 100, 7, 3], [8, 1, 2]]


def backward(model):
    logprobs, _ = target_logprobs(model, ROWS, [np.arange(len(row)) > 0 for row in ROWS])
    (logprobs * logprobs).sum().backward()


def bucket_names(model):
    return [[slot.parameter.name for slot in bucket.slots] for bucket in model.store.buckets]


@pytest.mark.parametrize("name", ["qwen3_tiny", "qwen2_tiny", "llama_tiny", "qwen3_tiny_bf16_sharded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layout(name, dtype):
    """A bucket a layer, dtype and kind, in layer order; parameters are aligned views, and the rest is zeros."""
    model = load_model(GOLDEN / name, dtype=dtype)
    layers = [bucket[0].split(".")[:2] for bucket in bucket_names(model)]
    order = [["embed_tokens", "weight"], *(["layers", str(i)] for i in range(model.config.num_hidden_layers))]
    assert list(dict.fromkeys(map(tuple, layers)))[: len(order)] == [tuple(words) for words in order]
    assert sum(map(len, bucket_names(model))) == len(model.parameters()) == len(model.store.parameters)
    for bucket in model.store.buckets:
        covered = np.zeros(bucket.size, bool)
        for slot in bucket.slots:
            parameter = slot.parameter
            assert parameter.dtype == bucket.dtype and np.shares_memory(parameter.data, bucket.data)
            assert slot.start % ALIGNMENT == 0 and not covered[slot.start : slot.stop].any()
            covered[slot.start : slot.stop] = True
            np.testing.assert_array_equal(bucket.data[slot.start : slot.stop], parameter.data.reshape(-1))
        assert not bucket.data[~covered].any()
        assert len({len(slot.parameter.shape) > 1 for slot in bucket.slots}) == 1
        assert bucket.size == padded_size(bucket.slots[-1].stop)


def test_sizes_are_whole_pieces_that_ranks_divide():
    for elements in (1, 7, PIECES, PIECES + 1, 15_728_640, 2**31 + 5):
        size = padded_size(elements)
        assert size >= elements and size % PIECES == 0
        assert size - elements < PIECES * VECTOR
        assert size < VECTOR * PIECES or (size // PIECES) % VECTOR == 0
    for ranks in (*range(1, 11), 12, 14, 15, 16, 32, 64):
        assert PIECES % ranks == 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 12, 64])
def test_shards_are_slices_that_make_the_whole(ranks):
    bucket = load_model(GOLDEN / "qwen3_tiny").store.buckets[2]
    shards = [bucket.shard(rank, ranks) for rank in range(ranks)]
    np.testing.assert_array_equal(np.concatenate([bucket.data[shard] for shard in shards]), bucket.data)
    assert len({shard.stop - shard.start for shard in shards}) == 1
    with pytest.raises(ValueError, match="11 ranks do not divide"):
        bucket.shard(0, 11)


def test_parts_are_the_fused_parameters_rows():
    model = load_model(GOLDEN / "qwen2_tiny")
    parts, attention = model.parts(), model.layers[1].self_attn
    for kind, fused in (("weight", attention.qkv_proj.weight), ("bias", attention.qkv_proj.bias)):
        rows = [parts[f"model.layers.1.self_attn.{name}.{kind}"] for name in ("q_proj", "k_proj", "v_proj")]
        np.testing.assert_array_equal(np.concatenate(rows), fused.data)
        assert all(np.shares_memory(part, model.store.buckets[3 if kind == "bias" else 4].data) for part in rows)
    gate_up = [parts[f"model.layers.1.mlp.{name}.weight"] for name in ("gate_proj", "up_proj")]
    np.testing.assert_array_equal(np.concatenate(gate_up), model.layers[1].mlp.gate_up_proj.weight.data)


def test_gradients_come_bucket_by_bucket_and_go():
    """While the backward pass is in a layer, no layer before it has a gradient; after the update none has."""
    model = load_model(GOLDEN / "qwen3_tiny")
    first, last = (model.layers[i].mlp.down_proj.weight.slot.bucket for i in (0, model.config.num_hidden_layers - 1))
    seen = []
    original = model.backend.silu_mul_backward
    try:
        model.backend.silu_mul_backward = lambda *args: (
            seen.append((first.grad is None, last.grad is None)),
            original(*args),
        )[1]
        backward(model)
    finally:
        model.backend.silu_mul_backward = original
    assert seen[0] == (True, False) and seen[-1] == (False, False)
    assert all(np.shares_memory(p.grad, p.slot.bucket.grad) for p in model.parameters())
    AdamW(model.store, weight_decay=0.1).step()
    for bucket in model.store.buckets:  # what is left over stays zero
        assert not np.delete(bucket.data, np.r_[tuple(np.s_[s.start : s.stop] for s in bucket.slots)]).any()
    assert all(bucket.grad is None for bucket in model.store.buckets)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_parameters_gradient_can_be_dropped_or_set():
    """grad stays a view of the bucket, whatever is assigned: nothing stale is added to, and the optimizer sees it."""
    model = load_model(GOLDEN / "qwen3_tiny")
    weight = model.layers[0].mlp.down_proj.weight
    backward(model)
    first = weight.grad.copy()
    weight.grad = None
    assert weight.grad is None and not weight.slot.view(weight.slot.bucket.grad).any()
    model.store.zero_grad()
    for _ in range(2):
        weight.zero_grad()
        backward(model)
        np.testing.assert_array_equal(weight.grad, first)
    weight.grad = np.full(weight.shape, 2.0)
    weight.grad += 1.0
    np.testing.assert_array_equal(weight.slot.view(weight.slot.bucket.grad), np.full(weight.shape, 3.0))


def frozen_steps(model, frozen, steps=3):
    for parameter in model.parameters():
        parameter.requires_grad = not frozen(parameter.name)
    optimizer = AdamW(model.store, 1e-2, weight_decay=0.1, max_grad_norm=0.0)
    for _ in range(steps):
        backward(model)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("checkpointing", LEVELS)
@pytest.mark.parametrize(
    "frozen",
    [
        lambda name: name == "embed_tokens.weight",
        lambda name: name.startswith("layers.0"),
        lambda name: "norm" not in name,
        lambda name: name == "layers.0.mlp.gate_up_proj.weight",
        lambda name: name == "layers.1.self_attn.q_norm.weight",
        lambda name: name == "layers.0.self_attn.k_norm.weight",
    ],
)
def test_what_is_frozen_stays_and_the_rest_moves(frozen, checkpointing):
    model = load_model(GOLDEN / "qwen3_tiny")
    model.gradient_checkpointing = checkpointing
    before = {name: parameter.data.copy() for name, parameter in model.named_parameters().items()}
    optimizer = frozen_steps(model, frozen)
    for name, parameter in model.named_parameters().items():
        assert np.array_equal(parameter.data, before[name]) == frozen(name), name
    frozen_parts = {name for name, (parameter, _) in model.store.parts.items() if frozen(parameter.name)}
    assert frozen_parts and not any(key.rsplit(".", 1)[0] in frozen_parts for key in optimizer.state_dict())


def test_buckets_that_are_frozen_have_no_state():
    model = load_model(GOLDEN / "qwen3_tiny", dtype="bfloat16")
    optimizer = frozen_steps(model, lambda name: "norm" not in name, 1)
    assert all(len(bucket.slots[0].parameter.shape) == 1 for bucket in optimizer._states)


def test_frozen_copy_and_mixing():
    model = load_model(GOLDEN / "qwen3_tiny", dtype="bfloat16")
    model.limit_vocabulary(100)
    reference = model.frozen_copy()
    assert reference.vocab_size == 100 and not any(p.requires_grad for p in reference.parameters())
    for mine, theirs in zip(model.store.buckets, reference.store.buckets):
        np.testing.assert_array_equal(mine.data, theirs.data)
        assert not np.shares_memory(mine.data, theirs.data)
    model.init_weights(1)
    before = {name: part.astype(np.float64) for name, part in reference.parts().items()}
    reference.store.mix_from(model.store, 0.25)
    for name, part in reference.parts().items():
        mixed = 0.25 * model.parts()[name].astype(np.float64) + 0.75 * before[name]
        np.testing.assert_allclose(part.astype(np.float64), mixed, rtol=2**-8, atol=1e-30)
    for other in (load_model(GOLDEN / "qwen3_tiny"), load_model(GOLDEN / "llama_tiny", dtype="bfloat16")):
        with pytest.raises(ValueError, match="different shapes or dtypes"):
            reference.store.mix_from(other.store, 0.5)


def test_parameters_that_stand_alone_move_into_a_store():
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    parameter = Parameter(values)
    store = Store(backend_for("cpu"), {"w": parameter})
    np.testing.assert_array_equal(store.part_views()["w"], values)
    assert parameter.name == "w" and np.shares_memory(parameter.data, store.buckets[0].data)


def test_vocabulary_and_exactness_belong_to_the_model():
    model = load_model(GOLDEN / "qwen3_tiny")
    size = model.config.vocab_size
    assert model.vocab_size == size and model.exact == "auto"
    for asked, found in ((17, 17), (size + 5, size), (1, 1)):
        model.limit_vocabulary(asked)
        assert model.vocab_size == found
    with pytest.raises(ValueError, match="limited to 0 ids"):
        model.limit_vocabulary(0)
    with pytest.raises(ValueError, match="exact=true needs"):
        model.exact = "true"
    assert model.exact == "auto"


def test_a_limited_vocabulary_reaches_the_log_probabilities():
    model = load_model(GOLDEN / "qwen3_tiny", dtype="float64")
    wanted = [np.arange(len(row)) > 0 for row in ROWS]
    model.limit_vocabulary(101)
    got = target_logprobs(model, ROWS, wanted)[0].data
    expected = target_logprobs(model, ROWS, wanted, vocab_size=101)[0].data
    free = target_logprobs(model, ROWS, wanted, vocab_size=model.config.vocab_size)[0].data
    np.testing.assert_array_equal(got, expected)
    assert (got > free).all()
    hidden, targets = Tensor(np.random.default_rng(0).normal(size=(3, 48))), np.array([0, 100, 7], np.int32)
    scaled = model.lm_head(hidden).data[:, :101] / 0.7
    expected = scaled[np.arange(3), targets] - np.log(np.exp(scaled).sum(1))
    np.testing.assert_allclose(model.lm_head.logprobs(hidden, targets, 0.7)[0].data, expected)


def test_random_weights_do_not_depend_on_dtype_or_layout(tmp_path):
    wide, half = (load_model(GOLDEN / "qwen3_tiny", dtype=dtype) for dtype in ("float32", "bfloat16"))
    wide.init_weights(7), half.init_weights(7)
    for name, part in half.parts().items():
        np.testing.assert_array_equal(part, wide.parts()[name].astype(part.dtype))
    matrices = [part for part in wide.parts().values() if part.ndim == 2]
    assert len({part.reshape(-1)[:8].tobytes() for part in matrices}) == len(matrices)
    wide.init_weights(8)
    assert not np.array_equal(wide.parts()["model.embed_tokens.weight"], half.parts()["model.embed_tokens.weight"])
    save_model(half, tmp_path)
    assert load_model(tmp_path, dtype="bfloat16").embed_tokens.weight.dtype == ml_dtypes.bfloat16
