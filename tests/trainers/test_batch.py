"""The packed batch: views without copies, masks with holes, filling up to a bucket, saving, no loop over tokens."""

import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cukit import GRPOConfig
from cukit.autograd import no_grad
from cukit.backend import backend_for
from cukit.datasets.demonstrations import encode_sft
from cukit.models.logprobs import packed_logprobs, target_logprobs
from cukit.trainers.batch import SAVED, PackedBatch, Rows
from cukit.trainers.group_generation import pack_groups
from cukit.trainers.rollout import Samples

from .conftest import weights_of


def random_batch(rng, rows=9, low=2, high=20, vocab=50, slices=None, **columns):
    """(batch on the host, sequences, masks): masks have holes; row 0 learns nothing."""
    sequences = [rng.integers(0, vocab, rng.integers(low, high)).astype(np.int32) for _ in range(rows)]
    masks = [rng.random(len(ids)) < 0.5 for ids in sequences]
    masks[0][:] = False
    for mask in masks:
        mask[0] = False
    count = sum(mask.sum() for mask in masks)
    columns = {name: rng.normal(size=count) for name in ("weights", "advantages", "logprobs", "values")} | columns
    return PackedBatch.build(sequences, np.concatenate(masks), slices, **columns), sequences, masks


@pytest.fixture
def bucketed(monkeypatch):
    """The CPU backend with row buckets of 8, as a device has them."""
    backend = backend_for("cpu")
    monkeypatch.setattr(backend, "row_bucket", lambda rows: -(-rows // 8) * 8)
    return backend


def test_rows_are_views(rng):
    batch, sequences, masks = random_batch(rng)
    batch = batch.to(backend_for("cpu"))
    starts = np.cumsum([0, *map(len, sequences)])
    learnt = np.cumsum([0, *(mask.sum() for mask in masks)])
    for first in range(9):
        for last in range(first + 1, 10):
            rows = Rows(batch, first, last)
            tokens = rows.tokens
            np.testing.assert_array_equal(tokens.ids, np.concatenate(sequences[first:last]))
            np.testing.assert_array_equal(
                tokens.positions, np.concatenate([range(len(s)) for s in sequences[first:last]])
            )
            np.testing.assert_array_equal(tokens.cu_seqlens, starts[first : last + 1] - starts[first])
            np.testing.assert_array_equal(tokens.predictors + 1, np.flatnonzero(np.concatenate(masks[first:last])))
            np.testing.assert_array_equal(tokens.targets, tokens.ids[tokens.predictors + 1])
            np.testing.assert_array_equal(rows.cu_learnt, learnt[first : last + 1] - learnt[first])
            assert rows.num_learnt == len(rows.advantages) == len(rows.values) and rows.returns is None
            for view, whole in ((tokens.ids, batch.ids), (tokens.positions, batch.positions)):
                assert np.shares_memory(view, whole)
            assert not rows.num_learnt or np.shares_memory(rows.weights, batch.weights)
    with pytest.raises(AttributeError, match="no 'prompt_lengths'"):
        Rows(batch, 0, 1).prompt_lengths  # noqa: B018


def test_all_columns_go_to_the_device_in_one_copy(rng, bucketed, monkeypatch):
    """Each as it was, and where the widest load of a kernel may begin."""
    batch, *_ = random_batch(rng, adapter_ids=np.zeros(0, np.int32))
    batch.weights = batch.weights.astype(np.float32)
    copies = []
    monkeypatch.setattr(bucketed, "array", lambda host: copies.append(np.array(host)) or copies[-1])
    moved = batch.to(bucketed)
    assert len(copies) == 1
    for name in (
        "ids",
        "positions",
        "adapter_ids",
        "predictors",
        "targets",
        "weights",
        "advantages",
        "logprobs",
        "values",
    ):
        before, after = getattr(batch, name), getattr(moved, name)
        assert after.dtype == before.dtype and after[: len(before)].tobytes() == before.tobytes()
        assert (after.ctypes.data - copies[0].ctypes.data) % 256 == 0
    assert moved._borders[1].tolist() == batch.cu_learnt.tolist() and moved._borders[0][-1] == len(moved.ids)


def test_the_first_token_of_a_row_is_never_learnt(rng):
    batch = PackedBatch.build([[5, 6], [7], [8, 9, 10]], np.ones(6, bool))
    assert batch.mask.tolist() == [False, True, False, False, True, True]
    assert batch.cu_learnt.tolist() == [0, 1, 1, 3] and batch.targets.tolist() == [6, 9, 10]
    assert batch.predictors.tolist() == [0, 3, 4]


def test_filling_reads_on_into_the_rows_that_follow(rng, make_model, bucketed):
    """With buckets every slice, the last too, has whole buckets of tokens; the numbers are those without filling."""
    model = make_model("float64")
    batch, sequences, masks = random_batch(rng)
    batch = batch.to(bucketed)
    for first in range(9):
        for last in range(first + 1, 10):
            tokens = Rows(batch, first, last).tokens
            assert len(tokens.ids) % 8 == 0 and tokens.cu_seqlens[-1] == len(tokens.ids) == len(tokens.positions)
            assert (np.diff(tokens.cu_seqlens) > 0).all() and np.shares_memory(tokens.ids, batch.ids)
    for first, last in ((1, 3), (2, 9), (0, 9), (8, 9)):
        with no_grad():
            filled, _ = packed_logprobs(model, Rows(batch, first, last).tokens)
            plain, _ = target_logprobs(model, sequences[first:last], masks[first:last])
        np.testing.assert_allclose(filled.data, plain.data, rtol=0, atol=1e-13)


def test_filling_changes_no_gradient(rng, make_grpo, monkeypatch):
    """A trainer with a backend that rounds rows up, against one without."""
    plain = make_grpo(dtype="float64", max_tokens_per_batch=50, max_steps=1)
    plain.train()
    monkeypatch.setattr(backend_for("cpu"), "row_bucket", lambda rows: -(-rows // 64) * 64)
    filled = make_grpo(dtype="float64", max_tokens_per_batch=50, max_steps=1)
    filled.train()
    for name, value in weights_of(plain.model).items():
        np.testing.assert_allclose(weights_of(filled.model)[name], value, rtol=0, atol=1e-8, err_msg=name)


def test_saved_and_loaded_as_it_is(rng, bucketed):
    """Through the flat arrays of a checkpoint: every column that is set, the filling left out and made again."""
    batch, *_ = random_batch(
        rng,
        slices=[0, 4, 9],
        has_gradient=np.arange(9) % 4 < 2,
        prompt_lengths=np.ones(9, np.int32),
        rewards=np.array([np.nan] * 9),
        finish_reasons=np.zeros(9, np.int8),
        groups=np.array([0, 0, 1, 1, 1, 1, 2, 3, 3], np.int32),  # groups of unequal size
        weights_versions=np.zeros(1, np.int32),
        adapter_ids=np.zeros(1, np.int32),
    )
    batch = batch.to(bucketed)
    again = PackedBatch.from_arrays({name: np.array(x) for name, x in batch.to_arrays().items()}).to(bucketed)
    for name in SAVED:
        before, after = getattr(batch, name), getattr(again, name)
        assert (before is None) == (after is None), name
        if before is not None:
            np.testing.assert_array_equal(before, after, err_msg=name)
    with pytest.raises(ValueError, match="in the form of another version of cukit"):
        PackedBatch.from_arrays({"tokens": np.zeros(3, np.int32), "old_logps": np.zeros(2)})  # as 21bede1 wrote it


def test_micro_batches_keep_rows_without_a_gradient_apart(rng):
    batch, sequences, _ = random_batch(
        rng, slices=[0, 4, 4, 9], has_gradient=np.array([1, 1, 0, 0, 1, 1, 1, 1, 0], bool)
    )
    batch = batch.to(backend_for("cpu"))
    assert not batch.micro_batches(1, 30) and batch.num_slices == 3
    for index, (first, middle, last) in ((0, (0, 2, 4)), (2, (4, 8, 9))):
        parts = batch.micro_batches(index, 30)
        in_order = sorted(parts, key=lambda part: part.first)
        assert [row for part in in_order for row in range(part.first, part.last)] == list(range(first, last))
        for part in parts:
            assert part.has_gradient == (part.last <= middle) and (part.has_gradient or part.first >= middle)
            assert len(part) == 1 or sum(map(len, sequences[part.first : part.last])) <= 30


@pytest.mark.parametrize("learning, kinds", [(1, [False, True]), (2, [True, False]), (3, [True, False])])
def test_of_rows_with_a_gradient_and_without_those_with_more_tokens_run_first(learning, kinds):
    batch = PackedBatch.build([[7] * 10] * 4, np.ones(40, bool), has_gradient=np.arange(4) < learning)
    parts = batch.to(backend_for("cpu")).micro_batches(0, 100)
    assert [part.has_gradient for part in parts] == kinds
    assert sorted((part.first, part.last) for part in parts) == [(0, learning), (learning, 4)]


@pytest.mark.parametrize("riding, kinds", [(19, [(0, 2, True), (2, 4, False)]), (20, [(0, 4, True)])])
def test_few_tokens_without_a_gradient_ride_along(riding, kinds):
    batch = PackedBatch.build([[7] * 10] * 4, np.ones(40, bool), has_gradient=np.arange(4) < 2)
    parts = batch.to(backend_for("cpu")).micro_batches(0, 100, riding=riding)
    assert [(part.first, part.last, part.has_gradient) for part in parts] == kinds
    none = PackedBatch.build([[7] * 10] * 4, np.ones(40, bool), has_gradient=np.zeros(4, bool))
    assert [part.has_gradient for part in none.to(backend_for("cpu")).micro_batches(0, 100, riding=99)] == [False]


def test_a_conversation_with_holes_is_a_row(tokenizer, make_model):
    """Two assistant turns of one row are learnt, the user's turn between them is not; SFT and RL pack it alike."""
    turns = [("user", "1+1="), ("assistant", "2"), ("user", "2+2="), ("assistant", "4")]
    ids, mask = encode_sft({"messages": [{"role": role, "content": text} for role, text in turns]}, tokenizer)
    batch = PackedBatch.build([ids, ids[:5]], np.array(mask + [0] * 5)).to(backend_for("cpu"))
    learnt = np.flatnonzero(mask)
    assert (np.diff(learnt) > 1).sum() == 1 and batch.targets.tolist() == [ids[i] for i in learnt]
    with no_grad():
        packed, _ = packed_logprobs(make_model(), Rows(batch, 0, 2).tokens)
    assert packed.shape == (len(learnt),)


def opcodes_in(function, *parts):
    """Bytecode instructions that ran in files with one of `parts` in their path. A count that grows with the tokens
    shows a loop.
    """
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        if not any(part in frame.f_code.co_filename for part in parts):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def drawn(length, rows=16):
    """Samples of a rollout: groups of 4, prompts of 5 tokens, completions of `length`."""
    rng = np.random.default_rng(0)
    return Samples(
        [rng.integers(0, 20, 5 + length).astype(np.int32) for _ in range(rows)],
        np.full(rows, 5, np.int32),
        np.repeat(np.arange(rows // 4, dtype=np.int32), 4),
        [-rng.random(length).astype(np.float32) for _ in range(rows)],
        ["stop"] * rows,
        ["1" * length] * rows,
    )


def test_opcodes_show_a_loop():
    path = Path(__file__).name
    short, long = (opcodes_in(lambda n=n: [token for token in range(n)], path) for n in (10, 1000))  # noqa: C416
    assert long > short + 900


def test_no_loop_over_tokens(make_grpo):
    """From what the engine drew to the gradient: as many instructions for completions of 80 tokens as of 8."""

    def first_or_last(completion_ids, **_):
        return [float(ids[0] > ids[-1]) for ids in completion_ids]

    def step(length):
        trainer = make_grpo(first_or_last, beta=0.1)
        trainer.rollout.generate = lambda *arguments: drawn(length)

        def run():
            for rows in trainer.make_batch(0)[0]:
                trainer.compute_loss(rows)[0].backward()

        return opcodes_in(run, "cukit/trainers/", "cukit/models/logprobs.py", "cukit/datasets/", "cukit/rewards/")

    step(8)  # Python 3.13 counts a function's instructions from its second call on
    assert 1000 < step(8) == step(80)


def test_a_million_tokens_take_no_time():
    """10⁶ tokens from the engine's arrays to the views of the loss: 0.1 s where a loop takes seconds."""
    samples = drawn(1000, rows=1000)
    args = GRPOConfig(max_completion_length=2000, per_device_train_batch_size=250, steps_per_generation=4, seed=0)
    start = time.perf_counter()
    batch = pack_groups(samples, np.zeros(1000), np.ones(1000), args, 0, np.float32).to(backend_for("cpu"))
    for index in range(4):
        for rows in batch.micro_batches(index, 16384):
            assert rows.tokens.targets.shape == rows.advantages.shape == rows.logprobs.shape
    assert batch.num_tokens == 1_005_000 and time.perf_counter() - start < 2
