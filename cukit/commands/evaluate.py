"""eval: complete the rows of a data file with a model, and report the rewards."""

import time
from typing import Any

import numpy as np

from ..engine.config import EngineConfig, SamplingParams
from ..models.config import DTYPES
from ..options import Options, check_range, given_values, nested, option
from .dry_run import show_engine
from .generate import TINY_MODEL
from .parser import make, say

TEST_ROWS = "data/arithmetic/test.jsonl"
CUT_SHARE = 0.5  # above this the user is told, as in training


class EvalOptions(Options):
    group = "files"
    model: str = option(TINY_MODEL, "model folder (Hugging Face format), or a run folder")
    data: str = option(TEST_ROWS, "rows to answer, JSONL")
    limit: int | None = option(None, "only the first rows")
    dry_run: bool = option(False, "print the resolved options and the plan of memory, then end")
    reward_funcs: list[str] | None = option(
        None,
        "rewards by name (exact, boxed, gsm8k, …) or path/file.py:function; right means that the first is at least 1",
        group="rewards",
    )
    environment: str | None = option(
        None, "what answers the model between its turns: path/file.py:Class", group="environment"
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
    sampling: SamplingParams = nested(SamplingParams, without=("logprobs",), temperature=0.0)
    engine: EngineConfig = nested(EngineConfig, without=("seed",))

    def __post_init__(self) -> None:
        check_range(self, "limit", 1)
        check_range(self, "max_tool_calling_iterations", 1)


def evaluate(values: dict[str, Any]) -> None:
    from ..datasets.demonstrations import encode_prompts
    from ..datasets.sources import load_rows, prompt_rows
    from ..models.weights import load_config, load_model, model_folder
    from ..tokenizer import Tokenizer
    from ..trainers.environment import make_maker
    from ..trainers.episodes import Episodes
    from ..trainers.rewarding import RewardScorer
    from ..trainers.rollout import Rollout

    options = make(EvalOptions, values)
    if options.dry_run:
        show_engine(options, options.model, options.device, options.dtype, options.engine)
        return
    sampling = options.sampling
    maker, rewards = make_maker(options.environment, options.tools), options.reward_funcs
    scorer = RewardScorer(rewards if maker is None else maker.with_own_reward(rewards)[0])
    rows = prompt_rows(load_rows(options.data))[: options.limit]
    folder = model_folder(options.model)
    tokenizer = Tokenizer.from_folder(folder)
    model_rows = load_config(folder).vocab_size
    shown = rows if maker is None else maker.with_tools(rows)
    prompts = encode_prompts(shown, tokenizer, options.chat_template_kwargs, model_rows)
    model = load_model(folder, options.device, options.dtype)
    rollout = Rollout(model, tokenizer, **given_values(options.engine))
    if maker is not None:
        limit = options.max_tool_calling_iterations
        rollout.episodes = Episodes(rollout.llm, maker, options.chat_template_kwargs, limit)
    start, seeds = time.perf_counter(), None if sampling.seed is None else [sampling.seed] * len(prompts)
    samples = rollout.generate(prompts, sampling, seeds, row_of=rows.__getitem__)
    seconds = time.perf_counter() - start
    _, scores = scorer([rows[group] for group in samples.groups], samples, tokenizer)
    for line in report(options, scorer.names, scores, samples.failed, samples.lengths, samples.truncated, seconds):
        print(line)
    if samples.truncated.mean() > CUT_SHARE:
        say(
            f"warning: {samples.truncated.mean():.0%} of the completions were cut off at max_tokens="
            f"{sampling.max_tokens}; raise it unless that is what you want"
        )


def report(
    options: EvalOptions,
    names: list[str],
    scores: np.ndarray,
    failed: np.ndarray,
    lengths: np.ndarray,
    truncated: np.ndarray,
    seconds: float,
) -> list[str]:
    """The lines that eval prints. scores: (completions, rewards), NaN where a reward does not apply."""
    from ..trainers.rewarding import accuracy

    share, share_left_out = accuracy(scores[:, 0], failed)
    left_out = round(share_left_out * len(scores))
    counted = len(scores) - left_out
    if not counted:
        raise ValueError(f"reward {names[0]!r} applies to no row of {options.data}")
    out = f"; the reward did not apply to {left_out} more" if left_out else ""
    lines = [f"accuracy {share:.4f} ({round(share * counted)} of {counted}{out}; {options.data})"]
    for name, found in zip(names, scores.T, strict=True):
        nothing = np.isnan(found).all()
        lines.append(f"  rewards/{name}" + (" applies to no row" if nothing else f"/mean {np.nanmean(found):.4f}"))
    lines.append(
        f"  mean length {lengths.mean():.1f}, cut at max_tokens {truncated.mean():.4f}, "
        f"{lengths.sum() / seconds:,.0f} tokens/s"
    )
    return lines
