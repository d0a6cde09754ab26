"""Embedding kernels against NumPy. Run on a machine with a GPU: pytest -m gpu tests/gpu/test_embedding.py"""

import numpy as np
import pytest
from check import Sum, check_kernel, normal, statistics

from cukit.backend import backend_for

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "tokens, vocab_size, cols",
    [
        (1, 5, 8),
        (17, 3, 13),
        (0, 4, 8),
        (1100, 50, 24),
        (1100, 2, 1),
        (40, 7, 2560),
        (513, 1, 64),
        (4099, 1000, 1000),
        (5000, 20000, 256),
    ],
)
def test_against_numpy(tokens, vocab_size, cols):
    ids = np.random.default_rng(tokens).integers(0, vocab_size, tokens).astype(np.int32)
    check_kernel("embedding_forward", normal(vocab_size, cols), ids)
    check_kernel("embedding_backward", Sum(statistics(vocab_size, cols)), normal(tokens, cols), ids)


@pytest.mark.parametrize(
    "tokens, first, vocab_size, cols",
    [(1, 3, 5, 8), (17, 0, 3, 13), (0, 2, 4, 8), (1100, 25, 50, 24), (40, 7, 7, 2560), (4099, 600, 1000, 1000)],
)
def test_a_part_of_a_table_against_numpy(tokens, first, vocab_size, cols):
    ids = np.random.default_rng(tokens).integers(0, first + 2 * vocab_size, tokens).astype(np.int32)
    check_kernel("embedding_forward", normal(vocab_size, cols), ids, first)
    check_kernel("embedding_backward", Sum(statistics(vocab_size, cols)), normal(tokens, cols), ids, first)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("cols", [8, 13, 3000])
def test_a_part_has_the_bits_of_its_rows_of_the_whole(cols, dtype):
    """And zeros for ids elsewhere, whose gradients leave no trace, however far they are."""
    be = backend_for("cuda")
    ids = be.array(np.array([4, 0, 6, 3, 9, 4, 5, 4, 2**31 - 1, -(2**31), -1, 3], np.int32))
    table, dy = (normal(rows, cols, seed=rows).astype(be.dtype_of(dtype)) for rows in (7, 12))
    whole, whole_gradient = be.to_numpy(be.embedding_forward(be.array(table), ids)), be.zeros((7, cols), "float32")
    be.embedding_backward(whole_gradient, be.array(dy), ids)
    part, gradient = be.array(table[3:6]), be.zeros((3, cols), "float32")
    here = np.isin(be.to_numpy(ids), (3, 4, 5))
    dy[~here] = np.nan
    found = be.to_numpy(be.embedding_forward(part, ids, 3))
    assert found[here].tobytes() == whole[here].tobytes() and not found[~here].view(np.uint8).any()
    be.embedding_backward(gradient, be.array(dy), ids, 3)
    assert be.to_numpy(gradient).tobytes() == be.to_numpy(whole_gradient)[3:6].tobytes()


def test_one_id_far_more_often_than_the_rest():
    ids = np.where(np.arange(9000) % 10, 3, np.arange(9000) % 97).astype(np.int32)
    check_kernel("embedding_backward", Sum(np.zeros((97, 128), np.float32)), normal(9000, 128), ids)


def test_wrong_shapes_are_refused():
    be = backend_for("cuda")
    table, dy, ids = be.zeros((7, 8), "float32"), be.zeros((3, 8), "bfloat16"), be.zeros((2,), "int32")
    with pytest.raises(ValueError, match="does not fit 2 ids"):
        be.embedding_backward(table, dy, ids)
    with pytest.raises(TypeError, match="wants int32, got int64"):
        be.embedding_forward(table, ids.astype("int64"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("cols", [8, 13, 3000])
def test_t7_an_id_without_a_row_reads_and_writes_nothing_outside(cols, dtype):
    """Its row is NaN, its gradient goes nowhere; the rows beside it keep their bits. Also for compute-sanitizer."""
    be = backend_for("cuda")
    table = be.array(normal(7, cols).astype(be.dtype_of(dtype)))
    wrong = np.array([0, 7, 3, -1, 2**31 - 1, -(2**31), 3], np.int32)
    right = np.where((wrong >= 0) & (wrong < 7), wrong, 6).astype(np.int32)
    inside = wrong == right
    found, expected = (be.to_numpy(be.embedding_forward(table, be.array(ids))) for ids in (wrong, right))
    assert found[inside].tobytes() == expected[inside].tobytes()
    assert np.isnan(found[~inside].astype(np.float32)).all()
    dy = be.array(normal(len(wrong), cols, seed=1).astype(table.dtype))
    gradients = []
    for ids in (wrong, right):
        dtable = be.zeros((7, cols), "float32")
        be.embedding_backward(dtable, dy, be.array(ids))
        gradients.append(be.to_numpy(dtable))
    assert gradients[0][:6].tobytes() == gradients[1][:6].tobytes() and not gradients[0][6].any()


@pytest.mark.slow
def test_a_table_of_more_than_2_to_31_elements():
    be = backend_for("cuda")
    vocab_size, cols = 2**31 // 4096 + 8, 4096
    table = be.zeros((vocab_size, cols), "bfloat16")
    last = normal(1, cols).astype(be.dtype_of("bfloat16"))
    table[-1:] = be.array(last)
    ids = be.array(np.array([0, vocab_size - 1, vocab_size - 1], np.int32))
    y = be.embedding_forward(table, ids)
    assert np.array_equal(be.to_numpy(y), np.concatenate([np.zeros_like(last), last, last]))
    dtable = be.zeros((vocab_size, cols), "float32")
    be.embedding_backward(dtable, y, ids)
    assert np.array_equal(be.to_numpy(dtable[-1]), 2 * last[0].astype(np.float32)) and not be.to_numpy(dtable[:2]).any()
