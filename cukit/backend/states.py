"""Lean forms of an optimizer's state, as arrays of the host: what both shelves compute and checkpoints convert.

Master weights: a float32 is its bfloat16 weight plus a signed 16-bit remainder (store_weights says how it is rounded).
float32's bits come back exactly. Only beyond ±MASTER_LIMIT the remainder has no room: such a master is held there.

Moments of 8 bits: BLOCK numbers share an exponent, that of the largest. A number is a float of its own below it, with
3 fraction bits: the first moment has a sign and 4 exponent bits, the second has 5 exponent bits. So small numbers of a
block keep their relative precision over 5 decades of the gradient (dynamic quantisation, Dettmers et al. 2022; theirs
is a table of decimal exponents, ours needs bit operations alone, so that both shelves have the same bits). Codes of one
spacing would make 0 of what is 512 times smaller than the largest; the square of a gradient is soon that, and the
update divides by its root. A second moment above 0 therefore never becomes 0: it becomes the smallest code at least.
Every value of a code is a bfloat16, which is what a checkpoint holds.

Rounding is stochastic: 16 bits of noise decide, in proportion to what is cut off. With β2 = 0.999 a step changes a
second moment by a thousandth, far less than half a code; to the nearest, it would never change again.
"""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

BLOCK = 256  # numbers that share an exponent; STATE_BLOCK of kernels/optimizer.cu
# Form of the moments of matrices -> bytes of both for one parameter
MOMENT_BYTES = {"float32": 8, "bfloat16": 4, "int8": 2 + 2 / BLOCK}
MASTER_LIMIT = np.uint32(0x7F7F7FFF)  # the bits of 3.3961e38
NEAREST = 0x8000  # the noise that rounds to the nearest code, halves up
LOWEST_EXPONENT = 34  # so that no code is below float32's normal numbers
FRACTION_BITS = 3


class Update(NamedTuple):
    """What AdamWSteps changes: the elements `part` of flat arrays of one size, which adamw_step describes; with
    exponents, adamw_step_blocks, and `part` begins with a block. origin: where the arrays begin in what the noise is
    counted over.
    """

    master: Any
    m: Any
    v: Any
    grad: Any
    param: Any
    part: slice
    weight_decay: float
    seed: int = 0
    origin: int = 0
    m_exponents: Any = None
    v_exponents: Any = None

    @property
    def blocks(self) -> slice:
        """Those of `part`."""
        return slice(self.part.start // BLOCK, blocks_of(self.part.stop))


def bfloat16_bits(values):
    """float32 -> the bits of the nearest bfloat16 (uint16), halves away from zero; what is finite stays finite."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    high = (bits + np.uint32(0x8000)) >> np.uint32(16)
    too_large = (magnitude >= 0x7F7F8000) & (magnitude < 0x7F800000)
    if too_large.any():
        high = np.where(too_large, bits >> np.uint32(16), high)
    not_a_number = magnitude > 0x7F800000
    if not_a_number.any():
        high = np.where(not_a_number, (bits >> np.uint32(16)) | np.uint32(0x40), high)
    return high.astype(np.uint16)


def split_master(values):
    """float32 -> (bfloat16 weights, int16 remainders) of its shape."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    magnitude, sign = bits & np.uint32(0x7FFFFFFF), bits & np.uint32(0x80000000)
    too_large = (magnitude > MASTER_LIMIT) & (magnitude < 0x7F800000)
    if too_large.any():
        bits = np.where(too_large, MASTER_LIMIT | sign, bits)
    weights = bfloat16_bits(bits.view(np.float32))
    return weights.view(ml_dtypes.bfloat16), bits.astype(np.uint16).view(np.int16)


def join_master(weights, remainder):
    """The float32 that split_master() was given."""
    high = np.ascontiguousarray(weights.astype(ml_dtypes.bfloat16, copy=False)).view(np.uint16).astype(np.uint32)
    return ((high << np.uint32(16)) + remainder.astype(np.uint32)).view(np.float32)


def stochastic_bfloat16(values, noise):
    """float32 -> bfloat16, up in magnitude where the 16 bits of noise (uint32) and those cut off carry."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    high = (bits + noise) >> np.uint32(16)
    held = (magnitude >= 0x7F7F0000) & (magnitude < 0x7F800000)
    high = np.where(held, bits >> np.uint32(16), high)
    high = np.where(magnitude > 0x7F800000, (bits >> np.uint32(16)) | np.uint32(0x40), high)
    return high.astype(np.uint16).view(ml_dtypes.bfloat16)


# ---- blocks ----


def blocks_of(count: int) -> int:
    return -(-count // BLOCK)


def encode_blocks(values, signed, noise=NEAREST):
    """float32 (n,) -> (codes uint8 (n,), exponents uint8, one of each BLOCK). noise: 16 bits a number (uint32)."""
    count, blocks = values.size, blocks_of(values.size)
    padded = np.zeros((2, blocks * BLOCK), np.uint32)
    padded[0, :count] = np.ascontiguousarray(values, np.float32).view(np.uint32)
    padded[1, :count] = noise
    bits, noise = padded.reshape(2, blocks, BLOCK).astype(np.int64)
    sign, bits = bits >> 31, bits & 0x7FFFFFFF
    largest = bits.max(axis=1, initial=0)
    top = np.clip((largest + 0xFFFFF) >> 23, LOWEST_EXPONENT, 254)[:, None]
    lowest = top - _span(signed)
    exponent = bits >> 23
    below = np.maximum(lowest - exponent, 0)
    shift = 20 + np.minimum(below, 12)
    significand = np.where(exponent > 0, bits & 0x7FFFFF | 0x800000, 0)
    rounded = np.where(below < 12, (significand + (noise << (shift - 16))) >> shift, 0)
    codes = np.minimum(rounded + 8 * np.maximum(exponent - lowest, 0), 127 if signed else 255)
    codes = codes | sign << 7 if signed else np.maximum(codes, exponent > 0)
    return codes.reshape(-1)[:count].astype(np.uint8), top.reshape(-1).astype(np.uint8)


def decode_blocks(codes, exponents, signed):
    """The float32 values (n,) of codes and exponents."""
    magnitude = (codes & 127 if signed else codes).astype(np.int32)
    lowest = np.repeat(exponents, BLOCK)[: codes.size].astype(np.int32) - _span(signed)
    field = magnitude >> FRACTION_BITS
    units = (magnitude & 7) + 8 * (field > 0)
    values = np.ldexp(units.astype(np.float32), np.maximum(field, 1) - 1 + lowest - 130)
    return np.where(codes > 127, -values, values) if signed else values


def _span(signed: bool) -> int:
    """Exponents between the largest number of a block and its smallest normal one."""
    return 14 if signed else 30
