"""Groups that move between ranks: the rules, the messages with threads as ranks, and a rank's engine."""

import pickle
import time
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from cukit import GRPOConfig, SamplingParams
from cukit.engine.llm import LLM
from cukit.parallel.group import RankLost
from cukit.runs.signals import RunStopped
from cukit.trainers import dealing
from cukit.trainers.dealing import Deal, Load, Move, best_group, moves
from cukit.trainers.dealt_out import dealt_out
from cukit.trainers.dealt_rollout import Dealt, EngineTable, play
from cukit.trainers.ranks import Ranks
from cukit.trainers.rollout import Samples

from . import run_trainer
from .threads import ThreadMailbox, on_ranks


def test_a_load_in_tokens():
    assert Load(rows=3, tokens=1000).weight == 1000 + 3 * 256


def test_the_heaviest_gives_to_the_lightest():
    loads = {
        rank: Load(rows=0, tokens=tokens, free_rows=8, free_tokens=600)
        for rank, tokens in enumerate((50_000, 9_000, 30_000, 29_000, 8_000))
    }
    assert moves(loads, 8) == [Move(0, 4, 0, 42_000, 300), Move(2, 1, 0, 21_000, 300)]
    assert moves({0: Load(tokens=9_000), 1: Load(tokens=900, free_rows=8)}, 8) == [], "less than 8,192"
    assert moves({0: Load(tokens=90_000), 1: Load(tokens=81_100, free_rows=8)}, 8) == [], "less than a tenth"
    assert moves({0: Load(tokens=90_000), 1: Load(tokens=10_000, free_rows=7)}, 8) == [], "no room for its rows"
    assert moves({}, 8) == moves({0: Load(tokens=90_000)}, 8) == []


def test_groups_that_wait_go_where_they_can_begin():
    loads = {
        0: Load(rows=64, waiting=3),
        1: Load(rows=40, room=3),
        2: Load(rows=64, waiting=1),
        3: Load(rows=56, room=1),
    }
    assert moves(loads, 8) == [Move(0, 1, 3), Move(2, 3, 1)]
    assert moves(loads | {0: Load(rows=64, waiting=9)}, 8) == [Move(0, 1, 3), Move(0, 3, 1)]
    level = {0: Load(rows=64, waiting=4), 1: Load(rows=40, room=3), 2: Load(rows=44, room=3)}
    assert moves(level, 8) == [Move(0, 1, 2), Move(0, 2, 2)]
    # none runs from one to another meanwhile
    assert moves({0: Load(tokens=90_000, waiting=1), 1: Load(free_rows=8)}, 8) == []


def test_the_group_that_halves_the_gap_is_given():
    groups = {7: Load(1, 100), 8: Load(2, 400), 9: Load(4, 3000)}
    assert best_group(groups, Move(0, 1, 0, gap=1500, tokens=9999)) == 8
    assert best_group(groups, Move(0, 1, 0, gap=9000, tokens=9999)) == 9
    assert best_group(groups, Move(0, 1, 0, gap=9000, tokens=400)) == 8, "what the taker has no room for stays"
    assert best_group(groups, Move(0, 1, 0, gap=356, tokens=9999)) is None, "it would only turn the gap around"


# ---- messages --------------------------------------------------------------------------------------------------------


class Pile:
    """Groups (name -> steps that are left), of which `most` run at a time."""

    def __init__(self, groups, most):
        self.groups, self.most, self.ended, self.steps = dict(groups), most, [], 0

    @property
    def num_ended(self):
        return len(self.ended)

    def running(self):
        return list(self.groups)[: self.most]

    def load(self):
        running, free = self.running(), self.most - len(self.running())
        tokens = sum(10_000 * self.groups[name] for name in running)
        return Load(len(running), tokens, len(self.groups) - len(running), free, free, 10**9)

    def give(self, move):
        names = list(self.groups)
        names = names[self.most :][-move.groups :] if move.groups else names[-1:]
        return [(name, self.groups.pop(name)) for name in names]

    def take(self, groups):
        self.groups |= dict(groups)

    def step(self):
        self.steps += 1
        for name in self.running():
            self.groups[name] -= 1
            if self.groups[name] <= 0:
                del self.groups[name]
                self.ended.append(name)


def rollout(mailbox, pile, num_groups, pauses, does=None):
    """A rank's: it sleeps after steps, and does() may end it."""
    deal = Deal(mailbox, pile, num_groups, 1)
    try:
        while not deal.poll():
            pile.step()
            if does is not None:
                does(pile)
            time.sleep(pauses())
    except BaseException:
        deal.leave()
        raise
    return deal.num_given


@pytest.mark.parametrize("seed", range(12))
def test_every_group_ends_once(seed, monkeypatch):
    """Ranks of any speed, groups of any length, some ranks without any; two rollouts in turn."""
    monkeypatch.setattr(dealing, "PERIOD", 0.002)
    plan = np.random.default_rng(seed)
    size, most = int(plan.integers(2, 7)), int(plan.integers(1, 5))
    lengths = plan.integers(1, 12, (2, int(plan.integers(1, 40))))
    owners, speeds = plan.integers(0, size, lengths.shape), plan.choice([0.0, 1e-4, 3e-3], size)

    def work(group):
        mailbox, found = group.mailbox(), []
        for round_ in range(2):
            own = {place: length for place, length in enumerate(lengths[round_]) if owners[round_, place] == group.rank}
            pile = Pile(own, most)
            given = rollout(mailbox, pile, lengths.shape[1], lambda: speeds[group.rank])
            found.append((pile.ended, given, list(own)))
        group.barrier()
        return found, len(mailbox._boxes[group.rank])

    results = on_ranks(size, work)
    for round_ in range(2):
        ended = [name for found, _ in results for name in found[round_][0]]
        assert sorted(ended) == list(range(lengths.shape[1]))
    assert [left for _, left in results] == [0] * size, "no message is left"


def test_groups_do_move(monkeypatch):
    monkeypatch.setattr(dealing, "PERIOD", 0.002)

    def work(group):
        pile = Pile({place: 40 for place in range(8)} if group.rank == 1 else {}, 2)
        given = rollout(group.mailbox(), pile, 8, lambda: 1e-3)
        return len(pile.ended), given

    (first, _), (second, given) = on_ranks(2, work)
    assert first > 1 and first + second == 8 and given >= first


@pytest.mark.parametrize("fails", [0, 2])
@pytest.mark.parametrize("error", [OSError("broken"), RunStopped()])
def test_an_error_or_a_stop_of_one_rank_ends_all(fails, error, monkeypatch):
    monkeypatch.setattr(dealing, "PERIOD", 0.002)

    def work(group):
        def does(pile):
            if group.rank == fails and pile.steps == 5:
                raise error

        pile = Pile({group.rank: 10**9, group.rank + 3: 3}, 2)
        try:
            Ranks(group).each(lambda: rollout(group.mailbox(), pile, 6, lambda: 1e-3, does), "rollout")
        except BaseException as found:
            return type(found), str(found)

    stopped = isinstance(error, RunStopped)
    for rank, found in enumerate(on_ranks(3, work)):
        if stopped or rank == fails:
            assert found == (type(error), str(error))
        else:
            assert found == (RankLost, f"rank {fails} failed in rollout: OSError: broken")


def test_what_a_rollout_that_was_cut_short_left_is_no_part_of_the_next():
    boxes = [deque(), deque()]
    first, second = (ThreadMailbox(rank, boxes) for rank in (0, 1))
    Deal(first, Pile({}, 1), 1, 1)
    cut = Deal(second, Pile({0: 5}, 1), 1, 1)
    cut.poll()
    cut.leave()
    dealer, other = Deal(first, Pile({}, 1), 1, 1), Deal(second, Pile({0: 1}, 1), 1, 1)
    assert not dealer.poll() and not other.poll(), "the old `left` would stop both"
    other.table.step()
    for _ in range(3):
        ended = [other.poll(), dealer.poll()]
    assert ended == [True, True]


def test_a_rank_gets_no_order_before_it_has_carried_out_the_last(monkeypatch):
    """A report of before would say that a rank is light which has just been given groups."""
    boxes = [deque(), deque()]
    monkeypatch.setattr(dealing, "PERIOD", 0.0)
    dealer = Deal(ThreadMailbox(0, boxes), Pile({}, 1), 9, 1)._dealer

    def orders_after(order):
        dealer.take_in(0, "report", [0, order, Load(tokens=90_000)])
        dealer.take_in(1, "report", [0, order, Load(tokens=10_000, free_rows=8)])
        dealer.act()
        return len(boxes[0])

    assert [orders_after(order) for order in (0, 0, 0, 1, 1, 2)] == [1, 1, 1, 2, 2, 3]


# ---- a rank's engine -------------------------------------------------------------------------------------------------


def table(prompts=6, n=4, **options):
    llm = LLM.from_model(run_trainer.model(), run_trainer.tokenizer(), block_size=4, **options)
    ids = [[5 + i, 6, 7] for i in range(prompts)]
    params = [SamplingParams(n=n, max_tokens=12, seed=i, ignore_eos=True, logprobs=True) for i in range(prompts)]
    return EngineTable(llm.core, ids, params)


def test_an_engines_load():
    own = table(max_num_seqs=8, num_kv_blocks=64)
    assert own.load() == Load(0, 0, 0, 2, 8, 256)
    assert table(max_num_seqs=2, num_kv_blocks=20).load() == Load(0, 0, 0, 1, 2, 80), "one group always fits"
    assert table(n=1, max_num_seqs=64, num_kv_blocks=64).load() == Load(0, 0, 0, 256 // 15, 64, 256)
    for place in range(4):
        own.begin(place)
    assert own.load() == Load(0, 0, 4, 0, 8, 256)
    for _ in range(4):
        own.step()
    load = own.load()
    assert (load.rows, load.waiting, load.room, load.free_rows) == (8, 2, 0, 0)
    assert load.tokens == 2 * 3 + sum(seq.num_generated for r in own.running.values() for seq in r.sequences)
    assert load.free_tokens == own.core.blocks.num_free * 4 < 256


def test_an_engine_gives_and_takes():
    one, other, truth = (table(max_num_seqs=8, num_kv_blocks=64) for _ in range(3))
    for place in range(4):
        one.begin(place)
        truth.begin(place)
    for _ in range(5):
        one.step()
    given = one.give(Move(0, 1, 1))
    assert [(place, begun) for place, begun in given] == [(3, None)], "the last that waits"
    other.take(given)
    given = one.give(Move(0, 1, 0, gap=10**6, tokens=10**6))
    assert len(given) == 1 and given[0][0] in (0, 1) and len(given[0][1]) == 4
    other.take(given)
    assert one.give(Move(0, 1, 0, gap=10, tokens=10**6)) == []
    assert len(one.running) == len(other.running) == len(one.core.requests) == 2
    for each in (one, other, truth):
        while each.running:
            each.step()
    for place, request in truth.ended.items():
        found = (one if place in one.ended else other).ended[place]
        assert [seq.completion_ids.tolist() for seq in found.sequences] == [
            seq.completion_ids.tolist() for seq in request.sequences
        ]
        for ours, theirs in zip(found.sequences, request.sequences):
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-12)
    for each in (one, other):
        assert each.core.blocks.num_free == 64 and not each.core.requests


def test_a_rank_without_work_does_not_wait_for_ever():
    own = table()
    dealt = Dealt(ThreadMailbox(1, [deque(), deque()]), range(0), timeout=0.05)
    with pytest.raises(RankLost, match=r"the rollout has waited 0 s \(ddp_timeout\) for another rank"):
        play(own.core, own.prompts, own.params, lambda: None, dealt)


def test_a_lost_rank_ends_the_rollout(monkeypatch):
    """Nothing of it goes on, and the others are told."""
    own, boxes, looks = table(), [deque(), deque()], iter(range(3))

    def check(self):
        if next(looks, None) is None:
            raise RankLost("rank 0 is gone")

    monkeypatch.setattr(ThreadMailbox, "check", check)
    with pytest.raises(RankLost, match="rank 0 is gone"):
        play(own.core, own.prompts, own.params, lambda: None, Dealt(ThreadMailbox(1, boxes), range(2), timeout=9.0))
    assert not own.core.requests and own.core.blocks.num_free == own.core.blocks.num_blocks
    assert pickle.loads(boxes[0][-1][1]) == (1, "left")


# ---- completions and rewards of all ranks ----------------------------------------------------------------------------


def test_rewards_are_asked_for_where_a_prompt_was_at_first():
    """7 groups of 2 on 3 ranks, which draw others than their shares; the third draws none."""
    places, drawn = [10, 11, 12, 13, 14, 15, 16], ([6, 1, 3], [0, 2, 5, 4], [])

    def work(group):
        asked, scorer = [], SimpleNamespace(kept={}, take_recorded=lambda: {"mean": [group.rank]})
        scorer.add_recorded = lambda found: scorer.kept.setdefault("mean", []).extend(found["mean"])

        def complete(dealt):
            assert dealt.places == [range(2), range(2, 4), range(4, 7)][group.rank] and dealt.timeout == 0.0
            dealt.num_given, dealt.idle = group.rank, 0.5 * group.rank
            names = [place for place in drawn[group.rank] for _ in range(2)]
            one, ids = np.ones(len(names), np.int32), [np.array([place, place]) for place in names]
            return Samples(ids, one, np.array(names, np.int32), [one] * len(names), ["stop"] * len(names), names)

        def score(own, samples):
            asked.extend(own)
            samples.recorded = {"name": [str(text) for text in samples.texts]}
            values = np.array([own[group] for group in samples.groups], float)
            return values, values[:, None]

        found = dealt_out(Ranks(group), scorer, places, complete, score, "a test")
        return found, asked, scorer.kept

    results = on_ranks(3, work)
    assert [asked for _, asked, _ in results] == [[10, 11], [12, 13], [14, 15, 16]]
    for ((samples, rewards, by_function), metrics), _, kept in results:
        order = np.repeat(np.arange(7), 2)
        assert samples.groups.tolist() == order.tolist() == samples.texts
        assert rewards.tolist() == by_function[:, 0].tolist() == (order + 10).tolist()
        assert samples.recorded == {"name": [str(place) for place in order]} and kept == {"mean": [0, 1, 2]}
        assert metrics == {"balance/moved_groups": 3, "balance/wait": 1.0}


def test_a_model_without_finite_numbers_is_told_of_once_all_have_drawn():
    def work(group):
        def complete(dealt):
            failed = [np.full(1, np.nan if group.rank or bad else 0.0)]
            return Samples([np.ones(2, np.int32)], np.ones(1, np.int32), np.array([group.rank]), failed, ["stop"], [""])

        def score(own, samples):
            return np.zeros(1), np.zeros((1, 1))

        scorer = SimpleNamespace(take_recorded=dict, add_recorded=lambda found: None)
        return dealt_out(Ranks(group), scorer, range(2), complete, score, "a test")

    bad = False
    assert not any(isinstance(found, Exception) for found in on_ranks(2, work)), "one rank's completions alone"
    bad = True
    assert all("not finite in any of 2 completions" in str(found) for found in on_ranks(2, work))


# ---- the option ------------------------------------------------------------------------------------------------------


def test_ranks_that_share_a_model_move_no_groups():
    with pytest.raises(ValueError, match="balance_rollouts=true moves groups by the clock, which the 2 processes of"):
        GRPOConfig(balance_rollouts="true", tensor_parallel_size=2, per_device_train_batch_size=8)


AUTO = {"balance_rollouts": "auto"}


@pytest.mark.parametrize(
    "options, device, wanted",
    [({}, "cuda", False), (AUTO, "cpu", False), (AUTO, "cuda", True),
     (AUTO | {"exact": "false"}, "cuda", False), (AUTO | {"kv_cache_dtype": "fp8"}, "cuda", False),
     ({"balance_rollouts": "true"}, "cpu", True),
     ({"balance_rollouts": "true", "plays": True}, "cpu", False)],
)  # fmt: skip
def test_where_groups_move(options, device, wanted, monkeypatch, tmp_path):
    """auto: where no bit depends on it."""
    engine = {name: options[name] for name in ("exact", "kv_cache_dtype") if name in options}
    trainer = run_trainer.make_trainer(
        "grpo", output_dir=str(tmp_path), **{name: x for name, x in options.items() if name not in engine}
    )
    for name, value in engine.items():
        setattr(trainer.args.engine, name, value)
    monkeypatch.setattr(trainer.ranks, "size", 2)
    monkeypatch.setattr(trainer.model.backend, "name", device)
    assert trainer.generation._balances is wanted
    monkeypatch.setattr(trainer.ranks, "tensor", object())
    assert not trainer.generation._balances, "ranks that share a model read different clocks"
    monkeypatch.setattr(trainer.ranks, "tensor", None)
    monkeypatch.setattr(trainer.ranks, "size", 1)
    assert not trainer.generation._balances
