"""A peer for `bench train --use_peft`: a LoRA training step in transformers + PEFT, with Liger's kernels if they are
installed, on a model of random weights.

    python tests/oracle/lora_step_torch.py [--shape qwen3-1.7b] [--rows 32 --tokens_per_row 712 --completion 512]
    python cukit_cli.py bench train --model qwen3-1.7b --use_peft --lora_r 32 --lora_alpha 64 \
        --lora_target_modules all-linear --gradient_checkpointing true

Both: bfloat16 weights, float32 factors, AdamW, cross-entropy on the last `completion` tokens of each row, the same rows
in a pass. Prints one line of JSON: tokens a second (median of the measured steps), the most that arrays took
(max_memory_allocated), the most by the driver's count, and the versions. Needs torch, transformers, peft; accelerate
and liger_kernel (0.8.5) if they are there.
"""

import argparse
import importlib.metadata
import json
import statistics
import sys
import threading
import time

import torch

LIBRARIES = ("torch", "transformers", "peft", "accelerate", "liger_kernel")
LEARNING_RATE, WARM_UP, INTERVAL = 1e-6, 3, 0.01
SHAPES = {  # hidden, intermediate, layers, query heads, tied; as cukit/bench/subject.py has them
    "tiny": (128, 256, 3, 4, True),
    "qwen3-0.6b": (1024, 3072, 28, 16, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, True),
    "qwen3-4b": (2560, 9728, 36, 32, True),
    "qwen3-8b": (4096, 12288, 36, 32, False),
}


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def use_liger(wanted: bool) -> bool:
    """Put Liger's kernels in place of transformers' (norm, rope, SwiGLU, fused linear cross-entropy), before the model
    is made.
    """
    if not wanted:
        return False
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3
    except ImportError as error:
        print(f"without Liger: {error}", file=sys.stderr)
        return False
    apply_liger_kernel_to_qwen3()
    return True


def make_model(options):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Qwen3Config

    hidden, inner, layers, heads, tied = SHAPES[options.shape]
    tiny = options.shape == "tiny"
    config = Qwen3Config(
        vocab_size=64 if tiny else 151_936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2 if tiny else 8,
        head_dim=32 if tiny else 128,
        max_position_embeddings=40_960,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(options.device):
        kind = {"attn_implementation": options.attention}
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **kind)
        except TypeError:  # transformers 4
            model = AutoModelForCausalLM.from_config(config, torch_dtype=torch.bfloat16, **kind)
    if options.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    lora = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, lora_dropout=0.0, target_modules="all-linear",
                      task_type="CAUSAL_LM")  # fmt: skip
    model = get_peft_model(model, lora)
    model.train()
    return model, config.vocab_size


def make_passes(options, vocab_size: int) -> list[tuple]:
    """(ids, labels) of each pass; the loss is taken on the last tokens of each row."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (options.rows, options.tokens_per_row), generator=generator)
    labels = ids.clone()
    labels[:, : options.tokens_per_row - options.completion] = -100
    size = options.rows_per_pass or options.rows
    return [
        (ids[start : start + size].to(options.device), labels[start : start + size].to(options.device))
        for start in range(0, options.rows, size)
    ]


def step(model, optimizer, passes) -> None:
    for ids, labels in passes:
        loss = model(input_ids=ids, labels=labels).loss / len(passes)
        loss.backward()
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


class DriverPeak:
    """The most memory of the card that is taken by the driver's count, asked by a thread."""

    def __init__(self):
        self.nbytes, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self):
        while not self._ended.wait(INTERVAL):
            free, total = torch.cuda.mem_get_info()
            self.nbytes = max(self.nbytes, total - free)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()


def timed(options, model, optimizer, passes) -> list[float]:
    """Seconds of each measured step."""
    found = []
    for number in range(WARM_UP + options.repeats):
        if options.device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step(model, optimizer, passes)
        if options.device == "cuda":
            torch.cuda.synchronize()
        if number >= WARM_UP:
            found.append(time.perf_counter() - start)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-1.7b")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens_per_row", type=int, default=712)
    parser.add_argument("--completion", type=int, default=512)
    parser.add_argument("--rows_per_pass", type=int, default=None, help="default: all rows in one pass")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--recompute", action="store_true", help="gradient checkpointing")
    parser.add_argument("--attention", default="sdpa", help="attn_implementation of transformers")
    parser.add_argument("--no_liger", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    with_liger = use_liger(not options.no_liger)
    model, vocab_size = make_model(options)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0, fused=options.device == "cuda")
    passes = make_passes(options, vocab_size)
    report = {"shape": options.shape, "liger": with_liger, "recompute": options.recompute, "passes": len(passes)}
    report |= {"trained": sum(parameter.numel() for parameter in trained), "factors": str(trained[0].dtype)}
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        with DriverPeak() as driver:
            seconds = timed(options, model, optimizer, passes)
        report |= {"allocated_gb": torch.cuda.max_memory_allocated() / 1e9, "driver_gb": driver.nbytes / 1e9}
        report["device"] = torch.cuda.get_device_name()
    else:
        seconds = timed(options, model, optimizer, passes)
    report["tokens_per_s"] = options.rows * options.tokens_per_row / statistics.median(seconds)
    report["seconds"] = seconds
    report["versions"] = {
        name: version(name) for name in ("torch", "transformers", "peft", "accelerate", "liger_kernel")
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
