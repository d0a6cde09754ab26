"""Launch every kernel at small, odd sizes, for compute-sanitizer. Fails if a kernel of kernels/ was never launched.

    compute-sanitizer --tool memcheck  --error-exitcode 9 python tests/gpu/every_kernel.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python tests/gpu/every_kernel.py

Slow under racecheck: --parts models,attention,products,losses and --dtypes bfloat16,float16,float32 choose some of it.
--arch sm_90 runs on Hopper what other cards run (no wgmma).
"""

import argparse
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from check import normal, statistics  # noqa: E402

from cukit.autograd import no_grad  # noqa: E402
from cukit.backend import backend_for  # noqa: E402
from cukit.backend.cuda import compile as compiler  # noqa: E402
from cukit.backend.cuda import loader  # noqa: E402
from cukit.engine.config import SamplingParams  # noqa: E402
from cukit.engine.llm import LLM  # noqa: E402
from cukit.models.logprobs import pack, target_logprobs  # noqa: E402
from cukit.models.weights import load_model  # noqa: E402
from cukit.optim import AdamW  # noqa: E402

launched = set()


def watch():
    """Note every launch."""
    original = loader.Kernel.__call__

    def call(kernel, *args, **more):
        launched.add(kernel.name.rpartition(".")[2])
        return original(kernel, *args, **more)

    loader.Kernel.__call__ = call


def train_and_generate(name, dtype):
    model = load_model(ROOT / "tests/golden" / name, device="cuda", dtype=dtype)
    model.frozen_copy().init_weights(0)
    rows = [[5, 9, 100, 7, 3], [8], list(range(3, 80))]
    logprobs, entropy = target_logprobs(model, rows, [np.arange(len(r)) > 0 for r in rows], 0.7, 200)
    for form, model.gradient_checkpointing in zip(("float32", "bfloat16", "int8"), ("selective", "full", "none")):
        (logprobs.sum() + entropy.sum() * 0.1).backward()
        AdamW(model.store, max_grad_norm=1.0, weight_decay=0.1, state_form=form).step(1e-3)
        logprobs, entropy = target_logprobs(model, rows, [np.arange(len(r)) > 0 for r in rows], 0.7, 200)
    with no_grad():
        model.logits(model.forward(*pack(model, rows)))
    llm = LLM.from_model(model, None, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=40, enforce_eager=True)
    kinds = [
        {},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1, "n": 3},
        {"temperature": 0.0},
        {"repetition_penalty": 1.3, "top_k": 7, "top_p": 0.9},
    ]
    params = [
        SamplingParams(**{"max_tokens": 4, "min_tokens": 2, "stop_token_ids": [5], "seed": 1} | kind) for kind in kinds
    ]
    llm.generate([rows[i % 3] for i in range(len(params))], params)
    llm.close()


def attention(dtype, heads, kv_heads, dim, lengths, cache=None):
    from cukit.backend.cuda import paged_attention

    be = backend_for("cuda")
    borders = np.cumsum([0, *lengths]).astype(np.int32)
    qkv = be.array(normal(int(borders[-1]), (heads + 2 * kv_heads) * dim).astype(be.dtype_of(dtype)))
    o, lse = be.attention_forward(qkv, be.array(borders), heads, kv_heads)
    be.attention_backward(o, qkv, o, lse, be.array(borders), heads, kv_heads)
    first, end = lengths[0], int(borders[-1])
    prefixes = [[0, 0, end], *([0, first, border] for border in borders[2:])]  # the first is the prefix of the others
    given = be.array(borders), heads, kv_heads, be.array(np.array(prefixes, np.int32))
    o, lse = be.attention_forward(qkv, *given)
    be.attention_backward(o, qkv, o, lse, *given)
    blocks = [-(-length // 16) for length in lengths]
    caches = be.zeros((2, sum(blocks) + 1, 16, kv_heads, dim), cache or dtype)
    tables = np.zeros((len(lengths), max(blocks)), np.int32)
    firsts = np.cumsum([0, *blocks])[:-1] + 1
    for row, (first, count) in enumerate(zip(firsts, blocks)):
        tables[row, :count] = np.arange(first, first + count)
    slots = np.concatenate([first * 16 + np.arange(length) for first, length in zip(firsts, lengths)]).astype(np.int64)
    be.store_kv(*caches, qkv, be.array(slots), heads, kv_heads)
    context = np.array(lengths, np.int32)
    be.paged_prefill_attention(qkv, *caches, be.array(tables), be.array(borders), be.array(context), heads)
    last = be.array(be.to_numpy(qkv)[borders[1:] - 1])
    context *= np.arange(len(lengths)) != 1
    for paged_attention.FEW_BLOCKS in (0, 10**9):
        given = be.array(tables), be.array(context), heads
        be.paged_decode_attention(last, *caches, *given, int(context.max()))
        newest = np.where(context > 0, slots[borders[1:] - 1], -1)
        norms, angles = [be.array(statistics(dim))] * 2, [be.array(statistics(9, dim // 2))] * 2
        turn = *norms, *angles, be.array(np.arange(len(lengths), dtype=np.int32))
        sizes = kv_heads, 1e-6, int(context.max())
        be.rope_paged_decode_attention(*caches, be.array(newest), last, *turn, *given, *sizes)
    entries = (be.array(np.arange(len(lengths), dtype=np.int32)) for _ in range(3))
    be.update_block_tables(be.zeros((len(lengths), len(lengths)), np.int32), *entries)
    be.newest_tokens(*(be.array(np.arange(len(lengths), dtype=np.int32)) for _ in range(3)))
    be.copy_blocks(caches, be.array(np.array([1])), be.array(np.array([0])))


def products(dtype):
    """The product in order, which no weight needs on every card, in every tile."""
    from cukit.backend.cuda.exact import TILES, in_order_product

    be = backend_for("cuda")
    for rows, ins, outs in ((70, 200, 130), (5, 13, 7), (1, 24, 33), (9, 2100, 20)):
        x, w, bias = (
            be.array(normal(*shape).astype(be.dtype_of(dtype))) for shape in ((rows, ins), (outs, ins), (outs,))
        )
        for tile in TILES if x.itemsize == 2 else (None,):
            in_order_product(x, w, bias, tile)


def policy_losses(dtype="float32"):
    be = backend_for("cuda")
    new, old, ref, advantages = (be.array(statistics(13, seed=s)) for s in range(4))
    weights = be.array(np.full(13, 1 / 13, np.float32))
    borders = be.array(np.array([0, 5, 5, 13], np.int32))
    for kind in ("clip", "cispo"):
        for cu_seqlens in (None, borders):
            be.policy_loss_forward(
                new,
                old,
                ref,
                advantages,
                weights,
                cu_seqlens,
                kind,
                0.2,
                0.28,
                1.4 if kind == "clip" else None,
                0.1,
                True,
            )
    for kind, coefficients in (("sapo", (1.0, 1.05)), ("vespo", (2.0, 3.0, 3.0, 2.0))):
        columns = (new, old, ref, advantages, weights, borders)
        settings = (kind, 0.2, 0.28, None, 0.1, True, 20.0, "token", coefficients, "k2")
        be.policy_loss_forward(*columns, *settings, weights, ref, 0.01)


def scores(dtype):
    be = backend_for("cuda")
    for rows, cols in ((70, 260), (5, 13)):
        hidden, weight = be.array(normal(rows, cols).astype(be.dtype_of(dtype))), be.array(statistics(1, cols))
        found = be.score_forward(hidden, weight)
        be.score_backward(be.zeros((1, cols), "float32"), found, hidden, weight)


def adapters(dtype):
    be = backend_for("cuda")
    for rows, ins, outs, rank in ((70, 260, 130, 40), (5, 13, 7, 3)):
        x, w, a, b = (
            be.array(normal(*shape).astype(be.dtype_of(dtype)))
            for shape in ((rows, ins), (outs, ins), (rank, ins), (outs, rank))
        )
        y, u = be.linear_beside_forward(x, w, a, b)
        be.linear_beside_backward_input(y, w, u, a)
        for instead in (False, True):
            be.change_rows(y, y.copy(), be.array(np.arange(rows, dtype=np.int32) % 3), 1, instead)
        be.merge_adapter(w, w, be.array(statistics(rank, ins)), be.array(statistics(outs, rank)), 0.5)


def quantized(dtype):
    be = backend_for("cuda")
    for kind in (np.int8, np.uint8):
        for rows, ins, outs in ((3, 13, 7), (14, 160, 130), (20, 13, 70), (70, 160, 130), (5, 32, 4100), (300, 40, 33)):
            x, w = (be.array(normal(*shape).astype(be.dtype_of(dtype))) for shape in ((rows, ins), (outs, ins)))
            q, scale = be.zeros(w.shape, kind), be.zeros((outs,), "float32")
            be.quantize_weight(q, scale, w)
            be.dequantize_weight(w, q, scale)
            y = be.quantized_linear_forward(x, q, scale)
            be.quantized_linear_forward(x, q, scale, y[0].copy(), y)


def ranks(dtype):
    """What ranks that share a model launch besides."""
    be = backend_for("cuda")
    for count, rows, cols in ((2, 3, 13), (3, 5, 64), (2, 2, 4104)):
        parts = be.array(normal(count, rows, cols).astype(be.dtype_of(dtype)))
        be.sum_add_rms_norm_forward(parts, parts[0], be.array(statistics(cols)), 1e-6)
        ids = be.array(np.array([9, 5, 4, 0, 5], np.int32)[:rows])
        be.embedding_forward(parts[0], ids, 4)
        be.embedding_backward(be.zeros((rows, cols), "float32"), parts[1], ids, 4)


def norms(dtype):
    """The gradient of wide rows, several to a block."""
    be = backend_for("cuda")
    for rows, cols in ((1500, 520), (300, 2056)):
        x, dy = (be.array(normal(rows, cols, seed=seed).astype(be.dtype_of(dtype))) for seed in (1, 2))
        w, rstd = be.array(statistics(cols)), be.array(statistics(rows, 1))
        be.add_rms_norm_backward_remade(be.zeros((cols,), "float32"), dy, x, x, w, rstd, 1e-6)


def returns_and_ppo_loss():
    be = backend_for("cuda")
    columns = [be.array(statistics(113, seed=s)) for s in range(9)]
    borders, rows = be.array(np.array([0, 5, 5, 113], np.int32)), be.array(statistics(3))
    for ref in (None, columns[1]):
        be.token_rewards(columns[0], ref, rows, borders, 0.05, "k3")
    advantages, _ = be.gae(*columns[:2], rows, borders, 0.99, 0.95)
    for size in (1, 113):
        be.whiten(advantages[:size], False)
    be.ppo_loss_forward(*columns, 0.2, 0.28, 1.5, 0.5, 0.2, 0.01, 0.1, "k3")
    be.ppo_loss_forward(*columns[:5], None, *columns[6:], 0.2, 0.28, None, 0.5, None)


def filters(dtype):
    be = backend_for("cuda")
    logits = be.array(normal(3, 211).astype(be.dtype_of(dtype)))
    be.filter_logits(
        logits,
        *(
            be.array(np.array(v, t))
            for v, t in (([5, 0, 3], np.int32), ([0.9, 0.5, 1.0], np.float32), ([0.0, 0.1, 0.0], np.float32))
        ),
    )


def strays(dtype):
    """Ids and targets that no row belongs to, and logits that are not finite: nothing outside the arrays is touched."""
    be = backend_for("cuda")
    table, dy = (be.array(normal(n, 13, seed=n).astype(be.dtype_of(dtype))) for n in (7, 5))
    ids = be.array(np.array([0, 7, -1, 2**31 - 1, -(2**31)], np.int32))
    be.embedding_forward(table, ids)
    be.embedding_backward(be.zeros((7, 13), "float32"), dy, ids)
    logprobs, entropy, lse = be.token_logprobs_forward(dy, ids, 0.7, 11)
    be.token_logprobs_backward(dy, ids, lse, entropy, entropy, entropy, 0.7, 11)
    be.token_logprobs_backward(dy, ids, lse, entropy, entropy, entropy, 0.7, 11, out=dy)
    logits = normal(5, 5000)
    logits[0, 7], logits[1, 9], logits[2] = np.nan, np.inf, -np.inf
    values = ((0.7, np.float32), (20, np.int32), (0.9, np.float32), (0.1, np.float32), (3, np.uint64), (4, np.int64))
    settings = (be.array(np.full(5, value, kind)) for value, kind in values)
    be.sample(be.array(logits.astype(be.dtype_of(dtype))), *settings, 4999)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default="models,attention,products,losses")
    parser.add_argument("--dtypes", default="bfloat16,float16,float32")
    parser.add_argument("--arch", help="compile for this instead of the card's own")
    options = parser.parse_args()
    loader._arch = options.arch
    parts, dtypes = options.parts.split(","), options.dtypes.split(",")
    watch()
    be = backend_for("cuda")
    for dtype in dtypes:
        if "models" in parts:
            for name in ("qwen3_tiny", "qwen2_tiny"):
                train_and_generate(name, dtype)
            scores(dtype)
            filters(dtype)
            strays(dtype)
            ranks(dtype)
            norms(dtype)
        if "attention" in parts:
            for heads, kv_heads, dim in ((2, 1, 64), (7, 1, 128), (2, 2, 20), (2, 1, 132)):
                attention(dtype, heads, kv_heads, dim, [70, 1, 300])
                if dim % 8 == 0:
                    attention(dtype, heads, kv_heads, dim, [70, 1, 300], np.uint8)
            attention(dtype, 3, 1, 24, [70, 1, 300], np.uint8)
        if "products" in parts:
            products(dtype)
            adapters(dtype)
            quantized(dtype)
    if "losses" in parts:
        policy_losses()
        returns_and_ppo_loss()
    be.synchronize()
    known = {name for family in compiler.families() for name in loader.parse_signatures(compiler.source(family))}
    missing = known - launched
    print(f"{len(launched)} of {len(known)} kernels launched")
    if missing and len(parts) == 4 and len(dtypes) == 3:
        sys.exit(f"never launched: {', '.join(sorted(missing))}")


if __name__ == "__main__":
    main()
