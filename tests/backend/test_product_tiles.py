"""The tiles of the product in order: which one a shape gets. That all give the same bits: tests/gpu/test_linear.py."""

import re

import pytest

pytest.importorskip("cupy", reason="the CUDA shelf needs CuPy: pip install 'cukit[compile]'")

from cukit.backend.cuda.compile import source  # noqa: E402
from cukit.backend.cuda.exact import MULTIPROCESSORS, TILES, in_order_tile  # noqa: E402


def test_the_kernel_has_these_tiles():
    built = re.findall(r"if \((.*)\)\n\s+small_tile<(\d+), (\d+)>\(", source("linear_few"))
    last = re.findall(r"else\n\s+small_tile<(\d+), (\d+)>\(", source("linear_few"))
    assert sorted([*((int(r), int(o)) for _, r, o in built), *((int(r), int(o)) for r, o in last)]) == [*TILES[:-1]]
    for tile in TILES[:-1]:  # the first condition that holds leads to it
        fitting = (found for found in built if eval(found[0].replace("&&", "and"), dict(zip(NAMES, tile))))
        assert tile == tuple(map(int, next(fitting, (None, *last[0]))[1:]))


NAMES = "tile_rows", "tile_outs"


@pytest.mark.parametrize(
    "rows, outs, tile",
    [(1, 2048, (16, 16)), (64, 2048, (32, 32)), (1, 4096, (16, 32)), (64, 4096, (32, 64)), (1, 8, (16, 8))]
    + [(1, 2560, (16, 32)), (64, 32, (16, 8)), (1, 24576, (16, 64)), (64, 24576, TILES[-1]), (4096, 1024, TILES[-1])],
)
def test_the_tile_of_a_shape(rows, outs, tile):
    assert in_order_tile(rows, outs) == tile


@pytest.mark.parametrize("outs", [2048, 4096])
@pytest.mark.parametrize("rows", [1, 16, 32, 64])
def test_few_rows_fill_a_card(rows, outs):
    tile = in_order_tile(rows, outs)
    assert 0.9 * MULTIPROCESSORS <= -(-rows // tile[0]) * -(-outs // tile[1]) <= MULTIPROCESSORS
