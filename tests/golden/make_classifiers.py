"""Make the golden reward models with torch and transformers: python tests/golden/make_classifiers.py

Tiny ...ForSequenceClassification models of one label, written by transformers itself, and NAME.npz beside them: rows of
ids (padded at the right with the pad id), their lengths, scores, and of the Bradley-Terry loss over the pairs (0, 1),
(2, 3), (4, 5) with margins its value and gradients. Row 4 ends with the pad id, which transformers passes over.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

VOCAB, PAD, LENGTHS, MARGINS = 61, 2, [7, 4, 12, 1, 9, 9], [0.0, 0.5, 1.25]
SHARED = dict(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=PAD,
    eos_token_id=2,
    bos_token_id=1,
    num_labels=1,
)
MODELS = {
    "qwen3_reward": (Qwen3ForSequenceClassification, Qwen3Config, dict(head_dim=8, tie_word_embeddings=True)),
    "qwen2_reward": (Qwen2ForSequenceClassification, Qwen2Config, dict(tie_word_embeddings=False)),
    "llama_reward": (LlamaForSequenceClassification, LlamaConfig, dict(tie_word_embeddings=False)),
}


def make(name, out):
    kind, config, more = MODELS[name]
    generator = torch.Generator().manual_seed(len(name) + ord(name[4]))
    model = kind(config(**SHARED, **more)).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if key.endswith("norm.weight") else 0.3 * noise)
    ids = torch.full((len(LENGTHS), max(LENGTHS)), PAD)
    for row, length in zip(ids, LENGTHS):
        row[:length] = torch.randint(3, VOCAB, (length,), generator=generator)
    ids[4, LENGTHS[4] - 2 : LENGTHS[4]] = PAD
    mask = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]
    scores = model(input_ids=ids, attention_mask=mask.long()).logits[:, 0]
    loss = -F.logsigmoid(scores[0::2] - scores[1::2] - torch.tensor(MARGINS)).mean()
    loss.backward()
    model.save_pretrained(out / name)
    (out / name / "generation_config.json").unlink(missing_ok=True)
    arrays = {"ids": ids, "lengths": LENGTHS, "scores": scores, "margins": MARGINS, "loss": loss}
    arrays |= {f"grad/{key}": parameter.grad for key, parameter in model.named_parameters()}
    np.savez_compressed(
        out / f"{name}.npz",
        **{key: x.detach().numpy() if isinstance(x, torch.Tensor) else np.array(x) for key, x in arrays.items()},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    folder = parser.parse_args().out
    for each in MODELS:
        make(each, folder)
