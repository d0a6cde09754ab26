"""PPO's loss for a policy with a critic, as one differentiable function of N packed tokens:

    Σ weight · (policy + vf_coef · value − entropy_coef · entropy + beta · KL)

policy = max(−A·r, −A·clip(r, 1 − eps_low, 1 + eps_high)), r = exp(logp − old_logp) (Schulman et al. 2017). With
dual_clip = c > 1 it is at most −c·A where A < 0 (Ye et al. 2020), so that a large ratio does not rule the batch.

value = ½ · max((v − R)², (v' − R)²), v' = v held within ±cliprange_value of old_value; ½ · (v − R)² if that is None
(OpenAI Baselines, TRL).

KL, with x = ref_logp − logp, by kl_estimator: k1 = −x, k2 = x²/2, k3 = exp(x) − x − 1 (Schulman 2020).

Log-ratios are held within ±MAX_LOG_RATIO before exp, k3's x below it; what is held has gradient 0, and `extreme` counts
such tokens. A token of weight 0 takes no part.
"""

from ..autograd import Tensor, record
from .policy_loss import MAX_LOG_RATIO

# The order of the statistics that ppo_loss returns, each a sum over the tokens. The first three are weighted (the value
# loss before vf_coef), the others plain: tokens whose clipped surrogate is the larger one, whose clipped value loss is,
# that the dual clip bounds; log_ratio²/2 and the ratio, both of held log-ratios; KL (0 if beta is).
PPO_STATS = (
    "policy_loss",
    "value_loss",
    "entropy",
    "clip",
    "value_clip",
    "dual_clip",
    "approx_kl",
    "ratio",
    "kl",
    "extreme",
    "num_tokens",
)


def ppo_loss(
    logps: Tensor,
    values: Tensor,
    entropies: Tensor,
    old_logps,
    old_values,
    ref_logps,
    advantages,
    returns,
    weights,
    *,
    eps_low,
    eps_high,
    dual_clip=None,
    vf_coef,
    cliprange_value,
    entropy_coef=0.0,
    beta=0.0,
    kl_estimator="k3",
):
    """The loss, a scalar Tensor, and the sums that PPO_STATS names, an array (11,). See the module.

    logps, values, entropies: Tensors (N,); the other columns: arrays (N,), ref_logps None if beta is 0. Saves the
    gradient of each Tensor; entropies get none, not zeros, where entropy_coef is 0.
    """
    if beta and ref_logps is None:
        raise ValueError(f"beta={beta} needs the reference model's log-probabilities: give ref_logps, or beta=0")
    loss, dlogps, dvalues, dentropies, stats = logps.backend.ppo_loss_forward(
        logps.data,
        values.data,
        entropies.data,
        old_logps,
        old_values,
        ref_logps,
        advantages,
        returns,
        weights,
        eps_low,
        eps_high,
        dual_clip,
        vf_coef,
        cliprange_value,
        entropy_coef,
        beta,
        kl_estimator,
        MAX_LOG_RATIO,
    )

    def rule(dloss):
        return dloss * dlogps, dloss * dvalues, dloss * dentropies if entropy_coef else None

    return record(loss, (logps, values, entropies), rule), stats
