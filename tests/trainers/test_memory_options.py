"""Options that save memory in training: what they reach, what a resumed run keeps, what they change in the plan."""

import logging
from dataclasses import replace

import pytest

from cukit.backend.states import MOMENT_BYTES
from cukit.engine.memory import plan_memory
from cukit.engine.shapes import parameter_counts
from cukit.models.config import LEVELS
from cukit.trainers import config as options
from cukit.trainers import trainer as loop

from ..engine.shapes import SHAPE, bytes_of, card
from .conftest import assert_equal_weights, logged, rows_without_times, weights_of


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", options.OPTIMIZER_STATES)
def test_a_resumed_run_goes_on_bit_for_bit(make_sft, make_model, form, dtype):
    def build(**given):
        return make_sft(model=make_model(dtype), optimizer_state=form, save_steps=2, **given)

    straight = build()
    straight.train()
    folder = straight.run_folder
    rows = rows_without_times(folder)
    again = build(output_dir=str(folder))
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert_equal_weights(again, straight)
    assert rows_without_times(folder) == rows
    state, found = straight.optimizer.state_dict(), again.optimizer.state_dict()
    assert all(found[name].tobytes() == array.tobytes() for name, array in state.items())


def test_a_checkpoint_resumes_with_another_form(make_sft, make_model):
    first = make_sft(model=make_model("bfloat16"), save_steps=2)
    first.train()
    folder = first.run_folder
    for form in options.OPTIMIZER_STATES[1:]:
        again = make_sft(model=make_model("bfloat16"), output_dir=str(folder), optimizer_state=form)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        assert again.optimizer.step_count == 4 and again.optimizer.state_form == form
        assert logged(again, "loss")[-1] == pytest.approx(logged(first, "loss")[-1], rel=0.05)


@pytest.mark.parametrize("saved, resumed", [("bfloat16", "float32"), ("float32", "float16"), ("float16", "float64")])
def test_a_checkpoint_of_another_dtype_is_named(make_sft, make_model, saved, resumed):
    first = make_sft(model=make_model(saved), save_steps=1, max_steps=1)
    first.train()
    folder = first.run_folder / "checkpoint-1"
    with pytest.raises(ValueError) as error:
        make_sft(model=make_model(resumed)).train(resume_from_checkpoint=str(folder))
    assert str(error.value) == (
        f"{folder} was saved by a run in {saved}, and this run is in {resumed}: resume with dtype={saved}, or begin a "
        "new run with that folder as its model"
    )


def test_form_and_seed_reach_the_optimizer(make_grpo):
    ends = {}
    for form, seed in (("float32", 3), ("bfloat16", 3), ("int8", 3), ("int8", 4)):
        trainer = make_grpo(optimizer_state=form, seed=3, max_steps=3)
        trainer.args.seed = seed  # of the optimizer alone: rows are drawn
        trainer.train()
        assert (trainer.optimizer.state_form, trainer.optimizer.seed) == (form, seed)
        ends[form, seed] = weights_of(trainer.model)["embed_tokens.weight"].tobytes()
    assert len(set(ends.values())) == 4


def test_the_plan_counts_the_form_and_what_is_offloaded(make_sft, monkeypatch):
    """As on a card, where offloading is more than a word."""
    plans, on_card = {}, card()

    def planned(uses, engine, _, **more):  # of a model with many layers
        return plan_memory([replace(use, config=SHAPE, dtype="float32") for use in uses], engine, on_card, **more)

    for form in options.OPTIMIZER_STATES:
        for offload in (False, True):
            trainer = make_sft(optimizer_state=form, offload_optimizer=offload)
            assert bytes_of(trainer.plan, "from the host") == 0
            monkeypatch.setattr(loop, "plan_memory", planned)
            monkeypatch.setattr(trainer.model.store.backend, "name", "cuda")
            plans[form, offload] = trainer.plan_memory()
            monkeypatch.undo()
    numbers = sum(parameter_counts(SHAPE))
    for form, size in MOMENT_BYTES.items():
        moments, moved = bytes_of(plans[form, False], "moments"), plans[form, True]
        assert moments == pytest.approx(size * numbers, abs=1)
        assert 0 < bytes_of(moved, "from the host") < 0.8 * moments and not bytes_of(moved, "AdamW's moments")
        assert moved.phase_bytes("training") < plans[form, False].phase_bytes("training")


def test_offloading_on_a_cpu_changes_nothing_and_says_so_once(make_sft, caplog, monkeypatch):
    monkeypatch.setattr("cukit.options._said", set())
    ends = []
    with caplog.at_level(logging.WARNING):
        for offload in (False, True, True):
            trainer = make_sft(offload_optimizer=offload)
            trainer.train()
            assert not trainer.optimizer.offload
            ends.append(weights_of(trainer.model)["embed_tokens.weight"].tobytes())
    assert len(set(ends)) == 1
    lines = [record.message for record in caplog.records if "offload_optimizer" in record.message]
    assert lines == ["offload_optimizer changes nothing on a CPU, where all memory is the host's"]


def test_an_unknown_form_is_refused(make_sft):
    with pytest.raises(ValueError, match="optimizer_state must be one of float32, bfloat16, int8, got 'int4'"):
        make_sft(optimizer_state="int4")


# ---- gradient_checkpointing ----


@pytest.mark.parametrize("make", ["make_sft", "make_grpo", "make_ppo"])
def test_levels_change_no_bit_of_a_run(request, make):
    """Of weights in bfloat16 and of what is logged."""
    runs = [request.getfixturevalue(make)(dtype="bfloat16", gradient_checkpointing=level) for level in LEVELS]
    for run, level in zip(runs, LEVELS):
        assert run.model.gradient_checkpointing == run.plan.level == level
        run.train()
    for run in runs[1:]:
        assert_equal_weights(run, runs[0])
        assert logged(run, "loss") == logged(runs[0], "loss")


def test_auto_takes_the_level_of_the_plan_and_says_so(make_sft, make_ppo, caplog, monkeypatch):
    with caplog.at_level(logging.INFO, "cukit"):
        trainer = make_sft(gradient_checkpointing="auto", max_steps=1)
        trainer.train()
    assert trainer.model.gradient_checkpointing == trainer.plan.level == "none", "this machine has memory for it"
    (memory,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("memory:")]
    assert "none  of gradient_checkpointing, by auto: the fastest that fits" in memory
    monkeypatch.setattr(
        loop, "plan_memory", lambda *args, **more: plan_memory(*args, **more, total_bytes=10**9, free_bytes=0)
    )
    auto = {"gradient_checkpointing": "auto"}
    for trainer in (make_sft(**auto), make_ppo(critic="separate", num_kv_blocks=64, **auto)):
        levels = {one.model.gradient_checkpointing for one in trainer.models.values()}
        assert levels == {trainer.plan.level} == {"full"} and "selective needs" in trainer.plan.why
