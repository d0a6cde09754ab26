"""Functions between ranks that share a model, on threads as ranks: values, adjoints, bits."""

import numpy as np
import pytest
from parallel.threads import together

from cukit.autograd import Parameter, Remade, Tensor, backward, no_grad, remaking
from cukit.backend import backend_for
from cukit.ops import add_rms_norm, linear, rms_norm
from cukit.ops import tensor_parallel as tensor_parallel_module
from cukit.ops.tensor_parallel import (
    Columns,
    add_rms_norm_over_ranks,
    add_up,
    copy_to_ranks,
    embedding_of_ranks,
    gather_columns,
    sum_over_ranks,
)
from cukit.parallel import group as group_module

DTYPES = [np.float32, np.float64, backend_for("cpu").dtype_of("bfloat16"), np.float16]


def drawn(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_a_sum_has_the_same_bits_either_way_and_half_types_are_rounded_once(dtype, monkeypatch):
    parts = [(drawn(rank, 7, 5) * 10.0**rank).astype(dtype) for rank in range(3)]
    small = together(3, lambda group: add_up(parts[group.rank].copy(), group))
    monkeypatch.setattr(group_module, "SMALL", 0)
    large = together(3, lambda group: add_up(parts[group.rank].copy(), group))
    wide = np.float64 if dtype == np.float64 else np.float32
    truth = ((parts[0].astype(wide) + parts[1].astype(wide)) + parts[2].astype(wide)).astype(dtype)
    for one in (*small, *large):
        np.testing.assert_array_equal(one, truth)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("size", [2, 3])
def test_a_sum_and_a_norm_have_the_same_bits_in_one_step_and_in_two(size, dtype, monkeypatch):
    """One step: each rank gets the parts, where nothing is recorded and they are small."""
    parts, residual = [(drawn(rank, 5, 7) * 3.0**rank).astype(dtype) for rank in range(size)], drawn(9, 5, 7)
    w = Parameter(drawn(8, 7).astype(np.float64 if dtype == np.float64 else np.float32))

    def work(group):
        sums = []
        all_reduce = group.all_reduce
        group.all_reduce = lambda *given: (sums.append(1), all_reduce(*given))
        own, rest = (Tensor(array.astype(dtype)) for array in (parts[group.rank], residual))
        return *(one.data for one in add_rms_norm_over_ranks(own, rest, w, 1e-5, group)), len(sums)

    recorded = together(size, work)
    with monkeypatch.context() as patch:
        patch.setattr(tensor_parallel_module, "MOST_PARTS", size * parts[0].nbytes - 1)
        large = together(size, within(no_grad, work))
    small = together(size, within(no_grad, work))
    assert [found[0][2] for found in (recorded, large, small)] == [1, 1, 0]
    total = sum(part.astype(w.dtype) for part in parts).astype(dtype)
    truth = [one.data for one in add_rms_norm(Tensor(total), Tensor(residual.astype(dtype)), w, 1e-5)]
    for found in (*recorded, *large, *small):
        for one, right in zip(found, truth):
            assert one.dtype == right.dtype and one.tobytes() == right.tobytes()


def within(context, work):
    """The work of a rank inside a context of its thread."""

    def inside(group):
        with context():
            return work(group)

    return inside


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("width", [6, 7])
def test_columns_are_gathered_and_taken_apart_again(tokens, width):
    whole, borders = drawn(0, tokens, width), (0, width // 3, 2 * width // 3, width)

    def work(group):
        columns = Columns(group, borders)
        own = whole[:, borders[group.rank] : borders[group.rank + 1]]
        return columns.gather(np.ascontiguousarray(own)), columns.own(whole), own

    for gathered, own, truth in together(3, work):
        np.testing.assert_array_equal(gathered, whole)
        np.testing.assert_array_equal(own, truth)
        assert own.flags.c_contiguous


def mlp(x, first, last, group=None, invariant=False):
    """sum(dy · (x firstᵀ) lastᵀ) and the gradient of x; of ranks each with its rows of first, and columns of last (rows
    if invariant).
    """
    x = Tensor(x, requires_grad=True)
    if group is None:
        y = product(product(x, first), last)
    else:
        inner, outer = (tuple(len(w) * rank // group.size for rank in range(group.size + 1)) for w in (first, last))
        own, outs = (slice(*borders[group.rank : group.rank + 2]) for borders in (inner, outer))
        h = product(copy_to_ranks(x, group), first[own])
        if invariant:
            h = gather_columns(h, Columns(group, inner), multiplied=True)
            y = gather_columns(product(h, last[outs]), Columns(group, outer))
        else:
            y = sum_over_ranks(product(h, last[:, own]), group)
    backward([y], [drawn(9, *y.shape)])
    return y.data, x.grad


def product(x, weight):
    return linear(x, Parameter(np.ascontiguousarray(weight)))


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_two_products_and_their_gradients_are_those_of_one_rank(size, invariant):
    x, first, last = drawn(0, 5, 4), drawn(1, 12, 4), drawn(2, 6, 12)
    truth = mlp(x, first, last)
    for found in together(size, lambda group: mlp(x, first, last, group, invariant)):
        for one, right in zip(found, truth):
            np.testing.assert_allclose(one, right, rtol=1e-13, atol=1e-13)


def test_what_is_made_again_is_not_kept_for_a_product_of_ranks():
    x, w = Tensor(drawn(0, 3, 4), requires_grad=True), Parameter(drawn(1, 4))

    def work(group):
        with remaking(True):
            y = rms_norm(x, w)
            gathered = gather_columns(y, Columns(group, (0, 4, 8)), multiplied=True)
            return copy_to_ranks(y, group).saved is y.saved, isinstance(gathered.saved, Remade)

    assert together(2, work) == [(True, True)] * 2


def test_rows_of_a_table_come_from_the_rank_that_has_them_and_so_do_gradients_go():
    table, ids, dy = drawn(0, 7, 3), np.array([0, 6, 3, 3, 2, 0], np.int32), drawn(1, 6, 3)
    truth = np.zeros((7, 3))
    np.add.at(truth, ids, dy)
    borders = (0, 2, 4, 7)

    def work(group):
        first, last = borders[group.rank : group.rank + 2]
        own = Parameter(table[first:last].copy())
        y = embedding_of_ranks(own, ids, first, group)
        backward([y], [dy])
        return y.data, own.grad, truth[first:last]

    for y, gradient, right in together(3, work):
        np.testing.assert_array_equal(y, table[ids])
        np.testing.assert_allclose(gradient, right, atol=1e-15)


def test_a_row_that_is_not_wanted_leaves_no_trace():
    """Each rank looks up a row of its own also for an id that it does not have."""
    tables = np.array([[[1, 2], [np.nan, np.inf]], [[np.nan, np.inf], [3, 4]]], np.float32)
    ids = np.array([0, 3], np.int32)

    def work(group):
        return embedding_of_ranks(Parameter(tables[group.rank]), ids, 2 * group.rank, group).data

    for y in together(2, work):
        np.testing.assert_array_equal(y, [[1, 2], [3, 4]])
