"""The collector of garbage during a run: what it looks at, what a step leaves to it, and that all is put back."""

import gc
import weakref

import pytest

from cukit.engine.request import Request, Sequence
from cukit.runs.garbage import YOUNG, rare_collections


@pytest.fixture
def thresholds():
    before = gc.get_threshold()
    yield lambda *wanted: gc.set_threshold(*wanted)
    gc.set_threshold(*before)


class Seen:
    """What is in force after each step."""

    def __init__(self):
        self.steps = []

    def on_step_end(self, trainer, metrics):
        self.steps.append((gc.get_freeze_count() > 0, gc.get_threshold()[0]))
        if metrics.get("fails"):
            raise LookupError("mine")


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_puts_the_collector_back(make_grpo, thresholds, fails):
    thresholds(650, 9, 8)
    trainer = make_grpo(callbacks=[seen := Seen()])
    if fails:
        trainer.step_metrics = lambda sums: {"fails": 1.0}
        with pytest.raises(LookupError):
            trainer.train()
    else:
        trainer.train()
    assert seen.steps == [(True, YOUNG)] * (1 if fails else 2)
    assert gc.get_threshold() == (650, 9, 8) and gc.get_freeze_count() == 0


@pytest.mark.parametrize(("given", "within"), [(700, YOUNG), (0, 0), (5 * YOUNG, 5 * YOUNG)])
def test_a_collector_that_is_off_or_rarer_stays_so(thresholds, given, within):
    thresholds(given, 10, 10)
    with rare_collections():
        assert gc.get_threshold()[0] == within
    assert gc.get_threshold() == (given, 10, 10)


def test_the_model_of_the_run_before_is_gone(make_grpo):
    """Nobody could collect it any more where memory is short: it would be frozen."""
    gc.disable()
    try:
        trainer = make_grpo(max_steps=1)
        trainer.train()
        model = weakref.ref(trainer.model)
        del trainer
        with rare_collections():
            gone = model() is None
    finally:
        gc.enable()
    assert gone


def test_the_samples_of_a_step_need_no_collector(make_grpo):
    trainer = make_grpo()
    gc.collect()
    gc.disable()
    try:
        trainer.make_batch(0)
        left = [one for one in gc.get_objects() if isinstance(one, (Request, Sequence))]
    finally:
        gc.enable()
    assert not left
