"""A loss of your own: REINFORCE (Williams 1992) in place of GRPO's clipped surrogate.

    python docs/examples/custom_loss.py
    python cukit_cli.py grpo --loss docs/examples/custom_loss.py:policy_loss

One function is all: it gets the log-probabilities of the sampled tokens as the policy is now, a Tensor that the tape
follows, the rows with what belongs to each token, and the options. It returns the loss, or the loss and sums that
metrics show as means over the tokens. Advantages, packing, metrics, checkpoints stay as they are. As a method of a
subclass it can have metrics and states of its own.
"""

from cukit import GRPOConfig, GRPOTrainer


def policy_loss(logprobs, rows, args):
    """Raise log p of a token in proportion to its advantage; no ratio, no clip."""
    loss = -(logprobs * rows.advantages * rows.weights).sum()
    return loss, {"advantage": rows.advantages.sum()}  # arrays here are added up over the step


class ReinforceTrainer(GRPOTrainer):
    """The same in Python."""

    def policy_loss(self, logprobs, rows):
        return policy_loss(logprobs, rows, self.args)

    def step_metrics(self, sums):
        return super().step_metrics(sums) | {"advantage": sums.get("advantage", 0.0)}


def share_of_ones(completions, **columns):
    """A reward: the share of the characters that are "1"."""
    return [text.count("1") / max(len(text), 1) for text in completions]


def main(model="data/tiny-qwen3", **options):
    """Train; returns the trainer. options: those of GRPOConfig."""
    options = dict(max_steps=20, per_device_train_batch_size=32, max_completion_length=8, learning_rate=1e-3) | options
    rows = [{"prompt": f"{number}+1="} for number in range(64)]
    trainer = ReinforceTrainer(model, share_of_ones, GRPOConfig(logging_steps=1, **options), rows)
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
