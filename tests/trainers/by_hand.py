"""The loss of a trainer's first optimizer batch, and the same from its samples and its models alone."""

import numpy as np

from cukit.autograd import Tensor, no_grad
from cukit.models.logprobs import packed_logprobs, token_logprobs
from cukit.ops import policy_loss

from .conftest import share_of_ones
from .test_wires import noisy

LONG = dict(max_completion_length=40)  # so that some completions stop and others are cut


def prepared(trainer):
    """(its rows, its samples, the batch) of the first optimizer batch; sampler and reference are off by noise."""
    kept = noisy(trainer)
    if trainer.reference is not None:
        rng = np.random.default_rng(1)
        for parameter in trainer.reference.parameters():
            parameter.data[...] += 0.1 * rng.normal(size=parameter.shape)
    rows, _ = trainer.make_batch(0)
    return rows, kept[0], rows[0].batch


def order_of(samples, batch):
    """The places of the batch's rows among the samples."""
    left, places = list(range(len(samples))), []
    for first, last in zip(batch.cu_seqlens, batch.cu_seqlens[1:]):
        ids, old = batch.ids[first:last].tolist(), batch.logprobs if batch.sampled is None else batch.sampled
        start = batch.cu_learnt[len(places)]
        place = next(
            i
            for i in left
            if samples.token_ids[i].tolist() == ids and np.float32(samples.logprobs[i][0]) == np.float32(old[start])
        )
        left.remove(place)
        places.append(place)
    return places


def run(trainer):
    """(loss, gradient in the packed order of tokens) of the trainer's policy_loss, and what `prepared` gives."""
    rows, samples, batch = prepared(trainer)
    loss, grads = 0.0, []
    for part in sorted(rows, key=lambda part: part.first):
        with no_grad():
            now, _ = packed_logprobs(trainer.model, part.tokens, trainer.args.temperature)
        leaf = Tensor(now.data, requires_grad=True)
        found, _ = trainer.policy_loss(leaf, part)
        found.backward()
        loss, grads = loss + found.item(), [*grads, leaf.grad]
    return loss, np.concatenate(grads), samples, batch


def by_hand(trainer, samples, batch, weight, rewards=None, sampler_is_old=True, **settings):
    """The same by the op on columns that are put together here. weight(lengths (rows,)) -> (rows,)"""
    args, places = trainer.args, order_of(samples, batch)
    scores = rewards if rewards is not None else advantages_by_hand(np.array(share_of_ones(samples.texts)))
    lengths = samples.lengths[places]

    def column(model):
        whole = [
            token_logprobs(model, [ids], args.temperature, trainer.tokenizer.vocab_size)[0] for ids in samples.token_ids
        ]
        return np.concatenate([whole[i][samples.prompt_lengths[i] - 1 :] for i in places])

    new = Tensor(column(trainer.model), requires_grad=True)
    sampled = np.concatenate([samples.logprobs[i].astype(np.float64) for i in places])
    ref = column(trainer.reference) if trainer.reference is not None else None
    given = dict(eps_high=0.2, level="token", cu_seqlens=np.cumsum([0, *lengths])) | settings
    if not sampler_is_old:
        given["sampled"] = sampled
    loss, _ = policy_loss(
        new,
        sampled if sampler_is_old else new.data.copy(),
        ref,
        np.repeat(scores[places], lengths),
        np.repeat(weight(lengths), lengths),
        **given,
    )
    loss.backward()
    return loss.item(), new.grad


def advantages_by_hand(rewards, size=4):
    groups = rewards.reshape(-1, size)
    return ((groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-4)).ravel()


def by_tokens(lengths):
    return np.full(len(lengths), 1 / lengths.sum())


def by_row_means(lengths):
    return 1 / (lengths * len(lengths))


def by_rows(lengths):
    return np.full(len(lengths), 1 / len(lengths))
