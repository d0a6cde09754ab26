"""Models for engine tests: a tiny real one in float64, and one that recites a script."""

import lzma
import shutil
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from cukit.autograd import Tensor
from cukit.backend import backend_for
from cukit.engine.llm import LLM
from cukit.models.weights import load_model
from cukit.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
TINY_MODELS = ("qwen3_tiny", "qwen2_tiny", "llama_tiny")


def tiny_model(name="qwen3_tiny"):
    """The same object every time."""
    return _tiny_model(name)


@cache
def _tiny_model(name):
    return load_model(GOLDEN / name, device="cpu", dtype="float64")


def tiny_llm(name="qwen3_tiny", **options):
    """Float64, so that rounding cannot flip a draw."""
    return LLM.from_model(tiny_model(name), None, **{"max_model_len": 64, "block_size": 4} | options)


def random_prompts(count, low, high, seed=0, vocab_size=211):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, rng.integers(low, high)).tolist() for _ in range(count)]


class StandIn:
    """What the engine asks of a model: one layer, and a cache that holds one number a token."""

    exact = "auto"
    tensor = None

    def __init__(self, dtype, vocab_size, max_position_embeddings):
        self.backend, self.dtype, self.vocab_size = backend_for("cpu"), np.dtype(dtype), vocab_size
        ones = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        self.config = self.own_config = SimpleNamespace(
            **dict.fromkeys(ones, 1),
            vocab_size=vocab_size,
            vocab_rows=vocab_size,
            vocab_parts=1,
            max_position_embeddings=max_position_embeddings,
            head_dim=1,
            tie_word_embeddings=True,
            attention_bias=False,
            qk_norm=False,
            rms_norm_eps=1e-6,
            eos_token_id=None,
            head="lm_head",
        )

    def parameters(self):
        return []

    def limit_vocabulary(self, num_ids):
        self.vocab_size = min(num_ids, self.config.vocab_size)


class ScriptModel(StandIn):
    """A model that puts token script[p] (almost surely) at position p. It reads and writes no KV."""

    def __init__(self, script, vocab_size=151_669, max_position_embeddings=128):
        super().__init__(np.float32, vocab_size, max_position_embeddings)
        self.script = np.asarray(script)

    def forward(self, tokens, positions, attend):
        return Tensor(np.asarray(positions, np.float32)[:, None])

    def logits(self, hidden):
        logits = np.zeros((len(hidden.data), self.config.vocab_size), np.float32)
        following = np.minimum(hidden.data[:, 0].astype(int) + 1, len(self.script) - 1)
        logits[np.arange(len(logits)), self.script[following]] = 1000
        return Tensor(logits)


@cache
def qwen_tokenizer():
    with tempfile.TemporaryDirectory() as folder:
        packed = (GOLDEN / "qwen3-tokenizer" / "tokenizer.json.xz").read_bytes()
        Path(folder, "tokenizer.json").write_bytes(lzma.decompress(packed))
        shutil.copy(GOLDEN / "qwen3-tokenizer" / "tokenizer_config.json", folder)
        return Tokenizer.from_folder(folder)


def reciting_llm(prompt, text_ids, **options):
    """(llm, prompt ids) that answers `prompt` with text_ids."""
    tokenizer = qwen_tokenizer()
    prompt_ids = prompt if isinstance(prompt, list) else tokenizer.encode(prompt)
    return LLM.from_model(ScriptModel(prompt_ids + list(text_ids)), tokenizer, **options), prompt_ids


class HashModel(StandIn):
    """A model with a hash of all tokens so far as logits, read back from the KV cache through the block tables: a
    wrong block, slot or copy changes every later token. `bad(state)` gives the rows with NaN logits.
    """

    PRIME = 1_048_573

    def __init__(self, vocab_size=53, max_position_embeddings=512, bad=None):
        super().__init__(np.float64, vocab_size, max_position_embeddings)
        self.bad = bad

    def forward(self, tokens, positions, attend):
        (k_cache, _), tables = attend.kv[0], np.asarray(attend.block_tables)
        cells, block_size = k_cache.reshape(-1), k_cache.shape[1]
        values = (tokens * 7919.0 + positions * 104729.0 + 12345) % self.PRIME
        stored = attend.slot_mapping >= 0
        cells[attend.slot_mapping[stored]] = values[stored]
        borders = getattr(attend, "cu_seqlens_q", np.arange(len(tokens) + 1))
        state = np.zeros(len(tokens))
        for row, length in enumerate(np.asarray(attend.context_lens).tolist()):
            place = np.arange(length)
            keys = cells[tables[row, place // block_size] * block_size + place % block_size]
            sums = np.cumsum(keys * (place + 1)) % self.PRIME
            count = borders[row + 1] - borders[row]
            if length:
                state[borders[row] : borders[row + 1]] = sums[length - count :]
        return Tensor(state[:, None])

    def logits(self, hidden):
        state = hidden.data[:, :1]
        logits = (state * (np.arange(self.config.vocab_size) * 2_654_435 + 97)) % self.PRIME / self.PRIME * 6
        if self.bad is not None:
            logits[self.bad(state[:, 0])] = np.nan
        return Tensor(logits)


def check_engine(llm):
    """What holds between two steps: every block has as many owners as it counts, none is lost, rows are dense."""
    core = llm.core
    blocks, scheduler, rows = core.blocks, core.scheduler, core.rows
    everywhere = [*rows.sequences, *scheduler.prompts, *scheduler.waiting, *scheduler.held]
    assert len(set(map(id, everywhere))) == len(everywhere)
    owners = [0] * blocks.num_blocks
    for seq in everywhere:
        assert len(set(seq.block_table)) == len(seq.block_table)
        for block in seq.block_table:
            owners[block] += 1
    assert owners == blocks.reference_counts
    free = [*blocks._free, *blocks._free_cached]
    assert sorted(free) == [block for block, count in enumerate(owners) if count == 0]
    assert set(blocks._block_of.values()) == set(blocks._contents) and not set(blocks._free) & set(blocks._contents)
    assert rows.count == len(rows.sequences) <= rows.capacity
    assert all(seq.row == row and seq.rows is rows for row, seq in enumerate(rows.sequences))
    assert rows.count + len(scheduler.prompts) <= rows.capacity
    assert not rows.host.context_lens[rows.count :].any() and (rows.host.slot_mapping[rows.count :] == -1).all()
    assert scheduler.waiting == sorted(scheduler.waiting, key=lambda seq: seq.order)
    unfinished = [seq for request in core.requests.values() for seq in request.sequences if seq.finish_reason is None]
    queued = [seq for seq, _ in core._added if seq.finish_reason is None]
    assert {id(seq) for seq in unfinished} == {id(seq) for seq in everywhere if seq not in scheduler.held} | {
        id(seq) for seq in queued
    }


def check_sample(be, fault, dtype):
    """Rows 1 and 4 of 6 are spoilt, under every kind of filter: ids within range, log-probs not finite, other rows the
    same bits. For both shelves.
    """
    logits = np.random.default_rng(0).standard_normal((6, 300)).astype(be.dtype_of(dtype))
    spoilt = logits.copy()
    places = {"nan": slice(None), "one nan": 7, "inf": 7, "two inf": [7, 290], "-inf": slice(None)}[fault]
    for row in (1, 4):
        spoilt[row, places] = float(fault.split()[-1])
    precise = be.accumulator(be.dtype_of(dtype))
    for temperature, top_k, top_p, min_p in ((0, 0, 1, 0), (1, 0, 1, 0), (0.7, 5, 0.9, 0.1), (1, 0, 0.5, 0)):
        settings = [
            np.full(6, value, kind)
            for value, kind in ((temperature, precise), (top_k, np.int32), (top_p, precise), (min_p, precise))
        ]
        settings += [np.arange(6, dtype=np.uint64), np.arange(6, dtype=np.int64)]
        banned = np.array([[3, -1]] * 6, np.int32)
        for extra in ((), (banned, np.full(6, 1.3, precise), np.arange(1800).reshape(6, 300) % 2 == 0)):
            found = []
            for given in (logits, spoilt):
                drawn = be.sample(*map(be.array, (given, *settings)), 290, *map(be.array, extra))
                found.append([be.to_numpy(x) for x in drawn])
            (tokens, logprobs), (spoilt_tokens, spoilt_logprobs) = found
            assert ((spoilt_tokens >= 0) & (spoilt_tokens < 290)).all()
            assert not np.isfinite(spoilt_logprobs[[1, 4]]).any()
            others = [0, 2, 3, 5]
            assert tokens[others].tolist() == spoilt_tokens[others].tolist()
            assert logprobs[others].tobytes() == spoilt_logprobs[others].tobytes()


def byte_tokens(text):
    """`text` as one token a byte."""
    by_symbol = {qwen_tokenizer().id_to_token(token): token for token in range(256)}
    symbols = [symbol for character in text for symbol in _byte_symbols(character)]
    return [by_symbol[symbol] for symbol in symbols]


def _byte_symbols(character):
    """The byte-level alphabet of GPT-2: printable bytes stand for themselves, the others for U+0100 and following."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [table[byte] for byte in character.encode()]
