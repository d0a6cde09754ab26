"""Scores of a reward model's folder here and in transformers, float32 on a CPU. Needs torch and transformers.

python tests/oracle/reward_scores.py FOLDER [FOLDER …]      prints the largest difference of each; at most 1e-5
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification

sys.path.insert(0, str(Path(__file__).parents[2]))
from cukit.models.scores import sequence_scores  # noqa: E402
from cukit.models.weights import load_model  # noqa: E402

for folder in sys.argv[1:]:
    ours = load_model(folder, dtype="float32", head="score")
    theirs = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, ours.config.vocab_size, n) for n in (1, 5, 17, 40)]
    with torch.no_grad():
        expected = np.array([float(theirs(input_ids=torch.tensor(row[None])).logits[0, 0]) for row in rows])
    found = sequence_scores(ours, rows)
    difference = np.abs(found - expected).max()
    print(f"{folder}: {difference:.2e} of scores to {np.abs(expected).max():.2f}")
    assert difference <= 1e-5, (found, expected)
