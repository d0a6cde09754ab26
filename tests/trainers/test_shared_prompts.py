"""Passes in which a prompt's tokens stand once for the rows that answer it."""

from dataclasses import replace

import numpy as np
import pytest

from cukit import GRPOConfig, GRPOTrainer
from cukit.autograd import no_grad
from cukit.backend import backend_for
from cukit.models.attend import PackedCausal
from cukit.models.logprobs import packed_logprobs
from cukit.trainers.batch import PackedBatch, Rows
from cukit.trainers.shared_prompts import share_prompts, shared_lengths


def random_groups(rng, num_groups=5, vocab=50):
    """(batch on the host, sequences): groups of 1 to 5 rows with a prompt of 1 to 12 tokens; masks have holes."""
    sequences, masks, prompts = [], [], []
    for _ in range(num_groups):
        prompt = rng.integers(0, vocab, rng.integers(1, 13))
        for _ in range(rng.integers(1, 6)):
            completion = rng.integers(0, vocab, rng.integers(0, 9))
            sequences.append(np.concatenate([prompt, completion]).astype(np.int32))
            masks.append(np.concatenate([np.zeros(len(prompt), bool), rng.random(len(completion)) < 0.8]))
            prompts.append(len(prompt))
    columns = {"prompt_lengths": np.array(prompts, np.int32), "weights": np.ones(sum(mask.sum() for mask in masks))}
    return PackedBatch.build(sequences, np.concatenate(masks), **columns), sequences


def rows_of(shared, ids):
    """The rows that the sequences of a pass stand for, a prefix before what is its own; prefixes left out."""
    kept, borders = ids[shared.kept], shared.cu_seqlens
    is_prefix = shared.prefixes[:, 2] > borders[1:]
    return [
        np.concatenate([kept[first : first + count], kept[start:stop]])
        for start, stop, (first, count, _), prefix in zip(
            borders, borders[1:], shared.prefixes, is_prefix, strict=False
        )
        if not prefix
    ]


@pytest.mark.parametrize("seed", range(20))
def test_prefixes_and_what_is_left_make_the_rows_again(seed):
    rng = np.random.default_rng(seed)
    batch, sequences = random_groups(rng)
    lengths = shared_lengths(batch.ids, batch.mask, batch.cu_seqlens, batch.prompt_lengths)
    first = int(rng.integers(0, len(batch) // 2))
    start = batch.cu_seqlens[first]
    shared = share_prompts(batch.cu_seqlens[first:] - start, lengths[first:])
    if shared is None:
        assert not lengths[first + 1 :].any()
        return
    ids = batch.ids[start:]
    for found, expected in zip(rows_of(shared, ids), sequences[first:], strict=True):
        np.testing.assert_array_equal(found, expected)
    assert shared.cu_seqlens[-1] == len(shared.kept) < len(ids)
    np.testing.assert_array_equal(shared.places[shared.kept], np.arange(len(shared.kept)))
    for number, (first_row, count, end) in enumerate(shared.prefixes):
        readers = (shared.prefixes[:, 1] > 0) & (shared.prefixes[:, 0] == shared.cu_seqlens[number])
        if readers.any():  # a prefix, which its rows follow at once
            assert count == first_row == 0 and end == shared.cu_seqlens[1:][readers].max()
            assert readers.nonzero()[0].tolist() == list(range(number + 1, number + 1 + readers.sum()))
        else:
            assert end == shared.cu_seqlens[number + 1]


def test_what_is_shared():
    """Neighbours with the same prompt, of which nothing is learnt, and only where it saves something."""
    prompt, other = [1, 2, 3, 4], [1, 2, 9, 4]
    sequences = [prompt + [5], prompt + [6, 7], other + [5], other + [5], prompt + [8], [1, 2, 3, 8]]
    mask = np.concatenate([[False] * 4 + [True] * (len(ids) - 4) for ids in sequences])
    lengths = np.array([4, 4, 4, 4, 4, 3], np.int32)
    batch = PackedBatch.build(sequences, mask)
    assert shared_lengths(batch.ids, batch.mask, batch.cu_seqlens, lengths).tolist() == [0, 3, 0, 3, 0, 0]
    mask[1] = True  # a token of the first prompt
    assert shared_lengths(batch.ids, mask, batch.cu_seqlens, lengths).tolist() == [0, 0, 0, 3, 0, 0]
    for prompt, expected in ((8, 0), (9, 8)):  # of 124 tokens 7 or 8
        long = PackedBatch.build([[*range(prompt)] + [7] * (62 - prompt)] * 2, np.arange(124) % 62 >= prompt)
        found = shared_lengths(long.ids, long.mask, long.cu_seqlens, np.full(2, prompt))
        assert found.tolist() == [0, expected]
    assert share_prompts(long.cu_seqlens, np.array([7, 0])) is None  # the row before is in another pass


def test_a_prompt_stands_anew_in_a_long_group(monkeypatch):
    """After so many tokens of completions; those of the prompt do not count."""
    monkeypatch.setattr("cukit.trainers.shared_prompts.LONGEST", 40)
    rows = [[*range(50), *[7] * number] for number in range(5, 15)]
    batch = PackedBatch.build(rows, np.zeros(sum(map(len, rows)), bool))
    lengths = shared_lengths(batch.ids, batch.mask, batch.cu_seqlens, np.full(10, 50))
    before = np.cumsum([0, *range(5, 14)])
    assert (lengths == 0).tolist() == [True, *(before[1:] // 40 != before[:-1] // 40)]
    shared = share_prompts(batch.cu_seqlens, lengths)
    for found, expected in zip(rows_of(shared, batch.ids), rows, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_pass_has_as_many_rows_as_fit_with_shared_prompts():
    rows = [[*range(50), *[7] * 10]] * 6
    batch = PackedBatch.build(rows, np.zeros(360, bool), prompt_lengths=np.full(6, 50, np.int32)).to(backend_for("cpu"))
    assert list(batch.cut(120, 0, 6)) == [(0, 2), (2, 4), (4, 6)]
    assert list(batch.cut(93, 0, 6, True)) == [(0, 4), (4, 6)]  # 60 + 3 x 11 tokens
    assert list(batch.cut(92, 0, 6, True)) == [(0, 3), (3, 6)]
    assert list(batch.cut(92, 1, 6, True)) == [(1, 4), (4, 6)]  # the first row of a pass has its prompt
    for first, last in batch.cut(93, 1, 6, True):
        assert len(Rows(batch, first, last).shared_tokens.ids) <= 93


@pytest.mark.parametrize("bucket", [1, 8])
def test_log_probabilities_and_gradients_are_those_of_whole_rows(make_model, monkeypatch, bucket):
    model, cpu = make_model("float64"), backend_for("cpu")
    monkeypatch.setattr(cpu, "row_bucket", lambda rows: -(-rows // bucket) * bucket)
    batch, _ = random_groups(np.random.default_rng(3))
    batch = batch.to(cpu)
    found = {}
    for name in ("tokens", "shared_tokens"):
        tokens = getattr(Rows(batch, 1, len(batch)), name)
        assert len(tokens.ids) % bucket == 0 and (tokens.prefixes is not None) == (name == "shared_tokens")
        logprobs, entropy = packed_logprobs(model, tokens)
        (logprobs * np.linspace(-1, 1, len(logprobs.data)) + entropy).sum().backward()
        found[name] = [logprobs.data, entropy.data, *(one.grad.copy() for one in model.parameters())]
        for parameter in model.parameters():
            parameter.zero_grad()
    for one, other in zip(*found.values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-11)


def test_a_batch_without_prompts_is_as_it_was(make_model):
    batch, _ = random_groups(np.random.default_rng(3))
    rows = Rows(replace(batch, prompt_lengths=None).to(backend_for("cpu")), 0, len(batch))
    with no_grad():
        one, other = (packed_logprobs(make_model("float64"), x)[0].data for x in (rows.tokens, rows.shared_tokens))
    assert rows.shared_tokens.prefixes is None
    np.testing.assert_array_equal(one, other)


class WholeRows(GRPOTrainer):
    """A subclass with a loss of its own, over the rows as they are."""

    def compute_loss(self, rows):
        self.sizes = [*getattr(self, "sizes", ()), len(rows.tokens.ids)]
        logprobs, _ = packed_logprobs(self.model, rows.tokens, self.args.temperature)
        return -(logprobs * rows.advantages * rows.weights).sum(), {}


@pytest.mark.parametrize("cls", [GRPOTrainer, WholeRows])
def test_passes_of_a_subclass_hold_whole_rows(make_model, tokenizer, tmp_path, cls):
    """max_tokens_per_batch is a promise about memory, also where compute_loss() takes no shared_tokens."""
    args = GRPOConfig(output_dir=str(tmp_path), per_device_train_batch_size=16, num_generations=8, max_steps=1,
                      max_tokens_per_batch=100, max_completion_length=4, save_steps=0)  # fmt: skip
    trainer = cls(make_model(), [lambda completion_ids, **_: [float(sum(ids) % 2) for ids in completion_ids]], args,
                  [{"prompt": "1+2+3+4+5+6+7+8+9="}] * 2, processing_class=tokenizer)  # fmt: skip
    parts, _ = trainer.make_batch(0)
    whole, shared = ([len(getattr(rows, name).ids) for rows in parts] for name in ("tokens", "shared_tokens"))
    assert max(shared) <= 100 and (max(whole) <= 100) == (cls is WholeRows)
    if cls is WholeRows:
        trainer.train()
        assert max(trainer.sizes) <= 100


def test_training_and_what_it_compares_with_take_shared_passes(make_model, tokenizer, tmp_path, monkeypatch):
    """The loss, the choice of tokens by entropy, and the reference: no pass holds a prompt twice."""
    args = GRPOConfig(output_dir=str(tmp_path), per_device_train_batch_size=16, num_generations=8, max_steps=1,
                      max_tokens_per_batch=60, max_completion_length=4, save_steps=0, beta=0.1,
                      top_entropy_quantile=0.5, gradient_checkpointing="none")  # fmt: skip
    trainer = GRPOTrainer(make_model(), [lambda completion_ids, **_: [float(sum(ids) % 2) for ids in completion_ids]],
                          args, [{"prompt": "1+2+3+4+5+6+7+8+9="}] * 2, processing_class=tokenizer)  # fmt: skip
    seen = []
    for name, model in (("policy", trainer.model), ("reference", trainer.reference)):
        forward = model.forward

        def noted(tokens, positions, attend, forward=forward, name=name):
            if isinstance(attend, PackedCausal):
                seen.append((name, len(tokens), attend.prefixes is not None))
            return forward(tokens, positions, attend)

        monkeypatch.setattr(model, "forward", noted)
    trainer.train()
    passes = {name: sum(one[0] == name for one in seen) for name in ("policy", "reference")}
    assert all(size <= 60 and shared for _, size, shared in seen), seen
    assert passes["policy"] == 2 * passes["reference"] > 2  # entropies, then the loss
