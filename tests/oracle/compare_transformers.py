"""Forward and backward of a model in its exact shape against transformers in bfloat16, both judged by a float32 run.

Needs a GPU, torch and transformers (only here, as an oracle):   python tests/oracle/compare_transformers.py [--layers
28] Prints, for logits, log-probabilities, loss and each kind of gradient, rms error (ours) / rms error (transformers).
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import cupy
import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

sys.path.insert(0, str(Path(__file__).parents[2]))
from cukit.autograd import no_grad  # noqa: E402
from cukit.backend import backend_for  # noqa: E402
from cukit.models.config import ModelConfig  # noqa: E402
from cukit.models.decoder import Decoder  # noqa: E402
from cukit.models.logprobs import pack, target_logprobs  # noqa: E402

QWEN3_06B = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    tie_word_embeddings=True,
    hidden_act="silu",
    attention_bias=False,
)


def random_state(shapes, seed):
    """Weights as transformers initialises them (std 0.02), norm weights around 1; bfloat16 values held in float32."""
    generator = torch.Generator("cuda").manual_seed(seed)
    state = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator, device="cuda")
        value = 1 + 0.1 * noise if name.endswith("norm.weight") else 0.02 * noise
        state[name] = value.bfloat16().float()
    return state


def run_torch(state, config, dtype, rows):
    """logits of the first row, log-probabilities, loss and gradients, as float32 on the host."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").cuda()
    model.load_state_dict({k: v.to(dtype) for k, v in state.items()}, strict=False)
    ids = torch.tensor(rows, device="cuda")
    logits = model(input_ids=ids, use_cache=False).logits
    logprobs = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    loss = -logprobs.mean()
    loss.backward()
    grads = {name: p.grad.float().cpu().numpy() for name, p in model.named_parameters()}
    result = {
        "logits": logits[0].detach().float().cpu().numpy(),
        "logprobs": logprobs.detach().cpu().numpy().ravel(),
        "loss": loss.item(),
    }
    del model, logits
    torch.cuda.empty_cache()
    return result, grads


def run_cukit(state, raw, rows):
    model = Decoder(ModelConfig.from_json(raw), backend_for("cuda"), "bfloat16")
    for name, view in model.parts().items():
        view[...] = cupy.from_dlpack(state[name]).astype(view.dtype)
    lists = [list(map(int, row)) for row in rows]
    with no_grad():
        tokens, positions, attend = pack(model, lists[:1])
        logits = cupy.asnumpy(
            model.logits(model.forward(tokens, positions, attend)).data[: len(lists[0])].astype(cupy.float32)
        )
    logprobs, _ = target_logprobs(model, lists, [np.arange(len(r)) > 0 for r in lists])
    loss = logprobs.sum() * (-1.0 / logprobs.shape[0])
    loss.backward()
    result = {"logits": logits, "logprobs": cupy.asnumpy(logprobs.data), "loss": loss.item()}
    for parameter in model.parameters():
        parameter.data = parameter.grad
    return result, {name: cupy.asnumpy(view) for name, view in model.parts().items()}


def rms(x):
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    args = parser.parse_args()
    raw = dict(QWEN3_06B, num_hidden_layers=args.layers)
    config = Qwen3Config(
        **{k: v for k, v in raw.items() if k not in ("architectures", "rope_theta")},
        rope_parameters={"rope_type": "default", "rope_theta": raw["rope_theta"]},
    )
    shapes = {
        name: view.shape
        for name, view in Decoder(
            ModelConfig.from_json(dict(raw, max_position_embeddings=8)), backend_for("cuda"), "bfloat16"
        )
        .parts()
        .items()
    }
    state = random_state(shapes, 0)
    rows = np.random.default_rng(1).integers(0, 151000, (args.rows, args.length))
    truth, true_grads = run_torch(state, config, torch.float32, rows)
    theirs, their_grads = run_torch(state, config, torch.bfloat16, rows)
    ours, our_grads = run_cukit(state, raw, rows)

    for key in ("logits", "logprobs"):
        print(f"{key:12s} ours {rms(ours[key] - truth[key]):.3e}  transformers {rms(theirs[key] - truth[key]):.3e}")
    print(
        f"loss         truth {truth['loss']:.6f}  ours {ours['loss'] - truth['loss']:+.2e}  transformers "
        f"{theirs['loss'] - truth['loss']:+.2e}"
    )
    kinds = defaultdict(list)
    for name, true in true_grads.items():
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        kinds[kind].append((name, rms(our_grads[name] - true), rms(their_grads[name] - true), rms(true)))
    worst = {}
    print(f"{'gradient':50s} {'ours':>10s} {'transf.':>10s} {'kind':>6s} {'worst':>6s}")
    for kind, rows_ in kinds.items():
        mine, their = rms([r[1] for r in rows_]), rms([r[2] for r in rows_])
        single = max(r[1] / max(r[2], 1e-30) for r in rows_)
        worst[kind] = (mine / their, single)
        print(f"{kind:50s} {mine:10.3e} {their:10.3e} {mine / their:6.3f} {single:6.3f}")
    print(
        json.dumps({"worst_kind": max(v[0] for v in worst.values()), "worst_single": max(v[1] for v in worst.values())})
    )


if __name__ == "__main__":
    main()
