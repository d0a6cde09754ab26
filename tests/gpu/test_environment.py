"""Many turns on the GPU: every turn's log-probabilities have the bits of the training forward pass."""

import json
from pathlib import Path

import numpy as np
import pytest

from cukit import Environment, GRPOConfig, GRPOTrainer, SamplingParams
from cukit.backend import backend_for
from cukit.datasets.demonstrations import encode_prompts
from cukit.models.config import ModelConfig
from cukit.models.decoder import Decoder
from cukit.tokenizer import Tokenizer
from cukit.trainers.environment import EnvironmentMaker
from cukit.trainers.episodes import Episodes
from cukit.trainers.rollout import Rollout

pytestmark = pytest.mark.gpu
FOLDER = Path(__file__).parents[2] / "data" / "tiny-qwen3"
DEVICE = "cuda"
ROWS = [{"prompt": [{"role": "user", "content": "+".join(map(str, range(1 + 9 * (i % 5))))}]} for i in range(24)]


class Asking(Environment):
    """Up to five turns, with answers of 1 to 120 characters: further turns cross blocks and chunks of keys."""

    reward = 0.0

    def reset(self, **columns):
        self.rng = np.random.default_rng([self.seed, self.index])
        self.left = int(self.rng.integers(0, 5))

    def respond(self, conversation):
        self.reward += conversation[-1]["content"].count("4")
        self.left -= 1
        return None if self.left < 0 else [{"role": "user", "content": "7" * int(self.rng.integers(1, 120))}]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(FOLDER)


def make_model(dtype):
    raw = json.loads((FOLDER / "config.json").read_text()) | {"max_position_embeddings": 1024, "hidden_size": 256}
    model = Decoder(ModelConfig.from_json(raw), backend_for(DEVICE), dtype)
    model.init_weights(0)
    return model


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 5, "max_num_batched_tokens": 64}, {"num_kv_blocks": 90}])
def test_all_turns_have_the_bits_of_the_training_forward(tokenizer, dtype, options):
    rollout = Rollout(make_model(dtype), tokenizer, max_model_len=800, block_size=16, **options)
    rollout.episodes = Episodes(rollout.llm, EnvironmentMaker(Asking))
    params = SamplingParams(n=4, max_tokens=600, stop=["1", "2", "a", "+"], logprobs=True, temperature=0.8)
    seeds = [100 + 7 * i for i in range(len(ROWS))]
    samples = rollout.generate(encode_prompts(ROWS, tokenizer), params, seeds, None, None, ROWS.__getitem__)
    turns = [sum(message["role"] == "assistant" for message in messages) for messages in samples.messages]
    assert max(turns) == 5 and max(map(len, samples.token_ids)) > 300
    scored = rollout.llm.score([ids.tolist() for ids in samples.token_ids], temperature=0.8)
    compared = different = 0
    for row, values in enumerate(scored):
        learnt = np.asarray(values)[samples.prompt_lengths[row] - 1 :][samples.masks[row]]
        compared += len(learnt)
        different += int((learnt != samples.logprobs[row]).sum())
    print(f"{dtype} {options}: {compared} tokens of {sum(turns)} turns, {different} with other bits")
    assert compared > 1000 and different == 0


def test_training_says_a_difference_of_zero(tokenizer, tmp_path):
    args = GRPOConfig(
        output_dir=str(tmp_path / "run"),
        per_device_train_batch_size=64,
        max_steps=3,
        logging_steps=1,
        max_completion_length=400,
        save_steps=0,
        stop=["1", "2", "a", "+"],
    )
    trainer = GRPOTrainer(
        make_model("bfloat16"), None, args, ROWS, processing_class=tokenizer, environment_factory=Asking
    )
    trainer.train()
    rows = [json.loads(line) for line in (trainer.run_folder / "metrics.jsonl").read_text().splitlines()]
    differences = [row["sampling/sampling_logp_difference/max"] for row in rows if "reward" in row]
    assert differences == [0.0] * 3 and all(row["completions/max_turns"] > 2 for row in rows if "reward" in row)
