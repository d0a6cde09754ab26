"""LLM: generate, chat and score with one model; the blocking interface to the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from ..backend import backend_for
from ..models.decoder import Decoder
from ..models.weights import load_model, model_folder, tokenizer_folders
from ..tokenizer import Tokenizer
from .calls import (
    Adapters,
    CompletionOutput,
    LoRARequest,
    Messages,
    Prompt,
    Prompts,
    RequestOutput,
    Sampling,
    conversations,
    engine_config,
    one_each,
    report_errors,
    stored_eos,
)
from .config import EngineConfig, SamplingParams, bytes_of
from .core import EngineCore, EngineStats
from .memory import hold_memory
from .request import Request, Sequence
from .scores import adapter_scores, checked_sequences
from .tensor_parallel import take_tensor

Checked = list[tuple[np.ndarray, str | None, Any]]  # prompts as check_prompt() gives them, and their adapters
More = Callable[[list[int], list[Request]], list[tuple]]  # see LLM.run


class LLM:
    """A model with its KV cache. Any number of threads may call it: one computes, for all.

    model: a Hugging Face model folder (or hub name). device: auto | cuda | cpu. dtype: auto (bfloat16 on cuda, float32
    on cpu) | a dtype name. options: memory_limit (the most that this process may take of the GPU: "24GB"); those of
    EngineConfig (max_model_len, …); tensor_parallel_size: so many processes, which all make the same calls.
    """

    def __init__(self, model: str | Path, device: str = "auto", dtype: str = "auto", **options: Any):
        limit = options.pop("memory_limit", None)
        tensor = take_tensor(options)  # before anything of CUDA
        config = engine_config(None, options)
        if limit is not None:
            hold_memory(backend_for(device), bytes_of(limit, "memory_limit"))
        folder = model_folder(model)
        loaded = load_model(folder, device, dtype, tensor=tensor)
        own, config_folder = tokenizer_folders(folder)
        tokenizer = Tokenizer.from_folder(own, config_folder) if (own / "tokenizer.json").is_file() else None
        self._set_up(loaded, tokenizer, config, stored_eos(own))

    @classmethod
    def from_model(
        cls,
        model: Decoder,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        quiet_plan: bool = False,
        **options: Any,
    ) -> LLM:
        """An engine that shares the weights of a Decoder. After they change, call reset_prefix_cache(). quiet_plan: no
        warning of a plan that does not fit, since a larger one, which counts this engine too, has given it.
        """
        llm = cls.__new__(cls)
        llm._set_up(model, tokenizer, engine_config(config, options), frozenset(), quiet_plan)
        return llm

    def _set_up(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        generation_eos: frozenset[int],
        quiet_plan: bool = False,
    ) -> None:
        own = model.config.eos_token_id
        configured = frozenset(own if isinstance(own, list) else [] if own is None else [own])
        eos = frozenset(tokenizer.eos_token_ids) if tokenizer else (generation_eos or configured)
        self.model, self.tokenizer = model, tokenizer
        self._closed = False
        self.core = EngineCore(model, tokenizer, config, eos, quiet_plan)

    @property
    def config(self) -> EngineConfig:
        """The limits in force, what was left open filled in."""
        return self.core.config

    @property
    def stats(self) -> EngineStats:
        return self.core.stats

    @property
    def vocab_size(self) -> int:
        """Ids that can be drawn and count: at most the tokenizer's."""
        return self.core.vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.core.eos_token_ids

    def __repr__(self) -> str:
        shape, config, backend = self.model.config, self.config, self.model.backend
        cache = f"{self.core.runner.cache_bytes / 1e9:.2f} GB" if self.core.is_awake else "asleep"
        return (
            f"LLM({shape.num_hidden_layers} layers, hidden_size={shape.hidden_size}, vocab_size={self.vocab_size}, "
            f"{self.model.dtype.name} on {backend.name}; KV cache {cache}: {config.num_kv_blocks} blocks of "
            f"{config.block_size} tokens; max_model_len={config.max_model_len}, max_num_seqs={self.core.rows.capacity})"
        )

    # ---- generate ----

    @overload
    def generate(
        self,
        prompts: Prompts,
        sampling_params: Sampling = None,
        stream: Literal[False] = False,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]: ...
    @overload
    def generate(
        self,
        prompts: Prompts,
        sampling_params: Sampling = None,
        *,
        stream: Literal[True],
        lora_request: Adapters = None,
    ) -> Iterator[RequestOutput]: ...
    @overload
    def generate(
        self, prompts: Prompts, sampling_params: Sampling = None, stream: bool = False, lora_request: Adapters = None
    ) -> list[RequestOutput] | Iterator[RequestOutput]: ...
    def generate(
        self, prompts: Prompts, sampling_params: Sampling = None, stream: bool = False, lora_request: Adapters = None
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Complete prompts: text, ids, or a list of either; sampling_params for all, or one for each. lora_request: a
        LoRARequest (with enable_lora) for all, or one (or None) for each; None: the adapter that is trained on the
        model, if there is one and it is not off() in this thread, else none.

        Returns a RequestOutput for each prompt, in their order (a list even for a single prompt). With stream=True an
        iterator that yields the RequestOutput of a prompt whenever it has grown since the last one, each sample with
        what it has so far and its text_delta; an iterator that is dropped ends its requests. A request without a seed
        gets one from the engine's generator, which config.seed starts: the same calls give the same draws. ValueError
        if the logits of every sample were not finite.
        """
        listed, params = one_each(prompts, sampling_params)
        checked = self._check(listed, params, lora_request)
        if stream:
            return self._stream(checked, params)
        requests = self._run(checked, params)
        report_errors(requests)
        return [self._output(request, number, False) for number, request in enumerate(requests)]

    def run(
        self,
        prompts: Prompts,
        sampling_params: Sampling = None,
        between_steps: Callable[[], None] | None = None,
        more: More | None = None,
        lora_request: Adapters = None,
    ) -> list[Request]:
        """generate() for programs: the finished requests; their samples (request.sequences) hold arrays.

        A prompt is text, a list of ids or an integer array. A sample has token_ids (prompt + completion, int32),
        prompt_length, logprobs (one a completion token), finish_reason, stop_reason; its text is text_of(sample).
        between_steps is called after each step; if it raises, the requests are aborted. more(places, requests) is
        called with the requests that a step has finished and their places among the prompts; the (prompt,
        sampling_params) that it returns are queued behind, and their requests are returned too. Samples with logits
        that were not finite have the finish_reason "error", be it all of them.
        """
        listed, params = one_each(prompts, sampling_params)
        return self._run(self._check(listed, params, lora_request), params, between_steps, more)

    @overload
    def chat(
        self,
        messages: Messages,
        sampling_params: Sampling = None,
        stream: Literal[False] = False,
        tools: list[dict] | None = None,
        lora_request: Adapters = None,
        **template_arguments: Any,
    ) -> list[RequestOutput]: ...
    @overload
    def chat(
        self,
        messages: Messages,
        sampling_params: Sampling = None,
        *,
        stream: Literal[True],
        tools: list[dict] | None = None,
        lora_request: Adapters = None,
        **template_arguments: Any,
    ) -> Iterator[RequestOutput]: ...
    @overload
    def chat(
        self,
        messages: Messages,
        sampling_params: Sampling = None,
        stream: bool = False,
        tools: list[dict] | None = None,
        lora_request: Adapters = None,
        **template_arguments: Any,
    ) -> list[RequestOutput] | Iterator[RequestOutput]: ...
    def chat(
        self,
        messages: Messages,
        sampling_params: Sampling = None,
        stream: bool = False,
        tools: list[dict] | None = None,
        lora_request: Adapters = None,
        **template_arguments: Any,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """generate() after the chat template.

        messages: one conversation (a list of {"role", "content"}) or a list of them; tools: JSON schemas; further
        arguments (enable_thinking, …) go to the template.
        """
        if self.tokenizer is None or not self.tokenizer.has_chat_template:
            raise ValueError("chat needs a tokenizer with a chat template; give generate() text or ids")
        prompts = [
            self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tools=tools, **template_arguments)
            for messages in conversations(messages)
        ]
        return self.generate(prompts, sampling_params, stream, lora_request)

    def score(
        self, sequences: Iterable[Iterable[int]], temperature: float = 1.0, lora_request: Adapters = None
    ) -> list[np.ndarray]:
        """log p(token t | tokens before it) for t ≥ 1 of each sequence, by the training forward pass. lora_request: as
        for generate().

        Returns one float32 array a sequence (float64 for a float64 model), one shorter than the sequence. ValueError
        for a token that cannot be drawn, since the tokenizer does not have it.
        """
        checked = checked_sequences(self.core, sequences, temperature)
        adapters = self.core.adapters.chosen(lora_request, len(checked))
        return adapter_scores(self.core, checked, adapters, temperature)

    # ---- life cycle ----

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV, as every update of the weights demands. Refused while requests run."""
        self.core.reset_prefix_cache()

    def sleep(self) -> None:
        """Free the KV cache (the weights stay). Refused while requests run."""
        self.core.sleep()

    def wake_up(self) -> None:
        """Make the KV cache again, after sleep()."""
        self.core.wake_up()
        self._closed = False

    def close(self) -> None:
        """Abort what runs and free the KV cache."""
        for request in list(self.core.requests.values()):
            self.core.abort(request)
        self.core.sleep()
        self._closed = True

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- one request, one step ----

    def add_request(
        self, prompt: Prompt, params: SamplingParams, stream: bool = False, lora_request: LoRARequest | None = None
    ) -> Request:
        """Queue a prompt (text or ids); step() makes it grow, and so does every other call that computes."""
        self._require_awake()
        ids, text = self.core.check_prompt(prompt, params, len(self.core.requests))
        return self._queue((ids, text, *self.core.adapters.chosen(lora_request, 1)), params, stream)

    def step(self) -> None:
        """Compute one step for all requests."""
        self.core.step()

    def abort(self, request_id: int) -> None:
        """End a request now, its unfinished samples with the finish reason "abort". Unknown ids are ignored."""
        request = self.core.requests.get(request_id)
        if request is not None:
            self.core.abort(request)

    def output(self, request: Request, number: int = 0, with_delta: bool = False) -> RequestOutput:
        """A request's samples as they are now."""
        with self.core.paused():
            return self._output(request, number, with_delta)

    def text_of(self, sequence: Sequence) -> str:
        """The text of a finished sample: without special tokens, cut before what stopped it; "" without a tokenizer."""
        return "" if self.tokenizer is None else sequence.shown_text(self.tokenizer)

    # ---- parts ----

    def _check(self, prompts: list[Prompt], params: list[SamplingParams], lora_request: Adapters = None) -> Checked:
        """Every prompt is checked before the first is queued, and every adapter is there."""
        self._require_awake()
        pairs = enumerate(zip(prompts, params, strict=True))
        checked = [self.core.check_prompt(*pair, number) for number, pair in pairs]
        adapters = self.core.adapters.chosen(lora_request, len(checked))
        return [(*one, adapter) for one, adapter in zip(checked, adapters, strict=True)]

    def _queue(self, checked: tuple, params: SamplingParams, with_text: bool = False) -> Request:
        ids, text, adapter = checked
        return self.core.add(ids, text, params, with_text, adapter=adapter)

    def _run(
        self,
        checked: Checked,
        params: list[SamplingParams],
        between_steps: Callable[[], None] | None = None,
        more: More | None = None,
    ) -> list[Request]:
        requests: list[Request] = []
        try:
            for prompt, one in zip(checked, params, strict=True):
                requests.append(self._queue(prompt, one))
            pending = list(range(len(requests)))
            while pending:
                self.core.step()
                if between_steps is not None:
                    between_steps()
                ended = [place for place in pending if requests[place].finished]
                if not ended:
                    continue
                pending = [place for place in pending if not requests[place].finished]
                added = [] if more is None else more(ended, [requests[place] for place in ended])
                for prompt, one in added:
                    pending.append(len(requests))
                    requests.append(self._queue(self._check([prompt], [one])[0], one))
        finally:  # after an error or an interrupt nothing of this call goes on
            self._abandon(requests)
        return requests

    def _stream(self, checked: Checked, params: list[SamplingParams]) -> Iterator[RequestOutput]:
        requests: list[Request] = []
        try:
            for prompt, one in zip(checked, params, strict=True):
                requests.append(self._queue(prompt, one, with_text=True))
            seen = {number: (0, 0) for number in range(len(requests))}  # number -> (tokens, finished samples) then
            while seen:
                grown = False
                for number in list(seen):
                    output, seen[number] = self._if_grown(requests[number], number, seen[number])
                    if output is not None:
                        grown = True
                        if output.finished:
                            del seen[number]
                        yield output
                if not grown:
                    self.core.step()
            report_errors(requests)
        finally:
            self._abandon(requests)

    def _if_grown(self, request: Request, number: int, before: tuple) -> tuple[RequestOutput | None, tuple]:
        """The request's output if it has grown since `before`, and its (tokens, finished samples) now."""
        with self.core.paused():
            now = sum(seq.num_generated for seq in request.sequences), request.num_finished
            return None if now == before else self._output(request, number, True), now

    def _abandon(self, requests: list[Request]) -> None:
        for request in requests:
            self.core.abort(request)

    def _output(self, request: Request, number: int, with_delta: bool) -> RequestOutput:
        outputs = [self._completion(seq, with_delta) for seq in request.sequences]
        prompt, cached = (request.prompt, request.prompt_ids.tolist()), request.num_cached_tokens
        return RequestOutput(number, *prompt, outputs, request.finished, cached)

    def _completion(self, seq: Sequence, with_delta: bool) -> CompletionOutput:
        delta = seq.text.take_delta() if with_delta and seq.text is not None else ""
        finished, ids = seq.finish_reason is not None, seq.completion_ids.tolist()
        if seq.text is not None and not finished:
            text = seq.text.text[: seq.text.num_given]
        else:
            text = self.text_of(seq)
        logprobs = seq.logprobs.tolist() if seq.request.params.logprobs else None
        return CompletionOutput(seq.index, text, ids, logprobs, seq.finish_reason, seq.stop_reason, delta)

    def _require_awake(self) -> None:
        if self.core.is_awake:
            return
        if self._closed:
            raise ValueError("this LLM is closed: make a new one, or call close() later")
        raise ValueError("the engine sleeps: call wake_up() first")
