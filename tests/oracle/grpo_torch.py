"""An oracle for learning: GRPO in plain torch and transformers, on the task of data/recipes/smollm2-arithmetic.yaml.

    python tests/oracle/grpo_torch.py MODEL_FOLDER OUT.jsonl [--steps 200] [--seed 0]

float32 master weights, bfloat16 autocast, AdamW, the dapo loss, one update a step. Writes {"step", "reward"} a step,
the mean reward of what was sampled at temperature 1.
"""

import argparse
import json
import random
import re
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

DATA = Path(__file__).parents[2] / "data" / "boxed-arithmetic"
PROMPTS, GROUP, NEW_TOKENS = 16, 8, 64
LEARNING_RATE, WARM_UP, LARGEST_NORM, EPSILON = 1e-5, 5, 1.0, 0.2


def reward_of(text: str, answer: str) -> float:
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return 0.0 if not boxes else 1.0 if boxes[-1].strip() == answer else 0.1


def sample(model, tokenizer, rows, device):
    """(ids (B, T), mask of prompt and completion, mask of completion tokens, texts), B = PROMPTS * GROUP."""
    texts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left").to(device)
    batch = {name: value.repeat_interleave(GROUP, 0) for name, value in batch.items()}
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        ids = model.generate(**batch, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=NEW_TOKENS)
    start = batch["input_ids"].shape[1]
    completion = ids[:, start:]
    ended = (completion == tokenizer.eos_token_id).cumsum(1)
    learnt = (ended - (completion == tokenizer.eos_token_id).long()) == 0
    mask = torch.cat([batch["attention_mask"], learnt.long()], 1)
    kept = [row[use].tolist() for row, use in zip(completion, learnt)]
    return ids, mask, learnt, tokenizer.batch_decode(kept, skip_special_tokens=True)


def logprobs(model, ids, mask, width):
    """log p of the last `width` tokens of each row, (B, width)."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=width + 1).logits
    return torch.log_softmax(logits[:, :-1].float(), -1).gather(2, ids[:, -width:, None])[..., 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    order, device = random.Random(options.seed), "cuda"
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(device).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    rows, queue = [json.loads(line) for line in (DATA / "train.jsonl").read_text().splitlines()], []
    with open(options.out, "w") as out:
        for step in range(options.steps):
            if len(queue) < PROMPTS:
                queue = order.sample(rows, len(rows))
            picked, queue = queue[:PROMPTS], queue[PROMPTS:]
            start = time.perf_counter()
            ids, mask, learnt, texts = sample(model, tokenizer, picked, device)
            answers = [row["answer"] for row in picked for _ in range(GROUP)]
            rewards = torch.tensor([reward_of(*pair) for pair in zip(texts, answers)], device=device)
            groups = rewards.view(PROMPTS, GROUP)
            advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
            new = logprobs(model, ids, mask, learnt.shape[1])
            ratio = torch.exp(new - new.detach())
            gain = advantages.view(-1, 1)
            loss = -torch.minimum(ratio * gain, ratio.clamp(1 - EPSILON, 1 + EPSILON) * gain)
            loss = (loss * learnt).sum() / learnt.sum()
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
            optimizer.step()
            row = {"step": step + 1, "reward": rewards.mean().item(), "seconds": time.perf_counter() - start}
            out.write(json.dumps(row) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
