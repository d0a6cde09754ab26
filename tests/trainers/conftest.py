"""A random model small enough to train in milliseconds, with the bundled tokenizer, and rows it can be asked."""

import json
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from cukit import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer, SFTConfig, SFTTrainer
from cukit.backend import backend_for
from cukit.datasets.demonstrations import encode_prompts
from cukit.engine.config import SamplingParams
from cukit.models.config import ModelConfig
from cukit.models.decoder import Decoder
from cukit.runs.metrics import read_jsonl
from cukit.tokenizer import Tokenizer
from cukit.trainers.environment import EnvironmentMaker
from cukit.trainers.episodes import Episodes
from cukit.trainers.rollout import Rollout

from ..engine.helpers import check_engine
from .playing import ROWS, SHORT, Asking

FOLDER = Path(__file__).parents[2] / "data" / "tiny-qwen3"


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer.from_folder(FOLDER)


@pytest.fixture
def make_model():
    """make_model(dtype="float32", seed=0, **changes of config.json): 2 layers, hidden 32, context 96."""
    raw = json.loads((FOLDER / "config.json").read_text())
    raw |= {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 96,
    }

    def make(dtype="float32", seed=0, **changes):
        model = Decoder(ModelConfig.from_json(raw | changes), backend_for("cpu"), dtype)
        model.init_weights(seed)
        return model

    return make


@pytest.fixture
def rows():
    """12 rows with conversational prompts of different lengths."""
    return [
        {"prompt": [{"role": "user", "content": "+".join(map(str, range(i % 5 + 1)))}], "answer": str(i)}
        for i in range(12)
    ]


def weights_of(model):
    return {name: parameter.data.copy() for name, parameter in model.named_parameters().items()}


def share_of_ones(completions, **_):
    """A dense reward: the share of the characters that are "1"."""
    texts = [completion[0]["content"] if isinstance(completion, list) else completion for completion in completions]
    return [text.count("1") / max(len(text), 1) for text in texts]


def equal(completions, **_):
    return [0.5] * len(completions)


@pytest.fixture
def make_grpo(make_model, tokenizer, tmp_path, rows):
    """make_grpo(reward, dtype=, train_dataset=, **options) -> a GRPOTrainer of 16 completions a step."""
    numbers = count()

    def build(
        reward=share_of_ones,
        dtype="float32",
        train_dataset=None,
        eval_dataset=None,
        callbacks=(),
        model=None,
        **options,
    ):
        options = (
            dict(
                output_dir=str(tmp_path / f"run{next(numbers)}"),
                learning_rate=1e-2,
                max_steps=2,
                logging_steps=1,
                lr_scheduler_type="constant",
                per_device_train_batch_size=16,
                num_generations=4,
                max_completion_length=6,
                gradient_checkpointing=False,
                save_steps=0,
            )
            | options
        )
        rewards = reward if isinstance(reward, list) else [reward]
        model = make_model(dtype) if model is None else model
        args = GRPOConfig(**options)
        return GRPOTrainer(model, rewards, args, train_dataset or rows, eval_dataset, tokenizer, callbacks)

    return build


@pytest.fixture
def make_ppo(make_model, tokenizer, tmp_path, rows):
    """make_ppo(reward, dtype=, **options) -> a PPOTrainer of 12 completions a rollout and one pass over it."""
    numbers = count()

    def build(reward=share_of_ones, dtype="float32", train_dataset=None, eval_dataset=None, callbacks=(), model=None,
              environment_factory=None, **options):  # fmt: skip
        options = (
            dict(
                output_dir=str(tmp_path / f"ppo{next(numbers)}"),
                learning_rate=1e-2,
                max_steps=2,
                logging_steps=1,
                lr_scheduler_type="constant",
                per_device_train_batch_size=12,
                num_ppo_epochs=1,
                max_completion_length=6,
                temperature=1.0,
                gradient_checkpointing=False,
                save_steps=0,
            )
            | options
        )
        if "response_length" in options:
            del options["max_completion_length"]
        return PPOTrainer(
            make_model(dtype) if model is None else model,
            reward,
            PPOConfig(**options),
            train_dataset or rows,
            eval_dataset,
            tokenizer,
            callbacks,
            environment_factory=environment_factory,
        )

    return build


def logged(trainer, name):
    """Every value of a metric in metrics.jsonl."""
    lines = (trainer.run_folder / "metrics.jsonl").read_text().splitlines()
    return [row[name] for row in map(json.loads, lines) if name in row]


def assert_equal_weights(first, second):
    for (name, x), y in zip(weights_of(first.model).items(), weights_of(second.model).values(), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)


# ---- SFT runs and what they leave ----


def demonstrations(count=12):
    return [{"prompt": "1" + "+1" * (i % 4) + "=", "completion": str(i % 4 + 1)} for i in range(count)]


@pytest.fixture
def make_sft(make_model, tokenizer, tmp_path):
    """make_sft(cls=, callbacks=, model=, **options) -> an SFTTrainer of 4 rows a step."""
    numbers = count()

    def build(cls=SFTTrainer, callbacks=(), model=None, rows=None, evaluate=None, **options):
        options = (
            dict(
                output_dir=str(tmp_path / f"sft{next(numbers)}"),
                learning_rate=1e-2,
                max_steps=4,
                logging_steps=1,
                per_device_train_batch_size=4,
                save_steps=0,
            )
            | options
        )
        return cls(
            model or make_model(),
            args=SFTConfig(**options),
            train_dataset=rows or demonstrations(),
            eval_dataset=evaluate,
            processing_class=tokenizer,
            callbacks=callbacks,
        )

    return build


def rows_without_times(run_folder):
    """metrics.jsonl without wall-clock times."""
    timed = ("time/", "step_time", "tokens_per_second", "eval/runtime", "eps")
    return [
        {name: value for name, value in row.items() if not name.startswith(timed)}
        for row in read_jsonl(Path(run_folder) / "metrics.jsonl")
    ]


# ---- episodes ----


@pytest.fixture
def play(make_model, tokenizer):
    """play(environment class, rows=, options of the engine, …) -> (Samples, Rollout)."""

    def run(factory=Asking, rows=ROWS, dtype="float64", tools=None, max_iterations=None, seeds=None, sampling=None,
            model=None, between_steps=None, **options):  # fmt: skip
        options = {"max_model_len": 96, "block_size": 4} | options
        rollout = Rollout(model or make_model(dtype), tokenizer, **options)
        maker = EnvironmentMaker(factory, tools)
        rollout.episodes = Episodes(rollout.llm, maker, None, max_iterations)
        prompts = encode_prompts(maker.with_tools(rows), tokenizer)
        seeds = [100 + 7 * i for i in range(len(rows))] if seeds is None else seeds
        params = SamplingParams(**SHORT | (sampling or {}))
        samples = rollout.generate(prompts, params, seeds, between_steps, row_of=rows.__getitem__)
        check_engine(rollout.llm)
        core = rollout.llm.core
        assert not core.requests and not core.scheduler.held, "nothing is left behind"
        assert core.blocks.num_free == core.blocks.num_blocks
        return samples, rollout

    return run
