"""Reward models: −log σ(chosen − rejected − margin), the mean over the pairs of an optimizer batch.

The model of Bradley and Terry (1952): the probability that an answer is preferred to another is σ of the difference of
their scores. Ouyang et al. 2022, "Training language models to follow instructions with human feedback" (equation 1);
margins: Touvron et al. 2023, "Llama 2"; centring: Eisenstein et al. 2023, "Helping or Herding?" (equation 2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..autograd import Tensor
from ..datasets.preferences import Pair, encode_pairs
from ..models.decoder import Decoder
from ..models.logprobs import PackedTokens, batches_by_tokens, pack_tokens
from ..models.scores import packed_scores, score_rows, set_padding
from ..models.weights import load_model
from ..ops import log_sigmoid
from .reward_config import RewardConfig
from .row_trainer import RowTrainer


@dataclass(slots=True)
class PackedPairs:
    """Pairs side by side on the device: all chosen sequences, then all rejected ones.

    chosen, rejected (P,) int32: the tokens that their scores are read at. margins (P,). weight: of a pair in the loss.
    """

    tokens: PackedTokens
    chosen: Any
    rejected: Any
    margins: Any
    weight: float


def preference_loss(
    chosen: Tensor, rejected: Tensor, margins: Any, weight: float, center_coefficient: float | None = None
) -> Tensor:
    """weight · Σ (−log σ(chosen − rejected − margin) + center_coefficient · (chosen + rejected)²), all (P,)."""
    loss = -log_sigmoid(chosen - rejected - margins).sum()
    if center_coefficient:
        total = chosen + rejected
        loss = loss + (total * total).sum() * center_coefficient
    return loss * weight


class RewardTrainer(RowTrainer):
    """RewardTrainer(model="folder", args=RewardConfig(…), train_dataset=pairs).train(); also .evaluate(),
    .save_model(folder)

    Pairs as cukit.datasets.preferences says. model: a causal model's folder, which gets a fresh score head drawn from
    seed, a reward model's, or a Decoder with head="score". A pair is never split between two passes. The saved folder
    is a …ForSequenceClassification of transformers; GRPO takes it among its reward_funcs.
    """

    label = "reward"
    head = "score"
    args: RewardConfig

    def __init__(self, model: Any, args: RewardConfig, *arguments: Any, **more: Any):
        if isinstance(model, Decoder) and model.config.head != "score":
            raise ValueError("a reward model has a score head: give a Decoder with head='score', or a model folder")
        super().__init__(model, args, *arguments, **more)

    def load_model(self, folder: Path, device: str, dtype: str) -> Decoder:
        """The model, with the tokenizer's padding id in its configuration: transformers reads scores before padding."""
        model = load_model(folder, device, dtype, self.head, self.args.seed, self.ranks.tensor)
        if (pad := self.tokenizer.pad_token_id) is not None:
            set_padding(model, pad)
        return model

    def prepare_rows(self, rows: list[dict], name: str) -> list[Pair]:
        config = self.model.config
        limit = min(self.args.max_length or config.max_position_embeddings, config.max_position_embeddings)
        try:
            pairs, left_out = encode_pairs(
                rows, self.tokenizer, limit, self.args.chat_template_kwargs, config.vocab_size
            )
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if left_out:
            self.say(
                f"{name}: {left_out} of {len(rows)} pairs left out: longer than {limit} tokens (max_length, or the "
                "model's context)"
            )
        return pairs

    def ids_of(self, row: Pair) -> Iterable[ArrayLike]:
        return row.chosen, row.rejected

    def row_lengths(self) -> Iterable[int]:
        return (pair.num_tokens for pair in self.train_rows)

    def make_batch(self, step: int) -> tuple[list[PackedPairs], dict]:
        pairs = [self.train_rows[row] for row in self.sampler.take(self.rows_a_step)]
        tokens = sum(pair.num_tokens for pair in pairs)
        self.num_tokens += tokens
        return list(self._packed(pairs)), {"step_tokens": tokens}

    def _packed(self, pairs: list[Pair]) -> Iterator[PackedPairs]:
        """This rank's pairs in passes of at most max_tokens_per_batch tokens; a longer pair stands alone."""
        be, most = self.model.backend, self.args.max_tokens_per_batch
        own = pairs[slice(*self.ranks.share([pair.num_tokens for pair in pairs]))]
        for chosen in batches_by_tokens([pair.num_tokens for pair in own], most):
            part = [own[index] for index in chosen]
            sequences = [pair.chosen for pair in part] + [pair.rejected for pair in part]
            rows = score_rows(sequences, self.model.config.pad_token_id)
            margins = np.array([pair.margin for pair in part], be.accumulator(self.model.dtype))
            first, second = be.array(rows[: len(part)]), be.array(rows[len(part) :])
            yield PackedPairs(pack_tokens(be, sequences), first, second, be.array(margins), 1.0 / len(pairs))

    def compute_loss(self, pairs: PackedPairs) -> tuple[Tensor, dict[str, Any]]:
        chosen, rejected = packed_scores(self.model, pairs.tokens, pairs.chosen, pairs.rejected)
        coefficient = self.args.center_rewards_coefficient
        loss = preference_loss(chosen, rejected, pairs.margins, pairs.weight, coefficient)
        first, second = chosen.data, rejected.data
        return loss, {
            "pairs": np.asarray(float(len(first))),
            "right": (first > second).sum(),
            "margins": (first - second).sum(),
            "rewards": (first + second).sum(),
            "max/reward": np.maximum(first, second).max(),
            "max/minus_reward": (-np.minimum(first, second)).max(),
        }

    def step_metrics(self, sums: dict) -> dict:
        count = max(float(sums["pairs"]), 1.0)
        return {
            "accuracy": float(sums["right"]) / count,
            "margin": float(sums["margins"]) / count,
            "mean_reward": float(sums["rewards"]) / (2 * count),
            "min_reward": -float(sums["max/minus_reward"]),
            "max_reward": float(sums["max/reward"]),
        }

    def run_evaluation(self) -> dict:
        """eval/loss, eval/accuracy (share of pairs with the chosen answer ahead), eval/margin, … over eval_dataset."""
        total = self.ranks.add_up(lambda: self.evaluated(self._packed(self.eval_rows)), "evaluation")
        return {"eval/loss": float(total.pop("loss"))} | {
            f"eval/{name}": value for name, value in self.step_metrics(total).items()
        }
