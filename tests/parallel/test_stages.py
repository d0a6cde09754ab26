"""Runs with each zero_stage are the run without, to the bit where the order of sums allows. Threads are the ranks."""

from threading import get_ident

import numpy as np
import pytest

import cukit_cli
from cukit.engine.memory import plan_memory
from cukit.models.weights import load_model
from cukit.parallel.group import RankLost
from cukit.trainers import ranks as ranks_module
from cukit.trainers import trainer as trainer_module
from cukit.trainers.gradient_sums import GradientSums
from cukit.trainers.sharded_weights import ShardedWeights
from cukit.trainers.state import POLICY

from . import run_trainer
from .threads import ThreadGroup, on_ranks


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """runs(ranks, method, …): what each rank's `at_end(trainer)` gives after a run of these options."""
    groups, count = {}, iter(range(100))
    for module in (ranks_module, run_trainer):
        monkeypatch.setattr(module, "world", lambda: groups[get_ident()])

    def started(ranks, method, at_end=None, resume=None, prepare=None, **options):
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", str(ranks))
        folder = tmp_path / str(next(count))

        def rank(group):
            groups[get_ident()] = group
            trainer = run_trainer.make_trainer(method, **{"output_dir": str(folder)} | options)
            if prepare is not None:
                prepare(trainer)
            trainer.train(resume)
            return (at_end or weights_of)(trainer)

        found = on_ranks(ranks, rank)
        if errors := [one for one in found if isinstance(one, BaseException)]:
            raise errors[0]
        started.folder = folder
        return found

    return started


def weights_of(trainer):
    return {
        f"{name} {part}": np.array(view, np.float64)
        for name, one in trainer.models.items()
        for part, view in one.model.trained_store.part_views().items()
    }


def assert_equal(found, truth, tolerance=0.0):
    assert found.keys() == truth.keys()
    for name, array in truth.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=tolerance * np.abs(array).max(), err_msg=name)


ONE_PASS = dict(max_tokens_per_batch=4096)
CASES = {
    "one pass": ("sft", ONE_PASS | {"gradient_checkpointing": "none"}, 0.0),
    "selective": ("sft", ONE_PASS | {"gradient_checkpointing": "selective"}, 0.0),
    "full": ("sft", ONE_PASS | {"gradient_checkpointing": "full"}, 0.0),
    "bfloat16": ("sft", ONE_PASS | {"dtype": "bfloat16", "gradient_checkpointing": "selective"}, 0.0),
    "float16": ("sft", ONE_PASS | {"dtype": "float16"}, 0.0),
    "passes": ("sft", {"max_tokens_per_batch": 16, "gradient_checkpointing": "full"}, 1e-11),
    "lora": ("sft", {"use_peft": True, "lora_r": 4, "lora_alpha": 8, "max_tokens_per_batch": 16}, 1e-11),
    "reward": ("reward", ONE_PASS | {"center_rewards_coefficient": 0.1}, 0.0),
    "grpo": ("grpo", {"beta": 0.1, "top_entropy_quantile": 0.5, "num_iterations": 2, "sync_ref_model": True,
                      "ref_model_sync_steps": 2, "max_tokens_per_batch": 48}, 1e-9),
    "ppo": ("ppo", {"num_mini_batches": 2, "critic_warmup_steps": 1, "kl_coef": 0.1}, 1e-9),
    "ppo shared": ("ppo", {"critic": "shared", "entropy_coef": 0.01}, 1e-9),
}  # fmt: skip


SLOW = ("grpo", "ppo shared")


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES])
def test_a_stage_changes_nothing(case, runs):
    method, options, tolerance = CASES[case]
    size = {"sft": 3, "reward": 3, "grpo": 12, "ppo": 6}[method]
    options = options | {"per_device_train_batch_size": size}
    truth, other = runs(2, method, **options)
    assert_equal(truth, other)
    for stage in (1, 2, 3):
        for found in runs(2, method, zero_stage=stage, **options):
            assert_equal(found, truth, 0.0 if stage == 1 else tolerance)


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_without_rows_take_part(stage, runs, monkeypatch):
    """One or two rows for three ranks. What they gather for the others goes at once."""
    held, gather = [], ShardedWeights.gather

    def noted(self, bucket):
        gather(self, bucket)
        held.append(len(self._held))

    monkeypatch.setattr(ShardedWeights, "gather", noted)
    options = dict(per_device_train_batch_size=1, max_tokens_per_batch=8, max_steps=5)  # 14 rows: the fifth has two
    options |= {"gradient_accumulation_steps": 1, "learning_rate": 1e-2}
    truth = runs(3, "sft", **options)[0]
    for found in runs(3, "sft", zero_stage=stage, **options):
        assert_equal(found, truth, 1e-11)
    assert max(held, default=2) == 2


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_update_that_is_not_finite_is_skipped(stage, runs):
    def broken(trainer):
        compute = trainer.compute_loss

        def loss(rows):
            found, extra = compute(rows)
            return found * (np.nan if trainer.global_step == 1 and trainer.ranks.rank == 1 else 1.0), extra

        trainer.compute_loss = loss

    options = dict(per_device_train_batch_size=3, **ONE_PASS, max_steps=3, zero_stage=stage)
    found = runs(2, "sft", lambda trainer: (weights_of(trainer), trainer.optimizer.skipped), prepare=broken, **options)
    assert [skipped for _, skipped in found] == [1, 1]
    assert_equal(found[0][0], found[1][0])
    assert all(np.isfinite(array).all() for array in found[0][0].values())


@pytest.mark.parametrize("before, after", [(3, 0), (1, 3), (2, 1), (3, 2)])
def test_a_checkpoint_goes_on_at_another_stage_and_number_of_ranks(before, after, runs):
    """bfloat16: what a checkpoint holds of weights and masters is exact."""
    options = dict(dtype="bfloat16", **ONE_PASS, learning_rate=1e-3)
    truth = runs(2, "sft", per_device_train_batch_size=3, **options)[0]
    runs(2, "sft", per_device_train_batch_size=3, save_steps=1, max_steps=2, zero_stage=before, **options)
    checkpoint = str(runs.folder / "checkpoint-1")
    for found in runs(2, "sft", resume=checkpoint, per_device_train_batch_size=3, zero_stage=after, **options):
        assert_equal(found, truth)
    for found in runs(3, "sft", resume=checkpoint, per_device_train_batch_size=2, zero_stage=after, **options):
        assert_equal(found, truth, 1e-2)


def test_the_best_model_and_evaluations_are_of_whole_weights(runs):
    options = dict(per_device_train_batch_size=3, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True,
                   dtype="float32", **ONE_PASS)  # fmt: skip
    at_end = lambda trainer: (weights_of(trainer), trainer.evaluations)  # noqa: E731
    (truth, evaluations), _ = runs(2, "sft", at_end, **options)
    for found, own in runs(2, "sft", at_end, zero_stage=3, **options):
        assert_equal(found, truth)
        assert [metrics["eval/loss"] for _, metrics in own] == [metrics["eval/loss"] for _, metrics in evaluations]


def test_few_layers_are_gathered_at_a_time_and_the_rest_has_no_memory(runs, monkeypatch):
    """Within passes; at the end everything is there. A rank keeps its half and what is gathered."""
    held, gather, weights_sent, all_gather = [], ShardedWeights.gather, [], ThreadGroup.all_gather

    def noted(self, bucket):
        gather(self, bucket)
        held.append(len(self._held))
        assert not self.is_whole
        for one, (memory, _) in self._places.items():
            assert not memory.resident and one.own.size * 2 == one.size

    def counted(self, array, borders=None, what="all_gather"):
        all_gather(self, array, borders, what)
        weights_sent.append(what == "weights")

    monkeypatch.setattr(ShardedWeights, "gather", noted)
    monkeypatch.setattr(ThreadGroup, "all_gather", counted)

    def at_end(trainer):
        weights = trainer.models[POLICY].weights
        assert weights.is_whole and all(memory.resident for memory, _ in weights._places.values())
        return len(weights._places)

    monkeypatch.setitem(run_trainer.SMALL, "num_hidden_layers", 4)
    passes = dict(per_device_train_batch_size=3, max_steps=2, zero_stage=3, **ONE_PASS)
    assert runs(2, "sft", at_end, **passes) == [5, 5]  # the embedding, which is the head, and four layers
    assert max(held) == 2
    assert len(held) == 2 * 2 * (2 + 4 + 4)  # ranks, steps; forward: embedding, layers, head; backward: layers
    # beside these: norms' weights after each update, and the whole once, for the checkpoint and the run's end
    assert sum(weights_sent) == len(held) + 2 * 2 * 5 + 2 * 5


def test_between_steps_weights_are_whole_on_demand_alone(runs, tmp_path):
    def at_end(trainer):
        weights = trainer.models[POLICY].weights
        weights.drop()
        with pytest.raises(ValueError, match=r"zero_stage=3: this process holds a share .* trainer.whole_weights\(\)"):
            trainer.evaluated(trainer.make_batch(0)[0])
        trainer.whole_weights()
        trainer.evaluated(trainer.make_batch(0)[0])
        truth = weights_of(trainer)
        weights.drop()
        trainer.save_model(tmp_path / "saved")
        trainer.ranks.barrier("saved")
        loaded = load_model(tmp_path / "saved", "cpu", "float32").parts()
        return all(np.array_equal(truth[f"policy {name}"], view) for name, view in loaded.items())

    options = dict(per_device_train_batch_size=3, zero_stage=3, dtype="float32")
    assert runs(2, "sft", at_end, **options) == [True] * 2


def test_two_forward_passes_of_a_model_in_a_pass_are_refused(runs):
    def twice(trainer):
        compute = trainer.compute_loss
        trainer.compute_loss = lambda rows: (compute(rows), compute(rows))[1]

    with pytest.raises(ValueError, match="zero_stage=3 takes a model through its layers once in a pass of training"):
        runs(2, "sft", prepare=twice, per_device_train_batch_size=3, zero_stage=3, **ONE_PASS)


def test_a_run_that_an_error_ended_can_be_resumed_by_the_same_trainer(runs, tmp_path):
    """Its weights may be shared out then."""

    def breaks(trainer):
        compute = trainer.compute_loss

        def failing(rows):
            if trainer.global_step == 2:
                raise OSError("in the middle")
            return compute(rows)

        trainer.compute_loss = failing
        with pytest.raises((OSError, RankLost)):
            trainer.train()
        assert not trainer.models[POLICY].weights.is_whole
        trainer.compute_loss = compute

    options = dict(per_device_train_batch_size=3, dtype="float32", max_steps=4, save_steps=1, **ONE_PASS)
    truth, _ = runs(2, "sft", **options)
    folder = str(tmp_path / "broken")
    options |= {"output_dir": folder, "zero_stage": 3}
    for found in runs(2, "sft", resume=f"{folder}/checkpoint-1", prepare=breaks, **options):
        assert_equal(found, truth)


def test_one_process_keeps_everything_as_it_is(runs):
    def at_end(trainer):
        return trainer.models[POLICY].weights, trainer.model.around_layers, type(trainer.optimizer).__name__

    assert runs(1, "sft", at_end, zero_stage=3) == [(None, None, "AdamW")]


@pytest.mark.parametrize("stage", [0, 3])
def test_what_does_not_learn_is_not_summed(stage, runs, monkeypatch):
    """In a critic's warm-up the policy's weights come for the forward pass alone."""
    summed, gathered, total, gather = set(), [], GradientSums._sum, ShardedWeights.gather
    monkeypatch.setattr(GradientSums, "_sum", lambda self, name, bucket: (summed.add(name), total(self, name, bucket)))
    monkeypatch.setattr(ShardedWeights, "gather", lambda self, one: (gathered.append(self), gather(self, one)))
    options = dict(per_device_train_batch_size=6, critic_warmup_steps=2, max_steps=1, zero_stage=stage, **ONE_PASS)
    found = runs(2, "ppo", lambda trainer: [one.weights for one in trainer.models.values()], **options)
    assert summed == {"critic"}
    if stage == 3:
        (policy, critic), _ = found
        assert (gathered.count(policy), gathered.count(critic)) == (4, 3 + 2)


def test_the_base_of_an_adapter_stays_whole(runs):
    options = dict(zero_stage=3, per_device_train_batch_size=3, use_peft=True, max_steps=1)
    assert runs(2, "sft", lambda trainer: trainer.models[POLICY].weights, **options) == [None, None]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_plan_knows(stage, monkeypatch):
    seen = {}

    def planned(uses, *given, **sizes):
        seen.update(sizes)
        return plan_memory(uses, *given, **sizes)

    monkeypatch.setattr(trainer_module, "plan_memory", planned)
    trainer = run_trainer.make_trainer("sft", zero_stage=stage)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    trainer.plan_memory()
    assert (seen["ranks"], seen["zero_stage"]) == (1 if stage == 0 else 2, stage)


@pytest.mark.parametrize("processes, shares", [(3, 2), (5, 4)])
def test_states_are_planned_for_the_ranks_that_train(processes, shares, monkeypatch, capsys):
    """zero_stage=1 with ranks apart: those that draw hold none of them."""

    def planned(*more):
        assert cukit_cli.main(["grpo", "--dry_run", "--device", "cpu", *more]) == 0
        trains = capsys.readouterr().out.split("# a process that draws:")[0]
        (line,) = [line for line in trains.splitlines() if "AdamW's moments" in line]
        return float(line.split()[2])  # MB

    whole = planned()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", str(processes))
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert planned("--rollout_gpus", "1", "--zero_stage", "1") == pytest.approx(whole / shares, abs=0.01)
