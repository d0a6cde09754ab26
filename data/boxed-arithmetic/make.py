"""Writes train.jsonl (160 rows) and test.jsonl (40): the sums and products of two digits, answers to be boxed."""

import json
import random
from pathlib import Path

SYSTEM = "Answer the question. Put the final number inside \\boxed{}."


def main() -> None:
    pairs = [(x, y) for x in range(10) for y in range(10)]
    questions = [(f"What is {x} + {y}?", x + y) for x, y in pairs] + [(f"What is {x} * {y}?", x * y) for x, y in pairs]
    random.Random(7).shuffle(questions)
    for name, part in (("test", questions[:40]), ("train", questions[40:])):
        rows = [
            {
                "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
                "answer": str(answer),
            }
            for question, answer in part
        ]
        path = Path(__file__).with_name(f"{name}.jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
