"""The loop that trainers share: callbacks, options of a resumed run, saving, the final model, resume."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import yaml

import cukit_cli
from cukit import SFTTrainer
from cukit.engine.shapes import ModelUse
from cukit.models import weights
from cukit.models.weights import load_model
from cukit.runs.checkpoint import SaveError, latest_checkpoint, list_checkpoints, load_checkpoint, newest_model
from cukit.trainers.callbacks import TrainerCallback
from cukit.trainers.state import TrainedModel

from .conftest import assert_equal_weights, demonstrations, logged, rows_without_times, weights_of

GOLDEN = Path(__file__).parents[1] / "golden"


# ---- callbacks -------------------------------------------------------------------------------------------------------


def test_an_exception_in_a_callback_names_it(make_sft):
    class Broken:
        def on_log(self, trainer, row):
            raise LookupError("mine")

    with pytest.raises(LookupError) as error:
        make_sft(callbacks=[Broken()]).train()
    assert error.value.__notes__ == ["raised by the callback Broken.on_log"]


def test_every_hook_of_a_callback_is_called(make_sft):
    calls = []
    hooks = [name for name in vars(TrainerCallback) if name.startswith("on_")]
    watch = type("Watch", (), {name: lambda self, *_, name=name: calls.append(name) for name in hooks})()
    make_sft(callbacks=[watch, TrainerCallback()], evaluate=demonstrations(2), eval_steps=2, save_steps=2).train()
    assert calls[0] == "on_train_begin" and calls[-1] == "on_train_end" and set(calls) == set(hooks)
    assert calls.count("on_save") == 2 and calls.count("on_step_end") == 4 and calls.count("on_evaluate") == 2


def test_the_plan_of_memory_stands_in_the_first_lines(make_sft, make_model, caplog):
    """Every named model is in it, and what a method adds."""

    class Planned(SFTTrainer):
        def plan_memory(self):
            return super().plan_memory(ModelUse("reference", self.model.config, self.model.dtype), packed_tokens=10**6)

    trainer = make_sft(cls=Planned, max_steps=1)
    names = [item.name for item in trainer.plan.items]
    assert "policy: AdamW's moments" in names and "reference: weights in float32" in names
    assert "reference: AdamW's moments" not in names and trainer.plan.peak_bytes > 40e6
    with caplog.at_level("INFO", "cukit"):
        trainer.train()
    assert f"run folder {trainer.run_folder}, steps 0 of 1" in caplog.messages[0]
    assert caplog.messages[1] == f"memory:\n{trainer.plan.table()}"


# ---- c6: options of a resumed run ------------------------------------------------------------------------------------


def test_c6_config_says_what_runs_now(make_sft, tmp_path):
    folder = tmp_path / "run"
    make_sft(output_dir=str(folder), max_steps=2).train()
    make_sft(output_dir=str(folder), max_steps=2, resume_from_checkpoint="latest").train()  # nothing changed
    assert not list(folder.glob("config.step-*"))
    make_sft(output_dir=str(folder), max_steps=4, learning_rate=1e-3).train(resume_from_checkpoint=str(folder))
    now, before = (yaml.safe_load((folder / name).read_text()) for name in ("config.yaml", "config.step-2.yaml"))
    assert (now["max_steps"], now["learning_rate"]) == (4, 1e-3)
    assert (before["max_steps"], before["learning_rate"]) == (2, 1e-2)
    assert "resume_from_checkpoint" not in now


def test_c6_a_plain_resume_goes_on_with_the_options_of_now(tmp_path, monkeypatch):
    """The command line: 2 steps; 6 steps at another rate, killed after 4; a plain resume ends at 6 with that rate."""
    run, loss = str(tmp_path / "run"), SFTTrainer.compute_loss
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in demonstrations(12)))
    small = ["--logging_steps", "1", "--per_device_train_batch_size", "2", "--data", str(tmp_path / "rows.jsonl")]
    assert cukit_cli.main(["sft", "--output_dir", run, "--max_steps", "2", *small]) == 0

    def killed(self, micro_batch):
        if self.global_step == 4:
            raise KeyboardInterrupt
        return loss(self, micro_batch)

    monkeypatch.setattr(SFTTrainer, "compute_loss", killed)
    changes = ["--max_steps", "6", "--learning_rate", "5e-4", "--save_steps", "1", "--lr_scheduler_type", "constant"]
    assert cukit_cli.main(["sft", "--resume_from_checkpoint", run, *changes]) == 130
    monkeypatch.setattr(SFTTrainer, "compute_loss", loss)
    assert cukit_cli.main(["sft", "--resume_from_checkpoint", run]) == 0
    rates = [row["learning_rate"] for row in rows_without_times(run)]
    assert len(rates) == 6 and rates[2:] == [5e-4] * 4 and newest_model(run) == Path(run)


def test_c6_a_run_of_another_method_is_refused(make_sft, make_grpo, tmp_path):
    make_sft(output_dir=str(tmp_path / "run"), max_steps=1).train()
    trainer = make_grpo(output_dir=str(tmp_path / "run"))
    with pytest.raises(ValueError, match="run was made by sft, not grpo; to go on with it: cukit sft --resume_from_ch"):
        trainer.train(resume_from_checkpoint="latest")
    (tmp_path / "run/run.json").unlink()
    with pytest.raises(ValueError, match="checkpoint-1 holds no state of grpo: it lacks 'updates_a_generation'"):
        trainer.train(resume_from_checkpoint="latest")


def test_c6_a_refused_resume_changes_nothing(make_sft, tmp_path):
    folder = tmp_path / "run"
    make_sft(output_dir=str(folder)).train()
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    with pytest.raises(ValueError, match="is at step 4, beyond this run's 2 steps; raise max_steps"):
        make_sft(output_dir=str(folder), max_steps=2).train(resume_from_checkpoint="latest")
    with pytest.raises(ValueError, match="num_rows=12, this run has 11"):
        make_sft(output_dir=str(folder), max_steps=8, rows=demonstrations(11)).train(resume_from_checkpoint="latest")
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_c6_checkpoints_of_an_abandoned_way_are_not_the_latest(make_sft, tmp_path):
    """Resumed from step 2 of 4 with another rate and cut at step 3: `latest` is then step 3 of the new way."""
    folder = tmp_path / "run"
    make_sft(output_dir=str(folder), save_steps=2).train()
    again = make_sft(
        output_dir=str(folder), learning_rate=1e-3, save_steps=2, callbacks=[type("S", (), {"on_log": stop_at_3})()]
    )
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert latest_checkpoint(folder).name == "checkpoint-3" and (folder / "checkpoint-4.before-2").is_dir()
    assert newest_model(folder) == folder / "checkpoint-3"


def stop_at_3(self, trainer, row):
    if trainer.global_step == 3:
        trainer.stop()


def test_resuming_into_a_folder_of_another_run_is_refused(make_sft, tmp_path):
    first, second = (make_sft(output_dir=str(tmp_path / name), max_steps=1) for name in "ab")
    first.train()
    second.train()
    with pytest.raises(ValueError, match="already holds a run"):
        make_sft(output_dir=str(tmp_path / "b")).train(resume_from_checkpoint=str(tmp_path / "a"))
    third = make_sft(output_dir=str(tmp_path / "c"))
    third.train(resume_from_checkpoint=str(tmp_path / "a"))
    assert third.global_step == 4 and [row["step"] for row in rows_without_times(tmp_path / "c")] == [2, 3, 4]


# ---- c8: no room -----------------------------------------------------------------------------------------------------


class FullDisk:
    """save_file as on a disk without room while `full`; writes a part of the file first."""

    def __init__(self, save_file):
        self.save_file, self.full = save_file, False

    def __call__(self, tensors, path, **more):
        if self.full:
            Path(path).write_bytes(b"a part")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return self.save_file(tensors, path, **more)


@pytest.fixture
def disk(monkeypatch):
    disk = FullDisk(weights.save_file)
    monkeypatch.setattr(weights, "save_file", disk)
    return disk


def test_c8_a_periodic_save_that_fails_ends_nothing(make_sft, disk, caplog):
    class Fill:
        def on_step_end(self, trainer, metrics):
            disk.full = trainer.global_step == 2

    trainer = make_sft(save_steps=1, callbacks=[Fill()])
    trainer.train()
    assert [path.name for path in list_checkpoints(trainer.run_folder)] == [
        "checkpoint-1",
        "checkpoint-3",
        "checkpoint-4",
    ]
    (line,) = [record.getMessage() for record in caplog.records if "training goes on" in record.getMessage()]
    assert str(trainer.run_folder / "checkpoint-2") in line and "No space left" in line and "\n" not in line
    assert not list(trainer.run_folder.glob(".*"))


def test_c8_a_final_save_that_fails_is_an_error_after_the_metrics(make_sft, disk):
    disk.full = True
    trainer = make_sft()
    with pytest.raises(SaveError, match="checkpoint-4 could not be saved: No space left"):
        trainer.train()
    assert len(logged(trainer, "loss")) == 4
    assert not list(trainer.run_folder.glob(".*")) and newest_model(trainer.run_folder) is None


# ---- c12: the final model --------------------------------------------------------------------------------------------


def test_c12_the_run_folder_is_a_model(make_sft):
    trainer = make_sft()
    trainer.train()
    loaded, run = load_model(trainer.run_folder), trainer.run_folder
    for name, value in weights_of(trainer.model).items():
        np.testing.assert_array_equal(weights_of(loaded)[name], value)
    assert (run / "tokenizer.json").is_file() and newest_model(run) == run
    assert (run / "model.safetensors").samefile(run / "checkpoint-4/model.safetensors")  # no double on the disk
    assert not (run / "trainer_state.json").exists()


def test_c12_a_run_that_goes_on_has_no_final_model(make_sft, tmp_path):
    folder = tmp_path / "run"
    make_sft(output_dir=str(folder), max_steps=2).train()
    again = make_sft(output_dir=str(folder), callbacks=[type("S", (), {"on_log": stop_at_3})()])
    again.train(resume_from_checkpoint="latest")
    assert newest_model(folder) == folder / "checkpoint-3" and not (folder / "model.safetensors").exists()
    make_sft(output_dir=str(folder)).train(resume_from_checkpoint="latest")
    assert newest_model(folder) == folder and (folder / "config.json").samefile(folder / "checkpoint-4/config.json")


def test_c12_a_model_folder_is_no_run_folder(make_sft, tmp_path):
    """The final model would replace the model that is there."""
    trainer = make_sft()
    trainer.save_model(tmp_path / "model")
    with pytest.raises(ValueError, match="holds a model"):
        make_sft(output_dir=str(tmp_path / "model")).train()


# ---- e5, e13, e17, c9 ------------------------------------------------------------------------------------------------


def test_e5_a_step_with_nothing_to_learn_changes_nothing(make_sft, monkeypatch):
    """No weight, no moment, no count, no call of weights_changed; the rate goes on by the steps of the run."""
    trainer, changed = make_sft(lr_scheduler_type="linear"), []
    loss = trainer.compute_loss

    def no_gradient(micro_batch):
        from cukit.autograd import no_grad

        if trainer.global_step != 1:
            return loss(micro_batch)
        with no_grad():
            return loss(micro_batch)

    states = []

    class Watch:
        def on_step_end(self, trainer, metrics):
            arrays = {name: np.array(value) for name, value in trainer.optimizer.state_dict().items()}
            states.append(arrays | weights_of(trainer.model))

    trainer.callbacks.append(Watch())
    monkeypatch.setattr(trainer, "compute_loss", no_gradient)
    monkeypatch.setattr(trainer, "weights_changed", lambda: changed.append(trainer.global_step))
    trainer.train()
    assert states[0].keys() == states[1].keys() and all(np.array_equal(states[0][k], states[1][k]) for k in states[0])
    assert changed == [0, 2, 3] and trainer.optimizer.step_count == 3
    assert logged(trainer, "learning_rate") == [1e-2, 0.75e-2, 0.5e-2, 0.25e-2]
    assert logged(trainer, "grad_norm")[1] == 0 and logged(trainer, "skipped_updates") == [0] * 4


def broken_at(trainer, monkeypatch, steps):
    """Gradients that are not finite at these steps."""
    loss = trainer.compute_loss

    def broken(micro_batch):
        value, extra = loss(micro_batch)
        return (value * float("nan") if trainer.global_step in steps else value), extra

    monkeypatch.setattr(trainer, "compute_loss", broken)


def test_e13_a_run_that_learnt_nothing_is_no_success(make_sft, monkeypatch):
    trainer = make_sft()
    broken_at(trainer, monkeypatch, range(4))
    with pytest.raises(ValueError, match=r"every update of this run \(4\) was skipped.* lower learning_rate"):
        trainer.train()
    assert newest_model(trainer.run_folder) is None and logged(trainer, "grad_norm") == [None] * 4
    assert not list_checkpoints(trainer.run_folder)


def test_e13_updates_that_were_skipped_are_counted_at_the_end(make_sft, monkeypatch, caplog):
    trainer = make_sft()
    broken_at(trainer, monkeypatch, [1])
    trainer.train()
    assert "1 of 4 updates were skipped" in caplog.text and newest_model(trainer.run_folder) == trainer.run_folder


def test_e17_resuming_a_finished_run_says_so(make_sft, tmp_path, caplog):
    folder = tmp_path / "run"
    make_sft(output_dir=str(folder)).train()
    before = (folder / "metrics.jsonl").read_bytes()
    (folder / "config.json").unlink()  # killed before the final model was there
    again = make_sft(output_dir=str(folder))
    again.train(resume_from_checkpoint="latest")
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == [f"{folder} is already at step 4 of 4; raise max_steps to go on"]
    assert (folder / "metrics.jsonl").read_bytes() == before and newest_model(folder) == folder


@pytest.mark.parametrize("steps, warmup", [(4, 1), (25, 3), (20, 2)])
def test_c9_warm_up_is_rounded_up(make_sft, steps, warmup):
    trainer = make_sft(
        max_steps=steps, warmup_ratio=0.1, lr_scheduler_type="constant_with_warmup", rows=demonstrations(2)
    )
    trainer.train()
    rates = [(step + 1) / warmup * 1e-2 if step < warmup else 1e-2 for step in range(steps)]
    np.testing.assert_allclose(logged(trainer, "learning_rate"), rates, rtol=1e-12)


# ---- resume ----------------------------------------------------------------------------------------------------------


def test_means_between_two_rows_survive_a_resume(make_sft, tmp_path):
    """A checkpoint between two logged rows: the row after the resume is the mean over all its steps."""
    options = dict(max_steps=6, logging_steps=4, save_steps=3, lr_scheduler_type="linear")
    straight = make_sft(**options)
    straight.train()
    folder = straight.run_folder
    expected = rows_without_times(folder)
    again = make_sft(**options | {"output_dir": str(folder)})
    again.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    assert rows_without_times(folder) == expected and [row["step"] for row in expected] == [4, 6]


def test_a_checkpoint_of_an_older_version_goes_on(make_sft, tmp_path):
    """Written at commit 21bede1 (tests/golden/make_old_checkpoint.py): fused names, bfloat16 on float32 masters."""
    rows = [{"prompt": "1" + "+1" * i + "=", "completion": str(i + 1)} for i in range(6)]
    trainer = make_sft(
        model=load_model(GOLDEN / "old_checkpoint", dtype="bfloat16"),
        rows=rows,
        per_device_train_batch_size=1,
        output_dir=str(tmp_path / "run"),
    )
    trainer.train(resume_from_checkpoint=str(GOLDEN / "old_checkpoint"))
    np.testing.assert_allclose(logged(trainer, "loss"), [4.102326393127441, 4.134097099304199], rtol=1e-4)
    assert trainer.optimizer.step_count == 4


def test_another_model_is_refused_in_one_line(make_sft, tmp_path):
    with pytest.raises(ValueError, match=r"holds another model: .* has shape \(") as error:
        make_sft(output_dir=str(tmp_path / "run")).train(resume_from_checkpoint=str(GOLDEN / "old_checkpoint"))
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


class TwoModels(SFTTrainer):
    """A second model that learns the same rows, as a critic will beside the policy."""

    def __init__(self, *arguments, critic, **keywords):
        super().__init__(*arguments, **keywords)
        self.models["critic"] = TrainedModel("critic", critic)

    def compute_loss(self, micro_batch):
        mine, extra = super().compute_loss(micro_batch)
        policy = self.models["policy"]
        self.models["policy"] = self.models["critic"]
        try:
            other, _ = super().compute_loss(micro_batch)
        finally:
            self.models["policy"] = policy
        return mine + other, extra


def test_named_models_are_trained_saved_and_resumed(make_sft, make_model, tmp_path):
    def two(**options):
        return make_sft(cls=lambda *a, **k: TwoModels(*a, critic=make_model(seed=1), **k), **options)

    alone, straight = make_sft(), two()
    alone.train()
    straight.train()
    assert_equal_weights(alone, straight)  # the policy does not notice
    folder = tmp_path / "cut"
    two(output_dir=str(folder), callbacks=[type("S", (), {"on_log": stop_at_3})()]).train()
    arrays, _ = load_checkpoint(folder / "checkpoint-3")
    assert any(name.startswith("critic/") for name in arrays) and load_model(folder / "checkpoint-3/critic")
    resumed = two(output_dir=str(folder))
    resumed.train(resume_from_checkpoint="latest")
    for name in ("policy", "critic"):
        first, second = (weights_of(trainer.models[name].model) for trainer in (straight, resumed))
        assert all(np.array_equal(first[key], second[key]) for key in first), name
    assert logged(resumed, "grad_norm/critic") == logged(straight, "grad_norm/critic")
    alone = make_sft(output_dir=str(tmp_path / "alone"), max_steps=1)
    alone.train()
    with pytest.raises(ValueError, match="holds no model 'critic'"):
        two(output_dir=str(tmp_path / "alone")).train(resume_from_checkpoint="latest")


def test_a_run_folder_in_the_home_folder(make_sft, tmp_path, monkeypatch):
    """As transformers reads output_dir: a YAML's or a script's ~ is no folder of that name."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    make_sft(output_dir="~/run", max_steps=1).train()
    assert (tmp_path / "home/run/metrics.jsonl").is_file() and not (tmp_path / "~").exists()
    resumed = make_sft(output_dir="~/run", max_steps=2)
    resumed.train(resume_from_checkpoint="~/run")
    assert resumed.run_folder == tmp_path / "home/run"
