"""Ranks apart, with threads as ranks: who holds what, one step off-policy, how a run ends. No MPI is needed."""

import threading
from threading import get_ident

import numpy as np
import pytest
import yaml

import cukit_cli
from cukit import GRPOConfig, PPOConfig, SFTConfig, TrainerCallback
from cukit.autograd import no_grad
from cukit.models.logprobs import packed_logprobs
from cukit.optim import AdamW
from cukit.parallel.group import RankLost
from cukit.runs.metrics import read_jsonl
from cukit.trainers import ranks as ranks_module
from cukit.trainers.batch import Rows

from . import run_trainer
from .threads import on_ranks


@pytest.fixture
def ranks(monkeypatch):
    """ranks(size, work): [work(group) of each], where a trainer that is made finds its group."""
    groups = {}
    monkeypatch.setattr(ranks_module, "world", lambda: groups[get_ident()])
    monkeypatch.setattr(run_trainer, "world", lambda: groups[get_ident()])

    def run(size, work):
        def rank(group):
            groups[get_ident()] = group
            return work(group)

        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", str(size))
        return on_ranks(size, rank)

    return run


def trainer_of(folder, method="grpo", **options):
    sizes = {"rollout_gpus": 1, "eval_on_start": False, "output_dir": str(folder)}
    return run_trainer.make_trainer(method, **sizes | options)


# ---- who holds what ----


@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_a_rank_holds_what_its_part_needs(method, ranks, tmp_path):
    more = {"kl_coef": 0.1} if method == "ppo" else {"beta": 0.1}

    def rank(group):
        trainer = trainer_of(tmp_path / "run", method, max_steps=1, **more)
        trainer.train()
        plan, optimizers = trainer.plan, [one.optimizer for one in trainer.models.values()]
        planned = " ".join(item.name for item in plan.items)
        return trainer, optimizers, planned, plan

    trains, draws = ranks(2, rank)
    trainer, optimizers, planned, plan = trains
    assert trainer.rollout is None and trainer.reference is not None and None not in optimizers
    assert "AdamW" in planned and "reference" in planned and plan.phases == ["training"] and plan.num_kv_blocks == 0
    assert ("critic" in planned) == (method == "ppo") == (len(optimizers) == 2)
    trainer, optimizers, planned, plan = draws
    assert trainer.rollout is not None and trainer.reference is None and optimizers == [None]
    assert "AdamW" not in planned and "reference" not in planned and "critic" not in planned
    assert plan.phases == ["rollout"] and plan.num_kv_blocks > 0
    assert all(bucket.grad is None for bucket in trainer.model.store.buckets)


def test_engine_options_that_concern_numbers_reach_a_rank_without_engine(ranks, tmp_path):
    found = ranks(2, lambda group: trainer_of(tmp_path / "run", max_steps=1, exact="false").model.exact)
    assert found == ["false", "false"]


def test_a_dry_run_shows_both_plans(monkeypatch, capsys):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert cukit_cli.main(["grpo", "--rollout_gpus", "1", "--dry_run", "--device", "cpu"]) == 0
    trains, draws = capsys.readouterr().out.split("# a process that trains:")[1].split("# a process that draws:")
    assert "AdamW" in trains and "KV cache" not in trains
    assert "AdamW" not in draws and "KV cache" in draws


# ---- weights ----


def test_weights_are_sent_once_a_generation_batch_and_counted(ranks, tmp_path):
    """Two updates a batch; an evaluation in the middle gets the newest."""
    options = {"steps_per_generation": 2, "max_steps": 4, "per_device_train_batch_size": 12}

    def rank(group):
        trainer = trainer_of(tmp_path / str(options.get("eval_steps")), **options)
        sizes = [bucket.data.nbytes for bucket in trainer.model.store.buckets]
        trainer.train()
        return sum(sizes), [bucket.data.copy() for bucket in trainer.model.store.buckets]

    (size, first), (_, second) = ranks(2, rank)
    for ours, theirs in zip(first, second, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    rows = read_jsonl(tmp_path / "None" / "metrics.jsonl")
    assert [row.get("weights/bytes") for row in rows] == [0, None, size, None]
    assert rows[2]["time/weights"] > 0 == rows[0]["time/weights"]
    options["eval_steps"] = 1
    ranks(2, rank)
    rows = [row for row in read_jsonl(tmp_path / "1" / "metrics.jsonl") if "loss" in row]
    assert [row.get("weights/bytes") for row in rows] == [0, None, 2 * size, None]


def test_an_adapter_alone_is_sent_and_brought_into_force(ranks, tmp_path):
    def rank(group):
        trainer = trainer_of(tmp_path / "run", max_steps=2, use_peft=True, lora_r=4, lora_way="merged")
        trainer.train()
        linear, _ = trainer.model.adapter.linears[0]
        merged = linear.adapter.merged.copy()
        return sum(bucket.data.nbytes for bucket in trainer.model.trained_store.buckets), merged

    (size, first), (_, second) = ranks(2, rank)
    np.testing.assert_array_equal(first, second)
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl")[1]["weights/bytes"] == size


def test_frozen_buckets_stay(ranks, tmp_path):
    def rank(group):
        trainer = trainer_of(tmp_path / "run", max_steps=2)
        frozen, *_ = trainer.model.store.buckets
        for slot in frozen.slots:
            slot.parameter.requires_grad = False
        trainer.train()
        return sum(bucket.data.nbytes for bucket in trainer.model.store.buckets if bucket is not frozen)

    size, _ = ranks(2, rank)
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl")[1]["weights/bytes"] == size


# ---- one step off-policy ----


class Watched:
    """The weights that each generation batch was asked for with, and the batch."""

    def __init__(self, trainer):
        self.trainer, self.weights, self.batches, generation = trainer, {}, {}, trainer.generation
        batch = generation.batch

        def watched(number):
            self.weights[number] = [bucket.data.copy() for bucket in trainer.model.store.buckets]
            found = batch(number)
            self.batches[number] = found[0]
            return found

        generation.batch = watched

    def logprobs(self, number, weights):
        """Of a batch's learnt tokens, by other weights."""
        model, batch = self.trainer.model, self.batches[number]
        for bucket, data in zip(model.store.buckets, self.weights[weights], strict=True):
            bucket.data[...] = data
        with no_grad():
            return packed_logprobs(model, Rows(batch, 0, len(batch)).tokens, self.trainer.args.temperature)[0].data


@pytest.mark.parametrize("steps", [1, 2])
def test_a_batch_is_drawn_by_the_weights_before_and_corrected(steps, ranks, tmp_path):
    options = {"steps_per_generation": steps, "per_device_train_batch_size": 24 // steps, "max_steps": 4 * steps}

    def rank(group):
        trainer = trainer_of(tmp_path / "run", max_staleness=1, max_tokens_per_batch=10_000, **options)
        watched = Watched(trainer)
        trainer.train()
        return watched

    watched = ranks(2, rank)[0]
    for number in range(4):
        batch, before = watched.batches[number], max(number - 1, 0)
        np.testing.assert_allclose(batch.sampled, watched.logprobs(number, before), atol=1e-12)
        np.testing.assert_allclose(batch.logprobs, watched.logprobs(number, number), atol=1e-12)
        ratio = np.exp(batch.logprobs - batch.sampled)
        np.testing.assert_allclose(batch.corrections, np.minimum(ratio, 3.0), rtol=1e-12)
        assert (np.abs(ratio - 1).max() > 1e-2) == (number > 0)
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert rows[0]["sampling/importance_sampling_ratio/max"] == pytest.approx(1, abs=1e-12)
    assert rows[steps]["sampling/importance_sampling_ratio/max"] > 1.01


@pytest.mark.parametrize("steps", [1, 2])
def test_drawing_and_training_go_on_at_the_same_time(steps, ranks, tmp_path):
    """The rewards of the next batch wait for the last update of this one, and what training begins with for them."""
    begun, updated = ([threading.Event() for _ in range(3)] for _ in range(2))
    options = {"steps_per_generation": steps, "per_device_train_batch_size": 24 // steps, "max_steps": 3 * steps}

    class Tells(TrainerCallback):
        def on_step_end(self, trainer, metrics):
            if trainer.ranks.trains and trainer.global_step % steps == 0:
                updated[trainer.global_step // steps - 1].set()

    def rank(group):
        trainer = trainer_of(tmp_path / "run", max_staleness=1, **options)
        trainer.callbacks.append(Tells())
        calls = []

        def reward(completions, **_):
            begun[len(calls)].set()
            calls.append(0)
            assert len(calls) == 1 or updated[len(calls) - 2].wait(20)
            return run_trainer.share_of_ones(completions)

        def correct(batch):
            corrected.append(batch)
            assert begun[min(len(corrected), 2)].wait(20)
            own(batch)

        corrected, own = [], trainer.generation._correct
        trainer.scorer.functions[0], trainer.generation._correct = reward, correct
        trainer.train()
        return len(calls)

    assert ranks(2, rank) == [0, 3]
    rows = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "time/wait" in row]
    assert len(rows) == 3 and all(row["time/rollout"] > 0 and row["time/rollout_wait"] >= 0 for row in rows)
    assert rows[0]["time/wait"] > 0


def test_a_resumed_run_draws_anew_what_was_drawn_ahead(ranks, tmp_path):
    """A stop takes effect between two generation batches. The prompts are those of the run that goes through, on-policy
    at first.
    """
    options = {"max_staleness": 1, "steps_per_generation": 2, "per_device_train_batch_size": 12, "dtype": "float32"}

    class Stops(TrainerCallback):
        def on_step_end(self, trainer, metrics):
            if trainer.ranks.is_first and trainer.global_step == 3:
                trainer.stop()

    def rank(name, resume=None, callbacks=()):
        def work(group):
            trainer = trainer_of(tmp_path / name, max_steps=6, **options)
            trainer.callbacks += callbacks
            watched = Watched(trainer)
            trainer.train(resume)
            return watched, trainer.global_step, trainer.sampler.state_dict()

        return work

    stopped = ranks(2, rank("run", callbacks=[Stops()]))
    assert [step for _, step, _ in stopped] == [4, 4] and [*stopped[0][0].batches] == [0, 1]
    assert (tmp_path / "run" / "checkpoint-4").is_dir() and stopped[0][2] == stopped[1][2]
    through = ranks(2, rank("through"))[0][0]
    resumed = ranks(2, rank("run", resume="latest"))[0][0]
    assert [*resumed.batches] == [2]
    ours, theirs = resumed.batches[2], through.batches[2]
    prompts = [{tuple(batch.ids[a : a + n]) for a, n in zip(batch.cu_seqlens, batch.prompt_lengths)}
               for batch in (ours, theirs)]  # fmt: skip
    assert prompts[0] == prompts[1]
    assert np.abs(ours.sampled - ours.logprobs).max() < 1e-5 < 1e-3 < np.abs(theirs.sampled - theirs.logprobs).max()


def test_the_same_trainers_go_on_after_a_stop(ranks, tmp_path):
    class Stops(TrainerCallback):
        def on_step_end(self, trainer, metrics):
            if trainer.global_step == 1:
                trainer.stop()

    def rank(group):
        trainer = trainer_of(tmp_path / "run", max_steps=2, max_staleness=1, dtype="float32")
        trainer.callbacks.append(Stops())
        watched = Watched(trainer)
        trainer.train()
        trainer.train("latest")
        return watched

    found = ranks(2, rank)[0].batches
    assert [*found] == [0, 1] and np.abs(found[1].sampled - found[1].logprobs).max() < 1e-5


def test_resumed_within_a_generation_batch(ranks, tmp_path):
    """Saved after the first of two updates, where the next batch is drawn already: it is dropped, and drawn anew by the
    weights of the end of this one.
    """
    options = {"max_staleness": 1, "steps_per_generation": 2, "per_device_train_batch_size": 12, "dtype": "float32"}

    def rank(name, resume=None):
        def work(group):
            trainer = trainer_of(tmp_path / name, max_steps=4, save_steps=1, **options)
            watched = Watched(trainer)
            trainer.train(resume)
            return watched

        return work

    ranks(2, rank("run"))
    found = ranks(2, rank("again", tmp_path / "run" / "checkpoint-1"))[0]
    assert [*found.batches] == [1]
    assert np.abs(found.batches[1].sampled - found.batches[1].logprobs).max() < 1e-5


# ---- how a run ends ----


def test_an_error_in_what_is_drawn_ahead_ends_the_run_after_the_updates(ranks, tmp_path):
    def rank(group):
        trainer = trainer_of(tmp_path / "run", max_staleness=1, max_steps=3)
        calls = []

        def reward(completions, **_):
            calls.append(0)
            if len(calls) == 2:
                raise KeyError("no such answer")
            return run_trainer.share_of_ones(completions)

        trainer.scorer.functions[0] = reward
        with pytest.raises(Exception) as error:
            trainer.train()
        return error.type, str(error.value), trainer.global_step

    trains, draws = ranks(2, rank)
    assert trains[0] is RankLost and "rank 1 failed in rollout" in trains[1] and "no such answer" in trains[1]
    assert "no such answer" in draws[1] and draws[0] is not RankLost
    assert trains[2] == draws[2] == 1 and (tmp_path / "run" / "checkpoint-1").is_dir()


def test_every_rank_knows_that_nothing_was_learnt(ranks, tmp_path, monkeypatch):
    def skipped(self, rate):
        self.zero_grad()
        return float("nan"), False

    monkeypatch.setattr(AdamW, "step", skipped)

    def rank(group):
        with pytest.raises(ValueError, match=r"every update of this run \(2\) was skipped"):
            trainer_of(tmp_path / "run", max_steps=2).train()
        return True

    assert ranks(2, rank) == [True, True]


# ---- options ----


def test_what_is_refused(monkeypatch):
    sizes = {"per_device_train_batch_size": 8, "num_generations": 4}
    with pytest.raises(ValueError, match="rollout_gpus=1 takes some of several processes, .* or give rollout_gpus=0"):
        GRPOConfig(rollout_gpus=1, **sizes)
    with pytest.raises(ValueError, match="SFTConfig has no option 'rollout_gpus'"):
        SFTConfig(rollout_gpus=1)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    for count in (3, 4):
        with pytest.raises(
            ValueError, match=f"rollout_gpus={count} leaves none of 3 processes to train: give at most 2"
        ):
            GRPOConfig(rollout_gpus=count, **sizes)
    for wrong, message in {
        "max_staleness=2": "max_staleness must be",
        "max_staleness=1 rollout_gpus=0": "max_staleness=1 draws completions while others are trained on: give rollout",
        "tensor_parallel_size=2": "rollout_gpus=1 sends weights to ranks that hold whole models, and tensor_para",
        "balance_rollouts='true'": "balance_rollouts=true moves groups between processes that both draw and train",
        "max_staleness=1 dynamic_sampling=true": "dynamic_sampling draws in rounds",
        "max_staleness=1 use_kl_in_reward=true beta=0.1": "use_kl_in_reward takes the log-probs that were drawn with",
        "max_staleness=1 loss=a.py:b vllm_importance_sampling_correction=false": "loss=a.py:b gets completions",
        "max_staleness=1 vllm_importance_sampling_clip_max=0": "vllm_importance_sampling_clip_max must be",
    }.items():
        given = dict(word.split("=") for word in wrong.split())
        with pytest.raises(ValueError, match=message):
            GRPOConfig(**sizes | {"rollout_gpus": 1} | {name: yaml.safe_load(text) for name, text in given.items()})
    with pytest.raises(ValueError, match="max_staleness=1 is for grpo: ppo takes completions for those of the weights"):
        PPOConfig(rollout_gpus=1, max_staleness=1)


def test_the_age_is_corrected_unless_that_was_said_or_the_loss_does(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")

    def made(**options):
        loss = GRPOConfig(per_device_train_batch_size=8, num_generations=4, rollout_gpus=1, **options).loss_options
        return loss.vllm_importance_sampling_correction, loss.vllm_importance_sampling_mode

    assert made() == (False, "sequence_mask")
    assert made(max_staleness=1) == (True, "token_truncate")
    assert made(max_staleness=1, vllm_importance_sampling_mode="token_mask") == (True, "token_mask")
    assert made(max_staleness=1, vllm_importance_sampling_correction=True) == (True, "sequence_mask")
    assert made(max_staleness=1, vllm_importance_sampling_correction=False) == (False, "sequence_mask")
    assert made(max_staleness=1, loss_type="vespo") == (False, "sequence_mask")


def test_rows_are_those_of_the_processes_that_train(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    for count, rows in ((0, 24), (1, 16), (2, 8)):
        args = GRPOConfig(per_device_train_batch_size=8, num_generations=4, rollout_gpus=count)
        assert args.generation_size == rows
        assert PPOConfig(per_device_train_batch_size=8, rollout_gpus=count).generation_size == rows
