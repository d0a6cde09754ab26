"""The evaluation of a GRPO run: completions of held-out prompts and their rewards."""

from __future__ import annotations

import time

from .rewarding import completion_rows, evaluation_metrics
from .rollout import prompt_seed

EVALUATION = 2**63  # the "step" in the seeds of sampled evaluations: one that no training step has


def evaluate(trainer) -> dict:
    """Greedy completions of eval_dataset (num_generations_eval: that many sampled ones) and their rewards.

    eval/accuracy: see rewarding.accuracy; eval/frac_reward_none is the share of completions left out of it.
    """
    args, started = trainer.args, time.perf_counter()
    count, seeds = args.num_generations_eval or 1, None
    sampling = args.sampling_params(n=count, logprobs=False)
    if args.num_generations_eval is None:
        sampling.temperature = 0.0
    else:
        seeds = [prompt_seed(args.seed, EVALUATION, place) for place in range(len(trainer.eval_rows))]
    prompts = [ids for _, ids in trainer.eval_rows]
    samples = trainer.rollout.generate(
        prompts, sampling, seeds, trainer.raise_if_stopped, row_of=lambda place: trainer.eval_rows[place][0]
    )
    rows = [trainer.eval_rows[group][0] for group in samples.groups]
    with trainer.interruptible():
        rewards, by_function = trainer.scorer(rows, samples, trainer.tokenizer)
    if trainer.logger is not None:
        shown = completion_rows(rows[:32], samples, trainer.scorer.names, by_function)
        trainer.logger.log_completions(trainer.global_step, shown)
    metrics = evaluation_metrics(trainer.scorer.names, samples, rewards, by_function)
    return metrics | {"eval/runtime": time.perf_counter() - started}
