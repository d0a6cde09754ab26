"""LLM: generate, chat and score with one model; the public face of the engine."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from operator import index
from pathlib import Path

from ..models.logprobs import token_logprobs
from ..models.weights import load_model, model_folder
from ..tokenizer import Tokenizer
from .block_manager import BlockManager
from .config import EngineConfig, SamplingParams
from .model_runner import ModelRunner, fit_memory
from .scheduler import Scheduler, Step
from .sequence import CompletionText, Request, Sequence, completion_text


@dataclass(slots=True)
class CompletionOutput:
    """One sample. While it grows (stream=True) finish_reason is None, and text holds whole characters only."""

    index: int
    text: str
    token_ids: list[int]  # the stop token and the tokens of a stop string included; the text is cut before them
    logprobs: list[float] | None  # of softmax(logits / temperature), one a token; None unless params.logprobs
    finish_reason: str | None  # "stop", "length" or "abort"
    stop_reason: int | str | None  # the stop_token_id or stop string that ended it; None for the end-of-text token
    text_delta: str = ""  # with stream=True: what text gained since the last output of this request


@dataclass(slots=True)
class RequestOutput:
    index: int  # place of the prompt in the call
    prompt: str | None  # None for a prompt given as ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int  # prompt tokens that the prefix cache gave


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine was made."""

    num_requests: int = 0
    num_steps: int = 0
    num_prefill_tokens: int = 0  # computed as prompts, after a preemption also anew
    num_cached_tokens: int = 0  # not computed, since the prefix cache had them
    num_generated_tokens: int = 0
    num_preemptions: int = 0


class LLM:
    """A model with its KV cache.

    model: a Hugging Face model folder (or hub name). device: auto | cuda | cpu. dtype: auto (bfloat16 on cuda, float32
    on cpu) | a dtype name. options: the fields of EngineConfig (max_model_len, max_num_seqs, gpu_memory_utilization,
    enforce_eager, …).
    """

    def __init__(self, model: str | Path, device: str = "auto", dtype: str = "auto", **options):
        config = _engine_config(options)
        folder = model_folder(model)
        loaded = load_model(folder, device, dtype)
        tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None
        self._set_up(loaded, tokenizer, config, _generation_eos(folder))

    @classmethod
    def from_model(cls, model, tokenizer=None, **options) -> LLM:
        """An engine that shares the weights of a Decoder. After they change, call reset_prefix_cache()."""
        llm = cls.__new__(cls)
        llm._set_up(model, tokenizer, _engine_config(options), frozenset())
        return llm

    def _set_up(self, model, tokenizer, config: EngineConfig, generation_eos: frozenset[int]) -> None:
        self.model, self.tokenizer = model, tokenizer
        limits = model.config
        self.vocab_size = min(limits.vocab_size, tokenizer.vocab_size) if tokenizer else limits.vocab_size
        own_eos = limits.eos_token_id
        configured = frozenset(own_eos if isinstance(own_eos, list) else [] if own_eos is None else [own_eos])
        self.eos_token_ids = frozenset(tokenizer.eos_token_ids) if tokenizer else (generation_eos or configured)
        model.backend.set_exact(config.exact)
        self.config = fit_memory(config, model)
        self.stats = EngineStats()
        self._seeds = random.Random(self.config.seed)
        self._requests: dict[int, Request] = {}
        config = self.config
        self._blocks = BlockManager(config.num_kv_blocks, config.block_size, config.enable_prefix_caching)
        self._scheduler = Scheduler(self._blocks, config.max_num_seqs, config.max_num_batched_tokens)
        rows = self._scheduler.max_num_seqs
        self._runner = ModelRunner(
            model,
            rows,
            config.max_model_len,
            config.num_kv_blocks,
            config.block_size,
            self.vocab_size,
            config.enforce_eager,
        )

    # ---- generate ----

    def generate(
        self, prompts, sampling_params: SamplingParams | list[SamplingParams] | None = None, stream: bool = False
    ):
        """Complete prompts: text, ids, or a list of either; sampling_params for all, or one for each.

        Returns a RequestOutput for each prompt, in their order (a list even for a single prompt). With stream=True an
        iterator that yields the RequestOutput of a prompt whenever it has grown, each sample with what it has so far
        and its text_delta. A request without a seed gets one from the engine's generator, which config.seed starts: the
        same calls give the same draws.
        """
        if isinstance(prompts, str) or (isinstance(prompts, list) and prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        prompts = list(prompts)
        if isinstance(sampling_params, list) and len(sampling_params) != len(prompts):
            raise ValueError(
                f"{len(sampling_params)} sampling_params for {len(prompts)} prompts: give one for all, or one for each"
            )
        params = sampling_params
        if not isinstance(params, list):
            params = [SamplingParams() if params is None else params] * len(prompts)
        self._require_awake()
        # Every prompt is checked before the first is queued.
        checked = [self._check_prompt(*pair, number) for number, pair in enumerate(zip(prompts, params, strict=True))]
        outputs = self._stream(checked, params)
        return outputs if stream else self._run_to_end(checked, params)

    def chat(self, messages, sampling_params=None, stream: bool = False, tools=None, **template_arguments):
        """generate() after the chat template.

        messages: one conversation (a list of {"role", "content"}) or a list of them; tools: JSON schemas; further
        arguments (enable_thinking, …) go to the template.
        """
        if self.tokenizer is None or not self.tokenizer.has_chat_template:
            raise ValueError("chat needs a tokenizer with a chat template; give generate() text or ids")
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [
            self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tools=tools, **template_arguments)
            for messages in conversations
        ]
        return self.generate(prompts, sampling_params, stream)

    def score(self, sequences: list[list[int]], temperature: float = 1.0) -> list:
        """log p(token t | tokens before it) for t ≥ 1 of each sequence, by the training forward pass.

        Returns one float32 array a sequence (float64 for a float64 model), one shorter than the sequence.
        """
        longest = self.model.config.max_position_embeddings
        sequences = [self._check_ids(ids, f"sequence {number}") for number, ids in enumerate(sequences)]
        for number, ids in enumerate(sequences):
            if len(ids) > longest:
                raise ValueError(f"sequence {number} has {len(ids)} tokens, the model's limit is {longest}: shorten it")
        return token_logprobs(self.model, sequences, temperature, self.vocab_size, self.config.max_num_batched_tokens)

    # ---- life cycle ----

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV, as every update of the weights demands. Refused while requests run."""
        self._require_idle("reset_prefix_cache()")
        self._blocks.reset_prefix_cache()

    def sleep(self) -> None:
        """Free the KV cache (the weights stay). Refused while requests run."""
        self._require_idle("sleep()")
        self._blocks.reset_prefix_cache()
        self._runner.free_cache()

    def wake_up(self) -> None:
        """Make the KV cache again, after sleep()."""
        if self._runner.kv is None:
            self._runner.allocate_cache()

    def close(self) -> None:
        """Abort what runs and free the KV cache."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self.sleep()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    # ---- one request, one step ----

    def add_request(self, prompt, params: SamplingParams, stream: bool = False) -> Request:
        """Queue a prompt (text or ids); step() makes it grow."""
        self._require_awake()
        return self._add(*self._check_prompt(prompt, params, len(self._requests)), params, stream)

    def step(self) -> list[Request]:
        """Compute one step; the requests that grew, each once."""
        if not self._scheduler.has_work:
            return []
        step = self._scheduler.schedule()
        (tokens, logprobs), completed = self._runner.run(step)
        grown: dict[int, Request] = {}
        for seq, token, logprob in zip(step.decodes, tokens, logprobs, strict=True):
            self._scheduler.computed(seq, 1)
            self._append(seq, token, logprob)
            grown[seq.request.request_id] = seq.request
        self._finish_prompts(step, completed, grown)
        self._count(step, completed)
        for request in grown.values():
            if request.finished:
                self._requests.pop(request.request_id)
        return list(grown.values())

    def abort(self, request_id: int) -> None:
        """End a request now, its unfinished samples with the finish reason "abort". Unknown ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        leader = request.sequences[0]
        for number in range(len(request.sequences), request.params.n):
            prompt = list(request.prompt_ids)
            request.sequences.append(Sequence(request, number, prompt, len(prompt), leader.limit, leader.stop_ids))
        for seq in request.sequences:
            if seq.finish_reason is None:
                self._scheduler.remove(seq)
                seq.finish("abort")

    def output(self, request: Request, number: int = 0, with_delta: bool = False) -> RequestOutput:
        """A request's samples as they are now."""
        outputs = [self._completion(seq, with_delta) for seq in request.sequences]
        prompt, cached = (request.prompt, request.prompt_ids), request.num_cached_tokens
        return RequestOutput(number, *prompt, outputs, request.finished, cached)

    # ---- parts ----

    def _run_to_end(self, checked, params) -> list[RequestOutput]:
        requests: dict[int, Request] = {}
        try:
            for prompt, one in zip(checked, params, strict=True):
                request = self._add(*prompt, one, False)
                requests[request.request_id] = request
            unfinished = len(requests)
            while unfinished:
                unfinished -= sum(request.finished and request.request_id in requests for request in self.step())
        finally:  # after an error or an interrupt the engine must be usable
            for request_id in requests:
                self.abort(request_id)
        return [self.output(request, number) for number, request in enumerate(requests.values())]

    def _stream(self, checked, params) -> Iterator[RequestOutput]:
        requests = {}
        try:
            for number, (prompt, one) in enumerate(zip(checked, params, strict=True)):
                requests[self._add(*prompt, one, True).request_id] = number
            unfinished = len(requests)
            while unfinished:
                for request in self.step():
                    if request.request_id in requests:
                        unfinished -= request.finished
                        yield self.output(request, requests[request.request_id], with_delta=True)
        finally:
            for request_id in requests:
                self.abort(request_id)

    def _add(self, prompt_ids: list[int], prompt: str | None, params: SamplingParams, stream: bool) -> Request:
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)
        limit = min(len(prompt_ids) + params.max_tokens, self.config.max_model_len)
        request = Request(self.stats.num_requests, prompt_ids, prompt, params, seed, stop_ids, limit, stream)
        self.stats.num_requests += 1
        self._requests[request.request_id] = request
        self._scheduler.add(Sequence.first_of(request, self._text_of(request)))
        return request

    def _finish_prompts(self, step: Step, completed, grown: dict[int, Request]) -> None:
        """Count computed prompt tokens; a completed prompt gets its first token, and its forks theirs."""
        for seq, _, count in step.prefills:
            self._scheduler.computed(seq, count)
        for leader, tokens, logprobs in completed:
            request = leader.request
            forks = self._scheduler.fork(leader, lambda request=request: self._text_of(request))
            for seq, token, logprob in zip([leader, *forks], tokens, logprobs, strict=True):
                self._append(seq, token, logprob)
                if seq is not leader and seq.finish_reason is None:
                    self._scheduler.add(seq)
            grown[request.request_id] = request

    def _append(self, seq: Sequence, token: int, logprob: float) -> None:
        seq.append(token, logprob)
        if seq.finish_reason is not None:
            self._scheduler.remove(seq)

    def _text_of(self, request: Request) -> CompletionText | None:
        """Text that grows with the tokens costs time at each of them: only where somebody reads it before the end."""
        if self.tokenizer is None or not (request.params.stop or request.streams):
            return None
        return CompletionText(self.tokenizer, request.prompt_ids, request.params.stop)

    def _completion(self, seq: Sequence, with_delta: bool) -> CompletionOutput:
        finished, ids = seq.finish_reason is not None, seq.completion_ids
        text = delta = ""
        if seq.text is not None:
            delta = seq.text.take_delta() if with_delta else ""
            text = seq.text.text if finished else seq.text.text[: seq.text.num_given]
        elif self.tokenizer is not None:  # a stop token is no part of the text, special or not
            shown = ids[:-1] if seq.finish_reason == "stop" else ids
            text = completion_text(self.tokenizer, seq.request.prompt_ids, shown)
        logprobs = list(seq.logprobs) if seq.request.params.logprobs else None
        return CompletionOutput(seq.index, text, ids, logprobs, seq.finish_reason, seq.stop_reason, delta)

    def _count(self, step: Step, completed) -> None:
        stats = self.stats
        stats.num_steps += 1
        stats.num_prefill_tokens += sum(count for _, _, count in step.prefills)
        stats.num_generated_tokens += len(step.decodes) + sum(len(tokens) for _, tokens, _ in completed)
        stats.num_cached_tokens = self._scheduler.num_cached_tokens
        stats.num_preemptions = self._scheduler.num_preemptions

    # ---- checks ----

    def _check_prompt(self, prompt, params: SamplingParams, number: int) -> tuple[list[int], str | None]:
        """(ids, text or None) of a prompt that this engine can complete; ValueError with the numbers if it cannot."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        if self.tokenizer is None and (isinstance(prompt, str) or params.stop):
            raise ValueError(
                "the model folder has no tokenizer.json: give prompts as ids, and stop_token_ids instead of stop"
            )
        text = prompt if isinstance(prompt, str) else None
        ids = self.tokenizer.encode(prompt, add_special_tokens=True) if text is not None else prompt
        ids = self._check_ids(ids, f"prompt {number}")
        if len(ids) >= self.config.max_model_len:
            raise ValueError(
                f"prompt {number} has {len(ids)} tokens, which leaves no room for a completion within max_model_len="
                f"{self.config.max_model_len}: shorten the prompt or raise max_model_len"
                f" (the model's own limit is {self.model.config.max_position_embeddings})"
            )
        return ids, text

    def _check_ids(self, ids, what: str) -> list[int]:
        """ids as a list of int, or ValueError if it is empty or holds something else than ids of the model."""
        try:
            ids = [index(token) for token in ids]
        except TypeError:
            raise ValueError(f"{what} must be text or a list of token ids, got {ids!r:.60}") from None
        if not ids:
            raise ValueError(f"{what} is empty: give at least one token")
        vocab_size = self.model.config.vocab_size
        if min(ids) < 0 or max(ids) >= vocab_size:
            wrong = next(token for token in ids if not 0 <= token < vocab_size)
            raise ValueError(f"{what} has the token id {wrong}: the model's vocabulary goes from 0 to {vocab_size - 1}")
        return ids

    def _require_idle(self, what: str) -> None:
        if self._requests:
            raise ValueError(f"{what} while {len(self._requests)} requests run: let them finish, or abort them")

    def _require_awake(self) -> None:
        if self._runner.kv is None:
            raise ValueError("the engine sleeps: call wake_up() first")


def _engine_config(options: dict) -> EngineConfig:
    known = [field.name for field in fields(EngineConfig)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(
            f"LLM has no option {', '.join(unknown)}; options are {', '.join(['device', 'dtype', *known])}"
        )
    return EngineConfig(**options)


def _generation_eos(folder: Path) -> frozenset[int]:
    """End-of-text ids of generation_config.json, for a folder without a tokenizer."""
    path = folder / "generation_config.json"
    ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
    return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])
