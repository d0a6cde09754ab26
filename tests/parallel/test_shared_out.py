"""What a trainer shares out among ranks, with threads as ranks: no MPI is needed."""

import pickle
from threading import Lock, get_ident

import numpy as np
import pytest

from cukit.optim import AdamW
from cukit.parallel.group import Group, RankLost
from cukit.runs.checkpoint import SaveError
from cukit.runs.signals import RunStopped
from cukit.trainers import loop
from cukit.trainers import ranks as ranks_module
from cukit.trainers.environment import Environment, Made, ToolEnvironment
from cukit.trainers.ranks import Ranks, _sum_of_weights, merged
from cukit.trainers.rollout import Samples
from cukit.trainers.shared_rollouts import _counts, joined
from cukit.trainers.zero import ShardedAdamW

from . import run_trainer
from .threads import ThreadGroup, on_ranks, together


def test_shares_of_rows_have_about_as_many_tokens(rng):
    class Place(Group):
        size = 4

    ranks = Ranks(Place())
    for count in (0, 1, 3, 50, 500):
        lengths = rng.integers(1, 100, count)
        borders = ranks.borders(lengths)
        assert borders == sorted(borders) and len(borders) == 5 and (borders[0], borders[-1]) == (0, count)
        tokens = [lengths[a:b].sum() for a, b in zip(borders, borders[1:])]
        if count >= 50:
            assert max(tokens) - min(tokens) <= 200
    assert Ranks(Group()).share([3, 4]) == (0, 2)


def test_sums_of_ranks_are_added_and_maxima_taken():
    parts = [{"a": 1.0, "max/b": np.array([1, 9])}, {}, {"a": 2.0, "max/b": np.array([5, 2]), "c": 4.0}]
    found = merged(parts)
    assert found["a"] == 3 and found["max/b"].tolist() == [5, 9] and found["c"] == 4


def test_an_error_of_one_rank_ends_all():
    def work(group):
        def own():
            if group.rank == 1:
                raise KeyError("mine")
            return group.rank

        with pytest.raises(KeyError if group.rank == 1 else RankLost) as error:
            Ranks(group).each(own, "a test")
        return str(error.value)

    first, second, third = on_ranks(3, work)
    assert first == third == "rank 1 failed in a test: KeyError: 'mine'" and second == "'mine'"


def test_a_stop_of_one_rank_stops_all_and_an_error_outweighs_it():
    def work(group, fails):
        def own():
            if group.rank == 1:
                raise RunStopped
            if fails and group.rank == 2:
                raise OSError("broken")

        try:
            Ranks(group).each(own, "a test")
        except BaseException as error:
            return type(error)

    assert on_ranks(3, lambda group: work(group, False)) == [RunStopped] * 3
    assert on_ranks(3, lambda group: work(group, True)) == [RankLost, RankLost, OSError]


def test_alone_a_rank_asks_no_other():
    def work(group):
        ranks = Ranks(group)
        alone = ranks.each(lambda: ranks.any(group.rank == 1), "a test")
        return alone, ranks.any(group.rank == 1), ranks.first(lambda: group.rank + 7, "a test")

    assert on_ranks(2, work) == [([False, True], True, 7)] * 2


def test_ranks_that_differ_are_told(tmp_path):
    def work(group):
        with pytest.raises(ValueError, match="the ranks differ in rows: 5 on rank 0, 6 on rank 2; give each the same"):
            Ranks(group).compare({"rows": 5 if group.rank < 2 else 6})
        Ranks(group).compare({"rows": 5})
        return _sum_of_weights(run_trainer.model(seed=int(group.rank == 1)))

    first, second, third = on_ranks(3, work)
    assert first == third != second


@pytest.mark.parametrize("method", ["sft", "reward", "grpo"])
@pytest.mark.parametrize("name, rows", [("train_dataset", "train_rows"), ("eval_dataset", "eval_rows")])
def test_ranks_whose_rows_differ_in_their_order_are_told(method, name, rows):
    def work(group):
        trainer = run_trainer.make_trainer(method)
        Ranks(group).begin(trainer, "")
        if group.rank == 1:
            getattr(trainer, rows).reverse()
        with pytest.raises(ValueError, match=rf"the ranks differ in rows of {name}, or their order \(a checksum\): "):
            Ranks(group).begin(trainer, "")

    together(2, work)


def samples(groups, **more):
    count = len(groups)
    return Samples([np.arange(3 + i, dtype=np.int32) for i in range(count)], np.full(count, 2, np.int32),
                   np.array(groups, np.int32), [np.zeros(1 + i) for i in range(count)], ["stop"] * count,
                   [f"text {i}" for i in range(count)], **more)  # fmt: skip


def test_completions_of_ranks_are_joined_in_order():
    first, second = samples([0, 0, 1], recorded={"a": [1, 2, 3]}), samples([2], recorded={"b": ["x"]})
    both = joined([first, second])
    assert both.groups.tolist() == [0, 0, 1, 2] and len(both) == 4
    assert both.recorded == {"a": [1, 2, 3, None], "b": [None, None, None, "x"]}
    assert both.lengths.tolist() == [*first.lengths, *second.lengths] and both.masks is None


def test_environments_stay_and_their_counts_travel():
    """Live objects need not be such that they can be sent."""
    own = ToolEnvironment([])
    own.num_calls, own.num_failed_calls, own.lock = 5, 2, Lock()
    made = [Made(own, own), Made(Environment(), object())]
    sent = pickle.loads(pickle.dumps(_counts(made)))
    assert isinstance(sent[0].responder, ToolEnvironment) and not isinstance(sent[1].responder, ToolEnvironment)
    assert (sent[0].responder.num_calls, sent[0].responder.num_failed_calls) == (5, 2)
    assert _counts(None) is None


@pytest.mark.parametrize("method", ["sft", "reward", "grpo", "ppo"])
def test_two_threads_train_as_one_does(method, monkeypatch, tmp_path):
    """The gradient of the first step, float64, and the row of metrics.jsonl."""

    def step(group):
        options = {"max_steps": 1, "per_device_train_batch_size": 12 // group.size}
        monkeypatch.setattr(ranks_module, "world", lambda: group) if group.size == 1 else None
        trainer = run_trainer.make_trainer(method, output_dir=str(tmp_path / str(group.size)), **options)
        recorder = run_trainer.Recorder(trainer)
        last = trainer.train()
        return {name: x for name, x in recorder.arrays.items() if name.startswith("gradient/")}, last

    alone, truth = step(Group())
    groups = {}
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr(ranks_module, "world", lambda: groups[get_ident()])

    def rank(group):
        groups[get_ident()] = group
        return step(group)

    for gradients, last in on_ranks(2, rank):
        assert gradients.keys() == alone.keys()
        for name, array in alone.items():
            assert np.abs(gradients[name] - array).max() <= 1e-12 * max(np.abs(array).max(), 1e-9), name
        assert last["loss"] == pytest.approx(truth["loss"], abs=1e-12)


def test_every_rank_gets_the_first_ones_error_of_saving(monkeypatch, tmp_path):
    """So that all of them end, or go on, alike."""

    def full(folder, *given, **more):
        raise SaveError(f"{folder} could not be saved: no space left")

    groups, calls = {}, []
    monkeypatch.setattr(loop.checkpoint, "save_checkpoint", lambda *given, **more: (calls.append(1), full(*given))[1])
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr(ranks_module, "world", lambda: groups[get_ident()])

    def rank(group):
        groups[get_ident()] = group
        options = {"max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 3}
        trainer = run_trainer.make_trainer("sft", "float32", output_dir=str(tmp_path / "run"), **options)
        with pytest.raises(SaveError, match="checkpoint-2 could not be saved: no space left"):
            trainer.train()
        return trainer.global_step

    assert on_ranks(2, rank) == [2, 2]
    assert len(calls) == 2  # after step 1, where training went on, and at the end; by one rank


@pytest.mark.parametrize("options", [{}, {"fast_reduction": True}, *({"zero_stage": stage} for stage in (1, 2, 3))])
def test_options_reach_the_sum_of_gradients_and_the_optimizer(options, monkeypatch, tmp_path):
    """fast_reduction: the library's own sum, once a bucket. zero_stage: a rank holds the states of its half alone."""
    groups, added, updated = {}, [], []
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    for module in (ranks_module, run_trainer):
        monkeypatch.setattr(module, "world", lambda: groups[get_ident()])
    add_up, step = ThreadGroup._add_up, AdamW.step
    monkeypatch.setattr(
        ThreadGroup, "_add_up", lambda self, array, what: added.append(what) or add_up(self, array, what)
    )
    monkeypatch.setattr(AdamW, "step", lambda self, *rest: updated.append(type(self)) or step(self, *rest))

    def rank(group):
        groups[get_ident()] = group
        sizes = {"max_steps": 1, "per_device_train_batch_size": 6}
        trainer = run_trainer.make_trainer("sft", output_dir=str(tmp_path / "run"), **sizes | options)
        trainer.train()
        assert getattr(trainer.optimizer, "stage", 0) == options.get("zero_stage", 0)
        return len(trainer.model.store.buckets)

    buckets, again = on_ranks(2, rank)
    assert buckets == again and added == ["gradients"] * (2 * buckets if options.get("fast_reduction") else 0)
    assert updated == [ShardedAdamW if options.get("zero_stage") else AdamW] * 2
