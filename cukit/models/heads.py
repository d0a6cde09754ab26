"""A head computes something from a decoder's hidden states; a model may have several."""

from ..autograd import Parameter, Tensor
from ..ops import linear, lm_head_logprobs
from .modules import Module


class LanguageModelHead(Module):
    """Logits over the vocabulary. weight (V, C): its own, or the embedding's.

    vocab_size: ids from here on take no part in probabilities; at most V.
    """

    def __init__(self, weight: Parameter):
        self.weight, self.vocab_size = weight, weight.shape[0]

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden (N, C) -> logits (N, V) in the model's dtype."""
        return linear(hidden, self.weight)

    def logprobs(self, hidden: Tensor, targets, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Log p(target) and entropy, each (N,) float32, of softmax(logits / temperature) over the ids that count.

        hidden (N, C), targets (N,) int32; the logits are never held as a whole.
        """
        return lm_head_logprobs(hidden, self.weight, targets, temperature, self.vocab_size)
