"""Options of what an optimizer keeps, and where; see docs/MEMORY.md."""

from ..options import Options, option

OPTIMIZER_STATES = ("float32", "bfloat16", "int8")


class StateOptions(Options):
    """The form and the place of AdamW's states."""

    group = "device and memory"
    optimizer_state: str = option(
        "float32",
        "AdamW's two moments of matrices: float32 (8 bytes a parameter), bfloat16 (4) or int8 (2)",
        OPTIMIZER_STATES,
    )
    offload_optimizer: bool = option(
        False,
        "keep AdamW's moments and master weights in the host's memory, a layer's on the GPU while it is updated",
    )
    optimizer_in_bwd: bool = option(
        False,
        "update each layer within the backward pass, as soon as its gradient is complete, and drop that; needs "
        "max_grad_norm=0 and one pass an update",
    )
