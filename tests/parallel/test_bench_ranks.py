"""bench grpo of several processes: those that are apart, and groups that move. Times are not judged."""

import json
import subprocess
from threading import get_ident

import pytest

from cukit.bench import GRPOBench, grpo
from cukit.bench.report import cells, columns
from cukit.trainers import ranks as ranks_module

from .launch import command, environment, needs_mpi
from .threads import on_ranks

SIZES = {"model": "tiny", "device": "cpu", "prompts": 2, "num_generations": 3}
SIZES |= {"prompt_length": 5, "max_completion_length": 7, "steps": 4}
ONE_PROCESS = {"samples", "tokens", "seconds", "generate_seconds", "reward_seconds", "reference_seconds"}
ONE_PROCESS |= {"train_seconds", "other_seconds", "largest_difference", "peak_gb", "driver_gb"}
APART = {"wait_seconds", "weights_seconds", "old_logprobs_seconds", "rollout_wait_seconds", "weights_bytes"}


@pytest.fixture
def measured(monkeypatch):
    """measured(number of ranks, options): (report of the first rank, trainer of each)."""
    groups, trainers, build = {}, {}, grpo._trainer
    monkeypatch.setattr(ranks_module, "world", lambda: groups[get_ident()])

    def made(*given):
        trainers[groups[get_ident()].rank] = found = build(*given)
        return found

    monkeypatch.setattr(grpo, "_trainer", made)

    def run(size, **options):
        def rank(group):
            groups[get_ident()] = group
            return grpo.run(GRPOBench(**SIZES | options))

        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", str(size))
        return on_ranks(size, rank)[0], [trainers[one] for one in range(size)]

    return run


def in_order(row):
    """What the first rank does one after the other."""
    names = ("reference", "old_logprobs", "train", "wait", "weights", "other")
    return sum(row[f"{name}_seconds"] for name in names)


@pytest.mark.parametrize("stale", [0, 1])
def test_processes_apart(stale, measured):
    report, (trains, draws) = measured(2, rollout_gpus=1, max_staleness=stale, beta=0.1)
    assert (report["processes"], report["rollout_gpus"], len(report["rows"])) == (2, 1, 2)
    assert trains.apart.stale == draws.apart.stale == bool(stale) and not trains.ranks.draws and draws.ranks.draws
    plan = "\n".join(report["plan"])
    assert "of a process that draws" in plan and "AdamW" in plan and "KV cache" in plan
    for row in report["rows"]:
        assert row.keys() == ONE_PROCESS | APART
        assert (row["samples"], row["tokens"]) == (6, 6 * (5 + 7))
        assert row["generate_seconds"] > 0 and row["reward_seconds"] is None
        assert min(row[f"{name}_seconds"] for name in ("train", "reference", "wait", "weights", "rollout_wait")) > 0
        assert (row["old_logprobs_seconds"] > 0) == bool(stale)
        assert in_order(row) == pytest.approx(row["seconds"]) and row["other_seconds"] < row["seconds"] / 2
        assert row["weights_bytes"] == sum(one.data.nbytes for one in trains.model.trained_store.buckets)
        assert row["largest_difference"] >= 0 and (stale or row["largest_difference"] < 1e-4)
        headings = [heading for _, heading, _ in columns("grpo", [row])]
        assert dict(zip(headings, cells("grpo", row), strict=True))["wait"] == f"{row['wait_seconds']:,.3f}"


def test_sizes_are_of_each_process_that_trains(measured):
    report, trainers = measured(3, rollout_gpus=1)
    assert report["rows"][0]["samples"] == 2 * 6
    assert [one.args.engine.max_num_seqs for one in trainers] == [12] * 3, "one process draws for two"
    report, trainers = measured(3, rollout_gpus=2, max_num_seqs=4)
    assert report["rows"][0]["samples"] == 6 and trainers[2].args.engine.max_num_seqs == 4


@pytest.mark.parametrize("balance", ["true", "false"])
def test_processes_that_do_both(balance, measured):
    report, trainers = measured(2, balance_rollouts=balance)
    assert (report["processes"], report["rollout_gpus"]) == (2, 0) and "of a process" not in "".join(report["plan"])
    moved = {"moved_groups", "balance_wait_seconds"} if balance == "true" else set()
    for row in report["rows"]:
        assert row.keys() == ONE_PROCESS | moved | {"generate_seconds_of_processes"}
        of_each = row["generate_seconds_of_processes"]
        assert row["samples"] == 12 and len(of_each) == 2 and min(of_each) > 0 and of_each[0] == row["generate_seconds"]
    assert [one.args.engine.max_num_seqs for one in trainers] == [6, 6]


def test_one_process_is_told_nothing_of_others(measured):
    report, (trainer,) = measured(1)
    assert report["processes"] == 1 and "rollout_gpus" not in report and trainer.args.engine.max_num_seqs == 6
    assert all(row.keys() == ONE_PROCESS for row in report["rows"])
    assert not {"wait", "weights sent"} & {heading for _, heading, _ in columns("grpo", report["rows"])}
    with pytest.raises(ValueError, match="rollout_gpus=1 takes some of several processes, and this is the only one"):
        grpo.run(GRPOBench(**SIZES, rollout_gpus=1))


@pytest.mark.mpi
@needs_mpi
def test_the_command_under_mpirun(tmp_path):
    words = [word for name, value in SIZES.items() for word in (f"--{name}", value)]
    words += ["--rollout_gpus", 1, "--max_staleness", 1, "--output", tmp_path / "rows.json"]
    done = subprocess.run(command(2, "cukit_cli.py", "bench", "grpo", *words), capture_output=True, text=True,
                          env=environment(COLUMNS="200"), timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "rows.json").read_text())
    assert done.stdout.count("bench grpo:") == 1 and "weights sent" in done.stdout
    assert (report["processes"], report["rollout_gpus"], len(report["rows"])) == (2, 1, 2)
