"""Commands of processes that share a model, without MPI: what they are told, and who speaks."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import cukit_cli
from cukit.bench import GenerateBench
from cukit.bench.generate import workloads
from cukit.commands import chat
from cukit.trainers import ranks

ROOT = Path(__file__).parents[2]
PAIR = ["--tensor_parallel_size", "2"]
BENCH = ["bench", "generate", "--model", "tiny", "--device", "cpu", "--workload", "decode", "--scale", "0.02"]


@pytest.mark.parametrize(
    "command", [["generate", "--prompt", "1+1="], BENCH, ["bench", "train", "--scale", "0.01"], ["eval"]]
)
def test_one_process_is_told_how_to_start_two(command, capsys):
    assert cukit_cli.main([*command, *PAIR]) == 2
    assert "this run has 1: start it with mpirun -n 2" in capsys.readouterr().err


def test_a_conversation_of_several_processes_needs_its_prompt(capsys):
    assert cukit_cli.main(["chat", *PAIR]) == 2
    assert "tensor_parallel_size=2 processes share the model" in (said := capsys.readouterr().err)
    assert "give --prompt" in said


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_of_them_speaks(rank, monkeypatch, capsys):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # put back at the end
    chat._let_one_speak(chat.ChatOptions(prompt="x", tensor_parallel_size=2))
    print("an answer")
    assert capsys.readouterr().out == ("an answer\n" if rank == 0 else "")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_command_of_one_process_is_not_done_twice(rank, monkeypatch, capsys):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
    assert cukit_cli.main(["doctor"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("cukit ") if rank == 0 else said.out == ""
    assert ("doctor is the work of one process, and 2 were started: the first does it" in said.err) == (rank == 0)


def test_an_evaluation_with_an_environment_shares_no_model(monkeypatch, capsys):
    watch = SimpleNamespace(timeout=0)
    monkeypatch.setattr(ranks, "Ranks", lambda options: SimpleNamespace(several=True, watch=watch))
    environment = f"{ROOT / 'tests/trainers/playing.py'}:Asking"
    assert cukit_cli.main(["eval", "--environment", environment, *PAIR, "--ddp_timeout", "7"]) == 2
    assert watch.timeout == 7
    assert "tensor_parallel_size=2 processes compute the same steps" in (said := capsys.readouterr().err)
    assert "leave out environment and tools" in said


@pytest.mark.parametrize("command", ["generate", "eval"])
def test_a_dry_run_plans_one_processs_part(command, monkeypatch, capsys):
    """No second process is needed for that; of several the first one shows it."""

    def weights(*more):
        assert cukit_cli.main([command, "--dry_run", "--device", "cpu", *more]) == 0
        lines = capsys.readouterr().out.splitlines()
        return float(next(line for line in lines if "model: weights" in line).split()[2])

    assert 0.5 * weights() < weights(*PAIR) < 0.8 * weights()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert cukit_cli.main([command, "--dry_run", "--device", "cpu", *PAIR]) == 0
    assert capsys.readouterr().out == ""


EVAL = ("--max_num_batched_tokens", "65536", "engine: prompts")
SFT = ("--max_tokens_per_batch", "65536", "--gradient_checkpointing", "none", "policy: activations")


@pytest.mark.parametrize("command, sizes", [("eval", EVAL), ("sft", SFT)])
def test_what_ranks_gather_is_planned(command, sizes, capsys, tmp_path):
    *options, item = sizes
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "1+1=", "completion": "2", "answer": "2"}\n')

    def planned(*more):
        words = [command, "--dry_run", "--device", "cpu", "--data", str(data), *PAIR, *options, *more]
        assert cukit_cli.main([*words, *(["--reward_funcs", "exact"] if command == "eval" else [])]) == 0
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.endswith(item))
        return float(line.split()[2])  # in GB

    assert planned("--tensor_parallel_invariant", "true") > planned()


def test_batches_of_the_decode_workload(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert cukit_cli.main([*BENCH, "--batches", "2", "3", "--repeats", "1", "--output", str(path)]) == 0
    report = json.loads(path.read_text())
    assert [row["workload"] for row in report["rows"]] == ["decode 2", "decode 3"]
    assert report["processes"] == 1
    assert [load.name for load in workloads("decode", 0.02, 0, 50)] == ["decode 1", "decode 8"]
    with pytest.raises(ValueError, match="batches must be at least 1, got 0"):
        GenerateBench(batches=[0])
