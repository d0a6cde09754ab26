"""How runs end early: a stop in any phase, an error, and what the next command finds (rows c5 and c7)."""

import os
import re
import shlex
import signal
import time
from itertools import count
from pathlib import Path

import pytest

import cukit_cli
from cukit.datasets import sources
from cukit.runs.checkpoint import latest_checkpoint, newest_model
from cukit.trainers.callbacks import TrainerCallback

from .conftest import assert_equal_weights, rows_without_times, share_of_ones


def advised_resume(text):
    """The arguments that the text advises to go on with, as train() takes them; None if it advises the same command."""
    found = re.search(r"go on with (--output_dir .*) --resume_from_checkpoint latest", text)
    if not found:
        assert "the same command starts it again" in text
        return None
    return shlex.split(found[1])[1]


def interrupt(number=signal.SIGINT):
    os.kill(os.getpid(), number)


# ---- c5: a stop in any phase -----------------------------------------------------------------------------------------

# phase -> (owner of the function, its name, the global_step at which it is struck, before it or after it)
PHASES = {
    "first evaluation": ("trainer", "run_evaluation", 0, "before"),
    "first generation": ("rollout", "generate", 0, "before"),
    "evaluation": ("trainer", "run_evaluation", 2, "before"),
    "last evaluation": ("trainer", "run_evaluation", 4, "after"),
    "generation": ("rollout", "generate", 1, "before"),
    "after generation": ("trainer", "make_batch", 1, "after"),
    "training": ("trainer", "compute_loss", 1, "before"),
    "update": ("trainer", "after_update", 1, "before"),
    "saving": ("tokenizer", "save", 2, "before"),
    "between": ("progress", "advance", 3, "after"),
}


class Strike(TrainerCallback):
    """A callback that arranges one signal in a phase of the run."""

    def __init__(self, phase, monkeypatch):
        self.phase, self.monkeypatch = phase, monkeypatch
        self.left = 1

    def on_train_begin(self, trainer):
        owner, name, step, when = PHASES[self.phase]
        owner = {"rollout": lambda: trainer.rollout, "trainer": lambda: trainer}.get(
            owner, lambda: getattr(trainer, owner)
        )()
        function = getattr(owner, name)

        def struck(*arguments, **keywords):
            result = function(*arguments, **keywords) if when == "after" else None
            if trainer.global_step == step and self.left:
                self.left = 0
                interrupt(signal.SIGTERM if step % 2 else signal.SIGINT)
            return result if when == "after" else function(*arguments, **keywords)

        self.monkeypatch.setattr(owner, name, struck)


@pytest.mark.parametrize("phase", PHASES)
def test_c5_a_stop_in_any_phase_loses_nothing(make_grpo, rows, monkeypatch, capsys, phase):
    """The run ends with success; what it prints works, and then all is as if nothing had happened, metrics too."""
    options = dict(max_steps=4, logging_steps=2, eval_dataset=rows[:4], eval_steps=2, lr_scheduler_type="linear")
    options |= dict(save_steps=2 if phase == "saving" else 0, eval_on_start=phase != "first generation")
    straight = make_grpo(**options)
    straight.train()
    with monkeypatch.context() as patch:
        strike = Strike(phase, patch)
        cut = make_grpo(**options, callbacks=[strike])
        capsys.readouterr()
        cut.train()
    folder = cut.args.output_dir
    assert not strike.left and (cut.global_step < 4 or phase == "last evaluation")
    assert cut.global_step == PHASES[phase][2] + (
        phase in ("training", "update")
    )  # a batch cut short is not trained on
    advice = advised_resume(capsys.readouterr().out)
    assert advice == (None if phase.startswith("first") else folder)
    resumed = make_grpo(**options | {"output_dir": folder})
    resumed.train(resume_from_checkpoint="latest" if advice else None)
    assert_equal_weights(straight, resumed)
    assert rows_without_times(folder) == rows_without_times(straight.run_folder)
    assert newest_model(folder) == Path(folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_c5_a_long_reward_is_cut(make_grpo, number, capsys):
    """A reward knows nothing of stops, and may swallow what it likes: it ends at once, and its step was never begun."""
    calls = count(1)

    def slow(completions, **_):
        if next(calls) == 2:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.2)
                time.sleep(30)
            except Exception:
                pass
        return share_of_ones(completions)

    before = signal.signal(signal.SIGALRM, lambda *_: interrupt(number))
    try:
        trainer, start = make_grpo(slow, max_steps=3), time.perf_counter()
        trainer.train()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.perf_counter() - start < 10 and trainer.global_step == 1
    resumed = make_grpo(max_steps=3, output_dir=advised_resume(capsys.readouterr().out))
    resumed.train(resume_from_checkpoint="latest")
    straight = make_grpo(max_steps=3)
    straight.train()
    assert_equal_weights(straight, resumed)


def test_c5_the_second_signal_ends_at_once(make_sft, monkeypatch):
    trainer = make_sft()

    def twice(micro_batch):
        interrupt()
        interrupt()
        raise AssertionError("the second signal did not end the run")

    monkeypatch.setattr(trainer, "compute_loss", twice)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert signal.getsignal(signal.SIGINT) is before and not trainer.stop_requested()


def test_c5_a_stop_when_nothing_is_done_leaves_no_folder(make_grpo, rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = make_grpo(output_dir=None, eval_dataset=rows[:2], callbacks=[Strike("first evaluation", monkeypatch)])
    trainer.train()
    assert not trainer.run_folder.exists() and not list((tmp_path / "runs").iterdir())


def test_c5_a_folder_of_the_users_own_stays(make_grpo, rows, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    strike = Strike("first evaluation", monkeypatch)
    make_grpo(output_dir=str(tmp_path / "mine"), eval_dataset=rows[:2], callbacks=[strike]).train()
    assert (tmp_path / "mine").is_dir()


def test_c5_a_callback_may_stop_the_run(make_sft, capsys):
    class Enough(TrainerCallback):
        def on_step_end(self, trainer, metrics):
            if trainer.global_step == 2:
                trainer.stop()

    trainer = make_sft(callbacks=[Enough()])
    trainer.train()
    assert trainer.global_step == 2 and advised_resume(capsys.readouterr().out) == str(trainer.run_folder)


# ---- errors in a run -------------------------------------------------------------------------------------------------


def test_c7_a_reward_that_raises_leaves_the_folder_free(make_grpo, rows, tmp_path):
    """Corrected, the same command runs: in the first evaluation, in the first step after an evaluation."""
    folder = str(tmp_path / "mine")
    for fails_at in (1, 2):
        calls = count(1)

        def broken(completions, calls=calls, fails_at=fails_at, **_):
            return [1 / 0] if next(calls) == fails_at else share_of_ones(completions)

        with pytest.raises(ValueError, match="ZeroDivisionError"):
            make_grpo(broken, output_dir=folder, eval_dataset=rows[:2]).train()
    trainer = make_grpo(output_dir=folder, eval_dataset=rows[:2], max_steps=1)
    trainer.train()
    assert [row["step"] for row in rows_without_times(folder)] == [0, 1, 1]  # nothing of the attempts is left


def test_c7_an_error_later_keeps_the_steps_before(make_grpo, capsys):
    """A reward that raises at step 3 of 5: two steps are saved, the advice works, the result is the undisturbed one."""
    calls = count(1)

    def breaks(completions, **_):
        return [None] if next(calls) == 3 else share_of_ones(completions)

    trainer = make_grpo(breaks, max_steps=5)
    with pytest.raises(ValueError, match="returned 1 values"):
        trainer.train()
    folder = advised_resume(capsys.readouterr().out)
    with pytest.raises(ValueError, match="already holds a run; .* --resume_from_checkpoint latest"):
        make_grpo(max_steps=5, output_dir=folder).train()
    resumed = make_grpo(max_steps=5, output_dir=folder)
    resumed.train(resume_from_checkpoint="latest")
    straight = make_grpo(max_steps=5)
    straight.train()
    assert_equal_weights(straight, resumed)


def test_sys_exit_in_a_callback_keeps_the_steps_before(make_sft, capsys):
    class Leaves(TrainerCallback):
        def on_step_end(self, trainer, metrics):
            if trainer.global_step == 2:
                raise SystemExit(5)

    trainer = make_sft(callbacks=[Leaves()], max_steps=4)
    with pytest.raises(SystemExit):
        trainer.train()
    found = latest_checkpoint(trainer.run_folder)
    assert found is not None and found.name == "checkpoint-2"
    assert "ends the run after step 2 of 4; the steps are saved" in capsys.readouterr().out


def test_callbacks_of_another_form_are_refused_before_the_run(make_sft):
    class Transformers:
        def on_save(self, args, state, control, **kwargs):
            """As transformers' callbacks have it."""

    class Ours(TrainerCallback):
        pass

    with pytest.raises(ValueError, match=r"^callbacks: Transformers.on_save is called with \(trainer, folder\)"):
        make_sft(callbacks=[Transformers()])
    with pytest.raises(ValueError, match=r"^callbacks: Ours.on_train_begin is called with \(trainer\)"):
        make_sft(callbacks=[Ours])
    make_sft(callbacks=[Ours(), object()])


@pytest.mark.parametrize("logging_steps", [1, 2, 3])
def test_an_error_in_a_callback_loses_no_row(make_sft, logging_steps):
    """At each step: what the run has logged after the resume is what an undisturbed one logs."""

    class Fails(TrainerCallback):
        def __init__(self, step):
            self.step = step

        def on_step_end(self, trainer, metrics):
            if trainer.global_step == self.step:
                raise RuntimeError("a callback's")

    straight = make_sft(logging_steps=logging_steps, max_steps=4)
    straight.train()
    for step in range(1, 4):
        cut = make_sft(logging_steps=logging_steps, max_steps=4, callbacks=[Fails(step)])
        with pytest.raises(RuntimeError):
            cut.train()
        resumed = make_sft(logging_steps=logging_steps, max_steps=4, output_dir=str(cut.run_folder))
        resumed.train(resume_from_checkpoint="latest")
        assert rows_without_times(cut.run_folder) == rows_without_times(straight.run_folder)


def test_an_error_in_on_evaluate_leaves_one_evaluation(make_sft):
    """It was logged and compared before the callback: the resumed run does not make it again."""

    class Fails(TrainerCallback):
        def on_evaluate(self, trainer, metrics):
            if trainer.global_step == 2:
                raise RuntimeError("a callback's")

    rows = [{"prompt": "1+1=", "completion": "2"}]
    options = dict(max_steps=4, evaluate=rows, eval_steps=1, save_steps=0, load_best_model_at_end=True)
    straight = make_sft(**options)
    straight.train()
    cut = make_sft(**options, callbacks=[Fails()])
    with pytest.raises(RuntimeError):
        cut.train()
    resumed = make_sft(**options, output_dir=str(cut.run_folder))
    resumed.train(resume_from_checkpoint="latest")
    assert rows_without_times(cut.run_folder) == rows_without_times(straight.run_folder)
    assert resumed.best.state() == straight.best.state() and resumed.best.step == 4


def test_c7_only_advice_that_works(make_sft, tmp_path):
    """A run that was killed before its first checkpoint cannot be continued, and nothing says so."""
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut/metrics.jsonl").write_text('{"step": 7, "loss": 1.0}\n')
    with pytest.raises(ValueError, match="logged 7 steps and has no checkpoint") as error:
        make_sft(output_dir=str(tmp_path / "cut")).train()
    assert "resume" not in str(error.value)


def test_an_error_in_an_update_saves_nothing(make_sft, monkeypatch):
    """Half an update is no state to resume from: the newest checkpoint is the one before."""
    trainer = make_sft(save_steps=2)

    def fails():
        if trainer.global_step == 3:
            raise RuntimeError("in the middle")

    monkeypatch.setattr(trainer, "after_update", fails)
    with pytest.raises(RuntimeError):
        trainer.train()
    assert latest_checkpoint(trainer.run_folder).name == "checkpoint-2"


def test_sigterm_while_rows_load_is_kept_until_the_first_step(monkeypatch, tmp_path, capfd):
    load, before, numbers = sources.load_rows, signal.getsignal(signal.SIGTERM), [signal.SIGTERM]

    def signalled(*given):
        if numbers:
            os.kill(os.getpid(), numbers.pop())
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # once more ends at once
        return load(*given)

    monkeypatch.setattr(sources, "load_rows", signalled)
    code = cukit_cli.main(["sft", "--output_dir", str(tmp_path / "run"), "--device", "cpu"])
    captured = capfd.readouterr()
    assert code == 130 and "stopped before the first step; nothing was saved" in captured.out + captured.err
    assert captured.err.count("stopping before the first step, once models and rows are loaded") == 1
    assert signal.getsignal(signal.SIGTERM) is before and not (tmp_path / "run").exists()
