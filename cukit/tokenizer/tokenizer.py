"""The tokenizer of a model folder: its files, its special ids, encoding and decoding."""

import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from .chat import ChatTemplates

# What a tokenizer consists of in a model folder; `save` copies those that the source folder had.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
BYTE_TOKEN = re.compile("<0x[0-9a-fA-F]{2}>")
SURROGATE = re.compile("[\ud800-\udfff]")  # what Python makes of bytes that are no UTF-8
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TEMPLATE_FOLDER = "additional_chat_templates"  # where transformers saves all templates but the default one


class Tokenizer:
    """Encodes, decodes and renders chats as transformers' fast tokenizer of the same folder does.

    vocab_size      number of ids the tokenizer has: largest id + 1, added tokens included (a checkpoint may have more)
    eos_token_ids   frozenset of the ids that end a text: generation_config.json's (or else config.json's) and the
                    tokenizer's own eos
    eos_token_id    the one to append to a text: the tokenizer's own, else the first configured one; may be None
    pad_token_id    may be None; bos_token_id likewise
    byte_ids        id -> byte of the tokens <0x00> … <0xFF> of a tokenizer with byte fallback, else {}
    """

    def __init__(self, backend: tokenizers.Tokenizer, files: dict[str, bytes], name: str, model_config: dict):
        """`files`: the folder's tokenizer files by name. Use `from_folder`."""
        self.name = name
        self._backend = backend
        self._files = files
        config = _parse(files, "special_tokens_map.json", name) | _parse(files, "tokenizer_config.json", name)
        generation = _parse(files, "generation_config.json", name)
        _add_missing_tokens(backend, config.get("added_tokens_decoder") or {}, name)
        # Truncation or padding stored in tokenizer.json would silently change what a text means.
        backend.no_truncation()
        backend.no_padding()
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.byte_ids = _byte_tokens(backend, vocabulary)
        self._texts: dict[int, str] = {}  # of single ids
        self.special_tokens = {key: _content(config[key]) for key in NAMED_TOKENS if config.get(key) is not None}
        self._set_special_ids(generation, model_config)
        templates = self._find_templates(config)
        self._chat = ChatTemplates(templates, self.special_tokens) if templates else None

    @classmethod
    def from_folder(cls, path: str | os.PathLike, config_folder: str | os.PathLike | None = None) -> "Tokenizer":
        """Read the tokenizer of a model folder; ValueError if there is none or it can not be read. config_folder: where
        the model's config.json lies, if it is not there.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise ValueError(f"model folder {str(path)!r} does not exist")
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(
                f"{folder}: no tokenizer.json; convert the tokenizer with transformers' save_pretrained "
                "(sentencepiece-only and vocab.json-only folders are not supported)"
            )
        names = [
            *TOKENIZER_FILES,
            *(f"{TEMPLATE_FOLDER}/{path.name}" for path in folder.glob(f"{TEMPLATE_FOLDER}/*.jinja")),
        ]
        files = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
        try:
            backend = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{folder / 'tokenizer.json'}: not a tokenizer: {_one_line(error)}") from error
        model_config = Path(config_folder or folder) / "config.json"
        config_files = {"config.json": model_config.read_bytes()} if model_config.is_file() else {}
        return cls(backend, files, str(folder), _parse(config_files, "config.json", str(folder)))

    def __len__(self) -> int:
        return self.vocab_size

    def same_as(self, other: "Tokenizer") -> bool:
        """Whether both give the same ids for every text and every chat, and end texts alike."""
        if self is other:
            return True
        chats = [one._chat.templates if one._chat else None for one in (self, other)]
        ends = [(one.eos_token_id, one.eos_token_ids, one.special_tokens) for one in (self, other)]
        return chats[0] == chats[1] and ends[0] == ends[1] and self._backend.to_str() == other._backend.to_str()

    def agrees_with(self, other: "Tokenizer") -> bool:
        """Whether every id that both have is the same token in both."""
        own, others = ({i: token for token, i in one._backend.get_vocab(True).items()} for one in (self, other))
        return all(others.get(i, token) == token for i, token in own.items())

    # ---- ids and text ----

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`. Markers such as <|im_end|> in the text become their ids, as in transformers.

        `add_special_tokens` adds what tokenizer.json's post-processor adds (Llama: the beginning-of-text id), unless
        the text has it already, as a rendered chat does.
        """
        if not isinstance(text, str):
            raise ValueError(f"only text can be encoded, not {type(text).__name__} {text!r:.60}")
        try:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # lone surrogates, or a WordLevel model without its unknown token
            reason = "it is not valid UTF-8" if SURROGATE.search(text) else _one_line(error)
            raise ValueError(f"text {text!r:.60} can not be encoded: {reason}") from error
        return self._without_doubles(text, ids) if add_special_tokens else ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]:
        """`encode` of every text, on all cores."""
        try:
            found = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except Exception:  # `encode` says which text it is and what is wrong
            return [self.encode(text, add_special_tokens) for text in texts]
        if not add_special_tokens:
            return [encoding.ids for encoding in found]
        return [self._without_doubles(text, encoding.ids) for text, encoding in zip(texts, found, strict=True)]

    def _without_doubles(self, text: str, ids: list[int]) -> list[int]:
        """The ids without a special token that the post-processor has put before (or behind) the same one."""
        pairs = (ids[:2], ids[-2:])
        if not any(len(pair) == 2 and pair[0] == pair[1] and pair[0] in self._special_ids for pair in pairs):
            return ids
        own = self._backend.encode(text, add_special_tokens=False).ids
        start = next((k for k in range(len(ids) - len(own) + 1) if ids[k : k + len(own)] == own), 0)
        before, behind = ids[:start], ids[start + len(own) :]
        has_before, has_behind = own[: len(before)] == before, own[len(own) - len(behind) :] == behind
        return ([] if has_before else before) + own + ([] if has_behind else behind)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids the tokenizer does not have give no text, halves of characters give U+FFFD."""
        ids = list(ids)
        try:
            return self._backend.decode(ids, skip_special_tokens)  # leaves out what it does not have
        except OverflowError:  # and takes none below 0 or beyond 32 bits
            return self._backend.decode([token for token in ids if 0 <= token < self.vocab_size], skip_special_tokens)

    def text_of(self, token_id: int) -> str:
        """Text of one id alone, special tokens included; it is kept, so that the next call is quick."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def shows(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Whether `decode` looks at an id: not at special tokens that it skips, nor at ids without a token."""
        return not (skip_special_tokens and token_id in self._special_ids) and self.id_to_token(token_id) is not None

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    # ---- chats ----

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def apply_chat_template(
        self,
        messages: Sequence[dict],
        add_generation_prompt: bool = False,
        tools: list[dict] | None = None,
        tokenize: bool = True,
        **template_arguments: object,
    ) -> list[int] | str:
        """The ids of a rendered chat, or with `tokenize=False` its text (see `render_chat`)."""
        text = self.render_chat(messages, add_generation_prompt, tools, **template_arguments)
        return self.encode(text) if tokenize else text

    def render_chat(
        self,
        messages: Sequence[dict],
        add_generation_prompt: bool = False,
        tools: list[dict] | None = None,
        **template_arguments: object,
    ) -> str:
        """The text of `messages` ({"role", "content", ...} each), as the chat template has it.

        `content` is text or a list of {"type": "text", "text": ...}; it may be missing where other keys say something
        (tool_calls). `tools` are JSON schemas; further arguments (`enable_thinking`, ...) go to the template.
        ValueError if the folder has no template, or the template raises or leaves out what a message says.
        """
        if self._chat is None:
            raise ValueError(
                f"{self.name}: the tokenizer has no chat template; give prompts as text, or add chat_template.jinja"
            )
        try:
            return self._chat.render(messages, add_generation_prompt, tools, template_arguments)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error.__cause__

    def encode_continuation(
        self,
        messages: Sequence[dict],
        replies: Sequence[dict],
        last_token: int,
        tools: list[dict] | None = None,
        **template_arguments: Any,
    ) -> list[int]:
        """The ids that a chat gains by `replies` and the next generation prompt; nothing before them is looked at.

        messages end with what the assistant said; last_token ends its ids. If the template ends an answer with that
        token, it is there already and is left out here. ValueError for a template that cannot go on like that.
        """
        if self._chat is None:
            raise ValueError(f"{self.name}: the tokenizer has no chat template, which a further turn needs")
        try:
            text = self._chat.render_continuation(messages, replies, tools, template_arguments)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error.__cause__
        ids = self.encode(text)
        place = ids.index(last_token) if last_token in ids else -1
        is_end = place >= 0 and not self.decode(ids[:place], skip_special_tokens=False).strip()
        return ids[place + 1 :] if is_end else ids

    # ---- folders ----

    def save(self, folder: str | os.PathLike) -> None:
        """Write the tokenizer's files as they were read (generation_config.json included), each atomically."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        for name, content in self._files.items():
            path = target / name
            path.parent.mkdir(exist_ok=True)
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            temporary.write_bytes(content)
            os.replace(temporary, path)

    # ---- set-up ----

    def _set_special_ids(self, generation: dict, model_config: dict) -> None:
        own = {key: self.token_to_id(token) for key, token in self.special_tokens.items()}
        if "eos_token" in own and own["eos_token"] is None:
            raise ValueError(f"{self.name}: eos_token {self.special_tokens['eos_token']!r} is not in the vocabulary")
        configured = {}
        for key in ("eos_token_id", "pad_token_id", "bos_token_id"):
            source = generation if generation.get(key) is not None else model_config
            configured[key] = _id_list(source.get(key), key, self.name)
        own_eos = own.get("eos_token")
        ends = ([own_eos] if own_eos is not None else []) + configured["eos_token_id"]
        self.eos_token_ids = frozenset(ends)
        self.eos_token_id: int | None = ends[0] if ends else None
        self.pad_token_id = _first(own.get("pad_token"), *configured["pad_token_id"], self.eos_token_id)
        self.bos_token_id = _first(own.get("bos_token"), *configured["bos_token_id"])

    def _find_templates(self, config: dict) -> dict[str, str]:
        """Chat templates by name. Files win over tokenizer_config.json, where one template or a list may stand."""
        files = {
            Path(name).stem: _text(content, f"{self.name}/{name}")
            for name, content in self._files.items()
            if name.startswith(TEMPLATE_FOLDER)
        }
        if "chat_template.jinja" in self._files:
            content = self._files["chat_template.jinja"]
            return files | {"default": _text(content, f"{self.name}/chat_template.jinja")}
        found = config.get("chat_template")
        entries = (
            found if isinstance(found, list) else [] if found is None else [{"name": "default", "template": found}]
        )
        if not all(isinstance(entry, dict) and isinstance(entry.get("template"), str) for entry in entries):
            raise ValueError(
                f"{self.name}: chat_template must be text or a list of {{name, template}}, got {found!r:.60}"
            )
        return {str(entry.get("name")): entry["template"] for entry in entries} | files


def _byte_tokens(backend: tokenizers.Tokenizer, vocabulary: dict[str, int]) -> dict[int, int]:
    """id -> byte of the tokens that the decoder takes as bytes."""
    found = {}
    for token, token_id in vocabulary.items():
        if len(token) == 6 and BYTE_TOKEN.fullmatch(token) and backend.decode([token_id], False) != token:
            found[token_id] = int(token[3:5], 16)
    return found


def _add_missing_tokens(backend: tokenizers.Tokenizer, decoder: dict, name: str) -> None:
    """Add the tokens that only tokenizer_config.json's added_tokens_decoder lists, at the ids it gives them."""
    try:
        entries = sorted((int(token_id), entry) for token_id, entry in decoder.items())
        for token_id, entry in entries:
            if backend.token_to_id(entry["content"]) == token_id:
                continue
            flags = {key: bool(entry.get(key, False)) for key in ("lstrip", "rstrip", "single_word", "special")}
            normalized = bool(entry.get("normalized", not flags["special"]))
            token = tokenizers.AddedToken(entry["content"], normalized=normalized, **flags)
            (backend.add_special_tokens if flags["special"] else backend.add_tokens)([token])
            got = backend.token_to_id(entry["content"])
            if got != token_id:
                raise ValueError(
                    f"{name}: tokenizer_config.json gives {entry['content']!r} the id {token_id}, "
                    f"but in tokenizer.json it is or would be {got}"
                )
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{name}/tokenizer_config.json: added_tokens_decoder is malformed") from error


def _parse(files: dict[str, bytes], file_name: str, folder: str) -> dict:
    """JSON object of a file, {} if the folder does not have it."""
    if file_name not in files:
        return {}
    try:
        value = json.loads(_text(files[file_name], f"{folder}/{file_name}"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{folder}/{file_name}: malformed JSON: {_one_line(error)}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{folder}/{file_name}: must be a JSON object, got {type(value).__name__}")
    return value


def _text(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text: {error.reason} at byte {error.start}") from error


def _content(token: str | dict) -> str:
    """A special token is written as text or as {"content": text, ...}."""
    return token["content"] if isinstance(token, dict) and isinstance(token.get("content"), str) else str(token)


def _id_list(value: Any, key: str, folder: str) -> list[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(entry) is int and entry >= 0 for entry in values):
        raise ValueError(f"{folder}: {key} must be an id or a list of ids, got {value!r:.60}")
    return values


def _first(*candidates: int | None) -> int | None:
    return next((candidate for candidate in candidates if candidate is not None), None)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:300] if text else type(error).__name__
