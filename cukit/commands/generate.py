"""generate: answer a prompt, with or without the chat template; without a prompt, on a terminal, it is chat."""

import sys
from typing import Any

from ..engine.config import SamplingParams
from ..options import nested, option, require
from ..runs.terminal import for_stream
from .adapters import engine_options, named_adapters
from .chat import Chat, ChatOptions, ready


class GenerateOptions(ChatOptions):
    group = "files"
    prompt: str | None = option(
        None, "answer this and end; without it: what comes on stdin, or a conversation", group="generation"
    )
    raw: bool = option(False, "give the text to the model as it is, without the chat template", group="generation")
    lora_modules: list[str] | None = option(
        None, "adapters (LoRA) as NAME=FOLDER: the model and each of them answer the prompt", group="generation"
    )
    sampling: SamplingParams = nested(SamplingParams, without=("logprobs",))

    def __post_init__(self) -> None:
        named_adapters(self.lora_modules or [])
        require(
            not (self.raw and self.system_prompt),
            "raw=true gives the text to the model as it is: write the system_prompt into the text, or leave out raw",
        )


def generate(values: dict[str, Any]) -> None:
    found = ready(GenerateOptions, values, lambda options: engine_options(named_adapters(options.lora_modules or [])))
    if found is None:
        return
    llm, options, prompt = found
    chat = Chat(llm, options, options.raw)
    if options.lora_modules:
        if prompt is None:
            raise ValueError("lora_modules compares answers to one prompt: give --prompt, or pipe it in")
        _answer_all(chat, prompt)
    elif prompt is not None:
        chat.answer(prompt)
    else:
        chat.converse()


def _answer_all(chat: Chat, prompt: str) -> None:
    """The answers of the model and of each adapter, computed in one batch, each under its name."""
    requests = [None, *named_adapters(chat.options.lora_modules)]
    prompts = [chat.prompt_of(prompt)] * len(requests)
    outputs = chat.llm.generate(prompts, chat.options.sampling, lora_request=requests)
    for request, output in zip(requests, outputs, strict=True):
        name = chat.options.model if request is None else request.lora_name
        answers = "\n---\n".join(one.text for one in output.outputs)
        print(for_stream(f"=== {name}\n{answers}", sys.stdout))
