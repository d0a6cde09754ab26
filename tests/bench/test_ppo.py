"""bench ppo: what it counts, and that it is a PPO update. Times are not judged."""

import json

import numpy as np
import pytest

import cukit_cli
from cukit.bench import PPOBench
from cukit.bench.ppo import LOSS, Learners, make_parts
from cukit.bench.subject import choose_subject
from cukit.ops import ppo_loss

SMALL = dict(model="tiny", device="cpu", rows=4, tokens_per_row=12, completion=7, max_tokens_per_batch=24)


def built(critic):
    options = PPOBench(**SMALL, critic=critic)
    subject = choose_subject(options)
    learners = Learners(options, subject)
    return learners, make_parts(options, subject, 1.0, learners.forward)


def loss_of(learners, parts):
    losses = []
    for rows in parts:
        old = rows.logprobs, rows.values, None, rows.advantages, rows.returns, rows.weights
        logprobs, entropies, values = learners.forward(rows)
        losses.append(ppo_loss(logprobs, values, entropies, *old, **LOSS)[0].item())
    return sum(losses)


@pytest.mark.parametrize("critic, models", [("shared", 1), ("separate", 2)])
def test_an_update_moves_every_weight_and_lowers_the_loss(critic, models):
    learners, parts = built(critic)
    stores = [optimizer.store for optimizer in learners.optimizers]
    assert len(parts) == 2
    before = [{name: np.array(view) for name, view in store.part_views().items()} for store in stores]
    assert "score.weight" in before[1] and len(before[1]) == (1 if models == 1 else len(before[0]) + 1)
    for optimizer in learners.optimizers:
        optimizer.lr = 1e-4
    first = loss_of(learners, parts)
    for _ in range(5):
        learners.update(parts)
    assert loss_of(learners, parts) < first
    for store, old in zip(stores, before):
        for name, view in store.part_views().items():
            assert not np.array_equal(view, old[name]), name
    assert all(optimizer.step_count == 5 and not optimizer.skipped for optimizer in learners.optimizers)


def test_old_columns_lie_near_the_models_own():
    learners, parts = built("shared")
    logprobs, _, values = learners.forward(parts[1])
    for old, own in ((parts[1].logprobs, logprobs.data), (parts[1].values, values.data)):
        assert 0.02 < np.std(old - own) < 0.3
    assert sum(rows.weights.sum() for rows in parts) == pytest.approx(1)


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_the_report(capsys, tmp_path, critic):
    path = tmp_path / "report.json"
    words = [f"--{name}={value}" for name, value in SMALL.items()]
    assert cukit_cli.main(["bench", "ppo", *words, f"--critic={critic}", "--repeats=2", f"--output={path}"]) == 0
    assert critic in capsys.readouterr().out
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["critic"], row["tokens"], row["completion_tokens"], row["micro_batches"]) == (critic, 48, 28, 2)
    assert row["least_seconds"] <= row["seconds"] <= row["most_seconds"] and len(row["all_seconds"]) == 2


def test_a_completion_without_a_prompt_is_refused(capsys):
    assert cukit_cli.main(["bench", "ppo", "--device=cpu", "--tokens_per_row=10", "--completion=10"]) == 2
    assert "completion=10 must be below tokens_per_row=10" in capsys.readouterr().err
