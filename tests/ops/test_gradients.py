"""Every differentiable op against finite differences in float64, odd sizes. Run: pytest tests/ops/test_gradients.py"""

import numpy as np
import pytest
from check import check_gradient, normal, statistics

from cukit import ops
from cukit.autograd import Parameter, Tensor, no_grad, recompute
from cukit.backend import backend_for


def ints(*values):
    return np.array(values, np.int32)


def angles(num_positions, half):
    table = np.random.default_rng(5).uniform(0, 6, (num_positions, half))
    return np.cos(table), np.sin(table)


@pytest.mark.parametrize("ids", [[0], [3, 3, 3], [6, 0, 6, 2, 1, 2, 2]])
def test_embedding(ids):
    check_gradient(lambda table: ops.embedding(table, ints(*ids)), normal(7, 5))


@pytest.mark.parametrize("rows, columns", [(1, 8), (3, 13), (7, 1)])
def test_norms(rows, columns):
    check_gradient(lambda x, w: ops.rms_norm(x, w, 1e-5), normal(rows, columns), normal(columns))
    check_gradient(
        lambda x, r, w: ops.add_rms_norm(x, r, w, 1e-5),
        normal(rows, columns),
        normal(rows, columns, seed=1),
        normal(columns),
    )


@pytest.mark.parametrize("heads, kv_heads, dim", [(1, 1, 2), (4, 2, 6), (7, 1, 12)])
def test_qk_norm_rope(heads, kv_heads, dim):
    qkv, positions = normal(5, (heads + 2 * kv_heads) * dim), ints(0, 1, 2, 0, 8)
    cos, sin = angles(9, dim // 2)

    def with_norm(x, q, k):
        return ops.qk_norm_rope(x, q, k, cos, sin, positions, heads, kv_heads, 1e-6)

    check_gradient(with_norm, qkv, 1 + 0.1 * normal(dim), 1 + 0.1 * normal(dim, seed=1))
    check_gradient(lambda x: with_norm(x, None, None), qkv)


@pytest.mark.parametrize("rows, width", [(1, 1), (3, 7)])
def test_silu_mul(rows, width):
    check_gradient(ops.silu_mul, normal(rows, 2 * width, scale=3))


@pytest.mark.parametrize("lengths", [[0], [1], [3, 1, 0, 3], [5, 17], [300]])
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (6, 2), (7, 1)])
def test_attention(lengths, heads, kv_heads):
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    for others in (0, 3):  # rows after the last sequence, which give zeros and get none
        qkv = normal(int(cu_seqlens[-1]) + others, (heads + 2 * kv_heads) * 6)
        check_gradient(lambda x: ops.attention(x, cu_seqlens, heads, kv_heads), qkv)


def test_linear():
    check_gradient(ops.linear, normal(5, 3), normal(7, 3, seed=1), normal(7))
    check_gradient(ops.linear, normal(1, 3), normal(2, 3, seed=1))


@pytest.mark.parametrize("temperature, vocab_size", [(1.0, None), (0.6, 9)])
def test_logprobs_and_entropy(temperature, vocab_size):
    targets = ints(0, 8, 3, 3)
    check_gradient(lambda x: ops.token_logprobs(x, targets, temperature, vocab_size), normal(4, 11, scale=2))
    for chunk in (1, 3, 100):
        check_gradient(
            lambda h, w: ops.lm_head_logprobs(h, w, targets, temperature, vocab_size, chunk),
            normal(4, 5),
            normal(11, 5, seed=1),
        )


def test_elementwise():
    a, b = 1 + normal(4, 3) ** 2, normal(3, seed=1) - 4
    check_gradient(lambda a, b: (a + b) * a - b / a, a, b)
    check_gradient(lambda a, b: ops.exp(ops.minimum(a, -b)) + ops.log(ops.maximum(a, b)), a, b)
    check_gradient(lambda a: 1 - ops.clip(a, 1.0, 2.0) * 3 + 2 / a, a)
    check_gradient(lambda a: ops.index_rows(a, ints(2, 0)), a)
    check_gradient(ops.log_sigmoid, 3 * normal(4, 3))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_log_sigmoid_of_0_and_of_large_numbers(dtype):
    x = Parameter(np.array([0, 1e4, -1e4, 90, -90], dtype))
    with np.errstate(all="raise", under="ignore"):
        y = ops.log_sigmoid(x)
        y.sum().backward()
    assert y.dtype == dtype
    np.testing.assert_allclose(y.data, [-np.log(2), 0, -1e4, -np.exp(-90.0), -90], rtol=1e-6, atol=1e-38)
    np.testing.assert_allclose(x.grad, [0.5, 0, 1, np.exp(-90.0), 1], rtol=1e-5, atol=1e-38)


def test_masked_vocabulary_gets_no_gradient():
    logits = Parameter(normal(3, 10))
    logprobs, _ = ops.token_logprobs(logits, ints(1, 2, 3), 1.0, 7)
    logprobs.sum().backward()
    assert not logits.grad[:, 7:].any() and logits.grad[:, :7].all()


def test_recompute_gives_the_same_gradients_with_less_memory():
    x, w = Tensor(normal(3, 4), requires_grad=True), Parameter(normal(4, 4, seed=1))
    y, weight_grads = Tensor(x.data, requires_grad=True), []

    def block(x):
        return (ops.silu_mul(ops.linear(x, w)), ops.linear(x, w))

    for run, leaf in ((block, x), (lambda z: recompute(block, [w], z), y)):
        w.zero_grad()
        first, second = run(leaf)
        (first.sum() + (second * second).sum()).backward()
        weight_grads.append(w.grad.copy())
    np.testing.assert_array_equal(x.grad, y.grad)
    np.testing.assert_array_equal(*weight_grads)


def test_gradients_add_up_over_backward_passes_and_uses():
    w = Parameter(np.ones(3, np.float32))
    for _ in range(2):
        (w * w).sum().backward()
    np.testing.assert_array_equal(w.grad, [4, 4, 4])


def test_no_grad_records_nothing_and_a_graph_serves_once():
    w = Parameter(np.ones(3))
    with no_grad():
        silent = (w * 2).sum()
    with pytest.raises(ValueError, match="depends on a parameter"):
        silent.backward()
    total = (w * 2).sum()
    total.backward()
    with pytest.raises(ValueError, match="twice"):
        total.backward()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_dtypes_are_kept_and_half_types_stay_near_float64(dtype):
    be = backend_for("cpu")
    half = be.dtype_of(dtype)
    x, w = normal(6, 16).astype(half), (1 + 0.1 * statistics(16)).astype(be.accumulator(half))
    for got, true in (
        (be.rms_norm_forward(x, w, 1e-6)[0], be.rms_norm_forward(x.astype(float), w.astype(float), 1e-6)[0]),
        (be.silu_mul_forward(x), be.silu_mul_forward(x.astype(float))),
        (
            be.attention_forward(x, np.array([0, 6]), 2, 1)[0],
            be.attention_forward(x.astype(float), np.array([0, 6]), 2, 1)[0],
        ),
        (be.linear_forward(x, x), be.linear_forward(x.astype(float), x.astype(float))),
    ):
        assert got.dtype == half
        np.testing.assert_allclose(got.astype(float), true, atol={"bfloat16": 0.1, "float16": 0.02}.get(dtype, 1e-5))
