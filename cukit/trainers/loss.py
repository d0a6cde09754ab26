"""The policy loss of a GRPO run: the built-in ones as the options say, or a user's own function of the same signature.

    policy_loss(logprobs, rows, args) -> loss, or (loss, {name: array})

logprobs: Tensor (N,), of the learnt tokens as the policy is now. rows has as arrays (N,) what belongs to them:
advantages, weights (how loss_type averages; they sum over all passes of the batch), logprobs (the old ones: the
sampler's, or the trainer's with importance correction), ref_logprobs (None unless beta is in the loss), corrections and
chosen (constant factors, or None). args: GRPOConfig. loss: a scalar Tensor; the losses of the passes of an optimizer
batch are added up. A user's arrays are sums over the tokens of a pass; metrics show their mean over the step's tokens.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from ..autograd import Tensor
from ..ops import policy_loss
from ..ops.policy_loss import needs_sequences
from ..options import require
from ..user_code import line_in, load_function, one_line
from .loss_config import LOSS_TYPES

OWN = "loss/"  # before the names of what a user's loss returns besides


def first_gradient(model, scale: float = 1.0):
    """What the backward pass of a loss will begin with, the loss scale, as an array () that the head knows before."""
    gradient = model.backend.zeros((), model.backend.accumulator(model.dtype))
    gradient += scale
    return gradient


def backward(loss: Tensor, upstream) -> None:
    """loss.backward(upstream). upstream, a first_gradient, becomes NaN where the loss is not finite: so is every
    gradient then, and the update is skipped.
    """
    gradient = loss.data * 0 + upstream
    if gradient.shape == () and gradient.dtype == upstream.dtype:
        upstream[...] = gradient
        gradient = upstream  # the very array: ops.lm_head_loss
    loss.backward(gradient)


def compute_and_backward(trainer, micro_batch, scale: float, around: AbstractContextManager) -> tuple[Tensor, dict]:
    """What trainer.compute_loss(micro_batch) gives, after scale times its gradients were added to the weights'.

    trainer.upstream is known while it runs, unless it is a user's: that may do anything with a loss. around: entered
    for the backward pass, if there is one.
    """
    upstream = first_gradient(trainer.model, scale)
    trainer.upstream = upstream if is_ours(trainer.compute_loss) else None
    try:
        loss, extra = trainer.compute_loss(micro_batch)
    finally:
        trainer.upstream = None
    if loss.requires_grad:
        with around:
            backward(loss, upstream)
    return loss, extra


def is_ours(function) -> bool:
    """Whether a function or method is one of this package's."""
    return (getattr(function, "__module__", None) or "").startswith("cukit.")


def is_by_token(loss_function, args) -> bool:
    """Whether the loss is a sum of terms of single tokens, so that the head makes its gradient in one pass
    (ops.lm_head_loss). A user's may be anything.
    """
    return loss_function is built_in_loss and not _by_sequence(args)


def _by_sequence(args) -> bool:
    kind = LOSS_TYPES[args.loss_type]
    return needs_sequences(kind, args.importance_sampling_level, args.off_policy_mask_threshold)


def built_in_loss(logprobs, rows, args):
    """The loss of TRL's loss_type and what belongs to it, and {"stats": the sums that ops.policy_loss.STATS names}."""
    options, kind = args.loss_options, LOSS_TYPES[args.loss_type]
    loss, stats = policy_loss(
        logprobs,
        rows.logprobs,
        rows.ref_logprobs,
        rows.advantages,
        rows.weights,
        kind=kind,
        eps_low=args.epsilon,
        eps_high=options.ratio_cap,
        delta=args.delta,
        beta=options.kl_in_loss,
        bias_kl=args.use_bias_correction_kl,
        cu_seqlens=rows.cu_learnt if _by_sequence(args) else None,
        level=args.importance_sampling_level,
        coefficients=_coefficients(kind, args),
        kl_estimator=options.estimates_kl_by,
        factors=_factors(rows),
        sampled=rows.sampled,
        off_policy_threshold=args.off_policy_mask_threshold,
    )
    return loss, {"stats": stats}


def _coefficients(kind, args) -> tuple:
    if kind == "sapo":
        return args.sapo_temperature_pos, args.sapo_temperature_neg
    if kind == "vespo":
        return args.vespo_k_pos, args.vespo_lambda_pos, args.vespo_k_neg, args.vespo_lambda_neg
    return ()


def _factors(rows):
    """corrections · chosen, where they are there."""
    if rows.corrections is None or rows.chosen is None:
        return rows.chosen if rows.corrections is None else rows.corrections
    return rows.corrections * rows.chosen


def load_loss(spec: str):
    """A user's loss, "path/file.py:function", that checks what it returns and names itself in errors."""
    function = load_function(spec, "loss")
    path = str(Path(spec.rpartition(":")[0]).resolve())

    def own_loss(logprobs, rows, args):
        try:
            found = function(logprobs, rows, args)
        except Exception as error:
            where = line_in(path, error)
            raise ValueError(f"loss {spec!r} raised {type(error).__name__}: {one_line(error)}{where}") from error
        loss, extra = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        require(
            isinstance(loss, Tensor) and loss.data.size == 1 and isinstance(extra, dict),
            f"loss {spec!r} must return a Tensor of one number, or that and a dict of arrays of one number, got "
            f"{found!r:.100}",
        )
        return loss, {OWN + name: value for name, value in extra.items()}

    return own_loss
