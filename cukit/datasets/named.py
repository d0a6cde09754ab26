"""Data sets for mathematics by short names: where the hub has them, and which of their columns are question and answer.

`seen` tells whether the columns' names were checked against the data itself (GSM8K: the files that its authors
publish). Those of the others are unseen: taken from what others have written about them. If one is wrong, the error
lists the columns, and --columns mends it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class NamedDataset:
    source: str  # NAME:CONFIG of the hub
    prompt: str  # the column with the problem, a text
    answer: str  # the column with the right answer, as the reward reads it
    splits: tuple[str, ...]
    reward: str
    seen: bool


NAMED = {
    "gsm8k": NamedDataset("openai/gsm8k:main", "question", "answer", ("train", "test"), "gsm8k", seen=True),
    "deepmath-103k": NamedDataset(
        "zwhe99/DeepMath-103K:default", "question", "final_answer", ("train",), "boxed", seen=False
    ),
    "dapo-math": NamedDataset(
        "open-r1/DAPO-Math-17k-Processed:en", "prompt", "solution", ("train",), "boxed", seen=False
    ),
    "math": NamedDataset(
        "DigitalLearningGmbH/MATH-lighteval:default", "problem", "solution", ("train", "test"), "boxed", seen=False
    ),
}
