"""The generation batches of a run: completions are drawn and rewarded, and what is said about them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..autograd import no_grad
from ..models.logprobs import packed_logprobs
from .batch import PackedBatch, Rows
from .dealt_out import dealt_out
from .rewarding import completion_rows
from .rollout import Samples, prompt_seed
from .shared_rollouts import Rewarded, own_part, shared_out

SILENT_BATCHES = 10  # generation batches without any reward after which the user is told


@dataclass
class Drawn:
    """Completions with their rewards."""

    rows: list[dict]  # the data row of each completion
    samples: Samples
    rewards: np.ndarray  # (rows,) weighted sums, NaN where there is none
    by_function: np.ndarray  # (rows, functions)

    def chosen(self, places: np.ndarray) -> Drawn:
        """Those of the given places only."""
        rows = [self.rows[place] for place in places.tolist()]
        return Drawn(rows, self.samples.rows(places), self.rewards[places], self.by_function[places])


class Generation(ABC):
    """Draws and rewards what a PolicyTrainer trains on. A method makes its batch of that."""

    def __init__(self, trainer):
        self.trainer = trainer
        self._warned_cut, self._warned_none, self._silent_batches = False, False, 0
        self.balance: dict[str, float] = {}  # metrics of groups that moved, of the newest generation batch

    @abstractmethod
    def batch(self, number: int) -> tuple[PackedBatch | None, dict]:
        """The generation batch of this number, on the device, and its metrics; None on a rank that does not train."""

    def draw(self, number: int) -> Drawn:
        """Completions of the next prompts."""
        data_rows = self.trainer.sampler.take(self.trainer.args.prompts_a_generation)
        return self.rewarded(data_rows, *self.answered(number, data_rows, range(len(data_rows))))

    def answered(self, number: int, data_rows: list[int], places: Sequence[int]) -> Rewarded:
        """Completions of the prompts at these places of data_rows, and their rewards; of several ranks each draws and
        rewards its share; with balance_rollouts, groups move between them while they are drawn. The samples' groups are
        numbers within `places`.
        """
        trainer, apart = self.trainer, self.trainer.apart
        given = trainer.ranks, trainer.scorer, places, partial(self._draw, number, data_rows)
        if apart is None:
            return self._dealt(number, data_rows, places) if self._balances else shared_out(*given, "rollout")
        apart.send_weights()
        with apart.waiting():
            found = shared_out(*given, "rollout", partial(apart.part_of, data_rows, partial(own_part, *given)))
        apart.exchange_times()
        return found

    def _draw(self, number: int, data_rows: list[int], places: Sequence[int]) -> Rewarded:
        samples = self.complete(number, data_rows, places)
        return samples, *self.score([data_rows[place] for place in places], samples)

    def draw_ahead(self, number: int) -> None:
        """Draw this rank's part of a later batch now. The data position stays: the batch is yet to be asked for."""
        trainer, before = self.trainer, self.trainer.sampler.state_dict()
        data_rows = trainer.sampler.take(trainer.args.prompts_a_generation)
        trainer.sampler.load_state(before)
        draw = partial(self._draw, number, data_rows)
        part = partial(own_part, trainer.ranks, trainer.scorer, range(len(data_rows)), draw)
        trainer.apart.draw_ahead(data_rows, part)

    def _dealt(self, number: int, data_rows: list[int], places: Sequence[int]) -> Rewarded:
        def complete(dealt):
            return self.complete(number, data_rows, places, dealt=dealt)

        def score(places, samples):
            return self.score([data_rows[place] for place in places], samples)

        found, metrics = dealt_out(self.trainer.ranks, self.trainer.scorer, places, complete, score, "rollout")
        self.balance = {name: self.balance.get(name, 0) + value for name, value in metrics.items()}
        return found

    @property
    def _balances(self) -> bool:
        """Whether groups move. auto: where the composition of a batch, and so the clock, changes no bit."""
        trainer, engine = self.trainer, self.trainer.args.engine
        ranks = trainer.ranks
        if ranks.size == 1 or ranks.tensor is not None or trainer.environments is not None:
            return False
        exact = trainer.model.backend.name != "cpu" and engine.exact != "false" and not engine.roundings
        return {"auto": exact, "true": True, "false": False}[trainer.args.balance_rollouts]

    def complete(self, number: int, data_rows: list[int], places: Sequence[int], more=None, dealt=None) -> Samples:
        """Completions of the prompts at these places of data_rows, to which `more` (see Rollout.generate) may add. What
        is drawn depends on a prompt's place, and not on the rank that draws it.
        """
        trainer, args = self.trainer, self.trainer.args
        with trainer.timer("generate"):
            return trainer.rollout.generate(
                [trainer.train_rows[data_rows[place]][1] for place in places],
                args.sampling_params(n=args.num_generations),
                [prompt_seed(args.seed, number, place) for place in places],
                trainer.raise_if_stopped,
                more,
                lambda group: trainer.train_rows[data_rows[places[0] + group]][0],
                dealt,
            )

    def score(self, data_rows: Sequence[int], samples: Samples) -> tuple[np.ndarray, np.ndarray]:
        """(rewards (rows,), by function (rows, functions)); data_rows: of each group of the samples."""
        trainer = self.trainer
        rows = [trainer.train_rows[data_rows[group]][0] for group in samples.groups]
        with trainer.timer("reward"), trainer.interruptible():
            return trainer.ranks.once(lambda: trainer.scorer(rows, samples, trainer.tokenizer), "rewards")

    def rewarded(self, data_rows: list[int], samples: Samples, rewards, by_function) -> Drawn:
        """Count the tokens, and warn of what most often makes a run learn nothing."""
        trainer = self.trainer
        trainer.num_tokens += sum(map(len, samples.token_ids))
        self._warn(samples, rewards)
        rows = [trainer.train_rows[data_rows[group]][0] for group in samples.groups]
        return Drawn(rows, samples, rewards, by_function)

    def logprobs_by(self, model, batch: PackedBatch):
        """A model's log-probabilities of the learnt tokens, on the device."""
        args, ranks = self.trainer.args, self.trainer.ranks.training
        found, borders = model.backend.empty(batch.targets.shape, batch.logprobs.dtype), ranks.borders(batch.lengths)
        with no_grad():
            for first, last in batch.cut(args.max_tokens_per_batch, *borders[ranks.rank : ranks.rank + 2], True):
                rows = Rows(batch, first, last)
                logprobs, _ = packed_logprobs(model, rows.shared_tokens, args.temperature)
                rows.of(found)[...] = logprobs.data
        ranks.fill(found, batch.cu_learnt[borders], model.backend)
        return found

    def show(self, drawn: Drawn, count: int, advantages: np.ndarray | None = None) -> None:
        """The first `count` completions into completions.jsonl, the first one on the screen if that is wanted."""
        trainer, step = self.trainer, self.trainer.global_step + 1
        rows, samples, rewards = drawn.rows[:count], drawn.samples, drawn.rewards
        if trainer.logger is not None:
            names, tokenizer = trainer.scorer.names, trainer.tokenizer
            shown = completion_rows(rows, samples, names, drawn.by_function, advantages, tokenizer)
            trainer.logger.log_completions(step, shown)
        last, every = step - 1 + trainer.updates_a_generation, trainer.args.logging_steps
        if trainer.args.log_completions and last // every > (step - 1) // every:  # one of its steps is logged
            trainer.say(f"prompt {rows[0]['prompt']!r}\ncompletion {samples.texts[0]!r} reward {rewards[0]:g}")

    def _warn(self, samples: Samples, rewards: np.ndarray) -> None:
        """Say once what most often makes a run learn nothing: cut-off completions, and a reward that is never given."""
        trainer = self.trainer
        if failed := int(samples.failed.sum()):
            trainer.say(
                f"step {trainer.global_step + 1}: {failed} of {len(samples)} completions failed, since the model's "
                "log-probabilities are not finite; left out"
            )
        if not self._warned_cut and samples.truncated.mean() > 0.5:
            self._warned_cut = True
            limit = trainer.args.max_completion_length
            where = f"at max_completion_length={limit}; raise it unless that is what you want"
            if (samples.lengths[samples.truncated] < limit).all():
                where = (
                    f"where max_model_len, the context, ends, before max_completion_length={limit}: take shorter "
                    "prompts or more memory for the KV cache"
                )
            trainer.say(f"warning: {samples.truncated.mean():.0%} of the completions were cut off {where}")
        if not self._warned_none and np.isnan(rewards[~samples.failed]).all() and not samples.failed.all():
            self._warned_none = True
            trainer.say(
                "warning: no reward applies to any completion of this generation batch (all are None), so that nothing "
                "is learnt from it; look at reward_funcs and the columns of the data"
            )
        self._silent_batches = self._silent_batches + 1 if not np.any(np.nan_to_num(rewards) != 0) else -math.inf
        if self._silent_batches == SILENT_BATCHES:
            trainer.say(
                f"warning: every reward of the first {SILENT_BATCHES} generation batches was 0; "
                "look at completions.jsonl"
            )
