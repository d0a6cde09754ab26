"""eval: complete the rows of a data file with a model, and report the rewards."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..datasets.config import PromptOptions, RowOptions
from ..datasets.tasks import TASKS, find_tasks
from ..engine.config import LORA_OPTIONS, EngineConfig, MemoryOptions, SamplingParams
from ..models.config import DTYPES
from ..options import Options, check_range, given_values, nested, option, require
from ..parallel.config import ParallelOptions
from ..rewards.config import RewardLimits
from ..trainers.evaluation_config import pass_at_k_values
from .chat import TINY_MODEL
from .dry_run import show_engine
from .parser import bundled, make, say

TEST_ROWS = "data/arithmetic/test.jsonl"
CUT_SHARE = 0.5  # above this the user is told, as in training


class EvalOptions(Options):
    group = "files"
    model: str = option(TINY_MODEL, "model folder (Hugging Face format), a run folder, or a name of the hub")
    data: str = option(
        TEST_ROWS,
        "rows to answer: a file (jsonl, json, csv, parquet), a folder or pattern of files, or a name of the "
        "hub (owner/name[@revision][:configuration[:split]]; where no split is named: test)",
    )
    tasks: list[str] | None = option(
        None, f"benchmarks that know their rows, prompt and reward: {', '.join(TASKS)}; with --data one, on these rows"
    )
    output: str | None = option(None, "write every answer to this file, JSONL")
    limit: int | None = option(None, "only the first rows")
    dry_run: bool = option(False, "print the resolved options and the plan of memory, then end")
    reward_funcs: list[str] | None = option(
        None,
        "rewards by name (exact, boxed, gsm8k, …) or path/file.py:function; right means that the first is at least 1",
        group="rewards",
    )
    reward_limits: RewardLimits = nested(RewardLimits)
    pass_at_k: list[int] | None = option(
        None, "the k of pass@k where n is above 1; default: powers of two up to n", group="rewards"
    )
    environment: str | None = option(
        None, "what answers the model between its turns: path/file.py:Class", group="environment", is_place=True
    )
    tools: list[str] | None = option(
        None, "functions that the model may call: path/file.py:function,function", group="environment"
    )
    max_tool_calling_iterations: int | None = option(
        None, "most answers of an environment in a completion; default: no limit", group="environment"
    )
    chat_template_kwargs: dict | None = option(None, "arguments of the chat template, as JSON", group="generation")
    device: str = option("auto", "where to run", ("auto", "cpu", "cuda"), "device and memory")
    dtype: str = option(
        "auto", "weights and activations; auto: bfloat16 on cuda, float32 on cpu", DTYPES, "device and memory"
    )
    rows: RowOptions = nested(RowOptions)
    prompts: PromptOptions = nested(PromptOptions)
    sampling: SamplingParams = nested(SamplingParams, without=("logprobs",), temperature=0.0)
    memory: MemoryOptions = nested(MemoryOptions)
    engine: EngineConfig = nested(EngineConfig, without=("seed", *LORA_OPTIONS))
    parallel: ParallelOptions = nested(ParallelOptions, without=("fast_reduction", "zero_stage"))

    @classmethod
    def respelled(cls, values: dict[str, Any]) -> dict[str, Any]:
        return RowOptions.respelled(values)

    def __post_init__(self) -> None:
        check_range(self, "limit", 1)
        check_range(self, "max_tool_calling_iterations", 1)
        pass_at_k_values(self.pass_at_k, self.sampling.n, "n")
        if self.tasks is not None:
            names = list(find_tasks(self.tasks))
            require(
                len(names) == 1 or "data" not in self.given,
                f"data={self.data} are the rows of one task, but tasks names {len(names)}: {', '.join(names)}",
            )


def evaluate(values: dict[str, Any]) -> None:
    from ..backend import backend_for
    from ..engine.memory import hold_memory
    from ..models.weights import load_model, model_folder, tokenizer_folders
    from ..runs.evaluations import write_answers
    from ..runs.files import check_writable
    from ..tokenizer import Tokenizer
    from ..trainers.environment import make_maker
    from ..trainers.episodes import Episodes
    from ..trainers.ranks import Ranks
    from ..trainers.rollout import Rollout
    from ..trainers.tensor_parallel import check_plays_alone

    options = make(EvalOptions, values)
    if options.dry_run:
        show_engine(options, options.model, options.engine)
        return
    if options.output:
        check_writable(Path(options.output), "output")
    ranks = Ranks(options=options.parallel)  # before anything of CUDA
    if ranks.several:
        ranks.watch.timeout = options.ddp_timeout
    folder = model_folder(options.model)
    tokenizer = Tokenizer.from_folder(*tokenizer_folders(folder))
    maker, names = make_maker(options.environment, options.tools), find_tasks(options.tasks or []) or [None]
    check_plays_alone(maker, options.tensor_parallel_size)
    suites = [read_suite(options, name, tokenizer, folder, maker) for name in names]
    if options.sampling.n > 1 and options.sampling.temperature == 0:
        say(f"warning: with temperature=0 the n={options.sampling.n} answers to a prompt are equal: raise temperature")
    hold_memory(backend_for(options.device), options.memory.nbytes)
    model = load_model(folder, options.device, options.dtype, tensor=ranks.tensor)
    rollout = Rollout(model, tokenizer, **given_values(options.engine))
    if maker is not None:
        limit = options.max_tool_calling_iterations
        rollout.episodes = Episodes(rollout.llm, maker, options.chat_template_kwargs, limit)
    answers: list[dict] = []
    for suite in suites:
        answers += run_suite(options, suite, rollout, tokenizer, ranks)
        if options.output:  # what is there if a later task fails
            ranks.first(partial(write_answers, Path(options.output), answers), "the answers file")


@dataclass
class Suite:
    """Rows to answer, their prompts as ids, and what scores the answers."""

    task: str | None
    data: str
    rows: list[dict]
    prompts: list[list[int]]
    scorer: Any


def read_suite(options: EvalOptions, task: str | None, tokenizer: Any, folder: Path, maker: Any) -> Suite:
    """The rows of --data or of a task. maker: of environments, or None."""
    from ..datasets.columns import dataset_rows
    from ..datasets.demonstrations import encode_prompts, fit_prompts
    from ..datasets.sources import located, prompt_rows
    from ..models.weights import load_config
    from ..trainers.rewarding import RewardScorer

    data, rewards = options.data, options.reward_funcs
    if task is not None:
        data = options.data if "data" in options.given else bundled(TASKS[task].data)
        rewards = rewards if rewards is not None else [TASKS[task].reward]
    if maker is not None:
        rewards, _ = maker.with_own_reward(rewards)
    scorer = RewardScorer(rewards, limits=options.reward_limits, in_process=maker is not None)
    rows = dataset_rows(data, options.rows, "test", options.limit)
    if task is not None:
        rows = [located(TASKS[task].row, index, row) for index, row in enumerate(rows)]
    rows = prompt_rows(rows)
    config = load_config(folder)
    shown = rows if maker is None else maker.with_tools(rows)
    prompts = encode_prompts(shown, tokenizer, options.chat_template_kwargs, config.vocab_size)
    context = min(config.max_position_embeddings, options.max_model_len or config.max_position_embeddings)
    rows, prompts, said = fit_prompts(rows, prompts, options.prompts, context)
    if said:
        say(said)
    return Suite(task, data, rows, prompts, scorer)


def run_suite(options: EvalOptions, suite: Suite, rollout: Any, tokenizer: Any, ranks: Any) -> list[dict]:
    """Answer and score the rows, of which each rank takes a run, print what came out; returns the rows of the answers
    file, all of them on every rank.
    """
    from ..trainers.evaluation import answer_rows, solved_metrics
    from ..trainers.shared_rollouts import shared_out

    sampling, scorer, seconds = options.sampling, suite.scorer, 0.0
    seeds = seeds_of(sampling, len(suite.prompts), rollout, ranks)

    def draw(places: Sequence[int]) -> tuple:
        nonlocal seconds
        start = time.perf_counter()
        samples = rollout.generate(
            [suite.prompts[place] for place in places],
            sampling,
            seeds and [seeds[place] for place in places],
            row_of=lambda group: suite.rows[places[group]],
        )
        seconds = time.perf_counter() - start
        rows = [suite.rows[places[group]] for group in samples.groups]
        return samples, *ranks.once(lambda: scorer(rows, samples, tokenizer), "rewards")

    samples, _, scores = shared_out(ranks, scorer, range(len(suite.prompts)), draw, "evaluation")
    rows = [suite.rows[group] for group in samples.groups]
    solved = solved_metrics(samples, scores[:, 0], pass_at_k_values(options.pass_at_k, sampling.n, "n"))
    where = f"{suite.task}: {suite.data}" if suite.task else suite.data
    seconds = max(ranks.world.gather_values(seconds))
    lines = report(where, scorer.names, scores, samples.failed, samples.lengths, samples.truncated, seconds, solved)
    lines += [f"  {name} {value:.4f}" for name, value in scorer.recorded_metrics().items()]
    if ranks.is_first:
        print("\n".join(lines))
    if samples.truncated.mean() > CUT_SHARE:
        say(
            f"warning: {samples.truncated.mean():.0%} of the completions were cut off at max_tokens="
            f"{sampling.max_tokens}; raise it unless that is what you want"
        )
    task = {"task": suite.task} if suite.task else {}
    return [task | row for row in answer_rows(rows, samples, scorer.names, scores)]


def seeds_of(sampling: SamplingParams, count: int, rollout: Any, ranks: Any) -> list[int] | None:
    """A seed for each prompt, whichever rank draws it: that of one process, but for episodes that are sampled without a
    seed. None: the engine's.
    """
    if sampling.seed is not None:
        return [sampling.seed] * count
    if not ranks.several:
        return None
    # environments get the place of their prompt where there is no seed
    return rollout.llm.core.take_seeds(count) if sampling.temperature else list(range(count))


def report(
    where: str,
    names: list[str],
    scores: np.ndarray,
    failed: np.ndarray,
    lengths: np.ndarray,
    truncated: np.ndarray,
    seconds: float,
    solved: dict[str, float] | None = None,
) -> list[str]:
    """The lines that eval prints. scores: (completions, rewards), NaN where a reward does not apply."""
    from ..trainers.rewarding import accuracy

    share, share_left_out = accuracy(scores[:, 0], failed)
    left_out = round(share_left_out * len(scores))
    counted = len(scores) - left_out
    if not counted:
        raise ValueError(f"reward {names[0]!r} applies to no row of {where}")
    out = f"; the reward did not apply to {left_out} more" if left_out else ""
    lines = [f"accuracy {share:.4f} ({round(share * counted)} of {counted}{out}; {where})"]
    if solved:
        lines.append("  " + "  ".join(f"{name} {value:.4f}" for name, value in solved.items()))
    for name, found in zip(names, scores.T, strict=True):
        nothing = np.isnan(found).all()
        lines.append(f"  rewards/{name}" + (" applies to no row" if nothing else f"/mean {np.nanmean(found):.4f}"))
    lines.append(
        f"  mean length {lengths.mean():.1f}, cut at max_tokens {truncated.mean():.4f}, "
        f"{lengths.sum() / seconds:,.0f} tokens/s"
    )
    return lines
