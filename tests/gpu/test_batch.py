"""The packed batch on the GPU: rows read on into those that follow, with the bits of rows that are packed alone."""

import numpy as np
import pytest

from cukit.autograd import no_grad
from cukit.backend import backend_for
from cukit.models.decoder import Decoder
from cukit.models.logprobs import pack_tokens, packed_logprobs
from cukit.models.weights import load_config
from cukit.trainers.batch import PackedBatch, Rows

pytestmark = pytest.mark.gpu


def make_model(golden, dtype):
    model = Decoder(load_config(golden / "qwen3_tiny"), backend_for("cuda"), dtype)
    model.init_weights(0)
    return model


def make_batch(rng, rows=13):
    """Rows of 2 to 60 tokens, a random half of them learnt."""
    sequences = [rng.integers(0, 200, rng.integers(2, 60)).astype(np.int32) for _ in range(rows)]
    masks = [rng.random(len(ids)) < 0.5 for ids in sequences]
    for mask in masks:
        mask[:2] = False, True
    count = sum(mask.sum() for mask in masks)
    batch = PackedBatch.build(sequences, np.concatenate(masks), weights=rng.random(count).astype(np.float32))
    return batch, sequences, masks


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("first, last", [(0, 1), (0, 5), (4, 12), (12, 13), (0, 13)])
def test_rows_have_the_bits_of_rows_packed_alone(rng, golden, dtype, first, last):
    """Log-probs and every gradient, whatever fills the bucket: the rows that follow, or a repeated token."""
    model, be = make_model(golden, dtype), backend_for("cuda")
    batch, sequences, masks = make_batch(rng)
    rows = Rows(batch.to(be), first, last)
    alone = pack_tokens(be, sequences[first:last], masks[first:last])
    assert len(rows.tokens.ids) == be.row_bucket(sum(map(len, sequences[first:last])))
    found = []
    for tokens in (rows.tokens, alone):
        logprobs, entropy = packed_logprobs(model, tokens, 0.7, 150)
        (logprobs * rows.weights).sum().backward()
        arrays = [logprobs.data, entropy.data, *(parameter.grad for parameter in model.parameters())]
        found.append([be.to_numpy(array).copy() for array in arrays])
        model.store.zero_grad()
    for x, y in zip(*found, strict=True):
        np.testing.assert_array_equal(x, y)


def test_slices_are_views_and_nothing_is_uploaded_again(rng):
    import cupy

    be = backend_for("cuda")
    batch = make_batch(rng)[0].to(be)
    uploads = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(be, "array", lambda *arguments: uploads.append(1))
        patch.setattr(cupy, "array", lambda *arguments, **keywords: uploads.append(1))
        for first in range(len(batch)):
            rows = Rows(batch, first, len(batch))
            tokens = rows.tokens
            assert tokens.ids.data.mem is batch.ids.data.mem and rows.weights.data.mem is batch.weights.data.mem
            assert tokens.targets.data.mem is batch.targets.data.mem and len(rows.cu_learnt) == len(rows) + 1
    assert not uploads


def test_a_whole_pass_needs_no_room_twice(rng, golden):
    """Reference log-probs of all rows at once and in passes: the same bits."""
    model, be = make_model(golden, "bfloat16"), backend_for("cuda")
    batch = make_batch(rng)[0].to(be)
    whole, parts = be.empty(batch.targets.shape, np.float32), be.empty(batch.targets.shape, np.float32)
    with no_grad():
        for scores, limit in ((whole, 10**6), (parts, 100)):
            for first, last in batch.cut(limit):
                rows = Rows(batch, first, last)
                rows.of(scores)[...] = packed_logprobs(model, rows.tokens)[0].data
    np.testing.assert_array_equal(be.to_numpy(whole), be.to_numpy(parts))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_shared_prompts_change_no_bit_of_a_log_probability(rng, golden, dtype):
    """Of 24 completions of 4 prompts, in one pass and in passes; and the backward pass repeats bit for bit."""
    model, be = make_model(golden, dtype), backend_for("cuda")
    prompts = [rng.integers(0, 100, length) for length in (3, 40, 70, 150)]
    rows = [[*prompt, *rng.integers(0, 100, rng.integers(1, 90))] for prompt in prompts for _ in range(6)]
    lengths = np.repeat([len(prompt) for prompt in prompts], 6).astype(np.int32)
    mask = np.concatenate([np.arange(len(row)) >= length for row, length in zip(rows, lengths, strict=True)])
    batch = PackedBatch.build(rows, mask, prompt_lengths=lengths).to(be)
    found = []
    with no_grad():
        for limit, name in ((10**6, "tokens"), (10**6, "shared_tokens"), (500, "shared_tokens")):
            scores = be.empty(batch.targets.shape, np.float32)
            for first, last in batch.cut(limit, shares_prompts=name == "shared_tokens"):
                part = Rows(batch, first, last)
                part.of(scores)[...] = packed_logprobs(model, getattr(part, name))[0].data
            found.append(be.to_numpy(scores).tobytes())
    assert found[0] == found[1] == found[2]
    shared, gradients = Rows(batch, 0, len(batch)).shared_tokens, []
    assert len(shared.ids) < batch.num_tokens
    for _ in range(2):
        packed_logprobs(model, shared)[0].sum().backward()
        gradients.append([be.to_numpy(parameter.grad).tobytes() for parameter in model.parameters()])
        for parameter in model.parameters():
            parameter.zero_grad()
    assert gradients[0] == gradients[1]
