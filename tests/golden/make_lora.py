"""Write the golden adapters of this folder with torch, transformers and PEFT, on the CPU, in float64.

    pip install torch transformers peft
    python tests/golden/make_lora.py

For each adapter: a folder as PEFT saves it, whose base is the folder of a tiny model beside it, and an .npz with
input_ids (B, L), lengths (B,), PEFT's logits (B, L, V) in float32, the loss (the mean of -log p of every predicted token), and
grad/NAME of each factor; merged/… the same where each adapted weight is round(W + s·B·A) to bfloat16, straight through
(its gradient is that of the sum). Those of REWARDS are of reward models (PEFT's task SEQ_CLS): scores (B,), the loss of
Bradley and Terry over the pairs (0, 1), (2, 3), grad/NAME of each factor and of the score head, which PEFT trains whole.
Tests read these files and never run this one.
"""

from pathlib import Path

import numpy as np
import peft
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent
LENGTHS = [12, 5, 9]
ADAPTERS = {
    "lora_qwen3": ("qwen3_tiny", dict(r=4, lora_alpha=8, target_modules="all-linear")),
    "lora_qwen2": (
        "qwen2_tiny",
        dict(r=3, lora_alpha=5, use_rslora=True, target_modules=["q_proj", "v_proj", "down_proj"]),
    ),
    "lora_llama": ("llama_tiny", dict(r=2, lora_alpha=7, target_modules=r"model\.layers\.\d+\.mlp\.(gate|down)_proj")),
}
REWARDS = {  # the second one's base has a language-model head, in whose place a new score head comes
    "lora_reward_llama": ("llama_reward", dict(r=3, lora_alpha=6, target_modules="all-linear")),
    "lora_reward_qwen3": ("qwen3_tiny", dict(r=2, lora_alpha=3, target_modules=["q_proj", "up_proj"])),
}
REWARD_LENGTHS = [9, 4, 6, 11]


def adapted(base: str, options: dict, task: str = "CAUSAL_LM"):
    """A base model with an adapter whose B is no longer zeros."""
    more = {} if task == "CAUSAL_LM" else {"num_labels": 1, "pad_token_id": 2}
    kind = transformers.AutoModelForCausalLM if task == "CAUSAL_LM" else transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(HERE / base, dtype=torch.float64, attn_implementation="sdpa", **more)
    make_precise(model)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type=task, **options), autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                noise = torch.randn(parameter.shape, generator=generator) * 0.15
                parameter.copy_(noise.to(torch.float32))  # the file holds float32
    return model.eval()


def make_precise(model):
    """transformers computes norms and rotary angles in float32, whatever the model's dtype: here in float64."""

    def norm(module, x):
        return module.weight * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + module.variance_epsilon))

    def rotary(module, x, position_ids):
        config = module.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        theta = config.rope_parameters["rope_theta"]
        inverse = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = position_ids[..., None] * inverse
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()

    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = norm.__get__(module)
        elif kind.endswith("RotaryEmbedding"):
            module.forward = rotary.__get__(module)


def batch(lengths=LENGTHS, vocabulary=211, padding=0):
    generator = torch.Generator().manual_seed(9)
    ids = torch.full((len(lengths), max(lengths)), padding)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(3, vocabulary, (length,), generator=generator)
        mask[row, :length] = 1
    return ids, mask


def loss_of(logits, ids, mask):
    logprobs = F.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
    return -(logprobs * mask[:, 1:]).sum() / mask[:, 1:].sum()


def straight_through(module, x):
    """What a LoRA layer of PEFT computes with its adapter merged into the weight and rounded."""
    base, (a, b) = module.base_layer, (getattr(module, f"lora_{kind}")["default"].weight for kind in "AB")
    total = base.weight + module.scaling["default"] * (b @ a)
    rounded = total.detach().float().to(torch.bfloat16).to(total.dtype)
    return F.linear(x, total + (rounded - total).detach(), base.bias)


def measured(model, ids, mask, prefix=""):
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=mask).logits
    loss = loss_of(logits, ids, mask)
    loss.backward()
    found = {f"{prefix}logits": logits.detach().float().numpy(), f"{prefix}loss": loss.detach().numpy()}
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            found[f"{prefix}grad/{name.replace('.default', '')}"] = parameter.grad.numpy().copy()
    return found


def save(model, name, base):
    model.peft_config["default"].base_model_name_or_path = f"../{base}"
    model.save_pretrained(HERE / name)
    (HERE / name / "README.md").unlink(missing_ok=True)
    weights = HERE / name / "adapter_model.safetensors"
    save_file({key: tensor.float() for key, tensor in load_file(weights).items()}, weights, {"format": "pt"})


def make_reward(name, base, options):
    ids, mask = batch(REWARD_LENGTHS, 61, 2)
    model = adapted(base, options, "SEQ_CLS")
    scores = model(input_ids=ids, attention_mask=mask).logits[:, 0]
    loss = -F.logsigmoid(scores[0::2] - scores[1::2]).mean()
    loss.backward()
    found = {"input_ids": ids.numpy().astype(np.int32), "lengths": np.array(REWARD_LENGTHS, np.int32)}
    found |= {"scores": scores.detach().numpy(), "loss": loss.detach().numpy()}
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            key = key.replace(".modules_to_save.default", "").replace(".default", "")
            found[f"grad/{key}"] = parameter.grad.numpy().copy()
    save(model, name, base)
    np.savez_compressed(HERE / f"{name}.npz", **found)
    print(name, sorted(path.name for path in (HERE / name).iterdir()), float(found["loss"]))


def main():
    for name, (base, options) in REWARDS.items():
        make_reward(name, base, options)
    ids, mask = batch()
    for name, (base, options) in ADAPTERS.items():
        model = adapted(base, options)
        found = {"input_ids": ids.numpy().astype(np.int32), "lengths": np.array(LENGTHS, np.int32)}
        found |= measured(model, ids, mask)
        save(model, name, base)
        for module in model.modules():
            if isinstance(module, peft.tuners.lora.Linear):
                module.forward = straight_through.__get__(module)
        found |= measured(model, ids, mask, "merged/")
        np.savez_compressed(HERE / f"{name}.npz", **found)
        print(name, sorted(path.name for path in (HERE / name).iterdir()), float(found["loss"]))


if __name__ == "__main__":
    main()
