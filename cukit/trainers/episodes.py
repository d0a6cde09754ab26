"""Conversations of a model with its environments, side by side in one engine.

A sampled id is never taken back and never tokenised again: the ids of a turn are a prefix of the next turn's. Between
them comes only what the chat template writes from the end of the answer to the next generation prompt. The engine goes
on from the KV of the turn before.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..datasets.demonstrations import encode_prompt
from ..engine.config import SamplingParams
from ..engine.llm import LLM
from ..engine.request import SEED_MASK, Request, Sequence
from .environment import EnvironmentMaker, Made, called, checked_replies

MAX_THREADS = 32  # slow environments that respond at the same time
PATIENCE = 0.1  # seconds between two looks at a stop while everything waits for environments


@dataclass(eq=False)
class Episode:
    """One completion: the turns of the model and what the environment says in between."""

    group: int
    made: Made
    prompt: list[dict]
    seed: int | None
    turns: list[Sequence] = field(default_factory=list)  # finished samples of the engine, each a prefix of the next
    messages: list[dict] = field(default_factory=list)  # after the prompt
    finish_reason: str = ""

    @property
    def token_ids(self) -> np.ndarray:
        return self.turns[-1].token_ids

    @property
    def prompt_length(self) -> int:
        return self.turns[0].prompt_length

    @property
    def mask(self) -> np.ndarray:
        """(completion tokens,) bool: the model drew it."""
        mask = np.zeros(len(self.token_ids) - self.prompt_length, bool)
        for turn in self.turns:
            mask[turn.prompt_length - self.prompt_length : turn.length - self.prompt_length] = True
        return mask

    @property
    def logprobs(self) -> np.ndarray:
        """Of each token that the model drew."""
        return np.concatenate([turn.logprobs for turn in self.turns])


# (places, their episodes) of prompts that have ended -> prompts that join
Further = Callable[[list[int], list[list[Episode]]], list[tuple[list[int], SamplingParams]]]


class Episodes:
    """Plays the completions of prompts to their end.

    max_iterations: how often an environment is asked, at most (None: no limit). template: arguments of the chat
    template. around: a context in which user's code runs, so that a stop can end it.
    """

    def __init__(self, llm: LLM, maker: EnvironmentMaker, template: dict | None = None, max_iterations=None):
        self.llm, self.maker, self.template, self.max_iterations = llm, maker, template or {}, max_iterations
        maker.check_template(llm.tokenizer, template)
        self.around: Callable[[], AbstractContextManager] = nullcontext

    def play(
        self,
        prompts: list[list[int]],
        row_of: Callable[[int], dict],
        params: list[SamplingParams],
        between_steps: Callable[[], None] | None = None,
        further: Further | None = None,
    ) -> list[list[Episode]]:
        """The episodes of each prompt. prompts: ids; row_of(place): the data row, with a conversational prompt; params:
        one each; max_tokens bounds the whole completion.

        between_steps is called after every engine step, and while all wait for environments; if it raises, no request
        is left behind. further(places, groups) is told of prompts with no episode left to play; the (prompt, params)
        pairs that it returns join the others.
        """
        game = _Game(self, row_of, between_steps or (lambda: None), further)
        try:
            for ids, one in zip(prompts, params, strict=True):
                game.begin(ids, one)
            game.run()
        finally:
            game.end()
        return game.groups


class _Game:
    """What is going on in one call of play()."""

    def __init__(self, episodes: Episodes, row_of: Callable[[int], dict], between_steps: Callable[[], None], further):
        self.llm, self.core, self.maker = episodes.llm, episodes.llm.core, episodes.maker
        self.template, self.max_iterations, self.around = episodes.template, episodes.max_iterations, episodes.around
        self.row_of, self.between_steps, self.further = row_of, between_steps, further
        self.params: list[SamplingParams] = []
        self.groups: list[list[Episode]] = []
        self.ended: list[int] = []  # groups that `further` has not been told of
        self.requests: list[Request] = []
        self.drawing: dict[Request, dict[int, Episode]] = {}  # request -> its samples that still draw
        self.asked: dict[Future, Episode] = {}
        self.pool: ThreadPoolExecutor | None = None

    def begin(self, ids: list[int], params: SamplingParams) -> None:
        """The first turn of a prompt's completions: one request; its samples share the prompt."""
        group = len(self.groups)
        row = self.row_of(group)
        base = group if params.seed is None else params.seed
        with self.around():
            made = [called("constructor", group, self.maker.make, base, index) for index in range(params.n)]
            texts = [called("reset()", group, one.own.reset, **row) for one in made]
        if wrong := [text for text in texts if text is not None and not isinstance(text, str)]:
            raise ValueError(
                f"reset() of {self.maker.name} must return a text or None, got {type(wrong[0]).__name__} "
                f"{wrong[0]!r:.60}"
            )
        if any(text != texts[0] for text in texts):
            raise ValueError(
                f"reset() of {self.maker.name} returned different texts for the completions of prompt {group}, which "
                "are compared with each other: let it depend on the data row and the seed alone"
            )
        prompt = row["prompt"]
        if texts[0]:
            prompt = _with_appended(prompt, texts[0])
            row = row | {"prompt": prompt} | ({"tools": self.maker.schemas} if self.maker.schemas else {})
            ids = encode_prompt(row, self.llm.tokenizer, self.template)
        seeds = [None if params.seed is None else (params.seed + index) & SEED_MASK for index in range(params.n)]
        found = [
            Episode(group, one, [dict(message) for message in prompt], seed)
            for one, seed in zip(made, seeds, strict=True)
        ]
        checked, text = self.core.check_prompt(ids, params, group)
        self.groups.append(found)
        self.params.append(params)
        self._add(checked, text, params, dict(enumerate(found)))

    def run(self) -> None:
        while self.drawing or self.asked:
            if self.drawing:
                self.core.step()
            else:
                wait(self.asked, PATIENCE, FIRST_COMPLETED)
            for request in [r for r, left in self.drawing.items() if r.num_finished + len(left) > r.params.n]:
                self._look_at(request)
            for future in [future for future in self.asked if future.done()]:
                episode = self.asked.pop(future)
                self._go_on(episode, called("respond()", episode.group, future.result))
            self.between_steps()
            if self.ended and self.further is not None:
                places, self.ended = sorted(self.ended), []
                for ids, params in self.further(places, [self.groups[place] for place in places]):
                    self.begin(ids, params)

    def end(self) -> None:
        """Nothing of this call goes on or keeps memory."""
        for future in self.asked:
            future.cancel()
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)
        for request in self.requests:
            self.core.abort(request)
            self.core.release(request)

    # ---- a turn ----

    def _add(self, ids, text, params: SamplingParams, episodes: dict[int, Episode], after=None) -> None:
        request = self.core.add(ids, text, params, keeps_cache=True, after=after)
        self.requests.append(request)
        self.drawing[request] = episodes

    def _look_at(self, request: Request) -> None:
        """End the turns of the samples of a request that have finished."""
        left = self.drawing[request]
        for sample in request.sequences:
            if sample.index in left and sample.finish_reason is not None:
                self._end_turn(left.pop(sample.index), sample)
        if not left:
            del self.drawing[request]

    def _end_turn(self, episode: Episode, sample: Sequence) -> None:
        episode.turns.append(sample)
        episode.messages.append({"role": "assistant", "content": self.llm.text_of(sample)})
        over = self.max_iterations is not None and len(episode.turns) > self.max_iterations
        if sample.finish_reason != "stop" or over:
            self._finish(episode, sample.finish_reason)
            return
        responder = episode.made.responder
        conversation = [*episode.prompt, *episode.messages]
        if not responder.slow:
            with self.around():
                replies = called("respond()", episode.group, responder.respond, conversation)
            self._go_on(episode, replies)
            return
        self.pool = self.pool or ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="environment")
        self.asked[self.pool.submit(responder.respond, conversation)] = episode

    def _go_on(self, episode: Episode, replies: Any) -> None:
        """Add the next turn, or end the episode where there is none or no room for it."""
        replies = checked_replies(replies, f"respond() of {self.maker.name}")
        if not replies:
            self._finish(episode, "stop")
            return
        before, params, longest = episode.turns[-1], self.params[episode.group], self.llm.core.plan.max_model_len
        said = [*episode.prompt, *map(_plainly_said, episode.messages)]
        seen = self.llm.tokenizer.encode_continuation(
            said, replies, int(before.token_ids[-1]), self.maker.schemas or None, **self.template
        )
        seen = self.core.check_ids(seen, f"what respond() of {self.maker.name} returned")
        ids = np.concatenate([before.token_ids, seen])
        room = min(episode.prompt_length + params.max_tokens, longest) - len(ids)
        if room < 1:
            self._finish(episode, "length")
            return
        episode.messages += replies
        params = replace(params, n=1, seed=episode.seed, max_tokens=room, min_tokens=min(params.min_tokens, room))
        self._add(ids, None, params, {0: episode}, after=before)

    def _finish(self, episode: Episode, reason: str) -> None:
        episode.finish_reason = reason
        self.core.release(episode.turns[-1])
        if all(one.finish_reason for one in self.groups[episode.group]):
            self.ended.append(episode.group)


def _plainly_said(message: dict) -> dict:
    """Without tool_calls: the ids of what an assistant said are there, only what follows is rendered."""
    if message["role"] != "assistant":
        return message
    return {"role": "assistant", "content": message["content"]}


def _with_appended(prompt: list[dict], text: str) -> list[dict]:
    """The prompt with a text behind its last user message."""
    places = [place for place, message in enumerate(prompt) if message["role"] == "user"]
    if not places or not isinstance(prompt[places[-1]]["content"], str):
        raise ValueError("reset() returned a text, but the prompt has no user message with text to append it to")
    last = prompt[places[-1]]
    return [*prompt[: places[-1]], last | {"content": last["content"] + text}, *prompt[places[-1] + 1 :]]
