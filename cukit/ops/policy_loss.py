"""The policy loss of GRPO's family as one differentiable function."""

from ..autograd import record

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8, and its square, are far inside float32
# the order of the statistics that policy_loss returns
STATS = ("clip_low", "clip_high", "clip_count", "kl", "num_tokens", "extreme")


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
):
    """Σ weight · (ℓ(log_ratio, advantage) + beta · k3) over N packed completion tokens, log_ratio = new − old.

    new_logps: Tensor (N,); old_logps, ref_logps (or None if beta is 0), advantages, weights: arrays (N,). A token of
    weight 0 takes no part. kind "clip" is PPO's clipped surrogate −min(r·A, clip(r, 1 − eps_low, 1 + eps_high)·A), with
    r capped at delta in the first term if that is given; "cispo" is −min(r, eps_high)·A·new with a constant factor.
    k3 = exp(ref − new) − (ref − new) − 1, times r if bias_kl. cu_seqlens (B+1,) int32: one ratio a sequence, exp(mean
    of its log_ratio). Log-ratios are held within ±MAX_LOG_RATIO before exp, ref − new below it; what is held has
    gradient 0, and `extreme` counts such tokens. Returns the loss, a scalar Tensor, and the sums that STATS names, an
    array (6,). Saves dloss/dnew.
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
    )
    return record(loss, (new_logps,), lambda dloss: (dloss * dlogps,)), stats
