"""Policy losses on the GPU: every golden case of TRL, and degenerate inputs, against the NumPy shelf."""

import json
from pathlib import Path

import numpy as np
import pytest
from check import check_kernel, statistics

from cukit import GRPOConfig, GRPOTrainer
from cukit.backend import backend_for
from cukit.runs.metrics import read_jsonl
from cukit.trainers.advantage import token_weights
from cukit.trainers.grpo_config import LOSS_TYPES

pytestmark = pytest.mark.gpu
GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "policy_losses.npz", allow_pickle=False)
CASES = json.loads(str(GOLDEN["grpo/cases"]))


def check_policy_loss(*args):
    """new, old, ref, advantages, weights, cu_seqlens, kind, eps_low, eps_high, delta, beta, bias_kl; float arrays
    become float32.
    """
    check_kernel(
        "policy_loss_forward",
        *(x.astype(np.float32) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x for x in args),
        dtypes=("float32",),
    )


@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    case = CASES[name]
    mask = GOLDEN[f"grpo/mask_{case['mask']}"]
    per_row = token_weights(
        case["loss_type"],
        mask.sum(1),
        int(GOLDEN["grpo/max_completion_length"]),
        float(GOLDEN[f"grpo/num_items_{case['mask']}"]),
    )
    advantages = np.broadcast_to(GOLDEN["grpo/advantages"][:, None], mask.shape)
    arrays = [
        GOLDEN["grpo/new_logps"],
        GOLDEN["grpo/old_logps"],
        GOLDEN["grpo/ref_logps"],
        advantages,
        per_row[:, None] * mask,
    ]
    new, old, ref, advantages, weights = (x.astype(np.float32).reshape(-1) for x in arrays)
    cu_seqlens = np.arange(0, mask.size + 1, mask.shape[1], dtype=np.int32) if case["level"] == "sequence" else None
    settings = (
        LOSS_TYPES[case["loss_type"]],
        case["eps_low"],
        case["eps_high"],
        case["delta"],
        case["beta"],
        case["bias_kl"],
    )
    check_policy_loss(new, old, ref if case["beta"] else None, advantages, weights, cu_seqlens, *settings)
    cuda = backend_for("cuda")
    given = [cuda.array(x) for x in (new, old, ref, advantages, weights)]
    loss, dlogps, _ = cuda.policy_loss_forward(
        *given, None if cu_seqlens is None else cuda.array(cu_seqlens), *settings
    )
    np.testing.assert_allclose(cuda.to_numpy(loss), GOLDEN[f"grpo/{name}/loss"], rtol=0, atol=1e-7)
    np.testing.assert_allclose(
        cuda.to_numpy(dlogps).reshape(mask.shape), GOLDEN[f"grpo/{name}/grad"], rtol=0, atol=1e-7
    )


@pytest.mark.parametrize("count", [0, 1, 211, 1024, 5003])
@pytest.mark.parametrize(
    "kind, delta, beta, bias_kl", [("clip", None, 0.0, False), ("clip", 1.5, 0.1, True), ("cispo", None, 0.05, False)]
)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_sizes(level, kind, delta, beta, bias_kl, count):
    rng = np.random.default_rng(count)
    new, old, ref, advantages = (statistics(count, seed=seed, scale=0.5) for seed in (1, 2, 3, 4))
    weights = (rng.random(count) * (rng.random(count) > 0.2)).astype(np.float32)
    cuts = np.sort(rng.integers(0, count + 1, 5))
    cu_seqlens = np.array([0, *cuts, count], np.int32) if level == "sequence" else None
    eps_high = 1.3 if kind == "cispo" else 0.28
    check_policy_loss(
        new, old, ref if beta else None, advantages, weights, cu_seqlens, kind, 0.2, eps_high, delta, beta, bias_kl
    )


MORE = {  # what follows new … cu_seqlens: kind, eps_low, eps_high, delta, beta, bias_kl, max_log_ratio, level, …
    "sapo": ("sapo", 0.2, 0.2, None, 0.1, True, 20.0, "token", (1.0, 1.05), "k3"),
    "sapo_sequence": ("sapo", 0.2, 0.2, None, 0.1, True, 20.0, "sequence", (1.0, 1.05), "k2"),
    "vespo": ("vespo", 0.2, 0.2, None, 0.1, True, 20.0, "token", (2.0, 3.0, 3.0, 2.0), "k3"),
    "gspo_token": ("clip", 0.2, 0.28, 1.5, 0.1, True, 20.0, "sequence_token", (), "k3"),
    "k1": ("clip", 0.2, 0.28, None, 0.1, True, 20.0, "token", (), "k1"),
    "k2": ("cispo", 0.2, 1.3, None, 0.1, False, 20.0, "token", (), "k2"),
}


@pytest.mark.parametrize("threshold", [None, 0.01])
@pytest.mark.parametrize("with_factors", [False, True], ids=["", "factors"])
@pytest.mark.parametrize("count", [0, 1, 211, 5003])
@pytest.mark.parametrize("name", MORE)
def test_more_losses(name, count, with_factors, threshold):
    rng = np.random.default_rng(count)
    new, old, ref, advantages, sampled = (statistics(count, seed=seed, scale=0.3) for seed in (1, 2, 3, 4, 5))
    weights = (rng.random(count) * (rng.random(count) > 0.2)).astype(np.float32)
    cuts = np.sort(rng.integers(0, count + 1, 5))
    cu_seqlens = np.array([0, *cuts, count], np.int32)
    factors = rng.random(count).astype(np.float32) if with_factors else None
    more = (factors, sampled if with_factors else None, threshold)
    check_policy_loss(new, old, ref, advantages, weights, cu_seqlens, *MORE[name], *more)


def test_factors_of_one_change_no_bit():
    cuda = backend_for("cuda")
    columns = [cuda.array(statistics(5003, seed=seed, scale=0.3)) for seed in range(5)]
    settings = (None, "clip", 0.2, 0.28, None, 0.1, False, 20.0, "token", (), "k3")
    plain = cuda.policy_loss_forward(*columns, *settings)
    ones = cuda.policy_loss_forward(*columns, *settings, cuda.array(np.ones(5003, np.float32)))
    for x, y in zip(plain, ones):
        assert cuda.to_numpy(x).tobytes() == cuda.to_numpy(y).tobytes()


def test_masked_tokens_may_hold_anything():
    bad, zeros, ones = np.array([-np.inf, np.nan, 800.0], np.float32), np.zeros(3, np.float32), np.ones(3, np.float32)
    for cu_seqlens in (None, np.array([0, 0, 3], np.int32)):
        check_policy_loss(bad, ones, bad, ones, zeros, cu_seqlens, "clip", 0.2, 0.2, None, 0.1, True)


@pytest.mark.parametrize("kind", ["clip", "cispo"])
@pytest.mark.parametrize("sequence_level", [False, True])
def test_nan_in_a_used_token_comes_through(kind, sequence_level):
    """So that the step is skipped instead of training on nonsense."""
    cuda = backend_for("cuda")
    new, ones = np.full(5, -1.0, np.float32), np.ones(5, np.float32)
    new[2] = np.nan
    given = [cuda.array(x) for x in (new, -ones, -ones, ones, ones)]
    cu_seqlens = cuda.array(np.array([0, 5], np.int32)) if sequence_level else None
    loss, dlogps, _ = cuda.policy_loss_forward(*given, cu_seqlens, kind, 0.2, 1.3, None, 0.1, False)
    assert np.isnan(cuda.to_numpy(loss)) and np.isnan(cuda.to_numpy(dlogps)[2])


def test_float64_weights_from_the_host_are_taken():
    cuda, cpu = backend_for("cuda"), backend_for("cpu")
    new, old, advantages = (statistics(50, seed=seed) for seed in (1, 2, 3))
    weights = np.full(50, 1 / 50)
    settings = (None, "clip", 0.2, 0.2, None, 0.0, False)
    given = [cuda.array(x) for x in (new, old, advantages, weights)]
    got = cuda.policy_loss_forward(*given[:2], None, *given[2:], *settings)
    near = cpu.policy_loss_forward(new, old, None, advantages, weights, *settings)
    for x, y in zip(got, near):
        np.testing.assert_allclose(cuda.to_numpy(x), y, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["clip", "cispo"])
@pytest.mark.parametrize(
    "new, old, ref, advantage", [(0, -89, -1, 1), (-1, -26, -1, -1), (-1, -801, -1, -1), (-101, -101, -1, 0)]
)
def test_e12_log_ratios_that_exp_cannot_take(new, old, ref, advantage, kind, level):
    """As tests/ops/test_policy_loss.py: finite, gradient 0 where the ratio is held, one extreme token counted."""
    cuda = backend_for("cuda")
    given = [cuda.array(np.array([x], np.float32)) for x in (new, old, ref, advantage, 1)]
    cu_seqlens = cuda.array(np.array([0, 1], np.int32)) if level == "sequence" else None
    for beta, bias_kl in ((0.0, False), (0.1, False), (0.1, True)):
        loss, dlogps, stats = cuda.policy_loss_forward(
            *given, cu_seqlens, kind, 0.2, 5.0 if kind == "cispo" else 0.2, None, beta, bias_kl
        )
        stats = cuda.to_numpy(stats)
        assert np.isfinite(cuda.to_numpy(loss)) and np.isfinite(cuda.to_numpy(dlogps)).all()
        assert stats[5] == (abs(new - old) > 20 or (beta > 0 and ref - new > 20))
        if kind == "clip" and beta == 0:
            assert cuda.to_numpy(dlogps)[0] == 0


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["clip", "cispo"])
def test_e12_any_finite_log_probs(kind, level):
    rng = np.random.default_rng(12)
    for count in (1, 211, 5003):
        new, old, ref = (-1000 * rng.random(count).astype(np.float32) for _ in range(3))
        advantages, weights = (rng.normal(size=count).astype(np.float32) for _ in range(2))
        cuts = np.sort(rng.integers(0, count + 1, 5))
        cu_seqlens = np.array([0, *cuts, count], np.int32) if level == "sequence" else None
        check_policy_loss(new, old, ref, advantages, weights, cu_seqlens, kind, 0.2, 0.3, 1.5, 0.1, True)


def test_the_correction_of_an_exact_engine_is_exactly_one(tmp_path):
    """The trainer's log-probs before an update are the engine's in every bit; the options about entropy run along."""
    args = GRPOConfig(
        output_dir=str(tmp_path / "run"),
        device="cuda",
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=12,
        max_steps=2,
        logging_steps=1,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode="token_truncate",
        off_policy_mask_threshold=0.5,
        top_entropy_quantile=0.5,
        entropy_coef=0.01,
    )
    folder = Path(__file__).parents[2] / "data" / "tiny-qwen3"
    rows = [{"prompt": f"{number}+1="} for number in range(16)]
    lengths = lambda completion_ids, **_: [len(set(ids)) / 12 for ids in completion_ids]  # noqa: E731
    trainer = GRPOTrainer(folder, lengths, args, rows)
    batch = trainer.make_batch(0)[0][0].batch
    corrections, chosen = (trainer.model.backend.to_numpy(x) for x in (batch.corrections, batch.chosen))
    assert (corrections == 1).all() and 0.3 < chosen.mean() < 0.7
    trainer.train()
    metrics = read_jsonl(trainer.run_folder / "metrics.jsonl")
    assert all(row["sampling/sampling_logp_difference/max"] == 0 for row in metrics if "entropy_coef" in row)
