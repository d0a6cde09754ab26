"""Write pairs of answers for the bundled arithmetic task: data/arithmetic/pairs.jsonl and test-pairs.jsonl.

A row is {"prompt": [user message], "chosen": [assistant message], "rejected": [assistant message]}. The questions are
those of train.jsonl and test.jsonl in which a step crosses a ten. The chosen answer is the right working. The rejected
one has a mistake: most often the careless teacher's (make_arithmetic.py: a forgotten carry or borrow), else a step that
is off by 1 to 9, or no last line. Same seed, same bytes.

    python data/make_pairs.py [--output_dir data/arithmetic] [--seed 0]
"""

import argparse
import json
import random
import re
from pathlib import Path

from make_arithmetic import work_out

HERE = Path(__file__).parent
FILES = {"train": "pairs", "test": "test-pairs"}
KINDS = {"careless": 0.9, "slip": 0.03, "unfinished": 0.07}


def parsed(question: str) -> tuple[list[int], list[str]]:
    """The digits and operators of `2+9-6`."""
    return [int(digit) for digit in re.findall(r"\d", question)], re.findall(r"[+-]", question)


def slip(digits: list[int], operators: list[str], rng: random.Random) -> str | None:
    """A worked answer in which one step is off by 1 to 9; None if a total fell below zero."""
    wrong, total, lines = rng.randrange(len(operators)), digits[0], []
    for step, (operator, digit) in enumerate(zip(operators, digits[1:], strict=True)):
        result = total + digit if operator == "+" else total - digit
        if step == wrong:
            result += rng.choice([-1, 1]) * rng.randint(1, 9)
        if result < 0:
            return None
        lines.append(f"{total}{operator}{digit}={result}")
        total = result
    return "\n".join([*lines, f"####{total}"])


def mistaken(digits: list[int], operators: list[str], right: str, rng: random.Random) -> str:
    """A wrong answer; what turned out right, or impossible, is drawn again."""
    while True:
        (kind,) = rng.choices(list(KINDS), KINDS.values())
        if kind == "careless":
            worked = work_out(digits, operators, 0.7, rng)
            answer = worked and worked[0]
        else:
            answer = slip(digits, operators, rng) if kind == "slip" else right.rpartition("\n")[0]
        if answer is not None and answer != right:
            return answer


def main() -> None:
    parser = argparse.ArgumentParser(description="write the bundled pairs of answers")
    parser.add_argument("--output_dir", type=Path, default=HERE / "arithmetic")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    for source, name in FILES.items():
        lines = []
        for line in (HERE / "arithmetic" / f"{source}.jsonl").read_text(encoding="utf-8").splitlines():
            prompt = json.loads(line)["prompt"]
            digits, operators = parsed(prompt[0]["content"])
            right = work_out(digits, operators, 0.0, rng)[0]
            totals = [int(step.rpartition("=")[2]) for step in right.split("\n")[:-1]]
            if len({total // 10 for total in [digits[0], *totals]}) == 1:  # no step crosses a ten
                continue
            row = {"prompt": prompt}
            for column, answer in (("chosen", right), ("rejected", mistaken(digits, operators, right, rng))):
                row[column] = [{"role": "assistant", "content": answer}]
            lines.append(json.dumps(row, separators=(",", ":")) + "\n")
        (arguments.output_dir / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")
        print(f"{name}.jsonl: {len(lines)} rows")


if __name__ == "__main__":
    main()
