"""report_to, run_name and project on their way to a dashboard; what a run sends there, and when."""

import importlib.util

import numpy as np
import pytest

from cukit.runs.metrics import read_jsonl
from cukit.runs.reporters import REPORTERS, Reporter
from cukit.trainers.config import SFTConfig
from cukit.trainers.grpo_config import GRPOConfig

from .conftest import demonstrations


@pytest.fixture
def recorder(monkeypatch):
    """A dashboard in wandb's place that keeps what it gets: its runs, each a list of calls."""

    class Recorder(Reporter):
        package = "json"
        runs: list = []

        def __init__(self, run, former):
            self.id, self.calls = f"id{len(self.runs)}", [("open", run, former)]
            self.runs.append(self.calls)

        def log(self, step, metrics):
            self.calls.append(("log", step, metrics))

        def log_completions(self, step, rows, name="completions"):
            self.calls.append((name, step, rows))

        def close(self):
            self.calls.append(("close",))

    monkeypatch.setitem(REPORTERS, "wandb", Recorder)
    return Recorder


def sent(calls, what="log"):
    return [call[1:] for call in calls if call[0] == what]


def test_a_run_sends_every_row_under_transformers_names(make_grpo, recorder, rows):
    named = {"report_to": ["wandb"], "run_name": "mine", "project": "ours", "log_completions": True}
    trainer = make_grpo(eval_dataset=rows[:4], max_steps=4, logging_steps=2, **named)
    trainer.train()
    (calls,) = recorder.runs
    _, run, former = calls[0]
    assert (run.folder, run.name, run.project, run.resume_step, former) == (
        trainer.run_folder, "mine", "ours", None, None,
    )  # fmt: skip
    assert run.config == trainer.run_config() and run.config["learning_rate"] == 1e-2
    written = read_jsonl(trainer.run_folder / "metrics.jsonl")
    assert [step for step, _ in sent(calls)] == [row["step"] for row in written] == [0, 2, 4, 4]
    for row, (step, metrics) in zip(written, sent(calls)):
        renamed = {name if name.startswith("eval/") else f"train/{name}": value for name, value in row.items()}
        wanted = {name: value for name, value in renamed.items() if value is not None and name != "train/step"}
        assert metrics == wanted | {"train/global_step": step}
    tables = sent(calls, "completions")
    assert [step for step, _ in tables] == [2, 4] and {row["step"] for _, found in tables for row in found} == {2, 4}
    assert len(tables[0][1]) == 4 and {"prompt", "completion", "share_of_ones", "advantage"} <= tables[0][1][0].keys()
    assert [step for step, _ in sent(calls, "eval/completions")] == [0, 4]
    assert calls[-1] == ("close",) and calls.count(("close",)) == 1


def test_ppos_metrics_are_sent(make_ppo, recorder):
    trainer = make_ppo(report_to=["wandb"], cliprange_value=None, log_completions=True)
    trainer.train()
    (calls,) = recorder.runs
    (_, first), (_, second) = sent(calls)
    for name in ("objective/kl", "loss/value_avg", "val/ratio", "critic/explained_variance", "grad_norm/critic", "eps"):
        assert isinstance(first[f"train/{name}"], float) and isinstance(second[f"train/{name}"], float), name
    assert calls[0][1].config["cliprange_value"] is None and len(sent(calls, "completions")) == 2


def test_a_resumed_run_goes_on_under_its_id(make_sft, recorder, tmp_path):
    folder = str(tmp_path / "run")
    first = make_sft(output_dir=folder, report_to="wandb", save_steps=2)
    first.callbacks.append(type("Stop", (), {"on_step_end": lambda self, trainer, metrics: trainer.stop()})())
    first.train()
    make_sft(output_dir=folder, report_to="wandb").train(resume_from_checkpoint="latest")
    one, two = recorder.runs
    assert two[0][1].resume_step == 1 and two[0][2] == "id0"
    assert [step for step, _ in sent(one)] == [1] and [step for step, _ in sent(two)] == [2, 3, 4]
    assert one[-1] == two[-1] == ("close",)
    # a resume into another folder is another run
    make_sft(output_dir=str(tmp_path / "other"), report_to="wandb", max_steps=5).train(resume_from_checkpoint=folder)
    assert recorder.runs[2][0][1].resume_step is None and recorder.runs[2][0][2] is None


def test_an_error_closes_the_dashboard_and_a_run_without_one_opens_none(make_sft, recorder):
    class Broken(Exception):
        pass

    def fail(self, trainer, metrics):
        raise Broken

    with pytest.raises(Broken):
        make_sft(report_to="wandb", callbacks=[type("Fail", (), {"on_step_end": fail})()]).train()
    assert recorder.runs[0][-1] == ("close",)
    for nothing in ("none", None, []):
        trainer = make_sft(report_to=nothing, max_steps=1)
        trainer.train()
        assert len(recorder.runs) == 1 and not (trainer.run_folder / "dashboards.json").exists()


def test_dashboards_change_no_number_of_a_run(make_sft, recorder):
    first, second = make_sft(report_to="wandb,tensorboard"), make_sft()
    losses = [[row["loss"] for row in read_jsonl(one.run_folder / "metrics.jsonl")] for one in (first, second)
              if one.train()]  # fmt: skip
    np.testing.assert_array_equal(*losses)


@pytest.mark.parametrize(
    "given, names",
    [
        ("trackio,wandb", ["trackio", "wandb"]),
        (["tensorboard", " WandB"], ["tensorboard", "wandb"]),
        ("wandb,wandb", ["wandb"]),
        ("none", []),
        ("None", []),
        ([], []),
        (None, None),
    ],
)
def test_report_to_is_a_list_of_names(given, names):
    assert SFTConfig(report_to=given).report_to == names
    assert GRPOConfig(report_to=names).report_to == names  # as a run's config.yaml says it


@pytest.mark.parametrize(
    "given, named", [("mlflow", "'mlflow'"), ("wandb,none", "'none'"), ("all", "'all'"), ("", "''")]
)
def test_other_dashboards_are_refused(given, named):
    with pytest.raises(ValueError, match=f"trackio, wandb, tensorboard, or none alone, got {named}"):
        SFTConfig(report_to=given)


def test_a_missing_package_is_said_before_anything_runs(make_sft, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"report_to=trackio needs trackio, .*pip install 'cukit\[trackio\]'"):
        make_sft(report_to="trackio", model="no folder", rows=demonstrations(), output_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
