"""Measurements of weights of 8 bits."""

import pytest

from cukit.backend import backend_for
from cukit.bench import TrainBench
from cukit.bench.cases import Workbench
from cukit.bench.quantized_cases import quantized_cases
from cukit.bench.subject import choose_subject


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cases_have_arguments_that_their_functions_take(dtype):
    subject = choose_subject(TrainBench(model="tiny", device="cpu", dtype=dtype))
    cases = list(quantized_cases(Workbench(subject, 12, 3, 20, 2, 0)))
    assert {case.name for case in cases} == {"quantized_linear_forward", "quantize_weight", "dequantize_weight"}
    for case in cases:
        getattr(backend_for("cpu"), case.name)(*case.arguments())
        assert case.bytes > 0
