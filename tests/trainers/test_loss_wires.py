"""Every option of the loss reaches the numbers of a run: the loss and its gradient are those by hand, from
the samples and the models alone, and differ from those without the option.
"""

import numpy as np
import pytest

from cukit.autograd import Tensor

from .by_hand import LONG, by_hand, by_row_means, by_rows, by_tokens, prepared, run
from .conftest import assert_equal_weights, logged
from .test_wires import name_of, noisy

VESPO = (2.0, 3.0, 3.0, 2.0)
CASES = [  # (options, weights, settings of the op, what they are compared with)
    (dict(loss_type="sapo"), by_row_means, dict(kind="sapo", coefficients=(1.0, 1.05)), dict(loss_type="grpo")),
    (
        dict(loss_type="sapo", sapo_temperature_pos=2.0),
        by_row_means,
        dict(kind="sapo", coefficients=(2.0, 1.05)),
        dict(loss_type="sapo"),
    ),
    (
        dict(loss_type="sapo", sapo_temperature_neg=3.0),
        by_row_means,
        dict(kind="sapo", coefficients=(1.0, 3.0)),
        dict(loss_type="sapo"),
    ),
    (
        dict(loss_type="luspo", importance_sampling_level="sequence") | LONG,
        by_rows,
        dict(level="sequence"),
        dict(importance_sampling_level="sequence") | LONG,
    ),
    (dict(loss_type="vespo"), by_tokens, dict(kind="vespo", coefficients=VESPO), {}),
    *[
        (
            {"loss_type": "vespo", name: 1.3},
            by_tokens,
            dict(kind="vespo", coefficients=(*VESPO[:i], 1.3, *VESPO[i + 1 :])),
            dict(loss_type="vespo"),
        )
        for i, name in enumerate(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"))
    ],
    (dict(loss_type="dr_grpo", loss_scale_factor=1), by_rows, {}, dict(loss_type="dr_grpo")),
    (dict(beta=0.3, kl_estimator="k1"), by_tokens, dict(beta=0.3, kl_estimator="k1"), dict(beta=0.3)),
    (dict(beta=0.3, kl_estimator="k2"), by_tokens, dict(beta=0.3, kl_estimator="k2"), dict(beta=0.3)),
    (dict(beta=0.3, kl_estimator="k3"), by_tokens, dict(beta=0.3), {}),
    (dict(off_policy_mask_threshold=0.02), by_tokens, dict(off_policy_threshold=0.02), {}),
    (
        dict(loss_type="grpo", importance_sampling_level="sequence_token", delta=1.1, epsilon=0.01),
        by_row_means,
        dict(level="sequence_token", delta=1.1, eps_low=0.01, eps_high=0.01),
        dict(loss_type="grpo", delta=1.1, epsilon=0.01),
    ),
]


@pytest.mark.parametrize(
    "options, weight, settings, without", CASES, ids=lambda x: name_of(x) if type(x) is dict else ""
)
def test_loss(make_grpo, options, weight, settings, without):
    trainer = make_grpo(dtype="float64", **options)
    loss, grad, samples, batch = run(trainer)
    expected, expected_grad = by_hand(trainer, samples, batch, weight, **settings)
    assert loss == pytest.approx(expected, rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-9, atol=1e-12)
    assert abs(loss - run(make_grpo(dtype="float64", **without))[0]) > 1e-7


def test_gspo_token_has_the_value_of_gspo_and_a_gradient_of_its_own(make_grpo):
    options = dict(dtype="float64", loss_type="grpo", scale_rewards="none")
    sequence = run(make_grpo(importance_sampling_level="sequence", **options))
    token = run(make_grpo(importance_sampling_level="sequence_token", **options))
    assert token[0] == pytest.approx(sequence[0], rel=1e-12)
    np.testing.assert_allclose(token[1], sequence[1], rtol=1e-9)  # of one advantage a row they agree, as the paper says
    rows, samples, batch = prepared(make_grpo(importance_sampling_level="sequence_token", **options))
    trainer = make_grpo(importance_sampling_level="sequence_token", **options)
    for part in rows:
        part.advantages[...] *= np.linspace(0.5, 1.5, len(part.advantages))  # as for turns with rewards of their own
        leaf = Tensor(part.logprobs.copy(), requires_grad=True)
        trainer.policy_loss(leaf, part)[0].backward()
        np.testing.assert_allclose(leaf.grad, -part.advantages * part.weights, rtol=1e-12)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_importance_correction(make_grpo, mode):
    """The old log-probs are the trainer's, so the ratio is 1; a token weighs its bounded ratio to the sampler."""
    options = dict(
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=1.3,
        vllm_importance_sampling_clip_min=0.8,
    )
    trainer = make_grpo(dtype="float64", **options)
    loss, grad, samples, batch = run(trainer)
    now = batch.logprobs
    log_ratio = now - batch.sampled
    assert np.abs(log_ratio).max() > 0.1
    if mode.startswith("sequence"):
        borders = batch.cu_learnt
        log_ratio = np.concatenate([np.full(b - a, log_ratio[a:b].sum()) for a, b in zip(borders, borders[1:])])
    ratio = np.exp(log_ratio)
    inside = (ratio >= 0.8) & (ratio <= 1.3)
    factors = np.clip(ratio, 0.8, 1.3) if mode.endswith("truncate") else ratio * inside
    assert not inside.all()
    expected, expected_grad = by_hand(trainer, samples, batch, by_tokens, sampler_is_old=False, factors=factors)
    assert loss == pytest.approx(expected, rel=1e-9)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-9, atol=1e-12)
    for name, value in (("clip_max", 9.0), ("clip_min", 0.1)):
        other = run(make_grpo(dtype="float64", **options | {f"vllm_importance_sampling_{name}": value}))
        assert abs(other[0] - loss) > 1e-9, name


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_the_correction_of_an_exact_engine_is_one(make_grpo, mode):
    """A sampler that has the trainer's numbers: every factor is exactly 1, and no bit of the loss moves."""
    trainer = make_grpo(vllm_importance_sampling_correction=True, vllm_importance_sampling_mode=mode)
    rows, _ = trainer.make_batch(0)
    batch = rows[0].batch
    batch.logprobs = trainer.generation.logprobs_by(trainer.model, batch)  # as if the engine had drawn with them
    trainer.generation._correct(batch)
    assert (batch.corrections == 1).all() and batch.logprobs.tobytes() == batch.sampled.tobytes()
    corrected = [trainer.compute_loss(part)[0].data.tobytes() for part in rows]
    batch.corrections = batch.sampled = None
    assert corrected == [trainer.compute_loss(part)[0].data.tobytes() for part in rows]


def test_the_off_policy_mask_asks_the_sampler(make_grpo):
    """With importance correction the old log-probs are the trainer's; the mask still looks at the sampler's."""
    options = dict(vllm_importance_sampling_correction=True, vllm_importance_sampling_mode="token_truncate")
    trainer = make_grpo(dtype="float64", off_policy_mask_threshold=0.02, **options)
    loss, _, samples, batch = run(trainer)
    settings = dict(sampler_is_old=False, factors=batch.corrections, off_policy_threshold=0.02)
    assert loss == pytest.approx(by_hand(trainer, samples, batch, by_tokens, **settings)[0], rel=1e-9)
    assert abs(loss - run(make_grpo(dtype="float64", **options))[0]) > 1e-7


def test_the_counts_of_the_off_policy_mask_are_logged(make_grpo):
    trainer = make_grpo(off_policy_mask_threshold=0.02, max_steps=1)
    noisy(trainer)
    trainer.train()
    assert 0 < logged(trainer, "sampling/off_policy_rows")[0] < 16


def test_the_ratio_to_the_sampler_is_logged_with_correction_too(make_grpo):
    trainer = make_grpo(vllm_importance_sampling_correction=True, max_steps=1)
    noisy(trainer)
    trainer.train()
    assert logged(trainer, "sampling/sampling_logp_difference/mean")[0] > 0.1
    assert logged(trainer, "clip_ratio/region_mean") == [0.0]


def test_a_run_with_correction_resumes_in_the_middle_of_a_generation(make_grpo):
    """The sampler's log-probs and the factors are part of the batch that a checkpoint holds."""
    options = dict(
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode="token_truncate",
        top_entropy_quantile=0.5,
        off_policy_mask_threshold=0.1,
        num_iterations=2,
        max_steps=4,
    )
    whole, part, rest = make_grpo(**options), make_grpo(**options, save_steps=1), make_grpo(**options)
    for trainer in (whole, part, rest):
        noisy(trainer)
    whole.train()
    part.callbacks.append(type("Stop", (), {"on_step_end": lambda _, t, *more: t.global_step == 1 and t.stop()})())
    part.train()
    rest.train(resume_from_checkpoint=str(part.run_folder / "checkpoint-1"))
    assert_equal_weights(whole, rest)
