"""eval: complete the rows of a data file with a model, and report the rewards."""

import time
from typing import Any

import numpy as np

from ..datasets.config import PromptOptions, RowOptions
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
    model: str = option(TINY_MODEL, "model folder (Hugging Face format), a run folder, or a name of the hub")
    data: str = option(
        TEST_ROWS,
        "rows to answer: a file (jsonl, json, csv, parquet), a folder or pattern of files, or a name of the "
        "hub (owner/name[@revision][:configuration[:split]]; where no split is named: test)",
    )
    limit: int | None = option(None, "only the first rows")
    dry_run: bool = option(False, "print the resolved options and the plan of memory, then end")
    reward_funcs: list[str] | None = option(
        None,
        "rewards by name (exact, boxed, gsm8k, …) or path/file.py:function; right means that the first is at least 1",
        group="rewards",
    )
    chat_template_kwargs: dict | None = option(None, "arguments of the chat template, as JSON", group="generation")
    device: str = option("auto", "where to run", ("auto", "cpu", "cuda"), "device and memory")
    dtype: str = option(
        "auto", "weights and activations; auto: bfloat16 on cuda, float32 on cpu", DTYPES, "device and memory"
    )
    rows: RowOptions = nested(RowOptions)
    prompts: PromptOptions = nested(PromptOptions)
    sampling: SamplingParams = nested(SamplingParams, without=("logprobs",), temperature=0.0)
    engine: EngineConfig = nested(EngineConfig, without=("seed",))

    @classmethod
    def respelled(cls, values: dict[str, Any]) -> dict[str, Any]:
        return RowOptions.respelled(values)

    def __post_init__(self) -> None:
        check_range(self, "limit", 1)


def evaluate(values: dict[str, Any]) -> None:
    from ..datasets.columns import dataset_rows
    from ..datasets.demonstrations import encode_prompts, fit_prompts
    from ..datasets.sources import prompt_rows
    from ..models.weights import load_config, load_model, model_folder
    from ..tokenizer import Tokenizer
    from ..trainers.rewarding import RewardScorer
    from ..trainers.rollout import Rollout

    options = make(EvalOptions, values)
    if options.dry_run:
        show_engine(options, options.model, options.device, options.dtype, options.engine)
        return
    sampling = options.sampling
    scorer = RewardScorer(options.reward_funcs)
    rows = prompt_rows(dataset_rows(options.data, options.rows, "test", options.limit))
    folder = model_folder(options.model)
    tokenizer = Tokenizer.from_folder(folder)
    config = load_config(folder)
    prompts = encode_prompts(rows, tokenizer, options.chat_template_kwargs, config.vocab_size)
    context = min(config.max_position_embeddings, options.max_model_len or config.max_position_embeddings)
    rows, prompts, said = fit_prompts(rows, prompts, options.prompts, context)
    if said:
        say(said)
    model = load_model(folder, options.device, options.dtype)
    rollout = Rollout(model, tokenizer, **given_values(options.engine))
    start = time.perf_counter()
    samples = rollout.generate(prompts, sampling, None if sampling.seed is None else [sampling.seed] * len(prompts))
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
