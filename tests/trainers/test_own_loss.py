"""--loss file.py:function: it is called with what it needs, its values are logged, and what is wrong is one line."""

import numpy as np
import pytest

from cukit import GRPOConfig
from cukit.trainers.loss import load_loss
from cukit.user_code import load_function

from .conftest import logged, weights_of
from .test_custom_loss import FILE

SOURCE = """
def minus_logprobs(logprobs, rows, args):
    assert rows.logprobs.shape == rows.weights.shape == logprobs.shape and args.beta == 0
    return -(logprobs * rows.weights).sum() * args.epsilon

def with_values(logprobs, rows, args):
    return minus_logprobs(logprobs, rows, args), {"mine": rows.weights.sum() * 0 + len(rows.weights) * 3}

def returns_a_number(logprobs, rows, args):
    return 1.0

def returns_no_scalar(logprobs, rows, args):
    return logprobs * 2

def fails(logprobs, rows, args):
    return rows.nothing
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def test_it_is_the_loss(make_grpo, file):
    """Σ weight · log p, which the advantages do not touch: rows of equal rewards learn too."""
    equal = lambda completions, **_: [0.5] * len(completions)  # noqa: E731
    trainer = make_grpo(equal, dtype="float64", loss=f"{file}:minus_logprobs", epsilon=0.5, max_steps=1)
    trainer.train()
    assert logged(trainer, "loss")[0] > 0.1 and logged(trainer, "grad_norm")[0] > 0
    other = make_grpo(equal, dtype="float64", loss=f"{file}:minus_logprobs", epsilon=0.25, max_steps=1)
    other.train()
    assert logged(trainer, "loss")[0] == pytest.approx(2 * logged(other, "loss")[0])
    assert not logged(trainer, "clip_ratio/low_mean") and "mine" not in logged(trainer, "loss")


def test_its_values_are_logged_as_means_over_the_tokens(make_grpo, file):
    for split in ({}, dict(max_tokens_per_batch=40)):
        trainer = make_grpo(loss=f"{file}:with_values", max_steps=1, **split)
        trainer.train()
        assert logged(trainer, "mine") == [3.0]


def test_the_example_as_a_function_and_as_a_method_are_one(make_grpo):
    """To rounding: a function's rows without an advantage are trained on too, in one pass with the others."""
    spec = f"{FILE}:policy_loss"
    by_file = make_grpo(loss=spec, max_steps=3, adam_epsilon=1e-3)
    by_file.train()
    example = load_function(spec, "loss")
    by_method = make_grpo(max_steps=3, adam_epsilon=1e-3)
    by_method.policy_loss = lambda logprobs, rows: example(logprobs, rows, by_method.args)
    by_method.train()
    for (name, x), y in zip(weights_of(by_file.model).items(), weights_of(by_method.model).values(), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6, err_msg=name)
    assert len(logged(by_file, "advantage")) == 3


def test_on_policy_the_examples_gradient_is_that_of_grpo(make_grpo):
    """At ratio 1 the clipped surrogate has REINFORCE's gradient."""
    found = []
    for options in ({}, dict(loss=f"{FILE}:policy_loss")):
        trainer = make_grpo(dtype="float64", **options)
        for part in trainer.make_batch(0)[0]:
            loss, _ = trainer.compute_loss(part)
            if loss.requires_grad:
                loss.backward()
        found.append({name: parameter.grad for name, parameter in trainer.model.named_parameters().items()})
    for name, grad in found[0].items():
        np.testing.assert_allclose(grad, found[1][name], rtol=0, atol=1e-7, err_msg=name)


@pytest.mark.parametrize(
    "name, message",
    [
        ("fails", r"loss '.*:fails' raised AttributeError: Rows has no 'nothing' \(.*mine.py, line 16\)"),
        ("returns_a_number", "must return a Tensor of one number, .* got 1.0"),
        ("returns_no_scalar", "must return a Tensor of one number"),
    ],
)
def test_what_it_does_wrong_is_one_line(make_grpo, file, name, message):
    trainer = make_grpo(loss=f"{file}:{name}", max_steps=1)
    with pytest.raises(ValueError, match=message) as error:
        trainer.train()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "spec, message",
    [
        ("mine", "give it as 'path/file.py:function'"),
        ("nowhere.py:f", "file 'nowhere.py' does not exist"),
        ("{file}:nothing", "has no 'nothing' \\(it has: minus_logprobs, with_values"),
        ("{file}:SOURCE", "has no 'SOURCE'"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(file, spec, message):
    with pytest.raises(ValueError, match=message):
        load_loss(spec.replace("{file}", str(file)))


def test_it_is_loaded_before_the_model(make_grpo):
    """So that a wrong path costs no time."""
    with pytest.raises(ValueError, match="file 'nowhere.py' does not exist"):
        make_grpo(loss="nowhere.py:f")
    assert GRPOConfig(loss="nowhere.py:f").loss == "nowhere.py:f"  # a config alone opens no file
