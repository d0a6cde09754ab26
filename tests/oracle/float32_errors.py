"""How near the limit the float32 kernels come: the rule of tests/gpu/test_models.py over many batches. Needs a GPU.

    python tests/oracle/float32_errors.py [--batches 12]

For each golden model: the largest ratio of (largest error) / (twice NumPy's own + an ulp) over log-probs and every
gradient, a batch each, and the geometric mean of (rms error) / (NumPy's). The first batch is the golden one, the others
are random.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from check import ulp  # noqa: E402

from cukit.models.logprobs import target_logprobs  # noqa: E402
from cukit.models.weights import load_model  # noqa: E402

GOLDEN = ROOT / "tests" / "golden"


def results(model, rows):
    """Log-probs of the rows' tokens and every gradient of their mean, as float64 on the host."""
    for parameter in model.parameters():
        parameter.grad = None
    logprobs, _ = target_logprobs(model, rows, [np.arange(len(row)) > 0 for row in rows])
    (logprobs.sum() * (-1.0 / logprobs.shape[0])).backward()
    found = {"logprobs": logprobs.data} | {f"grad {p.name}": p.grad for p in model.parameters()}
    return {key: np.asarray(model.backend.to_numpy(value), np.float64) for key, value in found.items()}


def rms(x):
    return max(np.sqrt(np.mean(x**2)), 1e-30)


def compare(true, near, got):
    """(largest ratio to what is allowed, its tensor, geometric mean of the rms errors' ratios)."""
    worst = max(
        (
            np.abs(got[key] - value).max()
            / (2 * np.abs(near[key] - value).max() + ulp(np.abs(value).max(), "float32")),
            key,
        )
        for key, value in true.items()
    )
    return *worst, np.exp(
        np.mean([np.log(rms(got[key] - value) / rms(near[key] - value)) for key, value in true.items()])
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=12)
    batches = parser.parse_args().batches
    for name in ("qwen3_tiny", "qwen2_tiny", "llama_tiny", "llama3_rope_tiny"):
        golden, generator = np.load(GOLDEN / f"{name}.npz"), np.random.default_rng(0)
        exact, yardstick, kernels = (
            load_model(GOLDEN / name, device=device, dtype=dtype)
            for device, dtype in (("cpu", "float64"), ("cpu", "float32"), ("cuda", "float32"))
        )
        rows = [ids[:length].tolist() for ids, length in zip(golden["input_ids"], golden["lengths"])]
        found = []
        for _ in range(batches):
            found.append(compare(*(results(model, rows) for model in (exact, yardstick, kernels))))
            rows = [
                generator.integers(3, exact.config.vocab_size, int(length)).tolist()
                for length in generator.integers(2, 20, 5)
            ]
        worst = max(found)
        print(
            f"{name}: worst {worst[0]:.2f} ({worst[1]}), rms {min(f[2] for f in found):.2f} to "
            f"{max(f[2] for f in found):.2f} of NumPy's"
        )


if __name__ == "__main__":
    main()
