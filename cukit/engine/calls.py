"""What a call of LLM takes and what it gives."""

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from ..options import changed
from .config import EngineConfig, SamplingParams
from .request import Request

logger = logging.getLogger(__name__)

Prompt = str | Iterable[int]  # text, or ids: a list or an integer array
Prompts = str | list[int] | Iterable[Prompt]  # one, or several; an integer array is one too
Messages = list[dict] | list[list[dict]]  # one conversation, or several
Sampling = SamplingParams | list[SamplingParams] | None  # for all prompts, or one for each


@dataclass(frozen=True)
class LoRARequest:
    """An adapter that a request wants, as in vLLM: lora_int_id, from 1 on, tells it from others; lora_path is its
    folder in PEFT's format, or a name of the hub. A folder that has changed needs another lora_int_id.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str


Adapters = LoRARequest | list[LoRARequest | None] | None  # for all prompts, or one for each


@dataclass(slots=True)
class CompletionOutput:
    """One sample. While it grows (stream=True) finish_reason is None, and text holds whole characters only."""

    index: int
    text: str
    token_ids: list[int]  # the stop token and the tokens of a stop string included; the text is cut before them
    logprobs: list[float] | None  # of softmax(logits / temperature), one a token; None unless params.logprobs
    # "stop": an end-of-text token, a stop_token_id or a stop string; "length": max_tokens or max_model_len;
    # "abort"; "error": the model's logits were not finite (the tokens before that are kept)
    finish_reason: str | None
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


def is_int_array(ids: object) -> TypeGuard[np.ndarray]:
    return isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype.kind in "iu"


def one_each(prompts: Prompts, sampling_params: Sampling) -> tuple[list[Prompt], list[SamplingParams]]:
    """Prompts as a list, and as many SamplingParams."""
    if isinstance(prompts, dict) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be text, a list of token ids or a list of either, got {prompts!r:.60}")
    first = prompts[0] if isinstance(prompts, (list, np.ndarray)) and len(prompts) else None
    is_one = isinstance(prompts, str) or isinstance(first, (int, np.integer))
    listed: list[Any] = [prompts] if is_one else list(prompts)
    if not isinstance(sampling_params, list):
        return listed, [SamplingParams() if sampling_params is None else sampling_params] * len(listed)
    if len(sampling_params) != len(listed):
        raise ValueError(
            f"{len(sampling_params)} sampling_params for {len(listed)} prompts: give one for all, or one for each"
        )
    return listed, sampling_params


def conversations(messages: Messages) -> list[Any]:
    if not isinstance(messages, (list, tuple)):
        raise ValueError(f"messages must be a list of {{'role', 'content'}}, or a list of those, got {messages!r:.60}")
    return [messages] if messages and isinstance(messages[0], dict) else list(messages)


def engine_config(config: EngineConfig | None, options: dict) -> EngineConfig:
    known = list(EngineConfig.options())
    unknown = sorted(set(options) - set(known))
    if unknown:
        known = ["device", "dtype", "memory_limit", *known]
        raise ValueError(f"LLM has no option {', '.join(unknown)}; options are {', '.join(known)}")
    return EngineConfig(**options) if config is None else changed(config, **options)


def stored_eos(folder: Path) -> frozenset[int]:
    """End-of-text ids of generation_config.json, for a folder without a tokenizer."""
    path = folder / "generation_config.json"
    ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
    return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])


def report_errors(requests: list[Request]) -> None:
    """Say that samples ended with "error"; ValueError if all of them did."""
    reasons = [seq.finish_reason for request in requests for seq in request.sequences]
    count = reasons.count("error")
    if count and count == len(reasons):
        raise ValueError(
            "the model's logits are not finite (NaN or infinity): the weights are damaged or training diverged; load "
            "an earlier checkpoint"
        )
    if count:
        logger.warning(
            '%d of %d completions ended with finish_reason "error": the model\'s logits were not finite (NaN or '
            "infinity)",
            count,
            len(reasons),
        )
