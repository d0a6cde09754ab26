"""gradient_checkpointing in the measurements: what is measured is what is said."""

import pytest
from parallel.threads import together

from cukit.backend import backend_for
from cukit.bench import GRPOBench, PPOBench, TrainBench, levels, ppo, train
from cukit.bench.subject import SHAPES, choose_subject
from cukit.engine.memory import plan_memory
from cukit.models.config import ModelConfig
from cukit.models.decoder import Decoder
from cukit.models.tensor_parallel import TensorParallel

SHAPE = ModelConfig.from_json(SHAPES["tiny"])
SMALL = dict(model="tiny", device="cpu", rows=2, tokens_per_row=12, completion=7, repeats=1)


@pytest.fixture
def little_memory(monkeypatch):
    """No memory is free where the planner is asked; what it is asked is kept."""
    asked = []

    def plan(uses, *args, **sizes):
        asked.append((uses, sizes))
        return plan_memory(uses, *args, **sizes, total_bytes=10**9, free_bytes=0)

    monkeypatch.setattr(levels, "plan_memory", plan)
    return asked


@pytest.mark.parametrize(
    "given, measured",
    [(None, ["full", "selective", "none"]), ("selective", ["selective"]), (True, ["full"]), ("auto", ["none"])],
)
def test_train_measures_the_levels_that_it_names(monkeypatch, given, measured):
    seen, step = [], train._train

    def watched(model, *more):
        seen.append(model.gradient_checkpointing)
        step(model, *more)

    monkeypatch.setattr(train, "_train", watched)
    report = train.run(TrainBench(**SMALL, gradient_checkpointing=given))
    assert [row["gradient_checkpointing"] for row in report["rows"]] == [None, *measured]
    assert list(dict.fromkeys(seen)) == measured


def test_train_asks_the_planner_of_auto(little_memory):
    options = TrainBench(**SMALL, gradient_checkpointing="auto", max_tokens_per_batch=12, use_peft=True)
    assert train.run(options)["rows"][-1]["gradient_checkpointing"] == "full"
    ((uses, sizes),) = little_memory
    assert sizes["max_tokens_per_batch"] == 12 and sizes["micro_batches"] == 2
    assert uses[0].trained and uses[0].loaded and uses[0].head and uses[0].adapter_parameters > 0


@pytest.mark.parametrize("invariant", [False, True])
def test_the_planner_is_asked_of_a_ranks_part(little_memory, invariant):
    def work(group):
        model = Decoder(SHAPE, backend_for("cpu"), "float32", tensor=TensorParallel(group, invariant))
        return levels.level_for("auto", [model], 64, 1)

    assert together(2, work) == ["full"] * 2
    for (use,), _ in little_memory:
        assert (use.config.vocab_parts, use.gathers) == (2, invariant)


@pytest.mark.parametrize("given, level", [("selective", "selective"), (False, "none"), ("auto", "full")])
@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_ppo_trains_both_models_at_the_level(little_memory, critic, given, level):
    options = PPOBench(**SMALL, critic=critic, gradient_checkpointing=given)
    learners = ppo.Learners(options, choose_subject(options))
    both = [learners.policy, learners.critic][: 2 if critic == "separate" else 1]
    assert [model.gradient_checkpointing for model in both] == [level] * len(both)
    if given == "auto":
        assert [use.head for use in little_memory[0][0]] == [True, False][: len(both)]
    report = ppo.run(options)
    assert report["rows"][0]["gradient_checkpointing"] == level


def test_defaults_are_those_of_before():
    assert (GRPOBench().gradient_checkpointing, PPOBench().gradient_checkpointing) == ("full", "none")
