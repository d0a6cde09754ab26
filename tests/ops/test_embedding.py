"""Row gather and scatter-add on the NumPy shelf, and ids that the table does not have."""

import numpy as np
import pytest
from check import normal

from cukit import ops
from cukit.autograd import Parameter
from cukit.backend.numpy import embedding_backward, embedding_forward


@pytest.mark.parametrize("ids", [[], [0], [6, 0, 6, 2, 1, 2, 2]])
def test_rows_are_gathered_and_added(ids):
    table, ids = normal(7, 5), np.array(ids, np.int32)
    np.testing.assert_array_equal(embedding_forward(table, ids), table[ids])
    dtable, dy, expected = np.ones((7, 5)), normal(len(ids), 5, seed=1), np.ones((7, 5))
    embedding_backward(dtable, dy, ids)
    for t, row in enumerate(ids):
        expected[row] += dy[t]
    np.testing.assert_allclose(dtable, expected, rtol=1e-14)


@pytest.mark.parametrize("ids", [[], [0], [3, 6, 0, 6, 2, 1, 4, 3, 3]])
def test_a_part_of_a_table_has_zeros_for_ids_elsewhere_and_drops_their_gradients(ids):
    table, ids = normal(7, 5), np.array(ids, np.int32)
    dtable, dy, expected = np.ones((3, 5)), normal(len(ids), 5, seed=1), np.ones((7, 5))
    here = (ids >= 2) & (ids < 5)
    dy[~here] = np.nan
    part = Parameter(table[2:5].copy())
    np.testing.assert_array_equal(ops.embedding(part, ids, 2).data, np.where(here[:, None], table[ids], 0))
    embedding_backward(dtable, dy, ids, 2)
    for row, gradient in zip(ids[here], dy[here]):
        expected[row] += gradient
    np.testing.assert_allclose(dtable, expected[2:5], rtol=1e-14)


@pytest.mark.parametrize("wrong", [-1, 7, 2**31 - 1])
def test_t7_an_id_without_a_row_is_named(wrong):
    ids = np.array([0, wrong, 3], np.int32)
    with pytest.raises(ValueError, match=f"^id {wrong} is not in 0 … 6: the embedding has 7 rows$"):
        ops.embedding(Parameter(normal(7, 5)), ids)
    with pytest.raises(ValueError, match=f"id {wrong} is not"):
        embedding_backward(np.zeros((7, 5)), normal(3, 5), ids)
