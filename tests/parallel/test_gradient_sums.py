"""Sums that begin while the backward pass runs: the bits of sums after it, one order on all ranks, and no rank that
waits in vain. Threads are the ranks.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from cukit.models.config import LEVELS
from cukit.models.logprobs import pack, target_logprobs
from cukit.parallel import group as group_module
from cukit.parallel.group import RankLost, shares
from cukit.runs.signals import RunStopped
from cukit.trainers import gradient_sums
from cukit.trainers.gradient_sums import GradientSums
from cukit.trainers.ranks import Ranks
from cukit.trainers.state import TrainedModel

from . import run_trainer
from .threads import ThreadGroup, on_ranks

RANKS = 3


def made(seed, stage):
    """Two models of which some parameters are frozen, as trained models."""
    rng, found = np.random.default_rng([7, seed]), {}
    level = str(rng.choice(LEVELS))
    for name in ("policy", "critic"):
        model = run_trainer.model("float64", seed=seed)
        model.gradient_checkpointing = level
        for parameter in model.store.parameters:
            parameter.requires_grad = bool(rng.random() > 0.2)
        found[name] = TrainedModel("", model, SimpleNamespace(stage=stage))
    return found


def passes_of(seed, rank):
    """[(models that a pass serves, rows)] of a rank: none to three, of models together or apart; some without rows."""
    together, rng = seed % 2, np.random.default_rng([8, seed, rank])
    kinds = [("policy", "critic")] if together else [("policy",), ("critic",)]
    count = int(rng.integers(0, 4)) if rank != seed % RANKS else 2
    found = []
    for names in kinds:
        for _ in range(count):
            rows = [rng.integers(1, 40, int(rng.integers(2, 9))).tolist() for _ in range(int(rng.integers(0, 3)))]
            found.append((names, rows))
    return found


def loss_of(models, names, rows):
    """None without rows: a pass without a gradient."""
    if not rows:
        return None
    wanted, loss = [np.arange(len(row)) > 0 for row in rows], None
    for name in names:
        one = target_logprobs(models[name].model, rows, wanted)[0].sum() * -0.1
        loss = one if loss is None else loss + one
    return loss if loss.requires_grad else None


def run_passes(models, passes, gradients=None, fails_at=None):
    for place, (names, rows) in enumerate(passes):
        loss = loss_of(models, names, rows)
        if place == fails_at:
            raise ValueError("boom")
        if loss is not None and gradients is None:
            loss.backward()
        elif loss is not None:
            with gradients.summing():
                loss.backward()
        if gradients is not None:
            gradients.end_pass()
    return {"loss": np.ones(1)}, bool(passes)


def gradients_of(models):
    """(model, bucket's place) -> its gradient, None where there is none."""
    return {
        (name, place): None if bucket.grad is None else bucket.grad.copy()
        for name, one in models.items()
        for place, bucket in enumerate(one.model.store.buckets)
    }


def added(arrays):
    found = [array for array in arrays if array is not None]
    return None if not found else sum(found[1:], found[0])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_sums_are_those_of_gradients_that_are_added_after_all_passes(seed, stage):
    truth = []
    for rank in range(RANKS):
        models = made(seed, stage)
        run_passes(models, passes_of(seed, rank))
        truth.append(gradients_of(models))
    held = {key: added([one[key] for one in truth]) for key in truth[0]}

    def work(group):
        models, passes = made(seed, stage), passes_of(seed, group.rank)
        sums, has = Ranks(group).total(
            lambda gradients: run_passes(models, passes, gradients),
            models,
            models,
            [names for names, _ in passes],
            False,
        )
        assert sums["loss"] == RANKS and has
        found = gradients_of(models)
        for (name, place), array in held.items():
            bucket = models[name].model.store.buckets[place]
            part = slice(*shares(bucket.size, RANKS)[group.rank : group.rank + 2])
            if array is None:
                assert found[name, place] is None and bucket.share is None, (name, place)
            elif stage == 0:
                np.testing.assert_array_equal(found[name, place], array)
            elif stage == 1:
                np.testing.assert_array_equal(found[name, place][part], array[part])
            else:
                assert bucket.grad is None
                np.testing.assert_allclose(bucket.share, array[part], atol=1e-12 * np.abs(array).max())
        reached = [[slot.has_gradient for slot in bucket.slots] for one in models.values()
                   for bucket in one.model.store.buckets]  # fmt: skip
        return reached

    found = on_ranks(RANKS, work)
    assert all(isinstance(one, list) for one in found), found
    assert found[0] == found[1] == found[2]


def test_a_parameter_that_no_rank_reached_has_no_gradient():
    """Though its bucket's zeros were summed."""

    def work(group):
        models = made(0, 0)
        for one in models.values():
            for parameter in one.model.store.parameters:
                parameter.requires_grad = True

        def passes(gradients):
            weight = models["policy"].model.layers[0].mlp.down_proj.weight
            if group.rank == 1:
                weight.grad_buffer()[...] = 1
            gradients.end_pass()
            return {}, True

        Ranks(group).total(passes, models, models, [("policy", "critic")], False)
        return [parameter.name for one in models.values() for parameter in one.model.store.parameters
                if parameter.grad is not None]  # fmt: skip

    assert on_ranks(2, work) == [["layers.0.mlp.down_proj.weight"]] * 2


@pytest.mark.parametrize("stage", [0, 2])
def test_a_sum_begins_before_the_backward_pass_ends(stage, monkeypatch):
    """The head's is over while the embedding has no gradient yet; in stage 2 few layers' gradients are held at a
    time.
    """
    original = GradientSums._sum

    def noted(self, name, bucket):
        store = self._stores[name]
        held = {one.layer for one in store.buckets if one.grad is not None}
        store.seen.append((bucket.layer, store.buckets[0].grad is None, len(held)))
        original(self, name, bucket)

    monkeypatch.setattr(GradientSums, "_sum", noted)

    def work(group):
        model = run_trainer.model("float64", "score")  # the embedding is not the head
        one, model.store.seen = {"policy": TrainedModel("", model, SimpleNamespace(stage=stage))}, []

        def passes(gradients):
            for _ in range(2):
                hidden = model.forward(*pack(model, [[1, 2, 3]]))
                with gradients.summing():
                    model.scores(hidden).sum().backward()
                gradients.end_pass()
            return {}, True

        Ranks(group).total(passes, one, one, [("policy",)] * 2, False)
        return model.store.seen

    order = ["score", "norm", "layers.1", "layers.1", "layers.0", "layers.0", "embed_tokens"]
    for seen in on_ranks(2, work):
        assert [layer for layer, *_ in seen] == order * (1 if stage == 0 else 2)
        if stage == 2:
            assert [early for layer, early, _ in seen if layer in ("score", "norm", "layers.1")] == [True] * 8
            assert max(held for *_, held in seen) <= 3


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_a_rank_that_fails_ends_the_others_in_one_line(stage, fails_at):
    def work(group):
        models = made(3, stage)
        passes = [(("policy", "critic"), [[1, 2, 3]])] * 4 if group.rank else passes_of(3, 0)
        at = fails_at if group.rank == 1 else None
        Ranks(group).total(
            lambda gradients: run_passes(models, passes, gradients, at),
            models,
            models,
            [names for names, _ in passes],
            False,
        )

    first, own, other = on_ranks(RANKS, work)
    assert isinstance(own, ValueError) and str(own) == "boom"
    for error in (first, other):
        assert isinstance(error, RankLost) and str(error) == "rank 1 failed in training: ValueError: boom"


def test_a_stop_within_a_pass_stops_all():
    def work(group):
        models = made(0, 2)

        def passes(gradients):
            raise RunStopped

        Ranks(group).total(passes, models, models, [("policy",)], False)

    assert [type(error) for error in on_ranks(2, work)] == [RunStopped] * 2


def test_a_rank_that_cannot_join_names_its_own_error(monkeypatch):
    """Memory for a sum is missing: the others wait in that sum, so no exchange of results can follow."""
    reduce_scatter = ThreadGroup.reduce_scatter

    def full(self, array, what="reduce_scatter"):
        if self.rank == 1:
            raise MemoryError("no room")
        return reduce_scatter(self, array, what)

    monkeypatch.setattr(group_module, "SMALL", 0)  # every sum goes by shares
    monkeypatch.setattr(ThreadGroup, "reduce_scatter", full)

    def work(group):
        models, passes = made(2, 0), passes_of(2, 2)
        names = [names for names, _ in passes]
        Ranks(group).total(lambda gradients: run_passes(models, passes, gradients), models, models, names, False)

    _, own = on_ranks(2, work, timeout=2)
    assert isinstance(own, RankLost) and str(own) == "rank 1 failed in training: MemoryError: no room"
    assert isinstance(own.__cause__, MemoryError)


def test_calls_wait_for_those_before_them():
    made_calls, calls = [], gradient_sums.InOrder()
    for key, due in (("a", False), ("b", True), ("c", False), ("d", True)):
        calls.add(key, lambda key=key: made_calls.append(key), due)
    calls.due("c")
    assert made_calls == []
    calls.due("a")
    assert made_calls == ["a", "b", "c", "d"]
    calls.finish()
    assert len(made_calls) == 4
