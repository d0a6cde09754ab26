"""The head of the torch oracles: log-probabilities and entropies of given tokens without the logits of a whole batch.

The schedule is that of TRL 1.16's fused head (`add_fused_lm_head`, `trl/kernels/chunked_logprob.py`): bfloat16 products
by cuBLAS in tiles of 4,096 tokens x 32,768 words, a Triton kernel that folds a tile into statistics a token, and a
backward pass that makes each tile again, turns it into the logits' gradient in place and adds the two products up in
float32. The code is written anew; `--head trl` of ppo_update_torch.py takes TRL's own class instead. Where there is no
Triton (a CPU) torch does what the kernels do.
"""

from __future__ import annotations

import os

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

TOKENS, WORDS, BLOCK = 4096, 32768, 1024


def jit(function):
    return triton.jit(function) if triton else function


@jit
def fold_kernel(tile, tile_stride, targets, sums, sums_stride, first_word, width, BLOCK: tl.constexpr):
    """One program a token: the tile's share of (maximum, sum of exp, sum of exp * logit, the target's logit)."""
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    tile += row * tile_stride
    sums += row
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, width, BLOCK):
        logits = tl.load(tile + start + lanes, mask=start + lanes < width, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(highest, logits)
    before = tl.load(sums)
    maximum = tl.maximum(before, tl.max(highest, 0))
    total = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + lanes < width
        logits = tl.load(tile + start + lanes, mask=inside, other=0.0).to(tl.float32)
        share = tl.where(inside, tl.exp(logits - maximum), 0.0)
        total += share
        moment += share * logits
    shrink = tl.exp(before - maximum)
    tl.store(sums, maximum)
    tl.store(sums + sums_stride, tl.load(sums + sums_stride) * shrink + tl.sum(total, 0))
    tl.store(sums + 2 * sums_stride, tl.load(sums + 2 * sums_stride) * shrink + tl.sum(moment, 0))
    word = tl.load(targets + row) - first_word
    if (word >= 0) & (word < width):
        tl.store(sums + 3 * sums_stride, tl.load(tile + word).to(tl.float32))


@jit
def gradient_kernel(tile, tile_stride, targets, columns, columns_stride, first_word, width, BLOCK: tl.constexpr):
    """One program a token and block: logits become d loss / d logits."""
    row = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = words < width
    tile += row * tile_stride + words
    columns += row
    log_p = tl.load(tile, mask=inside, other=0.0).to(tl.float32) - tl.load(columns)
    entropy, d_logprob = tl.load(columns + columns_stride), tl.load(columns + 2 * columns_stride)
    d_entropy = tl.load(columns + 3 * columns_stride)
    chosen = (words + first_word == tl.load(targets + row)).to(tl.float32)
    p = tl.exp(log_p)
    gradient = d_logprob * (chosen - p) - d_entropy * p * (log_p + entropy)
    tl.store(tile, gradient.to(tile.dtype.element_ty), mask=inside)


def has_triton(tensor) -> bool:
    return triton is not None and (tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")


def fold(tile, targets, sums, first_word: int) -> None:
    """Adds a tile of logits (n, words) to sums (4, n)."""
    width = tile.shape[1]
    if has_triton(tile):
        fold_kernel[(len(tile),)](tile, tile.stride(0), targets, sums, sums.stride(0), first_word, width, BLOCK=BLOCK)
        return
    logits, word = tile.float(), targets - first_word
    maximum = torch.maximum(sums[0], logits.amax(1))
    share, shrink = torch.exp(logits - maximum[:, None]), torch.exp(sums[0] - maximum)
    sums[0] = maximum
    sums[1] = sums[1] * shrink + share.sum(1)
    sums[2] = sums[2] * shrink + (share * logits).sum(1)
    here = (word >= 0) & (word < width)
    sums[3] = torch.where(here, logits.gather(1, word.clamp(0, width - 1)[:, None])[:, 0], sums[3])


def to_gradient(tile, targets, columns, first_word: int) -> None:
    """Turns a tile of logits into d loss / d logits; columns (4, n): log sum exp, entropy and the gradients a token."""
    width = tile.shape[1]
    if has_triton(tile):
        grid = (len(tile), triton.cdiv(width, BLOCK))
        gradient_kernel[grid](tile, tile.stride(0), targets, columns, columns.stride(0), first_word, width, BLOCK=BLOCK)
        return
    log_sum, entropy, d_logprob, d_entropy = (column[:, None] for column in columns)
    log_p = tile.float() - log_sum
    p = log_p.exp()
    chosen = torch.arange(first_word, first_word + width, device=tile.device) == targets[:, None]
    tile.copy_(d_logprob * (chosen.float() - p) - d_entropy * p * (log_p + entropy))


def add_product(total, a, b) -> None:
    """total += a @ b for a float32 total; the product is not rounded to bfloat16 on the way."""
    if total.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


def tiles(hidden, weight, dtype):
    """(tokens, words, hidden states, weights, logits) tile by tile; all logits share one buffer."""
    buffer = torch.empty(min(len(hidden), TOKENS), min(len(weight), WORDS), device=hidden.device, dtype=dtype)
    for first in range(0, len(hidden), TOKENS):
        tokens = slice(first, min(first + TOKENS, len(hidden)))
        states = hidden[tokens].to(dtype)
        for start in range(0, len(weight), WORDS):
            words = slice(start, min(start + WORDS, len(weight)))
            part = weight[words].to(dtype)
            logits = buffer[: len(states), : len(part)]
            torch.mm(states, part.t(), out=logits)
            yield tokens, words, states, part, logits


class FusedHead(torch.autograd.Function):
    """(log-probabilities, entropies), (N,) each in float32, of targets (N,) under hidden (N, C) @ weight (V, C).T."""

    @staticmethod
    def forward(ctx, hidden, weight, targets):
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        sums = torch.zeros(4, len(hidden), device=hidden.device, dtype=torch.float32)
        sums[0] = float("-inf")
        for tokens, words, _, _, logits in tiles(hidden, weight, dtype):
            fold(logits, targets[tokens], sums[:, tokens], words.start)
        log_sum = sums[0] + sums[1].log()
        entropies = log_sum - sums[2] / sums[1]
        ctx.save_for_backward(hidden, weight, targets, log_sum, entropies)
        ctx.dtype = dtype
        return sums[3] - log_sum, entropies

    @staticmethod
    def backward(ctx, d_logprobs, d_entropies):
        hidden, weight, targets, log_sum, entropies = ctx.saved_tensors
        columns = torch.stack([log_sum, entropies, d_logprobs.float(), d_entropies.float()])
        d_hidden = torch.zeros(hidden.shape, device=hidden.device, dtype=torch.float32)
        d_weight = torch.zeros(weight.shape, device=hidden.device, dtype=torch.float32)
        for tokens, words, states, part, logits in tiles(hidden, weight, ctx.dtype):
            to_gradient(logits, targets[tokens], columns[:, tokens], words.start)
            add_product(d_hidden[tokens], logits, part)
            add_product(d_weight[words], logits.t(), states)
        return d_hidden.to(hidden.dtype), d_weight.to(weight.dtype), None


def trl_head(hidden, weight, targets):
    """The same two outputs by the class of an installed TRL (1.16 or later)."""
    from trl.kernels import ChunkedLogProbFunction

    return ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, WORDS, None, 1.0, ("entropy",))[:2]


HEADS = {"own": FusedHead.apply, "trl": trl_head}
