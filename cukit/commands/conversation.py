"""The messages of a conversation, and the ids that a model has seen of them."""

from __future__ import annotations

from typing import Any

MOST_CUT = 4  # tokens at an answer's end that may be no part of its text: a stop token, bytes of a cut character


class Conversation:
    """Messages that grow by a question and an answer a turn.

    The ids of a turn begin with those of the turn before, sampled ids included, so that the prefix cache holds all of
    them. Where the template writes earlier turns otherwise (drops thoughts, strips spaces), the text is encoded anew.
    """

    def __init__(self, tokenizer: Any, system_prompt: str | None = None, template_arguments: dict | None = None):
        self.tokenizer, self.system_prompt, self.template_arguments = tokenizer, system_prompt, template_arguments or {}
        self.messages: list[dict[str, str]] = []
        self._seen: list[list[int]] = []  # ids of the prompt and the answer of each turn

    def prompt_ids(self, question: str) -> list[int]:
        """Ids of the conversation with a further question; ValueError if the template or the tokenizer refuses."""
        text = self._render(question, self.system_prompt)
        last = self._seen[-1] if self._seen else []
        for cut in range(min(MOST_CUT + 1, len(last))):
            seen = last[: len(last) - cut]
            before = self.tokenizer.decode(seen, skip_special_tokens=False)
            if text.startswith(before):
                ids = [*seen, *self.tokenizer.encode(text[len(before) :])]
                if self.tokenizer.decode(ids, skip_special_tokens=False) == text:
                    return ids
        return self.tokenizer.encode(text)

    def add(self, question: str, answer: str, seen: list[int]) -> None:
        """A turn is over. seen: the ids of its prompt and its answer."""
        self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        self._seen.append(seen)

    def take_back(self) -> tuple[str, str, list[int]]:
        """Remove the last turn; returns what add() takes. ValueError if there is none."""
        if not self._seen:
            raise ValueError("there is no answer yet to give again")
        question, answer = self.messages[-2:]
        del self.messages[-2:]
        return question["content"], answer["content"], self._seen.pop()

    def set_system_prompt(self, text: str | None) -> None:
        """For the turns that follow; ValueError, and nothing changes, if the template knows no system message."""
        self._render("?", text)
        self.system_prompt = text

    def reset(self) -> None:
        """Forget all messages; the system prompt stays."""
        self.messages, self._seen = [], []

    def _render(self, question: str, system_prompt: str | None) -> str:
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        messages = [*system, *self.messages, {"role": "user", "content": question}]
        return self.tokenizer.render_chat(messages, add_generation_prompt=True, **self.template_arguments)
