"""Supervised fine-tuning: −log p of the demonstrated tokens, the mean over all of them in an optimizer batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..autograd import no_grad
from ..backend import backend_for
from ..datasets.demonstrations import encode_sft_rows
from ..datasets.sampler import pack
from ..models.decoder import Decoder
from ..models.logprobs import batches_by_tokens
from ..models.logprobs import pack as pack_sequences
from ..models.weights import load_config
from ..ops import index_rows, lm_head_logprobs
from .trainer import Trainer


@dataclass
class _Examples:
    """One micro-batch: token ids and masks of whole demonstrations, and the weight of each learnt token in the loss."""

    sequences: list[list[int]]
    masks: list[list[int]]
    weight: float


class SFTTrainer(Trainer):
    """SFTTrainer(model="folder", args=SFTConfig(…), train_dataset=rows).train(); also .evaluate(), .save_model(folder)

    Rows as cukit.data says. The loss is on what the assistant says (completion_only_loss=False: on everything).
    Sequences are always packed without padding and never see one another. `packing` makes a training row of as many
    whole demonstrations as fit in max_length tokens. The loss is a mean over the learnt tokens of the whole optimizer
    batch, however it is split. init_from_config starts from random weights (seed) of the folder's config.json.
    """

    label = "sft"

    def load_model(self, folder, device, dtype):
        if not self.args.init_from_config:
            return super().load_model(folder, device, dtype)
        model = Decoder(load_config(folder), backend_for(device), dtype)
        model.init_weights(self.args.seed)
        return model

    def prepare_rows(self, rows, name):
        """A list of rows to draw from, each a list of (ids, mask): one demonstration, or several with `packing`."""
        field = self.args.dataset_text_field
        if field != "text":
            rows = [{**row, "text": row[field]} if field in row else row for row in rows]
        limit = min(self.args.max_length, self.model.config.max_position_embeddings)
        try:
            examples, counts = encode_sft_rows(rows, self.tokenizer, limit, self.args.chat_template_kwargs)
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
        if self.args.packing and name == "train_dataset":
            return [
                [examples[i] for i in chosen]
                for chosen in pack([len(ids) for ids, _ in examples], self.args.max_length)
            ]
        return [[example] for example in examples]

    def count_steps(self):
        if self.args.max_steps > 0:
            return self.args.max_steps
        return max(1, math.ceil(self.args.num_train_epochs * len(self.train_rows) / self._rows_a_step()))

    def _rows_a_step(self):
        return self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps

    def make_batch(self, step):
        chosen = self.sampler.take(self._rows_a_step())
        examples = [example for row in chosen for example in self.train_rows[row]]
        tokens = sum(len(ids) for ids, _ in examples)
        self.num_tokens += tokens
        return list(self._micro_batches(examples)), {"step_tokens": tokens}

    def _micro_batches(self, examples):
        learnt = sum(sum(mask[1:]) for _, mask in examples)
        for batch in batches_by_tokens([len(ids) for ids, _ in examples], self.args.max_tokens_per_batch):
            yield _Examples([examples[i][0] for i in batch], [examples[i][1] for i in batch], 1.0 / max(learnt, 1))

    def compute_loss(self, micro_batch):
        model, be = self.model, self.model.backend
        tokens, positions, attend = pack_sequences(model, micro_batch.sequences)
        # the first token has nothing before it; the token at row t is predicted by the hidden state of row t − 1
        learnt = np.concatenate([[False, *map(bool, mask[1:])] for mask in micro_batch.masks])
        rows = be.array(np.flatnonzero(learnt).astype(np.int32))
        hidden = index_rows(model.forward(tokens, positions, attend), rows - 1)
        logprobs, entropy = lm_head_logprobs(hidden, model.lm_head.weight, tokens[rows], 1.0, self.tokenizer_limit)
        loss = logprobs.sum() * -micro_batch.weight
        return loss, {
            "entropy": entropy.data.sum(),
            "learnt": np.asarray(len(rows)),
            "correct": self._count_correct(hidden.data, tokens[rows]),
        }

    @property
    def tokenizer_limit(self):
        """Ids the tokenizer does not have are left out of the normaliser, as they are in sampling."""
        return min(self.tokenizer.vocab_size, self.model.config.vocab_size)

    def _count_correct(self, hidden, targets, chunk_rows=4096):
        """How many targets are the most probable token (an extra product with the head, without the tape)."""
        be, head, limit = self.model.backend, self.model.lm_head.weight.data, self.tokenizer_limit
        starts = range(0, len(targets), chunk_rows)
        parts = [slice(start, start + chunk_rows) for start in starts]
        return sum(
            (be.linear_forward(hidden[part], head)[:, :limit].argmax(axis=1) == targets[part]).sum() for part in parts
        )

    def step_metrics(self, sums):
        count = max(float(sums["learnt"]), 1.0)
        return {"entropy": float(sums["entropy"]) / count, "mean_token_accuracy": float(sums["correct"]) / count}

    def run_evaluation(self):
        """eval/loss, eval/mean_token_accuracy, eval/entropy: means over all learnt tokens of eval_dataset."""
        be, total = self.model.backend, {}
        with no_grad():
            for micro_batch in self._micro_batches([example for row in self.eval_rows for example in row]):
                loss, extra = self.compute_loss(micro_batch)
                for name, value in (extra | {"loss": loss.data}).items():
                    total[name] = total.get(name, 0.0) + float(be.to_numpy(value))
        return {"eval/loss": total.pop("loss")} | {
            f"eval/{name}": value for name, value in self.step_metrics(total).items()
        }
