"""Ranks that share a model, and such groups that share the work, with threads as ranks: no MPI is needed."""

from threading import get_ident
from types import SimpleNamespace

import numpy as np
import pytest

from cukit.backend import backend_for
from cukit.parallel import group as group_module
from cukit.parallel.config import ParallelOptions, TensorOptions
from cukit.parallel.group import Group, RankLost
from cukit.parallel.world import world
from cukit.runs.signals import RunStopped
from cukit.trainers import ranks as ranks_module
from cukit.trainers.config import SFTConfig
from cukit.trainers.grpo_config import GRPOConfig
from cukit.trainers.loop import Run
from cukit.trainers.ranks import FailedElsewhere, Ranks
from cukit.trainers.tensor_parallel import divided

from . import run_trainer
from .threads import ThreadGroup, on_ranks, together

PAIRS = TensorOptions(tensor_parallel_size=2)


def test_neighbours_share_a_model_and_the_others_the_work():
    def work(group):
        across, tensor = divided(group, TensorOptions(tensor_parallel_size=2, tensor_parallel_invariant=True))
        return across.gather_values(group.rank), tensor.group.gather_values(group.rank), tensor.invariant

    assert together(4, work) == [
        ([0, 2], [0, 1], True),
        ([1, 3], [0, 1], True),
        ([0, 2], [2, 3], True),
        ([1, 3], [2, 3], True),
    ]


def test_without_tensor_parallelism_the_group_is_the_world():
    group = Group()
    assert divided(group, ParallelOptions()) == (group, None)
    assert divided(group, None) == (group, None)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(
        ValueError,
        match="_size=2 needs processes in multiples of 2, and this run has 1: .*or give tensor_parallel_size=1",
    ):
        divided(Group(), PAIRS)


def test_work_is_the_pairs_and_values_come_from_their_first_ranks():
    def work(group):
        ranks = Ranks(group, PAIRS)
        column = np.arange(4.0) * (ranks.rank == np.arange(4) // 2)
        ranks.fill(column, [0, 2, 4], backend_for("cpu"))
        return ranks.each(lambda: group.rank, "a test"), ranks.rank, ranks.size, ranks.is_first, column.tolist()

    found = together(4, work)
    assert found == [([0, 2], rank // 2, 2, rank == 0, [0.0, 1.0, 2.0, 3.0]) for rank in range(4)]


def test_a_users_code_runs_once_for_a_pair():
    calls = []

    def work(group):
        def reward():
            calls.append(group.rank)
            return group.rank

        return Ranks(group, PAIRS).once(reward, "rewards")

    assert together(4, work) == [0, 0, 2, 2]
    assert sorted(calls) == [0, 2]
    assert Ranks(Group()).once(lambda: 5, "rewards") == 5


def test_an_error_of_a_users_code_ends_all_ranks():
    """The rank that ran it ends with the error itself."""

    def work(group):
        ranks = Ranks(group, PAIRS)

        def own():
            def reward():
                if group.rank == 2:
                    raise KeyError("no answer")

            return ranks.once(reward, "rewards")

        with pytest.raises((KeyError, OSError)) as error:
            ranks.each(own, "rollout")
        return type(error.value), str(error.value)

    text = "KeyError: 'no answer'"
    assert together(4, work) == [
        (RankLost, f"rank 2 failed in rollout: {text}"),
        (RankLost, f"rank 2 failed in rollout: {text}"),
        (KeyError, "'no answer'"),
        (FailedElsewhere, f"rank 0 failed in rewards: {text}"),
    ]


def test_a_stop_that_one_of_a_pair_was_asked_for_stops_both_at_the_same_place():
    def work(group):
        ranks = Ranks(group, PAIRS)
        seen = []

        def own():
            for step in range(3):
                seen.append(ranks.any(group.rank == 3 and step == 1))
                if seen[-1]:
                    raise RunStopped

        with pytest.raises(RunStopped):
            ranks.each(own, "rollout")
        return seen, ranks.any(group.rank == 1)

    plain, stopped = ([False, False, False], True), ([False, True], True)
    assert together(4, work) == [plain, plain, stopped, stopped]


def test_ranks_with_the_same_part_must_have_the_same_weights():
    def work(group, weights):
        Ranks(group, PAIRS).compare({"weights": weights[group.rank]})

    together(4, lambda group: work(group, ["a", "b", "a", "b"]))
    found = on_ranks(4, lambda group: work(group, ["a", "b", "a", "c"]))
    assert {str(one).split(";")[0] for one in found} == {"the ranks differ in weights: 'b' on rank 1, 'c' on rank 3"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"zero_stage": 1}, "tensor_parallel_size=2 .* zero_stage=1"),
        ({"use_peft": True}, "use_peft .* tensor_parallel_size=2"),
        ({"optimizer_in_bwd": True, "max_grad_norm": 0.0}, "optimizer_in_bwd .* tensor_parallel_size=2"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1"),
    ],
)
def test_what_does_not_go_together_is_refused(more, message):
    with pytest.raises(ValueError, match=message):
        SFTConfig(**{"tensor_parallel_size": 2} | more)


def test_groups_that_move_are_refused():
    with pytest.raises(ValueError, match="balance_rollouts=true .* tensor_parallel_size"):
        GRPOConfig(tensor_parallel_size=2, balance_rollouts="true")


def test_environments_are_refused():
    with pytest.raises(ValueError, match="tensor_parallel_size=2 .* environment"):
        run_trainer.make_trainer("grpo", plays=True, tensor_parallel_size=2)


def test_pairs_count_as_one_process(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "6")
    assert [SFTConfig(tensor_parallel_size=size).num_processes for size in (1, 2, 3, 6)] == [6, 3, 2, 1]


# ---- trainers on threads ----


@pytest.fixture
def as_world(monkeypatch):
    """Call it in a thread: the thread's group becomes its world."""
    world()  # of this process, before it seems to be one of two
    groups = {}
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr(ranks_module, "world", lambda: groups[get_ident()])
    return lambda group: groups.setdefault(get_ident(), group)


HEADS = {"num_key_value_heads": 2}


def test_options_reach_the_models(as_world, monkeypatch):
    """A trainer's models are this rank's parts, in the mode that was asked for; all ranks have one plan, though one has
    less memory.
    """
    free = {}
    monkeypatch.setattr(backend_for("cpu"), "memory_info", lambda: (free[get_ident()],) * 2)

    def work(group):
        as_world(group)
        free[get_ident()] = 10**9 + 1000 * group.rank
        trainer = run_trainer.make_trainer("ppo", shape=HEADS, tensor_parallel_size=2, tensor_parallel_invariant=True)
        tensors = [one.model.tensor for one in trainer.models.values()]
        return [(tensor.size, tensor.invariant) for tensor in tensors], trainer.plan

    (tensors, plan), (_, other) = together(2, work)
    assert tensors == [(2, True)] * 2
    assert plan == other
    weights = {item.name.split(":")[0]: item.nbytes for item in plan.items if "weights in float64" in item.name}
    whole = sum(view.nbytes for view in run_trainer.model(shape=HEADS).parts().values())
    assert 0.4 * whole < weights["policy"] < 0.8 * whole and 0.3 * whole < weights["critic"] < 0.8 * whole


def test_rewards_of_rollouts_and_evaluations_run_on_the_first_rank(as_world, monkeypatch, tmp_path):
    calls, reward = [], run_trainer.share_of_ones

    def counted(completions, **more):
        calls.append(get_ident())
        return reward(completions, **more)

    monkeypatch.setattr(run_trainer, "share_of_ones", counted)

    def work(group):
        as_world(group)
        options = dict(max_steps=1, eval_steps=1, eval_strategy="steps", output_dir=str(tmp_path / "run"))
        trainer = run_trainer.make_trainer("grpo", shape=HEADS, tensor_parallel_size=2, **options)
        return trainer.train()["reward"], trainer.evaluations[0][1]["eval/reward"], get_ident()

    first, second = together(2, work)
    assert first[:2] == second[:2]
    assert calls == [first[2]] * 3  # of a rollout and of two evaluations


@pytest.mark.parametrize("method", ["sft", "reward", "grpo", "ppo"])
def test_two_threads_that_share_a_model_train_as_one_does(method, as_world, monkeypatch, tmp_path):
    """One step: gradients to 1e-12 of their norm, and the same loss."""

    def step(folder, **more):
        trainer = run_trainer.make_trainer(
            method, shape=HEADS, max_steps=1, output_dir=str(tmp_path / folder), max_grad_norm=0.01, **more
        )
        recorder = run_trainer.Recorder(trainer)
        last = trainer.train()
        return {name: x for name, x in recorder.arrays.items() if name.startswith("gradient/")}, last

    def rank(group):
        as_world(group)
        return step("two", tensor_parallel_size=2)

    (gradients, last), (partly, other) = together(2, rank)
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE")
    as_world(Group())
    alone, truth = step("one")
    assert gradients.keys() == alone.keys() > partly.keys()
    norm = np.sqrt(sum(np.square(x).sum() for x in alone.values()))
    for name, array in alone.items():
        assert np.abs(gradients[name] - array).max() <= 1e-12 * norm, name
        assert name not in partly or (partly[name] == gradients[name]).all(), name
    for name in ("loss", "grad_norm"):
        assert last[name] == other[name] == pytest.approx(truth[name], rel=1e-10)


def test_a_small_sum_is_one_exchange_and_a_large_one_is_two(monkeypatch):
    def exchanges(group):
        group.all_reduce(np.zeros(group_module.SMALL // 4, np.float32))
        before = len(calls)
        group.barrier()
        group.all_reduce(np.zeros(group_module.SMALL // 4 + 1, np.float32))
        return before

    calls, swap = [], ThreadGroup._swap
    monkeypatch.setattr(ThreadGroup, "_swap", lambda self, *given: (calls.append(1), swap(self, *given))[1])
    assert max(together(2, exchanges)) == 2
    assert len(calls) == 2 + 4


@pytest.mark.parametrize(
    "in_parts, zero_stage, size, saved",
    [(True, 0, 1, []), (False, 1, 2, []), (False, 1, 1, [True]), (False, 0, 2, [True])],
)
def test_an_error_between_updates_saves_where_a_rank_holds_the_whole(in_parts, zero_stage, size, saved):
    """The first rank saves alone then: the others may be anywhere, and gather nothing with it."""
    run, found = object.__new__(Run), []
    args, says = SimpleNamespace(zero_stage=zero_stage), lambda text: None
    run.trainer = SimpleNamespace(global_step=1, total_steps=2, args=args, say=says)
    run.ranks = SimpleNamespace(tensor=object() if in_parts else None, training=SimpleNamespace(size=size))
    run._updating, run._unsaved, run.folder = False, True, "run"
    run.save_checkpoint = lambda alone: found.append(alone)
    run._save_after_error()
    assert found == saved
