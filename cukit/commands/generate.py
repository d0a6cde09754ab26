"""generate: answer a prompt, with or without the chat template; without a prompt, on a terminal, it is chat."""

from typing import Any

from ..engine.config import SamplingParams
from ..options import nested, option, require
from .chat import Chat, ChatOptions, ready


class GenerateOptions(ChatOptions):
    group = "files"
    prompt: str | None = option(
        None, "answer this and end; without it: what comes on stdin, or a conversation", group="generation"
    )
    raw: bool = option(False, "give the text to the model as it is, without the chat template", group="generation")
    sampling: SamplingParams = nested(SamplingParams, without=("logprobs",))

    def __post_init__(self) -> None:
        require(
            not (self.raw and self.system_prompt),
            "raw=true gives the text to the model as it is: write the system_prompt into the text, or leave out raw",
        )


def generate(values: dict[str, Any]) -> None:
    found = ready(GenerateOptions, values)
    if found is None:
        return
    llm, options, prompt = found
    chat = Chat(llm, options, options.raw)
    if prompt is not None:
        chat.answer(prompt)
    else:
        chat.converse()
