"""Completions of many turns: what was sampled stays, what was observed is not learnt, and turns cost what is new."""

import threading
import time

import numpy as np
import pytest

from cukit import SamplingParams
from cukit.datasets.demonstrations import encode_prompts
from cukit.trainers.environment import EnvironmentMaker
from cukit.trainers.episodes import Episodes
from cukit.trainers.rollout import Rollout

from ..engine.helpers import check_engine
from . import conftest
from .playing import ROWS, SHORT, Asking


class SlowAsking(Asking):
    slow = True

    def respond(self, conversation):
        time.sleep(0.02 * ((self.seed + 3 * self.index) % 4))
        return super().respond(conversation)


def outcome(samples, row):
    return (
        samples.token_ids[row].tolist(),
        samples.masks[row].tolist(),
        samples.messages[row],
        samples.finish_reasons[row],
        samples.logprobs[row].round(9).tolist(),
    )


def outcomes(samples):
    """What came of each (prompt, completion), wherever it stands."""
    return [outcome(samples, row) for row in range(len(samples))]


# ---- what a row holds ----


def test_rows_are_the_turns_in_order(play, tokenizer):
    samples, rollout = play()
    assert len(samples) == 18 and samples.groups.tolist() == [i // 3 for i in range(18)]
    turns = [sum(message["role"] == "assistant" for message in messages) for messages in samples.messages]
    assert len(set(turns)) > 2, "the environments draw different numbers"
    for row in range(len(samples)):
        ids, length, mask = samples.token_ids[row], samples.prompt_lengths[row], samples.masks[row]
        assert len(mask) == len(ids) - length and mask[0] and mask[-1], "it begins and ends with what the model wrote"
        assert len(samples.logprobs[row]) == mask.sum() == samples.lengths[row]
        assert samples.finish_reasons[row] != "stop" or sum(np.diff(mask.astype(int)) == 1) + 1 == turns[row]
        text = tokenizer.decode(ids[length:])
        for message in samples.messages[row]:
            assert message["content"] in text
            text = text[text.index(message["content"]) + len(message["content"]) :]


def test_sampled_ids_are_appended_to_and_never_changed(play, monkeypatch):
    """The ids of each turn are a prefix of those of the next; a text is encoded only for what an environment said."""
    encoded, prompts = [], []
    samples, rollout = play()
    plain_encode, plain_add = rollout.llm.tokenizer.encode, rollout.llm.core.add
    monkeypatch.setattr(
        rollout.llm.tokenizer, "encode", lambda text, *more: encoded.append(text) or plain_encode(text, *more)
    )

    def add(ids, *arguments, **keywords):
        prompts.append((np.array(ids), keywords["after"], arguments[1].seed))
        return plain_add(ids, *arguments, **keywords)

    monkeypatch.setattr(rollout.llm.core, "add", add)
    ids = encode_prompts(ROWS, rollout.llm.tokenizer)
    encoded.clear()
    again = rollout.generate(
        ids, SamplingParams(**SHORT), [100 + 7 * i for i in range(len(ROWS))], None, None, ROWS.__getitem__
    )
    assert outcomes(again) == outcomes(samples)
    turns = [turn for turn in prompts if turn[1] is not None]
    assert len(turns) > 10
    for turn, before, seed in turns:
        assert seed == before.seed, "it draws on from its own completion's seed"
        assert turn[: before.length].tolist() == before.token_ids.tolist() and len(turn) > before.length
    answers = [f"user\n{said}<|im_end|>" for made in again.environments for said in made.own.said]
    texts = [text for text in encoded if text not in SHORT["stop"]]
    assert len(texts) == len(answers) >= len(turns)
    assert all(text.startswith("<|im_end|>\n<|im_start|>user") for text in texts)
    assert sorted(text.split("<|im_start|>")[1].rstrip() for text in texts) == sorted(answers)


def test_the_environment_sees_the_whole_conversation(play):
    samples, _ = play()
    for row, made in enumerate(samples.environments):
        whole = ROWS[samples.groups[row]]["prompt"] + samples.messages[row]
        assert [len(seen) for seen in made.own.seen] == sorted(len(seen) for seen in made.own.seen)
        for seen in made.own.seen:
            assert seen == whole[: len(seen)] and seen[-1]["role"] == "assistant"


def test_logprobs_are_those_of_the_training_forward(play):
    """Of every turn, and of sampled tokens only."""
    for dtype, tolerance in (("float64", 1e-10), ("float32", 2e-4)):
        samples, rollout = play(dtype=dtype)
        scored = rollout.llm.score([ids.tolist() for ids in samples.token_ids])
        for row, values in enumerate(scored):
            learnt = np.asarray(values)[samples.prompt_lengths[row] - 1 :][samples.masks[row]]
            np.testing.assert_allclose(samples.logprobs[row], learnt, rtol=0, atol=tolerance)


# ---- where an episode ends ----


def test_max_iterations_bounds_the_answers(play):
    class Always(Asking):
        def respond(self, conversation):
            self.seen.append(conversation)
            return [{"role": "user", "content": "1"}]

    for most in (1, 3):
        samples, _ = play(Always, max_iterations=most)
        ended = [row for row in range(len(samples)) if samples.finish_reasons[row] == "stop"]
        assert ended
        for row in ended:
            assert len(samples.environments[row].own.seen) == most
            assert samples.messages[row][-1]["role"] == "assistant" and len(samples.messages[row]) == 2 * most + 1


def test_all_turns_together_keep_the_limit(play):
    class Long(Asking):
        def respond(self, conversation):
            return [{"role": "user", "content": "7" * 9}]

    lengths = []
    for limit in (5, 17, 30):
        samples, _ = play(Long, sampling={"max_tokens": limit})
        assert set(samples.finish_reasons) == {"length"} and samples.truncated.all()
        for row in range(len(samples)):
            total = len(samples.token_ids[row]) - samples.prompt_lengths[row]
            assert total <= limit and samples.masks[row][-1], "an observation without an answer is left out"
            lengths.append(total)
            assert samples.messages[row][-1]["role"] == "assistant"
    assert max(lengths) == 30


def test_the_context_bounds_an_episode_too(play):
    class Long(Asking):
        def respond(self, conversation):
            return [{"role": "user", "content": "7" * 5}]

    samples, _ = play(Long, max_model_len=40, sampling={"max_tokens": 90})
    assert set(samples.finish_reasons) == {"length"} and max(map(len, samples.token_ids)) == 40


def test_a_turn_that_was_cut_ends_the_episode(play):
    samples, _ = play(sampling={"stop": [], "max_tokens": 4, "ignore_eos": True})
    assert set(samples.finish_reasons) == {"length"} and all(len(mask) == 4 for mask in samples.masks)
    assert all(made.own.seen == [] for made in samples.environments), "it was not asked"


def test_failed_rows_end(play, make_model):
    model = make_model("float64", tie_word_embeddings=False)
    model.parameters()[0].data[9] = np.nan  # the blank
    rows = [{"prompt": [{"role": "user", "content": "1 1"}]}, *ROWS]
    samples, _ = play(rows=rows, model=model)
    assert samples.finish_reasons[:3] == ["error"] * 3 and samples.failed[:3].all() and not samples.failed.all()


# ---- side by side, in any order ----


@pytest.mark.slow
def test_results_depend_on_no_order(play):
    expected = outcomes(play()[0])
    for options in ({"max_num_seqs": 2}, {"num_kv_blocks": 40}, {"enable_prefix_caching": False},
                    {"max_num_batched_tokens": 5, "max_num_seqs": 3}):  # fmt: skip
        assert outcomes(play(**options)[0]) == expected, options
    assert outcomes(play(SlowAsking)[0]) == expected
    seeds = [100 + 7 * i for i in range(len(ROWS))]
    backwards, _ = play(rows=ROWS[::-1], seeds=seeds[::-1])
    assert sum((outcomes(backwards)[3 * i : 3 * i + 3] for i in reversed(range(6))), []) == expected
    assert outcomes(play(seeds=[seed + 1 for seed in seeds])[0]) != expected


def test_later_turns_draw_fresh_numbers(play):
    """Completions whose turns begin with equal contexts would repeat themselves if draws did not go by position."""
    samples, _ = play(sampling={"n": 16, "max_tokens": 30}, rows=ROWS[:2])
    second = [
        tuple(samples.token_ids[row][samples.prompt_lengths[row] :][samples.masks[row]][-3:])
        for row in range(len(samples))
    ]
    assert len(set(second)) > 12


def test_a_turn_computes_only_what_is_new(play):
    """Its prefill: the token that ended the turn before, and what the environment said."""
    for caching in (True, False):
        samples, rollout = play(enable_prefix_caching=caching, rows=ROWS[:1] + ROWS[2:3])
        stats = rollout.llm.stats
        starts = sum(int(samples.prompt_lengths[row]) for row in range(0, len(samples), 3))
        seen = sum(int((~mask).sum()) for mask in samples.masks)
        turns = sum(int((np.diff(mask.astype(int)) == 1).sum()) for mask in samples.masks)
        assert turns > 3 and stats.num_preemptions == 0
        shared = stats.num_prefill_tokens - (starts + seen + turns)
        assert 0 <= shared <= 4 * turns, "at most a block that samples of one token shared"
        contexts = sum(
            int(place + samples.prompt_lengths[row])
            for row, mask in enumerate(samples.masks)
            for place in np.flatnonzero(np.diff(mask.astype(int)) == -1)
        )
        assert stats.num_cached_tokens >= contexts - 4 * turns


def test_what_is_over_keeps_no_kv(play):
    """While others go on: only what waits for its environment does."""

    class Once(Asking):
        def respond(self, conversation):
            return [{"role": "user", "content": "7"}] if len(conversation) == 2 and self.index else None

    held = []
    rollouts = []

    def look():
        (llm,) = rollouts
        held.append(len(llm.core.scheduler.held))
        if llm.core.requests and not llm.core._added:
            assert not held[-1]

    class Noted(Rollout):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            rollouts.append(self.llm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conftest, "Rollout", Noted)
        play(Once, between_steps=look)
    assert max(held) > 0 and held.count(0) > 5


def test_a_slow_environment_holds_up_no_other_row(play):
    """The first completion's environment waits until all others are over."""
    went_on = threading.Semaphore(0)

    class Waits(Asking):
        slow = True

        def respond(self, conversation):
            if (self.seed, self.index) == (100, 0):
                assert all(went_on.acquire(timeout=20) for _ in range(4)), "no other conversation went on"
                return None
            if len(conversation) >= 4:
                went_on.release()
            return [{"role": "user", "content": "8"}]

    samples, _ = play(Waits, rows=ROWS[:2], max_iterations=3)
    assert samples.finish_reasons[0] == "stop" and len(samples.messages[0]) == 1


def test_a_stop_while_environments_think(play):
    class Sleeps(Asking):
        slow = True

        def respond(self, conversation):
            time.sleep(0.5)

    class Enough(BaseException):
        pass

    asked = []

    def stop():
        asked.append(time.monotonic())
        if asked[-1] - asked[0] > 0.3:
            raise Enough

    with pytest.raises(Enough):
        play(Sleeps, between_steps=stop)


def test_an_error_leaves_nothing_behind(make_model, tokenizer):
    class Fails(Asking):
        def respond(self, conversation):
            if self.seed == 103:
                raise KeyError("lost")
            return super().respond(conversation)

    for factory, slow in ((Fails, False), (Fails, True)):
        rollout = Rollout(make_model("float64"), tokenizer, max_model_len=96, block_size=4)
        rollout.episodes = Episodes(rollout.llm, EnvironmentMaker(type("Fails", (factory,), {"slow": slow})))
        prompts = encode_prompts(ROWS, tokenizer)
        with pytest.raises(ValueError, match=r"respond\(\) raised KeyError: 'lost' \(.*line \d+\), prompt 3") as error:
            rollout.generate(
                prompts, SamplingParams(**SHORT), [100 + i for i in range(6)], None, None, ROWS.__getitem__
            )
        assert "\n" not in str(error.value)
        core = rollout.llm.core
        assert not core.requests and core.blocks.num_free == core.blocks.num_blocks
        check_engine(rollout.llm)
