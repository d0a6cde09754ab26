"""Write data/arithmetic/: the `chain4` task, its careless demonstrations and a held-out test set.

A question is four digits joined by + and -, for example `2+9+9-6`. Its running total never becomes negative. A worked
answer computes one step a line and repeats the last total after `####`:

    2+9=11
    11+9=20
    20-6=14
    ####14

sft.jsonl   demonstrations of a careless teacher: {"prompt": [user message], "completion": [assistant message]}
train.jsonl questions for reinforcement learning: {"prompt": [user message], "answer": "14"}
test.jsonl  held-out questions in the same form

No question stands in two files. The teacher is off by ten in 55 % of the steps that cross a ten, and goes on from the
wrong total. A model taught by it follows that habit when decoding greedily but still samples the right step; that is
the room which reinforcement learning on the final answer has. Same seed, same bytes.

    python data/make_arithmetic.py [--output_dir data/arithmetic] [--seed 0]
"""

import argparse
import json
import random
from pathlib import Path

OPERANDS = 4
MISTAKE_RATE = 0.55
ROWS = {"test": 512, "sft": 16000, "train": 4000}


def draw_question(rng: random.Random) -> tuple[list[int], list[str]]:
    """Digits 1 to 9 and the operators between them, redrawn until no running total is negative."""
    while True:
        digits = [rng.randint(1, 9) for _ in range(OPERANDS)]
        operators = [rng.choice("+-") for _ in range(OPERANDS - 1)]
        total, smallest = digits[0], 0
        for operator, digit in zip(operators, digits[1:], strict=True):
            total += digit if operator == "+" else -digit
            smallest = min(smallest, total)
        if smallest == 0:
            return digits, operators


def work_out(
    digits: list[int], operators: list[str], mistake_rate: float, rng: random.Random
) -> tuple[str, int] | None:
    """The worked answer and its final total; None if a mistake made a later subtraction impossible.

    A step that crosses a ten (the tens digit changes) is off by ten with probability `mistake_rate`: a forgotten
    carry in a sum, a forgotten borrow in a difference.
    """
    total, lines = digits[0], []
    for operator, digit in zip(operators, digits[1:], strict=True):
        result = total + digit if operator == "+" else total - digit
        if result < 0:
            return None
        if result // 10 != total // 10 and rng.random() < mistake_rate:
            result += -10 if operator == "+" else 10
        lines.append(f"{total}{operator}{digit}={result}")
        total = result
    return "\n".join([*lines, f"####{total}"]), total


def careless_demonstration(digits: list[int], operators: list[str], rng: random.Random) -> str:
    """One demonstration of the careless teacher, redrawn while a mistake leads below zero."""
    while True:
        worked = work_out(digits, operators, MISTAKE_RATE, rng)
        if worked is not None:
            return worked[0]


def question_text(digits: list[int], operators: list[str]) -> str:
    return str(digits[0]) + "".join(
        operator + str(digit) for operator, digit in zip(operators, digits[1:], strict=True)
    )


def make_rows(seed: int) -> dict[str, list[dict]]:
    """File name without suffix -> rows; questions are distinct over all files."""
    rng = random.Random(seed)
    questions: dict[str, tuple[list[int], list[str]]] = {}
    while len(questions) < sum(ROWS.values()):
        digits, operators = draw_question(rng)
        questions.setdefault(question_text(digits, operators), (digits, operators))
    remaining = iter(questions.items())
    files: dict[str, list[dict]] = {}
    for name, count in ROWS.items():
        files[name] = []
        for _ in range(count):
            text, (digits, operators) = next(remaining)
            row: dict = {"prompt": [{"role": "user", "content": text}]}
            if name == "sft":
                demonstration = careless_demonstration(digits, operators, rng)
                row["completion"] = [{"role": "assistant", "content": demonstration}]
            else:
                row["answer"] = str(work_out(digits, operators, 0.0, rng)[1])
            files[name].append(row)
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description="write the bundled arithmetic task")
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent / "arithmetic")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    for name, rows in make_rows(arguments.seed).items():
        lines = [json.dumps(row, separators=(",", ":")) + "\n" for row in rows]
        (arguments.output_dir / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")
        print(f"{name}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    main()
