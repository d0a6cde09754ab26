"""One PPO update in plain torch and transformers, measured: what `cukit` is compared with. Needs a GPU for the figures.

    python tests/oracle/ppo_update_torch.py --critic shared
    python tests/oracle/ppo_update_torch.py --critic separate
    python tests/oracle/ppo_update_torch.py --model tiny --check --learning_rate 3e-4 --sequences 8 --prompt 16 \
        --completion 32 --max_tokens 128                              whether it learns; a CPU will do

One update is one optimizer step over `--sequences` rows of `--prompt` + `--completion` tokens (no padding) in
micro-batches of at most `--max_tokens`. Random weights in the model's exact shape, float32, bfloat16 autocast, sdpa,
fused AdamW, gradient norm held to 1. The loss is TRL's PPO loss (clipped surrogate, clipped value loss) with an entropy
bonus, the mean over the completion's tokens. Old log-probs and values are the model's own with noise, made before the
clock starts; advantages and returns are random.

The head is TRL 1.16's fused one (`add_fused_lm_head`), see fused_head.py: completion tokens only, no whole logits.
`--critic shared`: a score head on the policy's last hidden states, one backward pass and one AdamW. `--critic
separate`: a second trunk with a score head and an AdamW of its own. Its passes follow the policy's, so that the
activations of one trunk live at a time (TRL's wrapper keeps both, which needs about twice the memory).

Peaks: torch's own counts over the timed updates, and the highest of cudaMemGetInfo's (total - free), asked every 5 ms
in one more update that is not timed; nothing else may use the card.
"""

import argparse
import json
import os
import statistics
import sys
import threading
import time
from dataclasses import dataclass, fields

import torch
import transformers
from fused_head import HEADS
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

QWEN3 = dict(rms_norm_eps=1e-6, tie_word_embeddings=True, hidden_act="silu", attention_bias=False, use_cache=False)
SHAPES = {
    "qwen3-0.6b": dict(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "tiny": dict(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
}
CLIP_RANGE = CLIP_RANGE_VALUE = 0.2
VALUE_COEF, ENTROPY_COEF, LARGEST_NORM = 0.1, 0.01, 1.0
NOISE = 0.1  # of old log-probs and values: some ratios leave the clip range, as in later epochs of a rollout


@dataclass
class Batch:
    """ids (B, T); the others (B, completion) in float32."""

    ids: torch.Tensor
    old_logprobs: torch.Tensor
    old_values: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor

    def parts(self, rows: int) -> list["Batch"]:
        """Micro-batches of so many rows."""
        columns = [getattr(self, field.name).split(rows) for field in fields(self)]
        return [Batch(*part) for part in zip(*columns)]


class Learner(nn.Module):
    """A trunk with the heads that it learns (policy, critic or both) and their AdamW."""

    def __init__(self, options, policy: bool, critic: bool):
        super().__init__()
        config = Qwen3Config(**QWEN3, **SHAPES[options.model])
        with torch.device(options.device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()
            self.score = nn.Linear(config.hidden_size, 1, bias=False) if critic else None
        self.trunk, self.vocabulary = model.model, model.lm_head.weight if policy else None
        if options.checkpointing:
            self.trunk.gradient_checkpointing_enable({"use_reentrant": False})
        self.completion, self.head, self.device = options.completion, HEADS[options.head], options.device
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=options.learning_rate, weight_decay=0.0, fused=True)

    def forward(self, ids):
        """(log-probs, entropies, values) of the completions, (B, completion) each; None without the head."""
        logprobs = entropies = values = None
        with torch.autocast(self.device, torch.bfloat16):
            hidden = self.trunk(input_ids=ids, use_cache=False).last_hidden_state[:, -self.completion - 1 : -1]
            if self.vocabulary is not None:
                targets = ids[:, -self.completion :]
                rows = self.head(hidden.reshape(-1, hidden.shape[-1]), self.vocabulary, targets.reshape(-1))
                logprobs, entropies = (row.view(targets.shape) for row in rows)
            if self.score is not None:
                values = self.score(hidden)[..., 0].float()
        return logprobs, entropies, values

    def loss(self, part: Batch):
        """The sum over the part's tokens."""
        logprobs, entropies, values = self(part.ids)
        loss = 0.0
        if logprobs is not None:
            ratio = (logprobs - part.old_logprobs).exp()
            held = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
            surrogate = torch.maximum(-part.advantages * ratio, -part.advantages * held)
            loss = loss + surrogate.sum() - ENTROPY_COEF * entropies.sum()
        if values is not None:
            held = part.old_values + (values - part.old_values).clamp(-CLIP_RANGE_VALUE, CLIP_RANGE_VALUE)
            error = torch.maximum((values - part.returns) ** 2, (held - part.returns) ** 2)
            loss = loss + VALUE_COEF * 0.5 * error.sum()
        return loss

    def gradients(self, parts: list[Batch]):
        """Adds up the gradients; gives the mean loss a token, on the device."""
        total, tokens = 0.0, sum(part.advantages.numel() for part in parts)
        for part in parts:
            loss = self.loss(part) / tokens
            loss.backward()
            total = total + loss.detach()
        return total

    def update(self, parts: list[Batch]):
        loss = self.gradients(parts)
        nn.utils.clip_grad_norm_(self.parameters(), LARGEST_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def make_learners(options) -> list[Learner]:
    if options.critic == "shared":
        return [Learner(options, policy=True, critic=True)]
    return [Learner(options, policy=True, critic=False), Learner(options, policy=False, critic=True)]


def make_batch(options, learners: list[Learner], rows: int) -> Batch:
    generator = torch.Generator().manual_seed(options.seed)
    shape = (options.sequences, options.completion)
    size = (options.sequences, options.prompt + options.completion)
    ids = torch.randint(0, SHAPES[options.model]["vocab_size"], size, generator=generator).to(options.device)
    noise = [torch.randn(shape, generator=generator).to(options.device) for _ in range(4)]
    own = []
    with torch.no_grad():
        for part in ids.split(rows):
            columns = [column for learner in learners for column in learner(part) if column is not None]
            own.append((columns[0], columns[-1]))  # of log-probs, entropies, values
    logprobs, values = (torch.cat(columns) for columns in zip(*own))
    old_values = values + NOISE * noise[1]
    return Batch(ids, logprobs + NOISE * noise[0], old_values, noise[2], old_values + noise[3])


def update(learners: list[Learner], parts: list[Batch]) -> float:
    """One update of all; the mean loss a token before it."""
    return float(sum(learner.update(parts) for learner in learners))


class Peak:
    """The most memory in use by the driver's count, from entering to leaving."""

    def __init__(self):
        self.nbytes, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self):
        while not self._ended.is_set():
            self.nbytes = max(self.nbytes, memory_in_use())
            time.sleep(0.005)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()


def memory_in_use() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def seconds_of(learners, parts) -> float:
    start = time.perf_counter()
    update(learners, parts)  # reads the loss, so waits for the backward passes
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(options, learners, parts, context: int) -> dict:
    for _ in range(options.warmup):
        update(learners, parts)
    cuda = options.device == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = [seconds_of(learners, parts) for _ in range(options.repeats)]
    tokens = parts[0].ids.shape[1] * sum(len(part.ids) for part in parts)
    found = {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds), "seconds": seconds,
             "tokens": tokens, "tokens_per_s": tokens / statistics.median(seconds)}  # fmt: skip
    if cuda:
        found |= {"allocated_gb": torch.cuda.max_memory_allocated() / 1e9,
                  "reserved_gb": torch.cuda.max_memory_reserved() / 1e9}  # fmt: skip
        with Peak() as peak:
            seconds_of(learners, parts)
        found |= {"driver_gb": peak.nbytes / 1e9, "driver_before_gb": context / 1e9}
    return found


def check(options, learners, parts) -> int:
    """Every parameter has a gradient, the head's is the plain one, and the loss falls on this one batch."""
    failed = compare_head(options)
    for learner in learners:
        learner.gradients(parts)
        for name, weight in learner.named_parameters():
            if weight.grad is None or not weight.grad.isfinite().all() or not weight.grad.any():
                print(f"no gradient: {name}")
                failed += 1
        learner.optimizer.zero_grad()
    losses = [update(learners, parts) for _ in range(8)]
    print("losses", " ".join(f"{loss:.4f}" for loss in losses))
    failed += not losses[-1] < losses[0]
    print("failed" if failed else "all well")
    return 1 if failed else 0


def compare_head(options, tokens: int = 5000, words: int = 33000, width: int = 64) -> int:
    """How many of the head's outputs and gradients differ from log_softmax's; more than one tile either way."""
    torch.manual_seed(options.seed)
    hidden, weight = (torch.randn(n, width, device=options.device, requires_grad=True) for n in (tokens, words))
    targets = torch.randint(0, words, (tokens,), device=options.device)
    factors = torch.randn(2, tokens, device=options.device)
    found = []
    for head in (HEADS[options.head], plain_head):
        outputs = head(hidden, weight, targets)
        loss = sum((factor * output).sum() for factor, output in zip(factors, outputs))
        found.append([*outputs, *torch.autograd.grad(loss, (hidden, weight))])
    failed = 0
    for name, ours, plain in zip(("log-probs", "entropies", "d hidden", "d weight"), *found):
        error = ((ours - plain).norm() / plain.norm()).item()
        print(f"head, {name}: off by {error:.1e}")
        failed += not error < 1e-5
    return failed


def plain_head(hidden, weight, targets):
    logs = torch.log_softmax(hidden @ weight.T, -1)
    return logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


def read_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--critic", choices=["shared", "separate"], default="shared")
    parser.add_argument(
        "--head", choices=HEADS, default="own", help="own: fused_head.py; trl: the class of an installed TRL"
    )
    for name, value in {"sequences": 64, "prompt": 512, "completion": 1536, "max_tokens": 16384, "repeats": 5,
                        "warmup": 2, "seed": 0}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--learning_rate", type=float, default=1e-6)
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing of the trunk")
    parser.add_argument("--liger", action="store_true", help="Liger's RMSNorm, SwiGLU and rotary kernels")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--check", action="store_true", help="measure nothing: look whether it learns")
    options = parser.parse_args()
    if options.prompt + options.completion > options.max_tokens:
        parser.error(f"a row of {options.prompt} + {options.completion} tokens exceeds --max_tokens")
    if options.prompt < 1:
        parser.error("nothing precedes the completion: --prompt must be at least 1")
    return options


def use_liger() -> None:
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3
    except ImportError:
        sys.exit("--liger needs Liger: pip install liger-kernel")
    apply_liger_kernel_to_qwen3(rope=True, rms_norm=True, swiglu=True, cross_entropy=False,
                                fused_linear_cross_entropy=False)  # fmt: skip


def print_report(options, found: dict) -> None:
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    found = vars(options) | {"device": device, "torch": torch.__version__, "transformers": transformers.__version__,
                             "alloc_conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")} | found  # fmt: skip
    print(f"PPO update, {options.model}, critic {options.critic}, head {options.head}, checkpointing "
          f"{options.checkpointing}, liger {options.liger}; torch {torch.__version__}, {device}")  # fmt: skip
    names = ["median_s", "min_s", "max_s", "tokens_per_s", "allocated_gb", "reserved_gb", "driver_gb"]
    print("".join(f"{name:>14}" for name in names))
    print("".join(f"{found[name]:>14,.3f}" if name in found else f"{'-':>14}" for name in names))
    print(json.dumps(found))


def main() -> int:
    options = read_options()
    context = memory_in_use() if options.device == "cuda" else 0  # the first call makes the context
    if options.liger:
        use_liger()
    torch.manual_seed(options.seed)
    learners = make_learners(options)
    rows = options.max_tokens // (options.prompt + options.completion)
    parts = make_batch(options, learners, rows).parts(rows)
    if options.check:
        return check(options, learners, parts)
    try:
        print_report(options, measure(options, learners, parts, context))
    except torch.cuda.OutOfMemoryError as error:
        sys.exit(f"out of memory: lower --max_tokens or use --checkpointing ({str(error).splitlines()[0]})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
