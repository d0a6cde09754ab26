"""The CPU backend and the truth of every kernel test: one file an op family, plain NumPy, the dtype it is given
(float64 included).
"""

from .activation import silu_mul_backward, silu_mul_forward
from .attention import attention_backward, attention_forward
from .device import (
    accumulator,
    array,
    default_dtype,
    device_name,
    dtype_of,
    empty,
    host_buffer,
    name,
    synchronize,
    to_numpy,
    upload,
    zeros,
)
from .embedding import embedding_backward, embedding_forward
from .graph import Graphs
from .linear import (
    linear_backward_bias,
    linear_backward_input,
    linear_backward_weight,
    linear_forward,
    row_bucket,
    set_exact,
)
from .loss import token_logprobs_backward, token_logprobs_forward
from .memory import Reservation, memory_info
from .norm import add_rms_norm_backward, add_rms_norm_forward, rms_norm_backward, rms_norm_forward
from .optimizer import adamw_step, store_weights, sum_in_order, sums_of_squares
from .paged_attention import (
    copy_blocks,
    paged_decode_attention,
    paged_prefill_attention,
    store_kv,
    update_block_tables,
)
from .policy_loss import policy_loss_forward
from .random import fill_normal
from .rope import qk_norm_rope_backward, qk_norm_rope_forward
from .sampling import filter_logits, sample

__all__ = [
    "Graphs",
    "Reservation",
    "accumulator",
    "adamw_step",
    "add_rms_norm_backward",
    "add_rms_norm_forward",
    "array",
    "attention_backward",
    "attention_forward",
    "copy_blocks",
    "default_dtype",
    "device_name",
    "dtype_of",
    "embedding_backward",
    "embedding_forward",
    "empty",
    "fill_normal",
    "filter_logits",
    "host_buffer",
    "linear_backward_bias",
    "linear_backward_input",
    "linear_backward_weight",
    "linear_forward",
    "memory_info",
    "name",
    "paged_decode_attention",
    "paged_prefill_attention",
    "policy_loss_forward",
    "qk_norm_rope_backward",
    "qk_norm_rope_forward",
    "rms_norm_backward",
    "rms_norm_forward",
    "row_bucket",
    "sample",
    "set_exact",
    "silu_mul_backward",
    "silu_mul_forward",
    "store_kv",
    "store_weights",
    "sum_in_order",
    "sums_of_squares",
    "synchronize",
    "to_numpy",
    "token_logprobs_backward",
    "token_logprobs_forward",
    "update_block_tables",
    "upload",
    "zeros",
]
