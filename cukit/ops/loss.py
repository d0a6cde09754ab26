"""Log-probabilities and entropies of tokens, from logits or straight from hidden states."""

from ..autograd import Parameter, Tensor, is_recording, record
from .tensor_parallel import Columns, add_up


def token_logprobs(
    logits: Tensor, targets, temperature: float = 1.0, vocab_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """(log softmax(logits/T)[target], entropy of softmax(logits/T)), each (N,) float32, over the ids below vocab_size.

    logits (N, V), targets (N,) int32. Saves the logits.
    """
    be, limit = logits.backend, vocab_size or logits.shape[1]
    logprobs, entropy, lse = be.token_logprobs_forward(logits.data, targets, temperature, limit)

    def rule(dlogprobs, dentropy):
        if dlogprobs is None:
            dlogprobs = be.zeros(logprobs.shape, logprobs.dtype)
        return (
            be.token_logprobs_backward(logits.data, targets, lse, entropy, dlogprobs, dentropy, temperature, limit),
        )

    return record((logprobs, entropy), (logits,), rule)


def lm_head_logprobs(
    hidden: Tensor,
    weight: Parameter,
    targets,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    chunk_rows: int = 4096,
    on_logits=None,
    columns: Columns | None = None,
) -> tuple[Tensor, Tensor]:
    """token_logprobs(hidden weightᵀ, targets) without ever holding more than chunk_rows rows of logits.

    hidden (N, C), weight (V, C), targets (N,) int32 -> logprobs (N,), entropy (N,). The backward pass computes the
    logits again, chunk by chunk. on_logits(logits, rows) sees each chunk's, rows being a slice. columns: ranks share
    the logits out by these, and the weight has this rank's rows. Saves hidden and two numbers a row.
    """
    head = _Head(hidden, weight, targets, temperature, vocab_size, chunk_rows, on_logits, columns)
    for rows in head.chunks:
        head.read(rows)

    def rule(*grads):
        dhidden = head.backend.empty(head.hidden.shape, head.hidden.dtype)
        for rows in head.chunks:
            head.add_gradient(dhidden, head.logits(rows), rows, *(None if x is None else x[rows] for x in grads))
        return dhidden, None

    return record((head.logprobs, head.entropy), (hidden, weight), rule)


def lm_head_loss(
    hidden: Tensor,
    weight: Parameter,
    targets,
    loss_of,
    upstream=None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    chunk_rows: int = 4096,
    on_logits=None,
    columns: Columns | None = None,
):
    """A loss on lm_head_logprobs(…), a scalar Tensor; what loss_of returns beside it; logprobs and entropy, arrays.

    loss_of(logprobs, entropy, rows) -> (scalar Tensor, anything), of the tokens of the slice `rows`; None: of all.
    upstream: an array (), the gradient that backward() will begin with, and the very array that it is given. Then the
    gradients of hidden and weight are made chunk by chunk from the logits that the forward pass has: three products of
    the head in place of four, and the same bits. For that, the loss must be a sum of terms of single tokens, and what
    else it reads must be constant where rows are given; for all tokens it may be on the tape. The weight's gradient is
    added to before backward(), so that must follow, and with no other gradient: ValueError. Saves hidden's gradient.
    Without upstream, or without the tape, this is lm_head_logprobs.
    """
    if upstream is None or not is_recording():
        given = temperature, vocab_size, chunk_rows, on_logits, columns
        logprobs, entropy = lm_head_logprobs(hidden, weight, targets, *given)
        loss, more = loss_of(logprobs, entropy, None)
        return loss, more, logprobs.data, entropy.data
    head = _Head(hidden, weight, targets, temperature, vocab_size, chunk_rows, on_logits, columns)
    known, dhidden = upstream.copy(), head.backend.empty(hidden.shape, hidden.dtype)
    for rows in head.chunks:
        logits = head.read(rows)
        head.add_gradient(dhidden, logits, rows, *_slopes(loss_of, head, rows, upstream))
        del logits  # before the next chunk's appear: 1.2 GB less at the peak for 152,000 ids
    whole, more = loss_of(Tensor(head.logprobs), Tensor(head.entropy), None)

    def rule(dloss):
        nonlocal dhidden
        if dloss is not upstream:
            raise ValueError("this loss has its gradient already: give backward() `upstream`, and change no loss after")
        factor = dloss / known  # 1, or NaN: upstream is made that where the loss is not finite
        dhidden *= factor.astype(dhidden.dtype)
        return dloss, dhidden, None

    return record(whole.data, (whole, hidden, weight), rule), more, head.logprobs, head.entropy


def _slopes(loss_of, head, rows, upstream):
    """upstream · dloss/dlogprobs and dloss/dentropy, (n,) each, by the loss's own rule; None for what it does not
    read.
    """
    leaves = [Tensor(x[rows], requires_grad=True) for x in (head.logprobs, head.entropy)]
    loss, _ = loss_of(*leaves, rows)
    if loss.requires_grad:
        loss.backward(upstream)
    return [leaf.grad for leaf in leaves]


class _Head:
    """The rows of a language model's head in chunks, of which one's logits are held at a time."""

    def __init__(
        self, hidden: Tensor, weight: Parameter, targets, temperature, vocab_size, chunk_rows, on_logits, columns
    ):
        self.backend, self.hidden, self.weight, self.targets = hidden.backend, hidden.data, weight, targets
        self.on_logits, self.columns = on_logits, columns
        self.options = temperature, vocab_size or (weight.shape[0] if columns is None else columns.borders[-1])
        size, statistics = len(self.hidden), self.backend.accumulator(hidden.dtype)
        self.logprobs, self.entropy, self.lse = (self.backend.empty((size,), statistics) for _ in range(3))
        self.chunks = [slice(start, min(start + chunk_rows, size)) for start in range(0, size, chunk_rows)]

    def logits(self, rows):
        own = self.backend.linear_forward(self.hidden[rows], self.weight.data)
        return own if self.columns is None else self.columns.gather(own, "logits")

    def read(self, rows):
        """A chunk's logits; its log-probabilities, entropies and normalisers are noted."""
        logits = self.logits(rows)
        found = self.backend.token_logprobs_forward(logits, self.targets[rows], *self.options)
        self.logprobs[rows], self.entropy[rows], self.lse[rows] = found
        if self.on_logits is not None:
            self.on_logits(logits, rows)
        return logits

    def add_gradient(self, dhidden, logits, rows, dlogprobs, dentropy):
        """Write a chunk of dhidden and add to the weight's gradient. The logits become their gradient."""
        be, statistics = self.backend, (self.lse[rows], self.entropy[rows])
        if dlogprobs is None:
            dlogprobs = be.zeros(statistics[0].shape, statistics[0].dtype)
        given = self.targets[rows], *statistics, dlogprobs, dentropy, *self.options
        dlogits = be.token_logprobs_backward(logits, *given, out=logits)
        if self.columns is not None:
            dlogits = self.columns.own(dlogits)
        dchunk = be.linear_backward_input(dlogits, self.weight.data)
        dhidden[rows] = dchunk if self.columns is None else add_up(dchunk, self.columns.ranks, "gradient of the head")
        if (dweight := self.weight.grad_buffer()) is not None:
            be.linear_backward_weight(dweight, dlogits, self.hidden[rows])
