"""How long a decode step of few rows takes on a CPU, in SmolLM2-135M's shape, beside transformers if it is installed.

    python tests/oracle/cpu_rows.py [--rows 1 2 4 8] [--dtypes float32 bfloat16] [--repeats 15]

Wanted, float32: 2 rows at most 1.4 times, 4 rows 1.9 times, 8 rows 2.7 times as long as 1 row; bfloat16 no slower than
float32 (exit code 1 where one of these is missed). Needs a quiet machine: each number is the least of `repeats` rounds
in which all take their turns.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from cukit import LLM, SamplingParams  # noqa: E402
from cukit.backend import backend_for  # noqa: E402
from cukit.bench.subject import SHAPES  # noqa: E402
from cukit.models.config import ModelConfig  # noqa: E402
from cukit.models.decoder import Decoder  # noqa: E402

SHORT, LONG = 4, 12  # tokens; the difference of two calls leaves the prompt out
WANTED = {1: 1.0, 2: 1.4, 4: 1.9, 8: 2.7}
PROMPT = 8


def cukit_step(dtype: str):
    """step(rows) -> seconds of one decode step."""
    model = Decoder(ModelConfig.from_json(SHAPES["smollm2-135m"]), backend_for("cpu"), dtype)
    model.init_weights(0)
    llm = LLM.from_model(model, None, max_model_len=64, max_num_seqs=16, enable_prefix_caching=False)

    def seconds(rows: int, tokens: int) -> float:
        prompts = [[row + 1] * PROMPT for row in range(rows)]
        start = time.perf_counter()
        llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))
        return time.perf_counter() - start

    return lambda rows: (seconds(rows, LONG) - seconds(rows, SHORT)) / (LONG - SHORT)


def transformers_step(dtype: str):
    """The same for transformers; None where it is not installed."""
    try:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return None
    shape = {name: value for name, value in SHAPES["smollm2-135m"].items() if name != "architectures"}
    model = LlamaForCausalLM(LlamaConfig(**shape)).to(getattr(torch, dtype)).eval()

    def step(rows: int) -> float:
        ids = torch.ones((rows, PROMPT), dtype=torch.long)
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
            start = time.perf_counter()
            for _ in range(LONG - SHORT):
                logits = model(ids[:, :1], past_key_values=cache, use_cache=True).logits
                ids = logits[:, -1:].argmax(-1)
            return (time.perf_counter() - start) / (LONG - SHORT)

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    steps = {}
    for dtype in options.dtypes:
        for name, make in (("cukit", cukit_step), ("transformers", transformers_step)):
            if (step := make(dtype)) is not None:
                steps[name, dtype] = step
    least = {(key, rows): np.inf for key in steps for rows in options.rows}
    for _ in range(options.repeats):
        for key, rows in least:
            least[key, rows] = min(least[key, rows], steps[key](rows))
    print(f"{'ms a step':<24}" + "".join(f"{rows:>6} rows" for rows in options.rows) + "   times the first")
    failed = False
    for key in steps:
        numbers = [least[key, rows] for rows in options.rows]
        ratios = [number / numbers[0] for number in numbers]
        print(f"{' '.join(key):<24}" + "".join(f"{1000 * number:>11.1f}" for number in numbers), end="   ")
        print("  ".join(f"{ratio:.2f}" for ratio in ratios))
        if key == ("cukit", "float32") and options.rows[0] == 1:
            failed |= any(ratio > WANTED.get(rows, np.inf) for rows, ratio in zip(options.rows, ratios, strict=True))
        if key == ("cukit", "bfloat16") and ("cukit", "float32") in steps:
            failed |= any(least[key, rows] > least[("cukit", "float32"), rows] for rows in options.rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
