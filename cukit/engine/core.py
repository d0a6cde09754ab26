"""The engine's core: requests come in, step() advances all of them, and each request owns its output.

Any thread may add and abort, and any caller may step: a step serves the requests of all callers. One thread
steps at a time; the others wait until that step ends and then look at their own requests. The core has no loop.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from operator import index
from typing import Any

import numpy as np

from ..models.decoder import Decoder
from ..tokenizer import Tokenizer
from .adapters import RequestAdapters
from .blocks import BlockManager
from .calls import Prompt, is_int_array
from .config import EngineConfig, SamplingParams
from .copies import Results
from .memory import planned
from .request import Begun, Request, Sequence
from .rows import Rows
from .runner import ModelRunner
from .scheduler import Scheduler, Step
from .text import StopTexts

OWN = object()  # in place of an adapter: the model's own, if it has one and it is not off in this thread


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine was made."""

    num_requests: int = 0
    num_steps: int = 0
    num_prefill_tokens: int = 0  # computed as prompts, after a preemption also anew
    num_cached_tokens: int = 0  # not computed, since the prefix cache had them
    num_generated_tokens: int = 0
    num_preemptions: int = 0


class EngineCore:
    """Requests, their schedule, and the model that computes them."""

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        eos_token_ids: frozenset[int],
        quiet_plan: bool = False,
    ):
        self.model, self.tokenizer, self.eos_token_ids = model, tokenizer, eos_token_ids
        if tokenizer is not None:
            model.limit_vocabulary(tokenizer.vocab_size)
        self.vocab_size = model.vocab_size
        if model.tensor is not None and config.enable_lora:
            raise ValueError(
                "enable_lora serves adapters of whole models, and the processes of tensor_parallel_size="
                f"{model.tensor.size} share this one: leave one of the two out"
            )
        model.exact = config.exact
        self.plan, self.config = planned(config, model, quiet_plan)
        config = self.config
        self.stats = EngineStats()
        self.blocks = BlockManager(self.plan.num_kv_blocks, config.block_size, config.enable_prefix_caching)
        rows = min(config.max_num_seqs, config.max_num_batched_tokens)  # a step must be able to decode every row
        precise = model.backend.accumulator(model.dtype)
        longest, vocab_size = self.plan.max_model_len, model.config.vocab_size
        self.rows = Rows(model.backend, precise, rows, longest, config.block_size, vocab_size)
        self.scheduler = Scheduler(self.blocks, self.rows, config.max_num_batched_tokens, config.max_loras)
        self.adapters = RequestAdapters(model, config)
        self.runner = ModelRunner(model, self.rows, config, self.vocab_size, self.adapters, self.plan.step_bytes)
        self._runs_ahead = config.async_scheduling and model.backend.is_asynchronous
        self._flight: Results | None = None  # of a step that was launched and not looked at
        self.requests: dict[int, Request] = {}  # the unfinished ones
        self._seeds, self._ids = random.Random(config.seed), itertools.count()
        # by any thread, taken in at the beginning of a step: a sequence, and the one that it continues
        self._added: deque[tuple[Sequence, Sequence | None]] = deque()
        self._aborted: deque[Request] = deque()
        self._turn = threading.Condition()
        self._queue: list[object] = []  # the calls that wait for their turn
        self._stepper: int | None = None  # the thread that has the turn
        self._num_turns = 0

    # ---- requests ----

    def add(
        self,
        prompt_ids: np.ndarray,
        prompt: str | None,
        params: SamplingParams,
        with_text: bool = False,
        keeps_cache: bool = False,
        after: Sequence | None = None,
        adapter: Any = OWN,
        begun: list[Begun] | None = None,
    ) -> Request:
        """Queue checked ids (check_prompt); step() makes the request grow.

        with_text: keep the text up to date token by token, for a stream. keeps_cache: the KV of finished samples stays
        until release(), memory permitting. after: a finished sample with such KV; prompt_ids begins with its token_ids
        (a further turn). The new request takes the KV over and computes only what follows. adapter: of all its tokens;
        None: the model without one. begun: all samples as another engine left them; their KV is computed anew.
        """
        seed = self.take_seeds(1)[0] if params.seed is None else params.seed
        stop_texts = StopTexts.of(params.stop or [], self.tokenizer)
        stop_ids = {*(params.stop_token_ids or ()), *stop_texts.ids, *(() if params.ignore_eos else self.eos_token_ids)}
        limit = min(len(prompt_ids) + params.max_tokens, self.plan.max_model_len)
        request = Request(next(self._ids), prompt_ids, prompt, params, seed, frozenset(stop_ids), stop_texts, limit)
        request.keeps_cache, request.adapter = keeps_cache, self.adapters.own() if adapter is OWN else adapter
        if self.tokenizer is not None and (with_text or stop_texts.shown or stop_texts.raw):
            request.tokenizer = self.tokenizer
        going = [request.new_sequence()] if begun is None else request.begin(begun)
        if after is not None and not np.array_equal(prompt_ids[: after.length], after.token_ids):
            raise ValueError("the prompt of a further turn must begin with all tokens of the turn before it")
        if after is not None and after.request.adapter is not request.adapter:
            raise ValueError("a further turn must have the adapter of the turn before it, whose KV it takes over")
        with self._turn:  # a restart sees both or neither
            self.stats.num_requests += 1
            self.requests[request.request_id] = request
            self._added.extend((sequence, after) for sequence in going)
        return request

    def take_seeds(self, count: int) -> list[int]:
        """Those that the next so many requests without a seed would have got."""
        return [self._seeds.getrandbits(63) for _ in range(count)]

    def abort(self, request: Request) -> None:
        """End a request, its unfinished samples with the finish reason "abort": now, or where another thread has the
        turn, at the end of that. Never waits, so that a finalizer may call it.
        """
        if not request.finished:
            self._aborted.append(request)
            with self._turn:
                if self._stepper is None and not self._queue:
                    with self.paused():
                        pass

    def release(self, owner: Request | Sequence) -> None:
        """Give back the KV that a finished sample of a request with keeps_cache keeps, or that all of them keep."""
        with self.paused():
            self._kept_whole(self.scheduler.drop_held, owner)

    # ---- steps ----

    def step(self) -> None:
        """Advance all requests by one step. While another thread computes one: wait until that step ends."""
        with self._turn:
            if self._stepper not in (None, threading.get_ident()):
                turns = self._num_turns
                self._turn.wait_for(lambda: self._num_turns != turns)
                return
        with self.paused():
            self._kept_whole(self._advance)

    def _kept_whole(self, work: Callable[..., None], *arguments: Any) -> None:
        """Also after an interrupt in its work the engine must stay usable for all other requests."""
        try:
            work(*arguments)
        except BaseException:
            self._restart()
            raise

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the calling thread has the turn: no other one steps, and what unfinished requests hold stands still.
        Turns are given in the order in which they were asked for.
        """
        me, place = threading.get_ident(), object()
        try:
            with self._turn:
                assert self._stepper != me, "a turn within a turn"
                self._queue.append(place)
                try:
                    self._turn.wait_for(lambda: self._stepper is None and self._queue[0] is place)
                    self._stepper = me
                finally:
                    self._queue.remove(place)
                    self._turn.notify_all()  # after an interrupt the next one in the queue must look again
            self._end_aborted()
            yield
        finally:
            if self._stepper == me:
                try:
                    self._end_aborted()
                finally:
                    with self._turn:
                        self._stepper = None
                        self._num_turns += 1
                        self._turn.notify_all()

    def _advance(self) -> None:
        while self._added:
            sequence, after = self._added.popleft()
            if sequence.finish_reason is None:
                if after is not None:
                    self.scheduler.hand_over(after, sequence)
                self.scheduler.add(sequence)
        if self.scheduler.has_work:
            self._compute()

    def _compute(self) -> None:
        """One token for each row, and spans of prompts.

        On a device that computes while the host goes on, steps of rows alone are launched ahead: each call looks at one
        step, and launches the one after it first. So a row that has ended is in at most one step more, where its token
        is discarded. Rows that come for the step ahead stand behind those of the step in flight.
        """
        flight = self._flight if self.rows.count else None  # nothing waits for a step without a row
        if flight is None:
            step = self.scheduler.schedule()
            if step.spans or not self._runs_ahead or not self.rows.draw_plainly:
                return self._compute_now(step)
            flight = self.runner.launch(step)
            self.rows.count_on()
        places = self.rows.places()
        self._flight = self._launch_ahead(flight)
        tokens, logprobs = (on_host[places] for on_host in flight.on_host())
        self._end_rows(self.rows.append(tokens, logprobs, self._flight is None), tokens, logprobs)
        self._count(Step(len(places)))

    def _launch_ahead(self, flight: Results) -> Results | None:
        """Launch the step after the one in flight, if it is a token of each row that goes on, and nothing else."""
        step = self.scheduler.schedule_ahead() if self.rows.leave_out_ended() else None
        if step is None:
            return None
        ahead = self.runner.launch(step, flight)
        self.rows.count_on()
        return ahead

    def _compute_now(self, step: Step) -> None:
        self._flight = None
        decoded, drawn = self.runner.run(step)
        if decoded is not None:
            self._end_rows(self.rows.advance(*decoded), *decoded)
        for span in step.spans:
            self.scheduler.computed(span.sequence, span.count)
        leaders = [self._end_prompt(span.sequence, tokens, logprobs) for span, tokens, logprobs in drawn]
        if going := [leader for leader in leaders if leader is not None]:
            self.scheduler.enter_rows(*going)
        self._count(step)

    def _end_rows(self, found: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Look at the rows `found`, to which the tokens were appended; take out the sequences that have ended."""
        rows = self.rows
        looked_at = [(rows.sequences[row], int(tokens[row]), isfinite(logprobs[row])) for row in found]
        for seq, token, is_finite in looked_at:
            if is_finite:
                seq.look_for_end(token)
            else:
                rows.drop_newest(seq)
                seq.finish("error")
        if ended := [seq for seq, *_ in looked_at if seq.finish_reason is not None]:
            self._retire(*ended)

    def _end_prompt(self, leader: Sequence, tokens: np.ndarray, logprobs: np.ndarray) -> Sequence | None:
        """A computed prompt gets its first token, and its other samples come into being with theirs. Returns the
        leader, for a row, if it goes on.
        """
        samples = self.scheduler.end_prompt(leader)
        for seq, token, logprob in zip(samples, tokens, logprobs, strict=True):
            if isfinite(logprob):
                seq.append(token, logprob)
                seq.look_for_end(int(token))
            else:
                seq.finish("error")
        for seq in samples:
            if seq.finish_reason is not None:
                self._retire(seq)
            elif seq is not leader:
                self.scheduler.add(seq)
        return leader if leader.finish_reason is None else None

    def _end_aborted(self) -> None:
        while self._aborted:  # popped when all is done: after an interrupt the next turn goes on with it
            self._kept_whole(self._end, self._aborted[0])
            self._aborted.popleft()

    def _end(self, request: Request) -> None:
        while request.num_missing:
            request.new_sequence()
        for seq in [seq for seq in request.sequences if seq.finish_reason is None]:
            seq.finish("abort")
            self._retire(seq)

    def _retire(self, *sequences: Sequence) -> None:
        """Finished sequences leave; only then do their requests count them, since another thread may read them then."""
        self.scheduler.remove(*sequences)
        for seq in sequences:
            if self.tokenizer is not None:
                seq.shown_text(self.tokenizer)  # now, since the device may be computing the next step
            seq.request.num_finished += 1
            if seq.request.finished:
                self.requests.pop(seq.request.request_id, None)

    def _restart(self) -> None:
        """After an interrupted step: unfinished requests keep their tokens and compute their KV anew. Steps in flight
        are forgotten: the device ends them before it begins another.
        """
        self._flight = None
        with self._turn:
            added = {sequence.request.request_id for sequence, _ in self._added}
            requests = [request for request in self.requests.values() if request.request_id not in added]
        self.scheduler.restart(requests)
        for request in requests:
            request.num_finished = sum(seq.finish_reason is not None for seq in request.sequences)
            if request.finished:
                self.requests.pop(request.request_id)

    def _count(self, step: Step) -> None:
        stats = self.stats
        stats.num_steps += 1
        stats.num_generated_tokens += step.num_rows
        for span in step.spans:
            stats.num_prefill_tokens += span.count
            stats.num_generated_tokens += span.draws
        stats.num_cached_tokens = self.scheduler.num_cached_tokens
        stats.num_preemptions = self.scheduler.num_preemptions

    def load_adapters(self, adapters: list[Any]) -> None:
        """Bring adapters to the device, for a pass outside steps; inside paused()."""
        self.runner.load_adapters(adapters)

    # ---- the cache ----

    @property
    def is_awake(self) -> bool:
        return self.runner.is_awake

    def reset_prefix_cache(self) -> None:
        """Forget all KV, that which finished requests keep included. ValueError while requests run."""
        with self.paused():
            self._require_idle("reset_prefix_cache()")
            self.scheduler.drop_held()
            self.blocks.reset_prefix_cache()
            self.runner.weights_changed()

    def sleep(self) -> None:
        """Give the KV cache's memory back to the driver. ValueError while requests run."""
        with self.paused():
            self._require_idle("sleep()")
            self.scheduler.drop_held()
            self.blocks.reset_prefix_cache()
            self.runner.free_cache()

    def wake_up(self) -> None:
        with self.paused():
            if not self.is_awake:
                self.runner.allocate_cache()

    # ---- checks ----

    def _require_idle(self, what: str) -> None:
        if self.requests:
            raise ValueError(f"{what} while {len(self.requests)} requests run: let them finish, or abort them")

    def check_prompt(self, prompt: Prompt, params: SamplingParams, number: int) -> tuple[np.ndarray, str | None]:
        """(ids, text or None) of a prompt that this engine can complete; ValueError with the numbers if it cannot."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        if self.tokenizer is None and (isinstance(prompt, str) or params.stop):
            raise ValueError(
                "the model folder has no tokenizer.json: give prompts as ids, and stop_token_ids instead of stop"
            )
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, str):
            assert self.tokenizer is not None
            prompt = self.tokenizer.encode(prompt, add_special_tokens=True)
        ids = self.check_ids(prompt, f"prompt {number}")
        if len(ids) >= self.plan.max_model_len:
            raise ValueError(
                f"prompt {number} has {len(ids)} tokens, which leaves no room for a completion within max_model_len="
                f"{self.config.max_model_len}: shorten the prompt or raise max_model_len"
                f" (the model's own limit is {self.model.config.max_position_embeddings})"
            )
        return ids, text

    def check_ids(self, ids: Iterable[int], what: str) -> np.ndarray:
        """ids as a new int32 array, or ValueError if it is empty or holds something else than ids of the model."""
        try:
            ids = ids.tolist() if is_int_array(ids) else [index(token) for token in ids]
        except TypeError:
            raise ValueError(f"{what} must be text or a list of token ids, got {ids!r:.60}") from None
        if not ids:
            raise ValueError(f"{what} is empty: give at least one token")
        vocab_size = self.model.config.vocab_size
        if min(ids) < 0 or max(ids) >= vocab_size:
            wrong = next(token for token in ids if not 0 <= token < vocab_size)
            raise ValueError(f"{what} has the token id {wrong}: the model's vocabulary goes from 0 to {vocab_size - 1}")
        return np.array(ids, np.int32)
