"""Differentiable functions on Tensors, written once for every device: formula, shapes, what is saved, where gradients
go.
"""

from .activation import silu_mul
from .adapter import Factors, linear_beside, linear_merged
from .attention import attention
from .elementwise import clip, exp, index_rows, log, log_sigmoid, maximum, minimum, where
from .embedding import embedding
from .linear import linear
from .loss import lm_head_logprobs, lm_head_loss, token_logprobs
from .norm import add_rms_norm, rms_norm, sum_add_rms_norm
from .policy_loss import policy_loss
from .ppo_loss import ppo_loss
from .rope import qk_norm_rope
from .score import score

__all__ = [
    "Factors",
    "add_rms_norm",
    "attention",
    "clip",
    "embedding",
    "exp",
    "index_rows",
    "linear",
    "linear_beside",
    "linear_merged",
    "lm_head_logprobs",
    "lm_head_loss",
    "log",
    "log_sigmoid",
    "maximum",
    "minimum",
    "policy_loss",
    "ppo_loss",
    "qk_norm_rope",
    "rms_norm",
    "score",
    "silu_mul",
    "sum_add_rms_norm",
    "token_logprobs",
    "where",
]
