"""Groups without spread are replaced by other prompts; prompts that teach nothing are retired."""

import json
import random

import numpy as np
import pytest

from cukit.datasets.sampler import EpochSampler
from cukit.trainers.curriculum import NEVER, SOLVED, CurriculumSampler
from cukit.trainers.dynamic_sampling import Replacements
from cukit.trainers.rollout import Samples

GROUP = 3


def ended(places):
    """Samples of these groups, one token a completion."""
    count = GROUP * len(places)
    return Samples(
        [np.array([1, 2], np.int32)] * count,
        np.ones(count, np.int32),
        np.repeat(np.arange(len(places), dtype=np.int32), GROUP),
        [np.zeros(1)] * count,
        ["stop"] * count,
        [""] * count,
    )


def drawn(has_spread, wanted, most, order):
    """Replacements after all groups have ended, some at a time in the order that `order` chooses."""

    def score(places, samples):
        rewards = np.concatenate([np.arange(GROUP) if has_spread[place] else np.ones(GROUP) for place in places])
        return rewards.astype(float), rewards[:, None]

    taken = iter(range(wanted, len(has_spread)))
    found = Replacements(wanted, most, score, lambda: next(taken, None))
    running = list(range(wanted))
    while running:
        places = [running.pop(order.randrange(len(running))) for _ in range(order.randint(1, len(running)))]
        running += found(places, ended(places))
    return found


def test_which_prompts_are_drawn_does_not_depend_on_which_end_first():
    moments = random.Random(20261128)
    for _ in range(200):
        wanted = moments.randint(1, 6)
        most = wanted * moments.randint(1, 5)
        has_spread = [moments.random() < 0.5 for _ in range(most)]
        runs = [drawn(has_spread, wanted, most, random.Random(seed)) for seed in range(4)]
        assert len({run.num_drawn for run in runs}) == 1 and runs[0].num_drawn <= most
        assert len({tuple(run.kept()) for run in runs}) == 1
        kept = runs[0].kept()
        spread = [place for place in range(runs[0].num_drawn) if has_spread[place]]
        assert len(kept) == wanted and set(spread[:wanted]) <= set(kept)
        # as few as possible: without the last one there are too few, or the bound is reached
        enough = sum(has_spread[: runs[0].num_drawn]) == wanted
        assert (enough and (runs[0].num_drawn == wanted or has_spread[runs[0].num_drawn - 1])) or (
            runs[0].num_drawn == most
        )


def by_first_digit(prompts, completions, **_):
    """Prompts of an even number of digits get equal rewards, the others different ones."""
    sizes = [len(prompt) for prompt in prompts]
    return [float(place) if size % 2 == 0 else 1.0 for place, size in enumerate(sizes)]


ROWS = [{"prompt": "1" * (i % 4 + 1) + "="} for i in range(16)]  # sizes 2, 3, 4, 5: every second has a spread


def test_a_batch_holds_groups_with_a_spread_only(make_grpo):
    trainer = make_grpo(by_first_digit, train_dataset=ROWS, dynamic_sampling=True, max_steps=2, logging_steps=1)
    found, seen = [], trainer.generation.batch
    trainer.generation.batch = lambda number: found.append(seen(number)) or found[-1]
    trainer.train()
    for batch, metrics in found:
        sizes = np.unique(batch.groups, return_counts=True)[1]
        assert (sizes == trainer.args.num_generations).all()
        assert sizes.sum() == trainer.args.generation_size and batch.has_gradient.any()
        for group in np.unique(batch.groups):
            assert len(set(batch.rewards[batch.groups == group])) > 1
        dropped = metrics["dynamic_sampling/dropped_groups"]
        groups = trainer.args.generation_size // trainer.args.num_generations
        assert dropped > 0 and metrics["dynamic_sampling/groups_without_spread"] == 0
        assert metrics["dynamic_sampling/num_gen_batches"] == (groups + dropped) / groups
        # what is logged about rewards is about all that was drawn
        assert metrics["frac_reward_zero_std"] == pytest.approx(dropped / (groups + dropped))
    assert sum(metrics["dynamic_sampling/dropped_tokens"] for _, metrics in found) > 0


def test_the_bound_holds_and_the_batch_stays_whole(make_grpo):
    trainer = make_grpo(
        lambda completions, **_: [1.0] * len(completions),
        train_dataset=ROWS,
        dynamic_sampling=True,
        max_num_gen_batches=3,
        max_steps=1,
        logging_steps=1,
    )
    row = trainer.train()
    assert row["dynamic_sampling/num_gen_batches"] == 3 and row["frac_reward_zero_std"] == 1
    groups = trainer.args.generation_size // trainer.args.num_generations
    assert row["dynamic_sampling/groups_without_spread"] == groups


def test_the_engine_s_schedule_changes_no_completion(make_grpo):
    """Few rows at once: other groups end first, the same prompts are drawn."""
    batches = []
    for rows in (2, 64):
        trainer = make_grpo(
            by_first_digit, train_dataset=ROWS, dynamic_sampling=True, max_num_seqs=rows, max_completion_length=12
        )
        batches.append(trainer.generation.batch(0)[0].to_arrays())
    assert batches[0].keys() == batches[1].keys()
    for name in ("ids", "groups"):
        assert np.array_equal(batches[0][name], batches[1][name]), name


def test_without_dynamic_sampling_rewards_are_asked_once(make_grpo):
    sizes = []

    def counted(completions, **_):
        sizes.append(len(completions))
        return [1.0] * len(completions)

    make_grpo(counted, train_dataset=ROWS).generation.batch(0)
    assert sizes == [16]


# ---- the curriculum ----


def test_a_curriculum_passes_over_rows_of_equal_rewards():
    sampler = CurriculumSampler(4, 0, False, "both", 2)
    for _ in range(2):
        sampler.observe(0, 1.0, 0.0)
        sampler.observe(1, 0.0, 0.0)
        sampler.observe(2, 0.5, 0.5)
    sampler.observe(3, 1.0, 0.0)
    assert sampler.take(4) == [2, 3]
    assert sampler.metrics() == {"curriculum/retired_solved": 1, "curriculum/retired_never": 1}
    sampler.observe(0, 0.5, 0.5)  # drawn by an earlier batch: it teaches again
    assert sampler.take(4) == [0, 2, 3]


@pytest.mark.parametrize("kind, left", [("solved", [1, 2]), ("never", [0, 2]), ("both", [2])])
def test_what_is_retired_is_an_option(kind, left):
    sampler = CurriculumSampler(3, 0, False, kind, 1)
    sampler.observe(0, 2.0, 0.0)
    sampler.observe(1, 0.0, 0.0)
    assert sampler.take(3) == left


def test_rows_come_back_where_all_are_retired():
    sampler = CurriculumSampler(2, 0, False, "both", 1)
    sampler.observe(0, 1.0, 0.0)
    sampler.observe(1, 0.0, 0.0)
    assert sampler.take(2) == [0, 1] and sampler.metrics() == {
        "curriculum/retired_solved": 0,
        "curriculum/retired_never": 0,
    }


def test_a_curriculum_goes_on_where_it_was():
    moments, straight = random.Random(7), CurriculumSampler(9, 3, True, "both", 2)
    for _ in range(300):
        kind = moments.choice([SOLVED, NEVER, "neither"])
        straight.observe(moments.randrange(9), float(kind == SOLVED), float(kind == "neither"))
        state = json.loads(json.dumps(straight.state_dict()))
        resumed = CurriculumSampler(9, 3, True, "both", 2)
        resumed.load_state(state)
        assert resumed.take(2) == straight.take(2) and resumed.metrics() == straight.metrics()


def test_the_options_reach_the_sampler(make_grpo):
    assert type(make_grpo(train_dataset=ROWS).sampler) is EpochSampler
    trainer = make_grpo(
        lambda completions, **_: [0.0] * len(completions),
        train_dataset=ROWS,
        curriculum="never",
        curriculum_patience=1,
        max_steps=2,
        logging_steps=1,
    )
    row = trainer.train()
    assert row["curriculum/retired_never"] == 8


def test_a_phase_within_a_phase_is_counted_once():
    from cukit.runs.metrics import Timer

    timer, clock = Timer(), iter([0.0, 1.0, 4.0, 10.0, 11.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cukit.runs.metrics.time.perf_counter", lambda: next(clock))
        with timer("generate"), timer("reward"):
            pass
        found = timer.pop()
    assert found["time/reward"] == 3.0 and found["time/generate"] == 7.0
