"""Collectives of a group: sums in order of ranks, with the same bits on each; and what finds the group."""

import os
import subprocess
import sys
from threading import get_ident
from types import SimpleNamespace

import numpy as np
import pytest

from cukit import GRPOConfig, PPOConfig
from cukit.parallel import group as group_module
from cukit.parallel import world as world_module
from cukit.parallel.config import ParallelOptions, launched_rank, local_rank, num_processes
from cukit.parallel.group import Group, shares
from cukit.parallel.mpi import start_mpi

from .launch import command, environment, needs_mpi
from .threads import on_ranks, together

SIZES = (0, 1, 2, 7, 97, 1000)


def numbers(rank, count, dtype=np.float32):
    """Such that the order of a sum shows in its bits."""
    rng = np.random.default_rng([rank, count])
    return (rng.normal(size=count) * 10.0 ** rng.integers(-3, 4, count)).astype(dtype)


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("chunk", [4, 1 << 25])
def test_a_sum_is_added_in_order_of_ranks(ranks, count, chunk, monkeypatch):
    monkeypatch.setattr(group_module, "CHUNK", chunk)
    truth = numbers(0, count)
    for rank in range(1, ranks):
        truth = truth + numbers(rank, count)

    def work(group):
        array = numbers(group.rank, count)
        group.all_reduce(array)
        return array

    for found in on_ranks(ranks, work):
        np.testing.assert_array_equal(found, truth)


@pytest.mark.parametrize("count", SIZES)
def test_a_share_of_the_sum_is_a_view_and_gathering_completes_it(count):
    def work(group):
        array = numbers(group.rank, count, np.float64)
        share = group.reduce_scatter(array)
        assert not count or np.shares_memory(share, array) or not len(share)
        share *= 2
        group.all_gather(array)
        return array

    truth = 2 * (numbers(0, count, np.float64) + numbers(1, count, np.float64) + numbers(2, count, np.float64))
    for found in on_ranks(3, work):
        np.testing.assert_array_equal(found, truth)


def test_parts_of_any_length_are_gathered():
    borders = [0, 3, 3, 11]

    def work(group):
        array = np.full(11, -1.0)
        array[borders[group.rank] : borders[group.rank + 1]] = group.rank
        group.all_gather(array, borders)
        return array.tolist()

    assert on_ranks(3, work) == [[0.0] * 3 + [2.0] * 8] * 3


def test_parts_are_groups_of_their_own_and_count_from_0():
    def work(group):
        pair = group.part([2, 0])
        own = group.part([0, 3] if group.rank in (0, 3) else [1, 2])
        array = numbers(group.rank, 97)
        own.all_reduce(array)
        return None if pair is None else (pair.rank, pair.gather_values(group.rank)), own.rank, array

    found = on_ranks(4, work)
    assert [pair for pair, _, _ in found] == [(1, [2, 0]), None, (0, [2, 0]), None]
    assert [rank for _, rank, _ in found] == [0, 0, 1, 1]
    for rank, others in ((0, (0, 3)), (3, (0, 3)), (1, (1, 2)), (2, (1, 2))):
        np.testing.assert_array_equal(found[rank][2], numbers(others[0], 97) + numbers(others[1], 97))
    assert Group().part([0]).size == 1


def test_a_group_of_one_changes_nothing_and_needs_nothing():
    group, array = Group(), np.arange(5.0)
    group.all_reduce(array)
    group.all_gather(array)
    group.broadcast(array)
    group.barrier()
    assert group.reduce_scatter(array).tolist() == array.tolist() == [0, 1, 2, 3, 4]
    assert group.gather_values("x") == ["x"] and (group.rank, group.size) == (0, 1)
    assert group.on(None) is group


def test_shares_are_runs_of_about_as_many():
    for count in (0, 1, 10, 20_160):
        for size in (1, 2, 3, 7):
            borders = shares(count, size)
            lengths = np.diff(borders)
            assert borders[0] == 0 and borders[-1] == count and len(borders) == size + 1
            assert lengths.max() - lengths.min() <= 1


# ---- what finds the group ----


@pytest.mark.parametrize(
    "given, found",
    [
        ({}, (1, 0, None)),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, (4, 3, 1)),
        ({"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1"}, (2, 1, 1)),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "0"}, (8, 5, 0)),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, (1, 0, None)),  # the batch script itself
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, (1, 0, None)),
        ({"OMPI_COMM_WORLD_SIZE": "many"}, (1, 0, None)),
    ],
)
def test_launchers_say_how_many_and_which(given, found):
    assert (num_processes(given), launched_rank(given), local_rank(given)) == found


def test_without_a_launcher_mpi_is_not_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setattr(world_module, "_found", [])
    assert world_module.world().size == 1


def test_mpi4py_that_is_missing_is_one_line(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(
        ValueError, match=r"one of 2 processes, which need mpi4py .*: pip install 'cukit\[mpi\]'"
    ) as error:
        start_mpi()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "visible, rank, found",
    [(None, 3, "3"), ("4,5,6,7", 1, "5"), ("2", 1, "2"), ("GPU-a,GPU-b", 1, "GPU-b"), ("", 1, ""), ("0,1", 3, "1")],
)
def test_a_process_sees_the_gpu_of_its_place(visible, rank, found, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    world_module.choose_gpu(rank)
    assert world_module.os.environ["CUDA_VISIBLE_DEVICES"] == found
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")


@pytest.mark.parametrize(
    "cores, has_card, said",
    [
        ([(8, 8), (1, 8)], True, "rank 1 may use 1 of 8 cores"),
        ([(3, 64), (1, 64)], True, "rank 0 may use 3 of 64 cores"),
        ([(4, 8), (4, 8)], True, None),  # a half each
        ([(1, 6), (1, 6)], True, None),  # not enough for both
        ([(1, 8), (1, 8)], False, None),
    ],
)
def test_few_cores_of_many_are_said_once(cores, has_card, said, monkeypatch, caplog):
    places = {}
    monkeypatch.setattr(world_module, "card_present", lambda: has_card)
    monkeypatch.setattr(world_module, "usable_cores", lambda: cores[places[get_ident()]])

    def work(group):
        places[get_ident()] = group.rank
        world_module.warn_of_few_cores(group)

    together(2, work)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (said is not None)
    if said:
        assert lines[0].startswith(said) and "mpirun --bind-to none" in lines[0] and "\n" not in lines[0]


def test_the_world_looks_at_its_cores(monkeypatch):
    asked, group = [], Group()
    group.watch = SimpleNamespace(leave=None)
    monkeypatch.setattr("cukit.parallel.mpi.start_mpi", lambda: group)
    monkeypatch.setattr(world_module, "choose_gpu", lambda rank: None)
    monkeypatch.setattr(world_module.atexit, "register", lambda function: None)
    monkeypatch.setattr(world_module, "warn_of_few_cores", asked.append)
    assert world_module._start() is group and asked == [group]


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores, and Linux"
)
def test_a_process_that_is_bound_knows_what_its_launcher_may_use():
    """Also behind a program between the two, which is bound with it."""
    all_of_them = len(os.sched_getaffinity(0))
    ask = "from cukit.parallel.world import usable_cores; print(*usable_cores())"
    bound = f"import os, subprocess, sys; os.sched_setaffinity(0, [{min(os.sched_getaffinity(0))}]); "
    between = f"subprocess.run([sys.executable, '-c', {ask!r}])"
    assert world_module.usable_cores()[0] == all_of_them
    for program in (bound + ask, bound + between):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["1", str(all_of_them)]


def test_the_options_ranges():
    assert (ParallelOptions().fast_reduction, ParallelOptions().ddp_timeout) == (False, 1800)
    with pytest.raises(ValueError, match="ddp_timeout must be at least 1, got 0"):
        ParallelOptions(ddp_timeout=0)


def test_the_size_of_a_batch_is_that_of_all_ranks(monkeypatch):
    """TRL's meaning: per_device_train_batch_size is a process's, generation_batch_size is everyone's."""
    given = dict(per_device_train_batch_size=4, num_generations=8)
    with pytest.raises(
        ValueError, match="generation batch of 4 completions .* must be a multiple of num_generations=8"
    ):
        GRPOConfig(**given)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    config = GRPOConfig(**given, steps_per_generation=2)
    assert (config.num_processes, config.generation_size, config.prompts_a_generation, config.num_slices) == (
        2,
        16,
        2,
        2,
    )
    assert GRPOConfig(**given, generation_batch_size=32).num_slices == 4
    wanted = "generation_batch_size=12 must be a multiple of per_device_train_batch_size=4 . 2 processes; 12 % 8 = 4"
    with pytest.raises(ValueError, match=wanted):
        GRPOConfig(**given, generation_batch_size=12)
    with pytest.raises(ValueError, match="optimizer_in_bwd=true updates a layer before the gradients of 2 processes"):
        PPOConfig(optimizer_in_bwd=True, max_grad_norm=0)
    ppo = PPOConfig(per_device_train_batch_size=4, num_mini_batches=3)
    assert (ppo.generation_size, ppo.num_slices) == (24, 3)


# ---- MPI itself ----

COLLECTIVES = """
import sys
import ml_dtypes
import numpy as np
from cukit.parallel import group, mpi
from cukit.parallel.world import world

g = world()
group.CHUNK, mpi.CHUNK_BYTES = 1000, 4096
everyone = [np.random.default_rng(rank).normal(size=4999).astype(np.float32) for rank in range(g.size)]
truth = everyone[0]
for one in everyone[1:]:
    truth = truth + one
for fast in (False, True):
    array = everyone[g.rank].copy()
    g.all_reduce(array, fast=fast)
    assert np.array_equal(array, truth) or fast and np.allclose(array, truth, atol=1e-5)
for dtype in (np.float64, ml_dtypes.bfloat16, np.int16):
    array = np.full((7, 3), g.rank, dtype)
    g.broadcast(array, root=g.size - 1)
    assert (array == g.size - 1).all()
borders = [0, *(10 * rank + 10 for rank in range(g.size - 1)), 1003]
array = np.zeros(1003, ml_dtypes.bfloat16)
array[borders[g.rank] : borders[g.rank + 1]] = g.rank + 1
g.all_gather(array, borders)
assert array.min() == 1 and array[-1] == g.size
found = g.gather_values({"rank": g.rank, "much": b"x" * (10_000 * g.rank)})
assert [one["rank"] for one in found] == list(range(g.size)) and len(found[-1]["much"]) == 10_000 * (g.size - 1)
found = g.all_parts(np.full((2, 3), g.rank, ml_dtypes.bfloat16))
assert found.shape == (g.size, 2, 3) and (found == np.arange(g.size)[:, None, None]).all()
g.barrier()
g.all_reduce(np.zeros(0, np.float32))
try:
    g.all_reduce(np.zeros((4, 4))[:, :2])
except ValueError as error:
    assert "contiguous" in str(error)
else:
    assert False
sys.stdout.write(f"rank {g.rank} of {g.size} is done\\n")
"""


@pytest.mark.mpi
@needs_mpi
@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_over_mpi(ranks, tmp_path):
    (tmp_path / "collectives.py").write_text(COLLECTIVES)
    root = str(world_module.__file__).rsplit("/cukit/", 1)[0]
    done = subprocess.run(command(ranks, tmp_path / "collectives.py"), capture_output=True, text=True,
                          env=environment(PYTHONPATH=root), timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(ranks):
        assert f"rank {rank} of {ranks} is done" in done.stdout


PARTS = """
from types import SimpleNamespace
import numpy as np
from cukit.parallel import nccl
from cukit.parallel.world import world
whole = world()
pair = whole.part([2, 0])
own = whole.part([0] if whole.rank == 0 else [1, 2])
array = np.full(1000, 10.0**whole.rank)
for _ in range(whole.rank + 1):  # the ranks enter different numbers of collectives
    own.gather_values(0) if own.size == 1 else None
own.all_reduce(array)
later = own.part([1]) if own.size == 2 else own
seen = None if pair is None else (pair.rank, pair.gather_values(whole.rank), pair._members)
print(whole.rank, own.rank, own.size, array[7], seen, later and (later.rank, later.size), sep="|", flush=True)
nccl.NCCLGroup = lambda host: (host.rank, host.size, object())
gpu, again = SimpleNamespace(name="cuda"), whole.part([2, 0])
if pair is not None:
    assert again.on(gpu) is pair.on(gpu) is not whole.on(gpu) and again.on(gpu)[:2] == (pair.rank, 2)
whole.barrier()
"""


@pytest.mark.mpi
@needs_mpi
def test_parts_of_an_mpi_world():
    """Parts of the same ranks have one group for arrays on their GPUs."""
    root = str(world_module.__file__).rsplit("/cukit/", 1)[0]
    found = subprocess.run(command(3, "-c", PARTS), env=environment(PYTHONPATH=root), capture_output=True, text=True,
                           timeout=120)  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert sorted(found.stdout.split("\n")[:3]) == [
        "0|0|1|1.0|(1, [2, 0], (2, 0))|(0, 1)", "1|0|2|110.0|None|None", "2|1|2|110.0|(0, [2, 0], (2, 0))|(0, 1)"
    ]  # fmt: skip
