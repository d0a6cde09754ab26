"""The options about the entropy: which tokens learn, and a bonus that keeps it up, constant or moved by a target."""

import numpy as np
import pytest

from cukit.autograd import Tensor, no_grad
from cukit.models.logprobs import packed_logprobs

from .by_hand import by_hand, by_tokens, prepared, run
from .conftest import logged
from .test_wires import name_of


def entropies_of(trainer, rows):
    with no_grad():
        return [packed_logprobs(trainer.model, part.tokens, trainer.args.temperature)[1].data for part in rows]


def whole_loss(trainer, rows):
    return sum(trainer.compute_loss(part)[0].item() for part in rows)


@pytest.mark.parametrize("split", [{}, dict(max_tokens_per_batch=40)], ids=["whole", "split"])
def test_the_top_entropy_quantile(make_grpo, split):
    """The threshold is over the whole optimizer batch, however it is cut; the KL keeps every token."""
    trainer = make_grpo(dtype="float64", top_entropy_quantile=0.3, beta=0.1, **split)
    loss, grad, samples, batch = run(trainer)
    rows = batch.micro_batches(0, 10**6)
    entropies = np.concatenate(entropies_of(trainer, rows))
    chosen = (entropies >= np.quantile(entropies, 0.7)).astype(float)
    assert 0.2 < chosen.mean() < 0.4 and batch.chosen.tolist() == chosen.tolist()
    expected, expected_grad = by_hand(trainer, samples, batch, by_tokens, beta=0.1, factors=chosen)
    assert loss == pytest.approx(expected, rel=1e-9)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-9, atol=1e-12)


def test_the_chosen_tokens_and_the_correction_multiply(make_grpo):
    options = dict(
        top_entropy_quantile=0.5,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=1.2,
    )
    trainer = make_grpo(dtype="float64", **options)
    loss, _, samples, batch = run(trainer)
    settings = dict(sampler_is_old=False, factors=batch.corrections * batch.chosen)
    assert loss == pytest.approx(by_hand(trainer, samples, batch, by_tokens, **settings)[0], rel=1e-9)


@pytest.mark.parametrize("options", [{}, dict(loss_type="dr_grpo"), dict(top_entropy_quantile=0.5)], ids=name_of)
def test_the_entropy_bonus(make_grpo, options):
    """loss − coefficient · mean entropy, its gradient by a difference along one direction, for every loss_type."""
    trainer = make_grpo(dtype="float64", entropy_coef=0.5, **options)
    rows, samples, batch = prepared(trainer)
    entropies = np.concatenate(entropies_of(trainer, rows))
    chosen = np.ones(len(entropies)) if batch.chosen is None else batch.chosen
    plain = sum(trainer.policy_loss(Tensor(new), part)[0].item() for new, part in zip(news(trainer, rows), rows))
    losses = [trainer.compute_loss(part) for part in rows]
    total = sum(loss.item() for loss, _ in losses)
    assert total == pytest.approx(plain - 0.5 * (entropies * chosen).sum() / chosen.sum(), rel=1e-10)
    for loss, _ in losses:
        loss.backward()
    rng = np.random.default_rng(0)
    moved = [(parameter, rng.normal(size=parameter.shape)) for parameter in trainer.model.parameters()]
    slope = sum(float((parameter.grad * direction).sum()) for parameter, direction in moved)
    ends = []
    for step in (1e-6, -2e-6):
        for parameter, direction in moved:
            parameter.data[...] += step * direction
        ends.append(whole_loss(trainer, rows))
    assert slope == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5)


def news(trainer, rows):
    with no_grad():
        return [packed_logprobs(trainer.model, part.tokens, trainer.args.temperature)[0].data for part in rows]


def test_rows_of_equal_rewards_feel_the_entropy(make_grpo):
    """They have no advantage, and the bonus is about them too."""
    equal = lambda completions, **_: [0.5] * len(completions)  # noqa: E731
    trainer = make_grpo(equal, entropy_coef=0.5, max_steps=1)
    trainer.train()
    assert logged(trainer, "grad_norm")[0] > 0
    assert logged(trainer, "policy_loss") == [0.0] and logged(trainer, "loss")[0] < 0
    assert logged(trainer, "entropy_coef") == [0.5]


def test_the_adaptive_coefficient_and_its_resumption(make_grpo):
    """It moves by the steps' entropies; a resumed run goes on as the whole one."""
    options = dict(
        use_adaptive_entropy=True,
        entropy_target=100.0,
        entropy_coef=0.1,
        entropy_coef_delta=0.05,
        entropy_coef_max=0.22,
        max_steps=5,
    )
    whole = make_grpo(**options)
    whole.train()
    assert logged(whole, "entropy_coef") == pytest.approx([0.0, 0.15, 0.2, 0.22, 0.22])
    part = make_grpo(**options, save_steps=3)
    part.callbacks.append(type("Stop", (), {"on_step_end": lambda _, t, *more: t.global_step == 3 and t.stop()})())
    part.train()
    rest = make_grpo(**options)
    rest.train(resume_from_checkpoint=str(part.run_folder / "checkpoint-3"))
    assert logged(rest, "entropy_coef")[-2:] == pytest.approx([0.22, 0.22])
    assert logged(rest, "loss")[-2:] == logged(whole, "loss")[-2:]
    low = make_grpo(**options | dict(entropy_target=0.0, entropy_coef_min=0.07))
    low.train()
    assert logged(low, "entropy_coef") == [0.0] * 5 and low.entropy_bonus.coefficient == pytest.approx(0.07)
