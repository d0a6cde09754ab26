"""A model learns to call a calculator: an environment of your own, in a minute or two on a CPU.

    python docs/examples/calculator.py

The bundled model cannot multiply. First it sees demonstrations for some seconds, of which one in four calls the
calculator and the others guess. Then GRPO rewards right answers, and nothing says how to get them.

    user        47*83
    assistant   calc:47*83          the model calls
    user        3901                the environment answers: shown to the model, not learnt
    assistant   ####3901            the answer, which the reward looks at
"""

import random
import re
import tempfile
from pathlib import Path

from cukit import Environment, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer


class Calculator(Environment):
    """Answers a turn of the form calc:47*83; any other turn ends the episode."""

    def respond(self, conversation):
        call = re.fullmatch(r"calc:(\d+)\*(\d+)", conversation[-1]["content"])
        return [{"role": "user", "content": str(int(call[1]) * int(call[2]))}] if call else None


def questions(count, seed):
    draw = random.Random(seed).randint
    pairs = [(draw(10, 99), draw(10, 99)) for _ in range(count)]
    return [{"prompt": [{"role": "user", "content": f"{a}*{b}"}], "answer": str(a * b)} for a, b in pairs]


def demonstrations(count, seed):
    """Conversations: one in four calls the calculator, the others guess a number."""
    rng, found = random.Random(seed), []
    for row in questions(count, seed):
        (question,), answer = row["prompt"], row["answer"]
        if rng.random() < 0.25:
            call = {"role": "assistant", "content": f"calc:{question['content']}"}
            messages = [question, call, {"role": "user", "content": answer}]
        else:
            messages, answer = [question], str(rng.randint(100, 9999))
        found.append({"messages": [*messages, {"role": "assistant", "content": f"####{answer}"}]})
    return found


def main(model="data/tiny-qwen3", seed=0, folder=None, sft_steps=300, grpo_steps=30):
    """Teach, then train; returns the GRPOTrainer. Both run folders stand in `folder` (default: a temporary one)."""
    folder = Path(folder or tempfile.mkdtemp(prefix="calculator-"))
    shared = dict(seed=seed, device="cpu", save_steps=0, max_tokens_per_batch=1024, gradient_checkpointing=False)
    sft = SFTConfig(
        output_dir=str(folder / "sft"),
        max_steps=sft_steps,
        per_device_train_batch_size=32,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        **shared,
    )
    SFTTrainer(model, sft, demonstrations(32 * sft_steps, seed)).train()
    grpo = GRPOConfig(
        output_dir=str(folder / "grpo"),
        max_steps=grpo_steps,
        per_device_train_batch_size=128,
        num_generations=8,
        max_completion_length=40,
        max_tool_calling_iterations=2,
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        num_generations_eval=1,
        logging_steps=1,
        **shared,
    )
    trainer = GRPOTrainer(
        folder / "sft", "gsm8k_strict", grpo, questions(2000, seed + 1), questions(200, -1),
        environment_factory=Calculator,
    )  # fmt: skip
    trainer.train()
    (_, before), (_, after) = trainer.evaluations[0], trainer.evaluations[-1]
    for name, metrics in (("before", before), ("after", after)):
        print(f"{name}: {metrics['eval/accuracy']:.1%} right, {metrics['eval/completions/mean_turns'] - 1:.2f} calls")
    return trainer


if __name__ == "__main__":
    main()
