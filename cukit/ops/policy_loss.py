"""The policy losses of GRPO's family as one differentiable function of packed completion tokens:

    Σ weight · (factor · ℓ(log_ratio, advantage) + beta · KL), log_ratio = new − old

new_logps, old_logps, ref_logps (None if beta is 0), advantages, weights, factors (constants; None: 1): of N tokens. A
token of weight 0 takes no part.

kind, with r = exp(log_ratio): "clip" is PPO's clipped surrogate −min(r·A, clip(r, 1 − eps_low, 1 + eps_high)·A), with r
capped at delta in the first term if that is given; "cispo" is −min(r, eps_high)·A·new with a constant factor; "sapo" is
−A·4/τ·sigmoid(τ·(r − 1)), coefficients = (τ where A > 0, τ elsewhere); "vespo" is −φ(w)·A·new with a constant factor,
log φ = λ + k·log w − λ·w, w = exp(Σ log_ratio) of the sequence, coefficients = (k, λ where A ≥ 0, k, λ elsewhere).

cu_seqlens (B+1,) int32: borders of sequences; None: a ratio a token. level says what they are for. "sequence": one
ratio a sequence, exp(mean of its log_ratio) (GSPO). "sequence_token": the same value, but a token's own log-probability
moves it (GSPO-token). "token": a ratio a token, with borders for "vespo" and the off-policy mask.

KL, with x = ref − new, by kl_estimator: k1 = −x, k2 = x²/2, k3 = exp(x) − x − 1; times r if bias_kl.
off_policy_threshold: ℓ is 0 in a sequence with A < 0 and mean(sampled − new) above it (sampled None: old).

Log-ratios are held within ±MAX_LOG_RATIO before exp, k3's x below it; what is held has gradient 0, and `extreme` counts
such tokens.
"""

from ..autograd import record

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8, and its square, are far inside float32
# the order of the statistics that policy_loss returns
STATS = ("clip_low", "clip_high", "clip_count", "kl", "num_tokens", "extreme", "off_policy")

TOKEN_KINDS = ("clip", "cispo", "sapo")  # a token's term is its own; any other kind is taken to need whole sequences


def needs_sequences(kind: str, level: str, off_policy_threshold: float | None) -> bool:
    """Whether a token's term, or its gradient, depends on other tokens of its sequence."""
    return level != "token" or kind not in TOKEN_KINDS or off_policy_threshold is not None


def policy_loss(
    new_logps,
    old_logps,
    ref_logps,
    advantages,
    weights,
    *,
    kind="clip",
    eps_low=0.2,
    eps_high=0.2,
    delta=None,
    beta=0.0,
    bias_kl=False,
    cu_seqlens=None,
    level="sequence",
    coefficients=(),
    kl_estimator="k3",
    factors=None,
    sampled=None,
    off_policy_threshold=None,
):
    """The loss, a scalar Tensor, and the sums that STATS names, an array (7,). See the module. Saves dloss/dnew.

    new_logps: Tensor (N,); the other columns: arrays (N,).
    """
    loss, dlogps, stats = new_logps.backend.policy_loss_forward(
        new_logps.data,
        old_logps,
        ref_logps,
        advantages,
        weights,
        cu_seqlens,
        kind,
        eps_low,
        eps_high,
        delta,
        beta,
        bias_kl,
        MAX_LOG_RATIO,
        level,
        coefficients,
        kl_estimator,
        factors,
        sampled,
        off_policy_threshold,
    )
    return record(loss, (new_logps,), lambda dloss: (dloss * dlogps,)), stats
