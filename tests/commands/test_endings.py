"""How commands end, and what they are fed: exit codes, pipes, stdin, conversations, run folders, dry runs."""

import builtins
import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

import cukit_cli
from cukit import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from cukit.commands.chat import Chat
from cukit.commands.evaluate import report
from cukit.commands.generate import GenerateOptions
from cukit.commands.parser import make
from cukit.commands.train import program
from cukit.trainers.trainer import Trainer

ROOT = Path(__file__).parents[2]


def shell(line: str, **more) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PY": sys.executable, "CLI": str(ROOT / "cukit_cli.py")}
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment, **more)


@pytest.fixture
def doctor_raises(monkeypatch):
    def set_up(error):
        def run(values):
            raise error

        monkeypatch.setitem(cukit_cli.COMMANDS, "doctor", replace(cukit_cli.COMMANDS["doctor"], run=run))

    return set_up


# ---- e9: one line ----------------------------------------------------------------------------------------------------


class _DeviceMemory(MemoryError):
    """As CuPy's OutOfMemoryError."""


_Runtime = type("CUDARuntimeError", (RuntimeError,), {"__module__": "cupy_backends.cuda.api.runtime"})
_Ours = type("CUDARuntimeError", (RuntimeError,), {"__module__": "cupy_backends.cuda.api.runtime"})


@pytest.mark.parametrize(
    "error, code, message",
    [
        (MemoryError(), 1, "out of memory (no more to be had); use less"),
        (
            _DeviceMemory("Out of memory allocating 12 bytes\n(allocated so far: 3)"),
            1,
            "allocating 12 bytes (allocated",
        ),
        (_Runtime("cudaErrorMemoryAllocation: out of memory"), 1, "out of memory (cudaErrorMemoryAllocation"),
        (PermissionError(13, "Permission denied", "/root/x"), 1, "error: /root/x: Permission denied"),
        (OSError(28, "No space left on device"), 1, "error: No space left on device"),
        (OSError("cannot"), 1, "error: cannot"),
        (ValueError("two\nlines"), 2, "error: two lines"),
    ],
)
def test_e9_what_a_user_or_the_machine_causes_is_one_line(doctor_raises, capsys, error, code, message):
    doctor_raises(error)
    assert cukit_cli.main(["doctor"]) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0]


def test_e9_other_errors_of_the_device_keep_their_traceback(doctor_raises):
    doctor_raises(_Ours("cudaErrorIllegalAddress: an illegal memory access"))
    with pytest.raises(RuntimeError, match="IllegalAddress"):
        cukit_cli.main(["doctor"])


def test_e9_seeds_are_checked_against_64_bits(fails):
    steps = ["--max_steps", "1", "--dry_run"]
    for command in (["sft", *steps], ["grpo", *steps], ["generate", "--prompt", "x"], ["eval"], ["bench", "generate"]):
        assert "seed must be at least 0 and at most" in fails(*command, "--seed", "99999999999999999999999")
    assert SFTConfig(seed=2**64 - 1).seed == 2**64 - 1


def test_e9_a_config_written_through_the_python_api_reads_back_with_another_batch_size(options, tiny, tmp_path):
    args = GRPOConfig(per_device_train_batch_size=8, num_generations=4, max_completion_length=2, max_steps=1)
    args.output_dir = str(tmp_path / "run")
    rows = [{"prompt": "1"}, {"prompt": "2"}]
    GRPOTrainer(str(tiny), [lambda completions, **_: [1.0] * len(completions)], args, rows).train()
    path = str(tmp_path / "run" / "config.yaml")
    again = make(GRPOConfig, options("grpo", "--config", path, "--per_device_train_batch_size", "4"))
    assert (again.generation_size, again.num_slices) == (4, 1)
    again = make(GRPOConfig, options("grpo", "--config", path, "--gradient_accumulation_steps", "3"))
    assert (again.generation_size, again.num_slices) == (24, 1)


# ---- c14 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["kernels", "bench"])
def test_c14_commands_of_two_words_have_help(first, capsys):
    with pytest.raises(SystemExit) as end:
        cukit_cli.main([first, "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert all(name in text for name in cukit_cli.COMMANDS if name.startswith(f"{first} ")) and "\n  sft" not in text


def test_c14_a_closed_pipe_is_no_traceback():
    ended = shell('"$PY" "$CLI" doctor | head -1; echo "${PIPESTATUS[0]}"')
    first, code = ended.stdout.splitlines()
    assert first.startswith("cukit ") and code in ("0", "141") and ended.stderr == ""
    ended = shell('"$PY" "$CLI" doctor | true; echo "${PIPESTATUS[0]}"')
    assert ended.stdout == "141\n" and ended.stderr == ""


def test_c14_python_dash_m():
    ended = shell('"$PY" -m cukit --version && "$PY" -m cukit eval --limit 0', cwd="/")
    assert ended.stdout.startswith("cukit ") and ended.returncode == 2 and "limit must be at least 1" in ended.stderr


def test_c14_a_prompt_on_stdin_is_answered(tiny, monkeypatch, capsys, fails):
    argv = ["generate", "--model", str(tiny), "--max_tokens", "4", "--temperature", "0"]
    assert cukit_cli.main([*argv, "--prompt", "1+2"]) == 0
    answered = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("1+2\n"))
    assert cukit_cli.main(argv) == 0
    assert capsys.readouterr().out == answered
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "stdin is empty" in fails(*argv)


def test_c14_ctrl_c_ends_the_answer_and_keeps_the_conversation(monkeypatch, capsys):
    asked, closed = [], []

    class Stream:
        def __init__(self, words):
            self.words = iter(words)

        def __iter__(self):
            return self

        def __next__(self):
            word = next(self.words)
            if word is KeyboardInterrupt:
                raise KeyboardInterrupt
            self.text = getattr(self, "text", "") + word
            output = SimpleNamespace(text=self.text, text_delta=word, token_ids=[1], finish_reason=None)
            return SimpleNamespace(outputs=[output], prompt_token_ids=[1], num_cached_tokens=0)

        def close(self):
            closed.append(True)

    answers = iter([["a long ", "answer", KeyboardInterrupt], ["yes"]])

    class Model:
        tokenizer = SimpleNamespace(
            has_chat_template=True,
            render_chat=lambda messages, **_: asked.append([message["content"] for message in messages]) or "",
            encode=lambda text: [1],
            decode=lambda ids, skip_special_tokens: "?",
        )
        config = SimpleNamespace(max_model_len=99)

        def generate(self, prompts, sampling, stream):
            return Stream(next(answers))

    lines = iter(["first", KeyboardInterrupt, "second"])

    def read(prompt):
        line = next(lines, None)
        if line is None:
            raise EOFError
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr(builtins, "input", read)
    Chat(Model(), make(GenerateOptions, {"model": "m"})).converse()
    assert asked == [["first"], ["first", "a long answer", "second"]] and closed == [True, True]
    assert "a long answer" in capsys.readouterr().out


def test_c14_ctrl_c_ends_a_command_with_a_prompt():
    def interrupted(*_, **__):
        raise KeyboardInterrupt
        yield

    llm = SimpleNamespace(tokenizer=None, generate=interrupted)
    options = make(GenerateOptions, {"raw": True})
    with pytest.raises(KeyboardInterrupt):
        Chat(llm, options, raw=True).answer("x")


def test_c14_lines_of_a_conversation_are_read_with_readline(monkeypatch):
    seen = []
    monkeypatch.setattr(builtins, "input", lambda prompt: seen.append("readline" in sys.modules) or "/exit")
    monkeypatch.delitem(sys.modules, "readline", raising=False)
    llm = SimpleNamespace(tokenizer=SimpleNamespace(has_chat_template=True))
    Chat(llm, make(GenerateOptions, {})).converse()
    monkeypatch.setitem(sys.modules, "readline", None)  # a Python without it
    Chat(llm, make(GenerateOptions, {})).converse()
    assert seen == [True, True]


def test_c14_measurements_show_progress_on_stderr(capsys):
    words = "bench kernels --model tiny --device cpu --tokens 8 --sequences 1 --repeats 1 --batch_milliseconds 0.1"
    assert cukit_cli.main([*words.split(), "--only", "embedding_forward", "store_kv"]) == 0
    assert "1 of 3: embedding_forward" in (shown := capsys.readouterr().err) and "3 of 3: store_kv" in shown


@pytest.mark.slow
def test_c14_pytest_slow_needs_no_gpu():
    def chosen(*words):
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/gpu", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        return [line for line in ended.stdout.splitlines() if "::" in line]

    assert chosen("-m", "slow") == []
    assert len(chosen("-m", "gpu and slow")) >= 7


# ---- c12, c13 --------------------------------------------------------------------------------------------------------


def test_c12_run_folders_are_taken_as_models(tiny, options, capsys, tmp_path, fails, write_checkpoint):
    run = tiny.parent
    argv = ["generate", "--model", str(run), "--prompt", "1+2", "--max_tokens", "3", "--temperature", "0"]
    assert cukit_cli.main(argv) == 0
    first = capsys.readouterr()
    assert f"model: {run}" in first.err
    argv[2] = str(tiny)
    assert cukit_cli.main(argv) == 0
    second = capsys.readouterr()
    assert second.out == first.out and "model: " not in second.err
    # before the end of a run it stands for its newest checkpoint, for every command
    unfinished = tmp_path / "grpo-001"
    for step in (1, 2, 10):
        write_checkpoint(unfinished / f"checkpoint-{step}")
    (unfinished / "config.yaml").write_text("model: m\n")
    for command in ("grpo", "sft", "generate", "eval", "bench generate"):
        newest = str(unfinished / "checkpoint-10")
        assert options(*command.split(), "--model", str(unfinished))["model"] == newest
        assert f"model: {newest} (the newest checkpoint" in capsys.readouterr().err
    (unfinished / "config.yaml").unlink()  # a copy of its checkpoints alone
    assert options("eval", "--model", str(unfinished))["model"] == newest
    empty = tmp_path / "grpo-002"
    empty.mkdir()
    (empty / "config.yaml").write_text("model: m\n")
    assert "run folder without a model" in fails("generate", "--model", empty, "--prompt", "x")


def test_c12_the_last_line_is_the_command_to_talk_to_the_result(tiny):
    last = (tiny.parents[1] / "printed.txt").read_text().splitlines()[-1]
    command = last.removeprefix("talk to it: ").replace("python cukit_cli.py", '"$PY" "$CLI"')
    ended = shell(f"echo 1+2 | {command} --max_tokens 3")
    assert ended.returncode == 0 and ended.stdout.strip(), ended.stderr


CALLS = {
    "/usr/bin/cukit": "cukit",
    "/x/cukit/__main__.py": "python -m cukit",
    "cukit_cli.py": "python cukit_cli.py",
    "../my cukit/cukit_cli.py": "python '../my cukit/cukit_cli.py'",
    "/x/pytest/__main__.py": "python cukit_cli.py",
}


def test_the_program_is_named_as_it_was_called(monkeypatch):
    for called, name in CALLS.items():
        monkeypatch.setattr(sys, "argv", [called])
        assert program() == name


def test_c13_eval_warns_when_completions_are_cut_and_counts_what_the_reward_left_out(tiny, capsys, tmp_path):
    argv = ["eval", "--model", str(tiny), "--limit", "4", "--max_tokens", "1", "--ignore_eos"]
    assert cukit_cli.main(argv) == 0
    assert "warning: 100% of the completions were cut off at max_tokens=1" in capsys.readouterr().err
    scores = np.array([[1.0], [np.nan], [0.0], [np.nan], [1.0]])
    lines = report("d", ["r"], scores, np.zeros(5, bool), np.ones(5), np.zeros(5, bool), 1.0)
    assert lines[0] == "accuracy 0.6667 (2 of 3; the reward did not apply to 2 more; d)"
    with pytest.raises(ValueError, match="applies to no row of d"):
        report(
            "d",
            ["r"],
            scores * np.nan,
            np.zeros(5, bool),
            np.ones(5),
            np.zeros(5, bool),
            1.0,
        )


# ---- dry runs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def plans(monkeypatch):
    """What the planner is asked; a stand-in answers."""
    asked = []

    def answered(*question):
        asked.append(question)
        return SimpleNamespace(level="none", table=lambda: "weights  1 GB\ncache    2 GB")

    monkeypatch.setattr(
        "cukit.engine.memory.plan_memory", lambda uses, engine, backend, **_: answered(uses, engine, backend.name)
    )
    plan = lambda self, *uses, **sizes: answered(self.model.config, self.model.dtype, self.args)  # noqa: E731
    for trainer in (Trainer, SFTTrainer, GRPOTrainer):
        monkeypatch.setattr(trainer, "plan_memory", plan, raising=False)
    return asked


def test_dry_run_asks_the_planner_that_a_run_asks(capsys, tmp_path, monkeypatch):
    """No stand-in: the table of a dry run is that of the run, though the weights of the run are already there."""
    monkeypatch.chdir(tmp_path)
    assert cukit_cli.main(["grpo", "--device", "cpu", "--dry_run", "--beta", "0.1", "--num_kv_blocks", "64"]) == 0
    lines = [line.removeprefix("# ") for line in capsys.readouterr().out.splitlines() if line.startswith("# ")]
    assert any("reference: weights" in line for line in lines) and any("KV cache, 64 blocks" in line for line in lines)
    argv = [
        "grpo",
        "--device",
        "cpu",
        "--beta",
        "0.1",
        "--num_kv_blocks",
        "64",
        "--max_steps",
        "1",
        "--output_dir",
        "r",
    ]
    assert cukit_cli.main([*argv, "--eval_on_start", "false", "--output_dir", "r"]) == 0
    said = capsys.readouterr().err
    assert all(line in said for line in lines if not line.startswith(("steps", "left"))), (lines, said)


def test_dry_run_of_training_prints_options_steps_and_the_plan(plans, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["--device", "cpu", "--num_train_epochs", "2", "--beta", "0.1", "--exact", "true"]
    assert cukit_cli.main(["grpo", *argv, "--dry_run"]) == 0
    text = capsys.readouterr().out
    rows = len((ROOT / "data/arithmetic/train.jsonl").read_text().splitlines())
    assert f"# steps: {-(-2 * rows // 16)}\n" in text and text.endswith("# weights  1 GB\n# cache    2 GB\n")
    ((config, dtype, args),) = plans
    assert config.hidden_size == 128 and dtype == np.float32 and args.engine.exact == "true"
    assert list(tmp_path.iterdir()) == []  # no run folder
    values = yaml.safe_load(text)  # and what it prints is a configuration
    assert values["beta"] == 0.1 and values["exact"] == "true" and "max_steps" not in values and "dry_run" not in values
    (tmp_path / "run.yaml").write_text(text)
    assert cukit_cli.main(["grpo", "--config", "run.yaml", "--dry_run"]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("packing", ["true", "false"])
def test_dry_run_counts_the_steps_that_a_trainer_counts(plans, capsys, tmp_path, packing):
    lines = (ROOT / "data/arithmetic/sft.jsonl").read_text().splitlines()[:50]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    argv = ["--model", "data/tiny-qwen3", "--data", str(tmp_path / "rows.jsonl"), "--packing", packing]
    assert cukit_cli.main(["sft", *argv, "--max_length", "128", "--dry_run"]) == 0
    args = SFTConfig(packing=packing == "true", max_length=128)
    trainer = SFTTrainer(str(ROOT / "data/tiny-qwen3"), args, str(tmp_path / "rows.jsonl"))
    assert f"# steps: {trainer.total_steps}\n" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["generate", "eval"])
def test_dry_run_of_an_engine(plans, capsys, command):
    assert cukit_cli.main([command, "--dry_run", "--max_num_seqs", "3", "--device", "cpu"]) == 0
    (([use], engine, backend),) = plans
    assert (use.name, use.dtype, use.loaded, engine.max_num_seqs, backend) == ("model", np.float32, False, 3, "cpu")
    values = yaml.safe_load(capsys.readouterr().out)
    assert values["max_num_seqs"] == 3 and values["temperature"] == (0.0 if command == "eval" else 1.0)
