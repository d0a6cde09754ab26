"""A head computes something from a decoder's hidden states; a model may have several."""

from typing import Any

from ..autograd import Parameter, Tensor
from ..ops import linear, lm_head_logprobs, lm_head_loss, score
from ..ops.tensor_parallel import Columns, copy_to_ranks, gather_columns
from .modules import Module, declare
from .row_adapters import adapter_at


class LanguageModelHead(Module):
    """Logits over the vocabulary. weight (V, C): its own, or the embedding's.

    vocab_size: ids from here on take no part in probabilities; at most V. columns: how ranks share the logits out, of
    which the weight then has this rank's rows; every rank gets all logits.
    """

    def __init__(self, weight: Parameter, vocab_size: int | None = None, columns: Columns | None = None):
        self.weight, self.vocab_size, self.columns = weight, vocab_size or weight.shape[0], columns

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden (N, C) -> logits (N, V) in the model's dtype."""
        if self.columns is None:
            return linear(hidden, self.weight)
        return gather_columns(linear(copy_to_ranks(hidden, self.columns.ranks), self.weight), self.columns)

    def logprobs(self, hidden: Tensor, targets, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Log p(target) and entropy, each (N,) float32, of softmax(logits / temperature) over the ids that count.

        hidden (N, C), targets (N,) int32; the logits are never held as a whole.
        """
        given = temperature, self.vocab_size
        return lm_head_logprobs(hidden, self.weight, targets, *given, columns=self.columns)

    def loss(self, hidden: Tensor, targets, loss_of, upstream=None, temperature: float = 1.0, on_logits=None):
        """A loss on logprobs(…): (loss, what loss_of returns beside it, logprobs, entropy). See ops.lm_head_loss.

        upstream: what backward() will begin with, if the loss is a sum of terms of single tokens: then the head's
        gradient is made in the same pass.
        """
        given = temperature, self.vocab_size
        more = {"on_logits": on_logits, "columns": self.columns}
        return lm_head_loss(hidden, self.weight, targets, loss_of, upstream, *given, **more)


class ScoreHead(Module):
    """A number for each hidden state: a reward model's score, a critic's value. weight (1, C), float32 or better.

    It is small and decides all, so its sums and its updates are not rounded to the model's dtype; its tensor is
    `score.weight`, as in transformers' ...ForSequenceClassification. adapter: as a Linear's.
    """

    def __init__(self, backend, dtype, hidden_size: int):
        self.weight = declare((1, hidden_size), backend.accumulator(dtype))
        self.adapter: Any = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden (N, C) -> scores (N,) in the weight's dtype."""
        adapter = adapter_at(self)
        return score(hidden, self.weight) if adapter is None else adapter(hidden, self)

    def init_weights(self, seed: int | None):
        """N(0, 1/(C + 1)) drawn from `seed` (Stiennon et al. 2020, "Learning to summarize from human feedback"), or
        zeros without one.
        """
        weight = self.weight.data
        if seed is None:
            weight[...] = 0
        else:
            self.weight.backend.fill_normal(weight, seed, (weight.shape[1] + 1) ** -0.5)
