"""The planner against the driver, on a card: runs of two steps with random weights, each in a process of its own.

    python tests/oracle/memory_plan.py            all of them, about 4 minutes on an H100
    python tests/oracle/memory_plan.py sft-0.6b   one of them, with its plan's table

The promise: the driver's peak lies within -10 … +3 % of the plan. The peak is the highest of cudaMemGetInfo's (total -
free), asked every 5 ms by a thread; nothing else may use the card.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from cukit import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer  # noqa: E402
from cukit.backend import backend_for  # noqa: E402
from cukit.bench.subject import SHAPES  # noqa: E402
from cukit.engine.shapes import block_bytes  # noqa: E402
from cukit.models.config import ModelConfig  # noqa: E402
from cukit.models.decoder import Decoder  # noqa: E402
from cukit.tokenizer import Tokenizer  # noqa: E402

LOW, HIGH = -0.10, 0.03
TOKENS = 16_384  # of a forward pass
PROMPT, COMPLETION = 200, 512
CACHE_BYTES = 12 * 10**9
CONFIGURATIONS = ["sft-0.6b", "sft-0.6b-recompute", "sft-1.7b", "sft-1.7b-recompute", "grpo-0.6b-recompute",
                  "grpo-1.7b-recompute", "sft-0.6b-selective"]  # fmt: skip


def shape_of(name: str) -> ModelConfig:
    small = ModelConfig.from_json(SHAPES["qwen3-0.6b"])
    return replace(small, hidden_size=2048, intermediate_size=6144) if "1.7b" in name else small


class Peak:
    """The most memory in use by the driver's count, from entering to leaving."""

    def __init__(self, runtime):
        self._runtime, self.nbytes, self._ended = runtime, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self):
        while not self._ended.is_set():
            free, total = self._runtime.memGetInfo()
            self.nbytes = max(self.nbytes, total - free)
            time.sleep(0.005)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()


def measure(name: str) -> dict:
    """Two steps of one configuration: what was planned, what the driver saw."""
    from cupy.cuda import runtime

    backend, config = backend_for("cuda"), shape_of(name)
    free, total = runtime.memGetInfo()  # this makes the context
    context = total - free
    tokenizer = Tokenizer.from_folder(ROOT / "data" / "tiny-qwen3")
    with Peak(runtime) as peak, tempfile.TemporaryDirectory() as folder:
        model = Decoder(config, backend, "bfloat16")
        model.init_weights(0)
        make = grpo if name.startswith("grpo") else sft
        trainer = make(model, tokenizer, folder, level_of(name))
        plan = trainer.plan
        trainer.train()
        backend.synchronize()
    return {"plan": plan.peak_bytes, "peak": peak.nbytes, "context": context, "table": plan.table()}


def level_of(name: str) -> str:
    return {"recompute": "full", "selective": "selective"}.get(name.rpartition("-")[2], "none")


def sft(model, tokenizer, folder: str, level: str):
    length = PROMPT + COMPLETION
    rows = [{"text": "1 + " * length}] * 64
    size = TOKENS // length
    common = {"max_tokens_per_batch": TOKENS, "gradient_checkpointing": level}
    args = SFTConfig(output_dir=f"{folder}/run", max_steps=2, max_length=length, per_device_train_batch_size=size,
                     save_steps=0, logging_steps=1, **common)  # fmt: skip
    return SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)


def grpo(model, tokenizer, folder: str, level: str):
    blocks = CACHE_BYTES // block_bytes(model.config, model.dtype, 16)
    limits = {"max_model_len": 1024, "max_num_seqs": 512, "num_kv_blocks": blocks}
    common = {"max_tokens_per_batch": TOKENS, "gradient_checkpointing": level}
    args = GRPOConfig(output_dir=f"{folder}/run", max_steps=2, num_generations=8, per_device_train_batch_size=256,
                      gradient_accumulation_steps=2, max_completion_length=COMPLETION, ignore_eos=True, save_steps=0,
                      logging_steps=1, eval_on_start=False, **limits, **common)  # fmt: skip
    prompt = "1 + " * PROMPT
    prompt = tokenizer.decode(tokenizer.encode(prompt)[:PROMPT])
    return GRPOTrainer(model=model, reward_funcs=[by_length], args=args, train_dataset=[{"prompt": prompt}] * 64,
                       processing_class=tokenizer)  # fmt: skip


def by_length(completions, **_):
    """Some reward that differs within a group, so that every completion has a gradient."""
    return [float(hash(str(completion)) % 97) for completion in completions]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="?", choices=CONFIGURATIONS)
    parser.add_argument("--json", action="store_true", help="print one line of JSON (used for each process)")
    options = parser.parse_args()
    if options.json:
        print("\n" + json.dumps(measure(options.only)))
        return 0
    failed = 0
    print(f"{'run':<22}{'plan GB':>9}{'driver GB':>11}{'driver/plan':>13}{'context GB':>12}")
    for name in [options.only] if options.only else CONFIGURATIONS:
        run = subprocess.run([sys.executable, __file__, name, "--json"], capture_output=True, text=True)
        if run.returncode:
            print(f"{name:<22} failed: {run.stderr.strip().splitlines()[-1]}")
            failed += 1
            continue
        found = json.loads(run.stdout.strip().splitlines()[-1])
        ratio = found["peak"] / found["plan"] - 1
        verdict = "" if LOW <= ratio <= HIGH else "  outside of -10 … +3 %"
        failed += bool(verdict)
        numbers = (found["plan"] / 1e9, found["peak"] / 1e9, ratio, found["context"] / 1e9)
        print(f"{name:<22}{numbers[0]:>9.2f}{numbers[1]:>11.2f}{numbers[2]:>+13.1%}{numbers[3]:>12.2f}{verdict}")
        if options.only:
            print(found["table"])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
