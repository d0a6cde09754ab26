"""FP8 in plain NumPy: a number is a code of 8 bits, E4M3 without infinities (Micikevicius et al. 2022): a sign, 4
exponent bits with the bias 7, 3 fraction bits. The largest is 448, the smallest 2^-9; 0x7F and 0xFF are NaN.
"""

import numpy as np

LARGEST = 448.0


def _values() -> np.ndarray:
    codes = np.arange(256)
    exponents, fractions = codes >> 3 & 15, codes & 7
    sizes = np.where(exponents == 0, fractions * 2.0**-9, (8 + fractions) * 2.0 ** (exponents - 10))
    sizes[codes & 0x7F == 0x7F] = np.nan
    return np.where(codes < 128, sizes, -sizes).astype(np.float32)


VALUES = _values()  # code -> number


def encode(values) -> np.ndarray:
    """The nearest codes (uint8), halves to even; what is larger becomes the largest, and so does NaN."""
    wide = np.asarray(values, np.float32)
    with np.errstate(invalid="ignore"):
        size = np.minimum(np.abs(wide), np.float32(LARGEST))
    size = np.where(np.isnan(size), np.float32(LARGEST), size)
    # the spacing of numbers is that of their exponent, but 2^-9 at the least
    exponents = np.where(size == 0, -6, np.maximum(np.frexp(size)[1] - 1, -6))
    steps = np.rint(np.ldexp(size, 3 - exponents)).astype(np.int32)  # 0 … 16; 8 is the first with a whole fraction
    codes = (exponents + 6) * 8 + steps
    return (codes | np.where(np.signbit(wide), 0x80, 0)).astype(np.uint8)


def decode(codes, dtype=np.float32) -> np.ndarray:
    """The numbers of uint8 codes; bfloat16 and float16 hold each exactly."""
    return VALUES.astype(dtype)[codes]
