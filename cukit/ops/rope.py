"""q/k norm and rotary embedding over the fused q, k, v projection."""

from ..autograd import Parameter, Remade, Tensor, record


def qk_norm_rope(
    qkv: Tensor,
    q_weight: Parameter | None,
    k_weight: Parameter | None,
    cos,
    sin,
    positions,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
) -> Tensor:
    """Each head of q and k: RMSNorm with q_weight, k_weight (D,) (none if they are None), then rotation by its
    position; v as it is.

    qkv (T, (H + 2K)·D), cos and sin (P, D/2), positions (T,) int32 -> like qkv. Saves qkv and rstd, and
    the output is remade; without a norm it saves nothing.
    """
    be = qkv.backend
    q_data, k_data = (None, None) if q_weight is None else (q_weight.data, k_weight.data)

    def forward(x):
        return be.qk_norm_rope_forward(x, q_data, k_data, cos, sin, positions, num_heads, num_kv_heads, eps)

    out, rstd = forward(qkv.data)
    x = None if q_weight is None else qkv.data  # a rotation is turned back without what was rotated
    again = Remade(lambda: forward(x)[0])

    def rule(dout):
        if again.wanted:
            again.give(again.array())
        dq, dk = (None, None) if q_weight is None else (q_weight.grad_buffer(), k_weight.grad_buffer())
        if (dq is None) != (dk is None):  # one of the two is frozen: its sum, which comes with the other's, is dropped
            dq, dk = (be.zeros(q_data.shape, q_data.dtype) if x is None else x for x in (dq, dk))
        values = dout if x is None else x
        dqkv = be.qk_norm_rope_backward(
            dq, dk, dout, values, q_data, k_data, rstd, cos, sin, positions, num_heads, num_kv_heads
        )
        return dqkv, None, None

    return record(out, (qkv, q_weight, k_weight), rule, () if x is None else (again,))
