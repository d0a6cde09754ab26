"""The evaluation of a GRPO run: completions of held-out prompts, their rewards, avg@n and pass@k."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from ..runs.evaluations import log_evaluation
from .evaluation_config import pass_at_k_values
from .rewarding import completion_rows, evaluation_metrics, nan_mean
from .rollout import Samples, prompt_seed
from .shared_rollouts import shared_out

EVALUATION = 2**63  # the "step" in the seeds of sampled evaluations: one that no training step has


def evaluate(trainer) -> dict:
    """Greedy completions of eval_dataset (num_generations_eval: that many sampled ones) and their rewards.

    eval/accuracy: see rewarding.accuracy; eval/frac_reward_none is the share of completions left out of it. With
    several completions a prompt eval/avg@n and eval/pass@k too. Every answer goes to evaluations/step-N.jsonl.
    """
    args, scorer, started = trainer.args, trainer.eval_scorer, time.perf_counter()
    count = args.num_generations_eval or 1
    sampling = args.sampling_params(n=count, logprobs=False)
    if args.num_generations_eval is None:
        sampling.temperature = 0.0
        seeds = list(range(len(trainer.eval_rows)))  # of environments: the same whichever rank plays them
    else:
        seeds = [prompt_seed(args.seed, EVALUATION, place) for place in range(len(trainer.eval_rows))]

    def draw(places):
        samples = trainer.rollout.generate(
            [trainer.eval_rows[place][1] for place in places],
            sampling,
            [seeds[place] for place in places],
            trainer.raise_if_stopped,
            row_of=lambda group: trainer.eval_rows[places[group]][0],
        )
        rows = [trainer.eval_rows[places[group]][0] for group in samples.groups]
        with trainer.interruptible():
            return samples, *trainer.ranks.once(lambda: scorer(rows, samples, trainer.tokenizer), "rewards")

    places = range(len(trainer.eval_rows))
    samples, rewards, by_function = shared_out(trainer.ranks, scorer, places, draw, "evaluation")
    rows = [trainer.eval_rows[group][0] for group in samples.groups]
    trainer.raise_if_stopped()
    if trainer.logger is not None:
        shown = completion_rows(rows[:32], samples, scorer.names, by_function)
        trainer.logger.log_completions(trainer.global_step, shown)
        log_evaluation(trainer.run_folder, trainer.global_step, answer_rows(rows, samples, scorer.names, by_function))
    ks = pass_at_k_values(args.pass_at_k, count, "num_generations_eval")
    metrics = evaluation_metrics(scorer.names, samples, rewards, by_function)
    solved = solved_metrics(samples, by_function[:, 0], ks)
    metrics |= {f"eval/{name}": value for name, value in (solved | scorer.recorded_metrics()).items()}
    return metrics | {"eval/runtime": time.perf_counter() - started}


def answer_rows(rows: list[dict], samples: Samples, names: list[str], by_function: np.ndarray) -> list[dict]:
    """Rows of an answers file: place of the prompt among the rows, number of the sample, and what was right."""
    numbers: dict[int, int] = {}
    found = completion_rows(rows, samples, names, by_function)
    for entry, row, group in zip(found, rows, samples.groups.tolist(), strict=True):
        numbers[group] = numbers.get(group, -1) + 1
        gold = {name: row[name] for name in ("answer", "solution") if name in row}
        entry |= {"row": group, "sample": numbers[group]} | gold
    return found


def solved_metrics(samples: Samples, first_reward: np.ndarray, ks: Sequence[int]) -> dict[str, float]:
    """{"avg@n", "pass@k" for each k}: means over prompts. {} where each prompt has one completion.

    A completion is right if its first reward is at least 1, and wrong if it failed. One that the reward does not apply
    to (NaN) is no sample of its prompt. A prompt with fewer than k samples is left out of pass@k; with none, of all.
    """
    counts = np.bincount(samples.groups) if len(samples) else np.zeros(0, int)
    if not len(counts) or counts.max() < 2:
        return {}
    failed = samples.failed
    applies = ~np.isnan(first_reward) | failed
    right = np.where(failed, False, np.nan_to_num(first_reward) >= 1) & applies
    n = np.bincount(samples.groups, weights=applies, minlength=len(counts)).astype(int).tolist()
    c = np.bincount(samples.groups, weights=right, minlength=len(counts)).astype(int).tolist()
    pairs = list(zip(n, c, strict=True))
    found = {f"avg@{counts.max()}": nan_mean(np.array([c / n for n, c in pairs if n]))}
    return found | {f"pass@{k}": nan_mean(np.array([pass_at_k(n, c, k) for n, c in pairs if n >= k])) for k in ks}


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k of n samples, c of them right, hold a right one: 1 - C(n - c, k) / C(n, k).

    Unbiased for the chance that k fresh samples do: Chen et al. 2021, "Evaluating Large Language Models Trained on
    Code", equation 1.
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
