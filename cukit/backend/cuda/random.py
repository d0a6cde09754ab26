"""Normal noise from a counter: number i depends on the seed and on i alone, on every device. Kernel: random.cu."""

from .loader import load

FILL_THREADS, FILL_VECTOR = 256, 4


def fill_normal(out, seed, scale):
    """out (contiguous) = scale · normal noise. Philox4x32-10 with key = seed (64 bits) and counter = (b >> 32, b, 0, 0)
    gives the numbers 4b … 4b + 3: Box and Muller's two pairs from words (0, 1) and (2, 3).
    """
    blocks = -(-out.size // (FILL_THREADS * FILL_VECTOR))
    load("random", out.dtype).fill_normal(blocks, FILL_THREADS, out, out.size, seed, scale)
