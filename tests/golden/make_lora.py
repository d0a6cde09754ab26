"""Write the golden adapters of this folder with torch, transformers and PEFT, on the CPU, in float64.

    pip install torch transformers peft
    python tests/golden/make_lora.py

For each adapter: a folder as PEFT saves it, whose base is the folder of a tiny model beside it, and an .npz with
input_ids (B, L), lengths (B,), PEFT's logits (B, L, V) in float32, the loss (the mean of -log p of every predicted token), and
grad/NAME of each factor; merged/… the same where each adapted weight is round(W + s·B·A) to bfloat16, straight through
(its gradient is that of the sum). Tests read these files and never run this one.
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


def adapted(base: str, options: dict):
    """A base model with an adapter whose B is no longer zeros."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        HERE / base, dtype=torch.float64, attn_implementation="sdpa"
    )
    make_precise(model)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options), autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
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


def batch():
    generator = torch.Generator().manual_seed(9)
    ids = torch.zeros((len(LENGTHS), max(LENGTHS)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(LENGTHS):
        ids[row, :length] = torch.randint(3, 211, (length,), generator=generator)
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


def main():
    ids, mask = batch()
    for name, (base, options) in ADAPTERS.items():
        model = adapted(base, options)
        found = {"input_ids": ids.numpy().astype(np.int32), "lengths": np.array(LENGTHS, np.int32)}
        found |= measured(model, ids, mask)
        model.peft_config["default"].base_model_name_or_path = f"../{base}"
        model.save_pretrained(HERE / name)
        (HERE / name / "README.md").unlink(missing_ok=True)
        weights = HERE / name / "adapter_model.safetensors"
        save_file({key: tensor.float() for key, tensor in load_file(weights).items()}, weights, {"format": "pt"})
        for module in model.modules():
            if isinstance(module, peft.tuners.lora.Linear):
                module.forward = straight_through.__get__(module)
        found |= measured(model, ids, mask, "merged/")
        np.savez_compressed(HERE / f"{name}.npz", **found)
        print(name, sorted(path.name for path in (HERE / name).iterdir()), float(found["loss"]))


if __name__ == "__main__":
    main()
