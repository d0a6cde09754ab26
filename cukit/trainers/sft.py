"""Supervised fine-tuning: −log p of the demonstrated tokens, the mean over all of them in an optimizer batch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..autograd import Tensor
from ..backend import backend_for
from ..datasets.demonstrations import encode_sft_rows
from ..datasets.sampler import pack_bins
from ..models.decoder import Decoder
from ..models.logprobs import predicting_states
from ..models.weights import load_config
from .batch import PackedBatch, Rows
from .config import SFTConfig
from .row_trainer import RowTrainer

Example = tuple[np.ndarray, np.ndarray]  # ids int32 and mask bool of a demonstration, each (length,)


class SFTTrainer(RowTrainer):
    """SFTTrainer(model="folder", args=SFTConfig(…), train_dataset=rows).train(); also .evaluate(), .save_model(folder)

    Rows as cukit.datasets.sources says. The loss is on what the assistant says (completion_only_loss=False: on
    everything). Sequences are always packed without padding and never see one another. `packing` makes a training row
    of as many whole demonstrations as fit in max_length tokens. An epoch is each row once: its last batch may be
    smaller. The loss is a mean over the learnt tokens of the whole optimizer batch, however it is split.
    init_from_config starts from random weights (seed) of the folder's config.json.
    """

    label = "sft"
    args: SFTConfig

    def load_model(self, folder: Path, device: str, dtype: str) -> Decoder:
        if not self.args.init_from_config:
            return super().load_model(folder, device, dtype)
        model = Decoder(load_config(folder, "lm_head"), backend_for(device), dtype, tensor=self.ranks.tensor)
        model.init_weights(self.args.seed)
        return model

    def prepare_rows(self, rows: list[dict], name: str) -> list[list[Example]]:
        """A list of rows to draw from, each a list of (ids, mask): one demonstration, or several with `packing`.

        ids int32 and mask bool are arrays (length,).
        """
        field = self.args.dataset_text_field
        if field != "text":
            rows = [{**row, "text": row[field]} if field in row else row for row in rows]
        if self.args.completion_only_loss:
            _refuse_plain_text(rows, name)
        context = self.model.config.max_position_embeddings
        limit = min(self.args.max_length or context, context)
        try:
            examples, counts = encode_sft_rows(
                rows, self.tokenizer, limit, self.args.chat_template_kwargs, self.model.config.vocab_size
            )
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        for what, count in counts.items():
            if count:
                self.say(
                    f"{name}: {count} of {len(rows)} rows {what}: longer than {limit} tokens "
                    "(max_length, or the model's context)"
                )
        if self.args.completion_only_loss is False:
            examples = [(ids, [1] * len(ids)) for ids, _ in examples]
        arrays = [(np.asarray(ids, np.int32), np.asarray(mask, bool)) for ids, mask in examples]
        if self.args.packing and name == "train_dataset":
            return [
                [arrays[i] for i in chosen]
                for chosen in pack_bins([len(ids) for ids, _ in arrays], self.args.max_length or limit)
            ]
        return [[example] for example in arrays]

    def ids_of(self, row: list[Example]) -> Iterable[ArrayLike]:
        return (ids for ids, _ in row)

    def row_lengths(self) -> Iterable[int]:
        return (sum(len(ids) for ids, _ in row) for row in self.train_rows)

    def make_batch(self, step: int) -> tuple[list[Rows], dict]:
        chosen = self.sampler.take(self.rows_a_step)
        batch = self._pack([example for row in chosen for example in self.train_rows[row]])
        self.num_tokens += batch.num_tokens
        parts = batch.micro_batches(0, self.args.max_tokens_per_batch, self.ranks.share)
        return parts, {"step_tokens": batch.num_tokens}

    def _pack(self, examples: list[Example]) -> PackedBatch:
        """Demonstrations as a batch on the device, each learnt token with the weight of a mean over all of them."""
        be = self.model.backend
        batch = PackedBatch.build([ids for ids, _ in examples], np.concatenate([mask for _, mask in examples]))
        count = len(batch.targets)
        batch.weights = np.full(count, 1.0 / max(count, 1), be.accumulator(self.model.dtype))
        return batch.to(be)

    def compute_loss(self, rows: Rows) -> tuple[Tensor, dict[str, np.ndarray]]:
        correct: list[Any] = []  # targets that are the most probable token, chunk by chunk

        def count_correct(logits: Any, part: slice) -> None:
            correct.append((logits[:, : self.model.vocab_size].argmax(axis=1) == rows.targets[part]).sum())

        def cross_entropy(logprobs: Tensor, entropy: Tensor, part: slice | None) -> tuple[Tensor, None]:
            return -(logprobs * rows.part(part).weights).sum(), None

        hidden = predicting_states(self.model, rows.tokens)
        loss, _, _, entropy = self.model.lm_head.loss(
            hidden, rows.targets, cross_entropy, self.upstream, on_logits=count_correct
        )
        return loss, {
            "entropy": entropy.sum(),
            "learnt": np.asarray(rows.num_learnt),
            "correct": sum(correct),
        }

    def step_metrics(self, sums: dict) -> dict:
        count = max(float(sums["learnt"]), 1.0)
        return {"entropy": float(sums["entropy"]) / count, "mean_token_accuracy": float(sums["correct"]) / count}

    def run_evaluation(self) -> dict:
        """eval/loss, eval/mean_token_accuracy, eval/entropy: means over all learnt tokens of eval_dataset."""
        batch = self._pack([example for row in self.eval_rows for example in row])
        parts = batch.micro_batches(0, self.args.max_tokens_per_batch, self.ranks.share)
        total = self.ranks.add_up(lambda: self.evaluated(parts), "evaluation")
        return {"eval/loss": float(total.pop("loss"))} | {
            f"eval/{name}": value for name, value in self.step_metrics(total).items()
        }


def _refuse_plain_text(rows: list[dict], name: str) -> None:
    """ValueError that names the first row without a completion, all of which would be learnt."""
    for index, row in enumerate(rows):
        if "text" in row and not row.keys() & {"prompt", "messages"}:
            raise ValueError(
                f"{name}: data row {index} is plain text, and completion_only_loss=true is about completions: give "
                "rows with a prompt and a completion, or leave it out to learn all of the text"
            )
