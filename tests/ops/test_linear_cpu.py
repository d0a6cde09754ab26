"""The CPU's products of few rows: right for every dtype and shape, in blocks, by several threads, and BLAS's own number
of threads left as it was. How long they take: tests/oracle/cpu_rows.py.
"""

import os
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from cukit.backend import backend_for
from cukit.backend.numpy import linear, threads

be = backend_for("cpu")
ROOT = Path(__file__).parents[2]
LARGE = (1031, 513)  # above MANY_WEIGHTS; neither is divisible by a block


def inputs(rng, rows, dtype, shape=LARGE):
    x, w = (rng.standard_normal(size).astype(be.dtype_of(dtype)) for size in ((rows, shape[1]), shape))
    return x, w, rng.standard_normal(shape[0]).astype(x.dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, linear.FEW_ROWS, linear.FEW_ROWS + 1])
@pytest.mark.parametrize("copies", [False, True])
def test_few_rows_have_the_numbers_of_one_product(rng, dtype, rows, copies):
    x, w, bias = inputs(rng, rows, dtype)
    precise = be.accumulator(x.dtype)
    # rounded once, from sums in the accumulator's dtype
    truth = (x.astype(np.float64) @ w.astype(np.float64).T + bias.astype(np.float64)).astype(precise).astype(x.dtype)
    with be.WideCopies([w] if copies else []):
        y = be.linear_forward(x, w, bias)
    assert y.shape == truth.shape and y.dtype == x.dtype and y.flags.c_contiguous
    sums = np.abs(x.astype(np.float64)) @ np.abs(w.astype(np.float64)).T + 1
    # each multiplication and addition may round once in the accumulator; a half type then rounds once more
    ulp = {"bfloat16": 2.0**-7, "float16": 2.0**-10}.get(dtype, 0.0)
    bound = 513 * float(np.finfo(precise).eps) * sums + ulp * np.abs(truth.astype(np.float64))
    assert (np.abs(y.astype(np.float64) - truth.astype(np.float64)) <= bound).all()


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_any_number_of_threads_gives_the_same_bits(rng, monkeypatch, count):
    monkeypatch.setattr(linear, "blas_threads", lambda: count)
    x, w, _ = inputs(rng, 5, "float32")
    whole = be.linear_forward(x, w)
    monkeypatch.setattr(linear, "blas_threads", lambda: 1)
    np.testing.assert_array_equal(whole, be.linear_forward(x, w))


def test_a_weight_that_changed_in_place_is_seen(rng):
    """Outside of `with WideCopies(…)` a half-precision weight is read as it is; inside, as it was."""
    x, w, _ = inputs(rng, 2, "bfloat16")
    before, copies = be.linear_forward(x, w), be.WideCopies([w])
    w[...] = -w
    with copies:
        np.testing.assert_array_equal(be.linear_forward(x, w), before)
    np.testing.assert_array_equal(be.linear_forward(x, w), -before)


def test_copies_of_weights_are_for_one_thread(rng):
    x, w, _ = inputs(rng, 2, "bfloat16")
    before, found = be.linear_forward(x, w), []
    with be.WideCopies([w]):
        w[...] = -w
        other = threading.Thread(target=lambda: found.append(be.linear_forward(x, w)))
        other.start()
        other.join()
    np.testing.assert_array_equal(found[0], -before)


def test_a_weight_with_fewer_rows_than_a_block_and_one_wider_than_a_block(rng):
    for shape in ((3, 100_003), (2, 2 * linear.BLOCK)):
        x, w, _ = inputs(rng, 3, "float32", shape)
        expected = x.astype(np.float64) @ w.astype(np.float64).T
        np.testing.assert_allclose(be.linear_forward(x, w), expected, rtol=0, atol=1e-2)


def counts():
    return [get() for get, _ in threads._libraries()]


@pytest.fixture
def two_threads():
    """BLAS with two threads, whatever it began with."""
    before = counts()
    for _, change in threads._libraries():
        change(2)
    yield
    for (_, change), count in zip(threads._libraries(), before, strict=True):
        change(count)


def test_e9_products_leave_blas_with_the_threads_it_had(rng, two_threads):
    seen = []
    for shape in ((8, 16), LARGE):
        for rows in (1, 2, 64):
            x, w, _ = inputs(rng, rows, "float32", shape)
            y = be.linear_forward(x, w)
            be.linear_backward_input(y, w)
            be.linear_backward_weight(np.zeros_like(w), y, x)
            seen.append(counts())
    assert all(set(numbers) == {2} for numbers in seen)


def test_e9_blas_is_restored_after_an_error(two_threads):
    for w in (np.zeros((4, 3), np.float32), np.zeros(LARGE, np.float32)):
        with pytest.raises(ValueError):
            be.linear_forward(np.zeros((2, w.shape[1] + 1), np.float32), w)
        assert set(counts()) == {2}


def test_a_small_product_takes_one_thread_and_a_large_one_does_not(two_threads):
    for weights, expected in ((linear.MANY_WEIGHTS - 1, 1), (linear.MANY_WEIGHTS, 2), (0, 1)):
        with threads.one_blas_thread(weights):
            assert set(counts()) == {expected}
    assert set(counts()) == {2}


def test_e9_generate_leaves_the_process_as_it_was():
    code = (
        "import threadpoolctl, numpy; from cukit import LLM, SamplingParams;"
        "count = lambda: [i['num_threads'] for i in threadpoolctl.threadpool_info() if i['user_api'] == 'blas'];"
        "before = count(); LLM('data/tiny-qwen3', device='cpu').generate('1 + 1', SamplingParams(max_tokens=3));"
        "assert count() == before and before != [1], (before, count())"
    )
    environment = {"OPENBLAS_NUM_THREADS": "2", "PATH": "", "PYTHONPATH": "."}
    result = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_work_is_shared_among_threads_and_errors_come_back():
    found, names = [], set()

    def function(start, stop):
        names.add(threading.current_thread().name)
        found.extend(range(start, stop))
        if start == 8:
            raise MemoryError("the third range")

    with pytest.raises(MemoryError, match="third"):
        threads.share(function, [0, 3, 3, 8, 12])
    assert sorted(found) == list(range(12)) and len(names) == 3
    found.clear()
    threads.share(function, [0, 5])  # the threads live on
    assert found == [0, 1, 2, 3, 4]


def test_threads_of_one_process_may_multiply_at_once(rng):
    x, w, _ = inputs(rng, 4, "float32")
    expected, wrong = be.linear_forward(x, w), []

    def multiply():
        for _ in range(20):
            if not np.array_equal(be.linear_forward(x, w), expected):
                wrong.append(1)

    callers = [threading.Thread(target=multiply) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_a_forked_child_multiplies_too():
    if not hasattr(os, "fork"):
        return  # nothing to protect
    code = (
        "import os; from cukit.backend.numpy import threads;"
        "threads.share(lambda *_: None, [0, 1, 2]); child = os.fork();\n"
        "if child == 0:\n    threads.share(lambda *_: None, [0, 1, 2]); os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7"
    )
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], timeout=60, check=True, env={"PYTHONPATH": "."}, cwd=ROOT
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [2, 4, 8, linear.FEW_ROWS])
def test_e18_a_few_rows_read_a_weight_once_in_blocks_that_blas_does_not_copy(rng, monkeypatch, dtype, rows):
    x, w, _ = inputs(rng, rows, dtype)
    read, matmul = [], np.matmul

    def spy(block, xt, out):
        read.append(block.shape)
        return matmul(block, xt, out=out)

    copies = be.WideCopies([w])
    monkeypatch.setattr(linear.np, "matmul", spy)
    with copies:
        be.linear_forward(x, w)
    assert sum(np.prod(shape) for shape in read) == w.size
    largest = max(shape[-2] * shape[-1] for shape in read)
    assert 50 * w.shape[1] <= largest <= linear.BLOCK and largest * rows <= linear.SMALL_PRODUCT


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_e18_a_half_precision_weight_is_converted_once(rng, rows):
    x, w, _ = inputs(rng, rows, "bfloat16", (4096, 1024))
    with be.WideCopies([w]):
        be.linear_forward(x, w)
        tracemalloc.start()
        try:
            be.linear_forward(x, w)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert most < w.size
