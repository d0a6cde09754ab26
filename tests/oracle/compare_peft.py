"""Does transformers with PEFT compute what cukit computes from an adapter folder? Run by hand:

    pip install torch transformers peft
    python tests/oracle/compare_peft.py ADAPTER [--dtype float32] [--merged FOLDER]

Logits of PEFT's model on fixed random ids beside cukit's in both ways; --merged: also transformers on a folder that
`cukit merge` wrote. Prints the largest difference of each pair; ends with 1 if one is not rounding.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import peft
import torch
import transformers

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from cukit.autograd import no_grad  # noqa: E402
from cukit.models.adapter_files import base_of, load_adapter  # noqa: E402
from cukit.models.logprobs import pack  # noqa: E402
from cukit.models.weights import load_model  # noqa: E402

ALLOWED = {"float32": 2e-4, "bfloat16": 0.3}  # of logits of the order of 10


def ours(folder, way, dtype, ids):
    model = load_model(base_of(folder), dtype=dtype) if way else load_model(folder, dtype=dtype)
    if way:
        load_adapter(model, folder, way)
    with no_grad():
        tokens, positions, attend = pack(model, [ids])
        return model.logits(model.forward(tokens, positions, attend)).data.astype(np.float64)[: len(ids)]


def theirs(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0].double().numpy()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("adapter")
    parser.add_argument("--dtype", default="float32", choices=ALLOWED)
    parser.add_argument("--merged")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    base = transformers.AutoModelForCausalLM.from_pretrained(base_of(args.adapter), dtype=dtype)
    ids = np.random.default_rng(0).integers(3, base.config.vocab_size, 60).tolist()
    plain = theirs(base.eval(), ids)
    wanted = theirs(peft.PeftModel.from_pretrained(base, args.adapter).eval(), ids)
    found = {f"cukit, {way}": ours(args.adapter, way, args.dtype, ids) for way in ("beside", "merged")}
    found["cukit, the folder as a model"] = ours(args.adapter, None, args.dtype, ids)
    if args.merged:
        merged = transformers.AutoModelForCausalLM.from_pretrained(args.merged, dtype=dtype).eval()
        found["transformers, merged folder"] = theirs(merged, ids)
    print(
        f"the adapter moves logits by up to {np.abs(wanted - plain).max():.3e}; they reach {np.abs(wanted).max():.1f}"
    )
    differences = {name: float(np.abs(logits - wanted).max()) for name, logits in found.items()}
    for name, difference in differences.items():
        print(f"{name}: PEFT's differ by up to {difference:.3e}")
    return int(max(differences.values()) > ALLOWED[args.dtype])


if __name__ == "__main__":
    sys.exit(main())
