"""Host time of a decode step, without model and draw: python tests/engine/host_time.py [rows …]

The stand-in model computes nothing and the draw gives zeros, so what is left is the engine's own work. Times are the
least and the median of many steps; compare numbers of one machine only. Runs on older commits too.
"""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from cukit import SamplingParams
from cukit.autograd import Tensor
from cukit.backend import backend_for
from cukit.engine.llm import LLM

STEPS, PROMPT, BLOCK = 400, 30, 16


class NoModel:
    """logits are None; see the draw below."""

    def __init__(self):
        self.backend, self.dtype = backend_for("cpu"), np.dtype(np.float32)
        self.config = SimpleNamespace(
            vocab_size=100,
            max_position_embeddings=PROMPT + STEPS + 20,
            num_hidden_layers=1,
            hidden_size=1,
            num_key_value_heads=1,
            head_dim=1,
            eos_token_id=None,
        )

    def forward(self, tokens, positions, attend):
        return Tensor(np.zeros((len(tokens), 1), np.float32))

    def logits(self, hidden):
        return hidden


def measure(rows: int) -> tuple[float, float, float]:
    """(least, median, mean) microseconds of a step of `rows` rows."""
    model = NoModel()
    backend = model.backend
    backend.sample = lambda logits, *_: (np.zeros(len(logits), np.int32), np.zeros(len(logits), np.float32))
    length = PROMPT + STEPS + 10
    llm = LLM.from_model(
        model,
        None,
        max_model_len=length,
        max_num_seqs=rows,
        block_size=BLOCK,
        num_kv_blocks=rows * -(-length // BLOCK),
        enable_prefix_caching=False,
    )
    generator = np.random.default_rng(0)
    for number in range(rows):  # lengths differ, so that each step has its share of block borders
        prompt = generator.integers(1, 100, PROMPT - number % BLOCK).tolist()
        llm.add_request(prompt, SamplingParams(max_tokens=STEPS + 5, stop_token_ids=[99], seed=1, logprobs=True))
    while llm.stats.num_generated_tokens < 3 * rows:
        llm.step()
    times = []
    for _ in range(STEPS // 2):
        start = time.perf_counter()
        llm.step()
        times.append(time.perf_counter() - start)
    return tuple(1e6 * value for value in (min(times), sorted(times)[len(times) // 2], sum(times) / len(times)))


if __name__ == "__main__":
    for rows in [int(word) for word in sys.argv[1:]] or [1, 64, 256, 512]:
        print(f"{rows:5} rows: least {{:8.1f}} µs, median {{:8.1f}} µs, mean {{:8.1f}} µs".format(*measure(rows)))
