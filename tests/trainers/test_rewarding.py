"""Rewards in a run: from files and from Python, together, with TRL's keywords, and how a run with workers ends."""

import asyncio
import os
import signal
import threading
import time

import numpy as np
import psutil
import pytest
from processes import running_children

from cukit import GRPOConfig
from cukit.runs.metrics import read_jsonl
from cukit.trainers.rewarding import RewardScorer
from cukit.trainers.rollout import Samples

from .conftest import assert_equal_weights, logged, share_of_ones
from .test_stops import advised_resume

FILE = """
import asyncio, os, pathlib, time

def share_of_ones(completions, **kwargs):
    texts = [completion[0]["content"] if isinstance(completion, list) else completion for completion in completions]
    return [text.count("1") / max(len(text), 1) for text in texts]

def told(completions, trainer_state, log_extra, log_metric, **kwargs):
    log_extra("place", list(range(len(completions))))
    log_metric("mine/step", trainer_state.global_step)
    log_metric("mine/rest", trainer_state.max_steps - trainer_state.global_step)
    return [trainer_state.epoch] * len(completions)

def takes_a_column(completions, log_extra, **kwargs):
    log_extra("length", list(range(len(completions))))
    return [0.0] * len(completions)

def takes_a_metric(completions, log_metric, **kwargs):
    log_metric("step", 1)
    return [0.0] * len(completions)

def waits(completions, **kwargs):
    if os.path.exists(__file__ + ".go"):
        return share_of_ones(completions)
    pathlib.Path(__file__ + ".here").write_text("")
    time.sleep(60)

async def meets(completions, **kwargs):
    pathlib.Path(__file__ + ".worker").write_text("")
    while not os.path.exists(__file__ + ".trainer"):
        await asyncio.sleep(0.01)
    return [1.0] * len(completions)

def one(completions, **kwargs):
    return [1.0] * len(completions)

def leaves(completions, **kwargs):
    os._exit(7)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return str(path)


@pytest.fixture(autouse=True)
def nothing_is_left():
    import gc

    yield
    gc.collect()
    end = time.monotonic() + 5
    while (left := children()) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left


def children():
    return running_children(psutil.Process(), "cukit.rewards")


def samples(texts, failed=()):
    count = len(texts)
    ids, reasons = [np.arange(3, dtype=np.int32)] * count, ["stop"] * count
    for place in failed:
        reasons[place] = "error"
    ones = np.ones(count, np.int32)
    return Samples(ids, ones, np.arange(count, dtype=np.int32), [np.zeros(2)] * count, reasons, list(texts))


def rows(count):
    return [{"prompt": "p", "answer": "1"}] * count


def test_a_run_is_the_same_with_a_reward_from_a_file(make_grpo, file):
    straight, other = make_grpo(share_of_ones), make_grpo(f"{file}:share_of_ones")
    straight.train()
    other.train()
    assert_equal_weights(straight, other)
    assert logged(straight, "rewards/share_of_ones/mean") == logged(other, "rewards/share_of_ones/mean")


def test_trls_keywords_in_a_run(make_grpo, file, rows):
    """From a worker and from this process: the state is the run's, what is recorded stands in the two logs."""

    def here(completions, log_extra, log_metric, trainer_state, **kwargs):
        log_extra("size", [len(text[0]["content"]) for text in completions])
        log_metric("mine/here", trainer_state.num_input_tokens_seen)
        log_metric("mine/here", trainer_state.num_input_tokens_seen + 2)
        return [0.0] * len(completions)

    trainer = make_grpo([here, f"{file}:told"], max_steps=3, eval_dataset=rows[:4])
    trainer.train()
    assert logged(trainer, "mine/step") == [0, 1, 2] and logged(trainer, "mine/rest") == [3, 2, 1]
    assert logged(trainer, "mine/here") == [1 + tokens for tokens in [0, *logged(trainer, "num_tokens")[:-1]]]
    assert logged(trainer, "rewards/told/mean") == pytest.approx([1 / 3, 2 / 3, 1])
    assert logged(trainer, "eval/mine/step") == [0, 3] and logged(trainer, "eval/mine/rest") == [3, 0]
    shown = read_jsonl(trainer.run_folder / "completions.jsonl")
    assert all(row["size"] == len(row["completion"]) for row in shown)
    assert [row["place"] for row in shown] == [0, 1, 2, 3] * 5  # an evaluation, three groups, an evaluation


def test_what_is_recorded_stays_with_its_completion_where_groups_are_replaced(make_grpo):
    """With dynamic sampling rewards get the groups as they end; here every first one has no spread."""
    calls = []

    def sizes(completions, log_extra, log_metric, **kwargs):
        texts = [text[0]["content"] for text in completions]
        if len(calls) % 2:
            log_extra("size", [len(text) for text in texts])
        calls.append(len(texts))
        log_metric("mine/calls", len(calls))
        return [float(place % 4 > 1 and len(calls) > 1) for place in range(len(texts))]

    trainer = make_grpo(sizes, dynamic_sampling=True, max_num_gen_batches=3)
    trainer.train()
    shown = read_jsonl(trainer.run_folder / "completions.jsonl")
    assert len(shown) == 8 and any(row.get("size") is not None for row in shown)
    assert all(row["size"] in (len(row["completion"]), None) for row in shown if "size" in row)
    assert len(calls) > 2 and len(logged(trainer, "mine/calls")) == 2


@pytest.mark.parametrize(
    ("name", "call"), [("takes_a_column", r"log_extra\('length'\)"), ("takes_a_metric", r"log_metric\('step'\)")]
)
def test_what_the_run_writes_itself_keeps_its_meaning(make_grpo, file, name, call):
    with pytest.raises(ValueError, match=f"^{call}: the run writes something of that name itself; choose another$"):
        make_grpo(f"{file}:{name}").train()


def test_what_is_recorded_stays_with_its_completion():
    def sizes(completions, log_extra, **kwargs):
        log_extra("size", [len(text) for text in completions])
        return [1.0] * len(completions)

    given = samples(["a", "", "ccc", "dd"], failed=[1])
    RewardScorer(sizes)(rows(4), given)
    assert given.recorded == {"size": [1, None, 3, 2]} and given.rows([2, 0]).recorded == {"size": [3, 1]}


def test_two_rewards_do_not_share_a_column(file):
    def first(completions, log_extra, **kwargs):
        log_extra("size", [1] * len(completions))
        return [1.0] * len(completions)

    def second(completions, log_extra, **kwargs):
        return first(completions, log_extra)

    with pytest.raises(ValueError, match=r"log_extra\('size'\) has 4 values for 2 completions; .*from one reward only"):
        RewardScorer([first, second])(rows(2), samples(["a", "b"]))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (lambda extra, metric: extra("a", [1]), r"reward 'bad': log_extra\('a'\) has 1 values for 2 completions"),
        (
            lambda extra, metric: extra("a", 1),
            "reward 'bad' raised TypeError: log_extra takes the name of a column",
        ),
        (lambda extra, metric: extra("a", [1, {3}]), r"log_extra\('a'\): values are texts, numbers, .* got set"),
        (lambda extra, metric: metric("a", "x"), r"log_metric\('a'\): a metric is a finite number, got 'x'"),
        (lambda extra, metric: metric("a", float("nan")), "a metric is a finite number, got nan"),
        (lambda extra, metric: metric(3, 1), "log_metric takes a name and a number, got the name 3"),
    ],
)
def test_what_can_not_be_recorded_is_refused(record, message):
    def bad(completions, log_extra, log_metric, **kwargs):
        record(log_extra, log_metric)
        return [1.0] * len(completions)

    with pytest.raises(ValueError, match=message):
        RewardScorer(bad)(rows(2), samples(["a", "b"]))


def test_async_rewards_and_workers_work_side_by_side(file):
    """Each waits for another: in turn none of them would end."""
    here, there = asyncio.Event(), asyncio.Event()

    async def first(completions, **kwargs):
        here.set()
        await asyncio.wait_for(there.wait(), 10)
        return [0.25] * len(completions)

    async def second(completions, **kwargs):
        await here.wait()
        there.set()
        return [0.5] * len(completions)

    async def third(completions, **kwargs):
        end = time.monotonic() + 20
        while not os.path.exists(file + ".worker") and time.monotonic() < end:
            await asyncio.sleep(0.01)
        open(file + ".trainer", "w").close()
        return [2.0] * len(completions)

    scorer = RewardScorer([first, f"{file}:one", second, f"{file}:meets", third], [1.0, 1.0, 1.0, 1.0, 0.5])
    total, values = scorer(rows(2), samples(["a", "b"]))
    assert values.tolist() == [[0.25, 1.0, 0.5, 1.0, 2.0]] * 2 and total.tolist() == [3.75] * 2
    assert scorer.names == ["first", "one", "second", "meets", "third"]


def test_an_async_reward_where_a_loop_runs_already():
    """As in a notebook."""

    async def inside():
        return RewardScorer(_later)(rows(1), samples(["a"]))[0]

    assert asyncio.run(inside()).tolist() == [3.0]


async def _later(completions, **kwargs):
    await asyncio.sleep(0)
    return [3.0] * len(completions)


def test_an_async_reward_that_fails_is_named():
    async def broken(completions, **kwargs):
        found = []
        for text in completions:
            found.append(1 / len(text))
        return found

    with pytest.raises(ValueError, match=r"reward 'broken' raised ZeroDivisionError: .*, with completion 1: ''\)"):
        RewardScorer([_later, broken])(rows(2), samples(["a", ""]))


# ---- limits, stops ----


def test_the_limits_reach_the_workers(make_grpo, file):
    trainer = make_grpo(f"{file}:waits", reward_timeout=1.0, reward_memory_gb=2.0)
    assert trainer.scorer.functions[0].limits.reward_memory_gb == 2
    with pytest.raises(ValueError, match=r"reward 'waits': .* took longer than reward_timeout=1 s"):
        trainer.train()
    assert not children()
    assert GRPOConfig().reward_timeout == 600 and GRPOConfig().reward_memory_gb == 16


def test_a_worker_that_dies_ends_the_run_in_one_line_with_its_steps_saved(make_grpo, file, capsys):
    trainer = make_grpo([f"{file}:share_of_ones"], max_steps=3)
    step = trainer.train_step

    def then_leave():
        if trainer.global_step == 1:
            trainer.scorer.functions[0].close()
            trainer.scorer.functions[0].spec = f"{file}:leaves"
        return step()

    trainer.train_step = then_leave
    with pytest.raises(ValueError, match=r"reward 'share_of_ones': .* ended its process \(it exited with code 7"):
        trainer.train()
    assert advised_resume(capsys.readouterr().out) and not children()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_cuts_a_call_of_a_worker(make_grpo, file, number, capsys):
    """The call ends there and then; the resumed run gets no reply of the call that was cut."""
    trainer = make_grpo(f"{file}:waits", max_steps=2)

    def stop():
        while not os.path.exists(file + ".here"):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=stop)
    thread.start()
    start = time.monotonic()
    trainer.train()
    thread.join()
    assert time.monotonic() - start < 20 and trainer.global_step == 0 and not children()
    open(file + ".go", "w").close()
    straight = make_grpo(share_of_ones, max_steps=2)
    straight.train()
    trainer.train()
    assert logged(trainer, "rewards/waits/mean") == logged(straight, "rewards/share_of_ones/mean")


def test_where_there_are_no_process_groups_it_is_said(file, monkeypatch, caplog):
    monkeypatch.setattr("cukit.trainers.rewarding.workers_are_possible", lambda: False)
    total, _ = RewardScorer(f"{file}:one")(rows(2), samples(["a", "b"]))
    assert total.tolist() == [1.0, 1.0] and not children()
    assert "runs in this process, without limits" in caplog.text
