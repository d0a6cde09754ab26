"""Text <-> ids for a Hugging Face model folder: `tokenizers` for ids, jinja2's sandbox for the chat template.

The folder is untrusted: only files with fixed names are read, and a template can reach neither files nor attributes.
"""

import json
import os
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.nodes
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

# What a tokenizer consists of in a model folder; `save` copies those that the source folder had.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# A UTF-8 character has at most 4 bytes, so at most 3 replacement characters at the end of a text may still become one.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_PENDING = 3


class Tokenizer:
    """Encodes, decodes and renders chats as transformers' fast tokenizer of the same folder does.

    vocab_size      number of ids the tokenizer has: largest id + 1, added tokens included (a checkpoint may have more)
    eos_token_ids   frozenset of the ids that end a text: generation_config.json's (or else config.json's) and the
                    tokenizer's own eos
    eos_token_id    the one to append to a text: the tokenizer's own, else the first configured one; may be None
    pad_token_id    may be None; bos_token_id likewise
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
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_tokens = {key: _content(config[key]) for key in NAMED_TOKENS if config.get(key) is not None}
        self._set_special_ids(generation, model_config)
        self._template = self._find_template(config)
        self._compiled_template: jinja2.Template | None = None

    @classmethod
    def from_folder(cls, path: str | os.PathLike) -> "Tokenizer":
        """Read the tokenizer of a model folder; ValueError if there is none or it can not be read."""
        folder = Path(path)
        if not folder.is_dir():
            raise ValueError(f"model folder {str(path)!r} does not exist")
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(
                f"{folder}: no tokenizer.json; convert the tokenizer with transformers' save_pretrained "
                "(sentencepiece-only and vocab.json-only folders are not supported)"
            )
        files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
        try:
            backend = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{folder / 'tokenizer.json'}: not a tokenizer: {_one_line(error)}") from error
        model_config = folder / "config.json"
        config_files = {"config.json": model_config.read_bytes()} if model_config.is_file() else {}
        return cls(backend, files, str(folder), _parse(config_files, "config.json", str(folder)))

    def __len__(self) -> int:
        return self.vocab_size

    # ---- ids and text ----

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`. Markers such as <|im_end|> in the text become their ids, as in transformers.

        `add_special_tokens` adds what tokenizer.json's post-processor adds (Llama: the beginning-of-text id).
        """
        if not isinstance(text, str):
            raise ValueError(f"only text can be encoded, not {type(text).__name__} {text!r:.60}")
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # lone surrogates, or a WordLevel model without its unknown token
            raise ValueError(f"text {text!r:.60} can not be encoded: {_one_line(error)}") from error

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids the tokenizer does not have give no text, halves of characters give U+FFFD."""
        known = [int(token) for token in ids if 0 <= token < self.vocab_size]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id)

    # ---- chats ----

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def apply_chat_template(
        self,
        messages: Sequence[dict],
        add_generation_prompt: bool = False,
        tools: list[dict] | None = None,
        tokenize: bool = True,
        **template_arguments,
    ) -> list[int] | str:
        """Render `messages` ({"role", "content", ...} each); ids, or the text with `tokenize=False`.

        `tools` are JSON schemas; further arguments (`enable_thinking`, ...) go to the template. ValueError if the
        folder has no template or the template raises.
        """
        if self._template is None:
            raise ValueError(
                f"{self.name}: the tokenizer has no chat template; give prompts as text, or add chat_template.jinja"
            )
        for index, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise ValueError(f"message {index} must be an object with a 'role', got {message!r:.80}")
        if tools is not None and not all(isinstance(tool, dict) for tool in tools):
            raise ValueError("tools must be JSON schemas (objects); describe a Python function by its schema")
        arguments = {**self.special_tokens, **template_arguments}
        try:
            if self._compiled_template is None:
                self._compiled_template = _template_environment().from_string(self._template)
            text = self._compiled_template.render(
                messages=list(messages),
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **arguments,
            )
        except Exception as error:  # a template is a program: any exception may come out of it
            raise ValueError(f"{self.name}: the chat template failed: {_one_line(error)}") from error
        return self.encode(text) if tokenize else text

    # ---- folders ----

    def save(self, folder: str | os.PathLike) -> None:
        """Write the tokenizer's files as they were read (generation_config.json included), each atomically."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        for name, content in self._files.items():
            temporary = target / f".{name}.{os.getpid()}.tmp"
            temporary.write_bytes(content)
            os.replace(temporary, target / name)

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

    def _find_template(self, config: dict) -> str | None:
        """chat_template.jinja wins over tokenizer_config.json, whose list form has a template named default."""
        if "chat_template.jinja" in self._files:
            return _text(self._files["chat_template.jinja"], f"{self.name}/chat_template.jinja")
        template = config.get("chat_template")
        if isinstance(template, list):
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template = named.get("default")
        if template is not None and not isinstance(template, str):
            raise ValueError(f"{self.name}: chat_template must be text, got {type(template).__name__}")
        return template


class IncrementalDecoder:
    """Text of a growing sequence of ids, given out only in whole characters.

    The pieces of `push` and the last one of `flush` join to `tokenizer.decode(ids)`. With `prompt_ids`, a character
    that the prompt began is completed instead of shown as U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # Only a short window is decoded again: the ids of the last piece given out (decoders may treat the first id
        # of a text specially) and those after it.
        self._window = [int(token) for token in prompt_ids[-8:]]
        self._printed = len(self._whole(self._decode()))
        self._piece_start = len(self._window)

    def push(self, token_id: int) -> str:
        """Add one id; the text that became certain, often "" ."""
        self._window.append(int(token_id))
        text = self._decode()
        whole = self._whole(text)
        piece = whole[self._printed :]
        self._printed = max(self._printed, len(whole))
        if piece and whole == text:
            del self._window[: self._piece_start]
            self._piece_start = len(self._window)
            self._printed = len(self._decode())
        return piece

    def flush(self) -> str:
        """The rest, with U+FFFD for a character that never became whole; the decoder then starts anew."""
        rest = self._decode()[self._printed :]
        self._window, self._printed, self._piece_start = [], 0, 0
        return rest

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, self._skip_special_tokens)

    @staticmethod
    def _whole(text: str) -> str:
        end = len(text)
        while end > 0 and len(text) - end < MAX_PENDING and text[end - 1] == REPLACEMENT:
            end -= 1
        return text[:end]


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant wrote in training templates; rendered as is."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _template_environment() -> ImmutableSandboxedEnvironment:
    """The environment transformers renders chat templates in: no loader, no attributes that begin with _."""

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda text_format: datetime.now().strftime(text_format)
    return environment


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


def _id_list(value, key: str, folder: str) -> list[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(entry) is int and entry >= 0 for entry in values):
        raise ValueError(f"{folder}: {key} must be an id or a list of ids, got {value!r:.60}")
    return values


def _first(*candidates: int | None) -> int | None:
    return next((candidate for candidate in candidates if candidate is not None), None)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:300] if text else type(error).__name__
