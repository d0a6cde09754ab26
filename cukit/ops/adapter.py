"""Products with a weight that has a low-rank adapter (LoRA, Hu et al. 2021): y = x (w + s·B·A)ᵀ + bias, in two ways.

beside: the base weight's product plus the adapter's two small ones. merged: one product with round(w + s·B·A), a copy
that is made once an update. Gradients of both are the low-rank way, dB = s·dyᵀ(x Aᵀ) and dA = s·(dy B)ᵀ x, so that no
gradient has the weight's size. For merged that is a straight-through estimate: the rounding passes gradients on.
"""

from dataclasses import dataclass
from typing import Any

from ..autograd import Kept, Parameter, Remade, Tensor, record


@dataclass(eq=False, slots=True)
class Factors:
    """The adapter of one weight (O, I), which may be fused of several parts with factors of their own.

    a (P·r, I), b (rows of the adapted parts, r): what is trained, in float32 or better. down (P·r, I), up (O, P·r): a
    and s·b as products take them, in the model's dtype; up has each part's rows in the columns of its own rank and
    zeros elsewhere. blocks: a part's rows of the weight, its rows of b, its columns of up (its rows of a).
    """

    a: Parameter
    b: Parameter
    scale: float
    down: Any
    up: Any
    blocks: list[tuple[slice, slice, slice]]

    def add_gradients(self, dy, x: Kept | Remade, u):
        """Add the gradients of a and b; dy (T, O), x (T, I), u = x downᵀ. Returns du = dy up (T, P·r)."""
        be = self.a.backend
        if (db := self.b.grad_buffer()) is not None:
            wide = be.zeros(self.up.shape, db.dtype)
            be.linear_backward_weight(wide, dy, u)
            for rows, own, columns in self.blocks:
                db[own] += wide[rows, columns] * self.scale
        du = be.linear_backward_input(dy, self.up)
        if (da := self.a.grad_buffer()) is not None:
            x.use(lambda array: be.linear_backward_weight(da, du, array))
        return du


def linear_beside(x: Tensor, w: Parameter, factors: Factors, bias: Parameter | None = None) -> Tensor:
    """y = (x wᵀ + bias) + (x downᵀ) upᵀ, each product and their sum rounded. x (T, I) -> (T, O). w and bias are frozen.

    Saves x and x downᵀ.
    """
    be, saved, has_gradient = x.backend, x.saved, x.requires_grad
    y, u = be.linear_beside_forward(x.data, w.data, factors.down, factors.up, None if bias is None else bias.data)

    def rule(dy):
        du = factors.add_gradients(dy, saved, u)
        dx = be.linear_beside_backward_input(dy, w.data, du, factors.down) if has_gradient else None
        return dx, None, None

    return record(y, (x, factors.a, factors.b), rule)


def linear_merged(x: Tensor, merged, factors: Factors, bias: Parameter | None = None) -> Tensor:
    """y = x mergedᵀ + bias with merged = round(w + s·b·a) (O, I), an array. x (T, I) -> (T, O). bias is frozen.

    Saves x.
    """
    be, saved, has_gradient = x.backend, x.saved, x.requires_grad

    def rule(dy):
        saved.use(lambda x: factors.add_gradients(dy, Kept(x), be.linear_forward(x, factors.down)))
        return be.linear_backward_input(dy, merged) if has_gradient else None, None, None

    return record(
        be.linear_forward(x.data, merged, None if bias is None else bias.data), (x, factors.a, factors.b), rule
    )
