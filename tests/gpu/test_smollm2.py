"""A real model in bfloat16. Build it with the golden values' make_smollm2.py, then: CUKIT_SMOLLM2=folder pytest -m gpu
tests/gpu/test_smollm2.py -s
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from cukit.autograd import no_grad
from cukit.engine.config import SamplingParams
from cukit.engine.llm import LLM
from cukit.models.logprobs import pack
from cukit.models.weights import load_model
from cukit.tokenizer import Tokenizer

pytestmark = pytest.mark.gpu
CHATS = json.loads((Path(__file__).parents[1] / "golden" / "smollm2.json").read_text())["chats"]


@pytest.mark.parametrize("folder", [f for f in [os.environ.get("CUKIT_SMOLLM2")] if f])
def test_greedy_ids_are_golden_where_the_margin_is_clear(folder):
    model = load_model(folder, device="cuda", dtype="bfloat16")
    compared = equal = 0
    for chat in CHATS:
        ids, start = chat["prompt_ids"] + chat["new_ids"], len(chat["prompt_ids"])
        with no_grad():
            tokens, positions, attend = pack(model, [ids])
            logits = model.backend.to_numpy(model.logits(model.forward(tokens, positions, attend)).data)[
                : len(ids)
            ].astype(np.float32)
        clear = np.array(chat["margins"]) > 0.1
        choice = logits[start - 1 : -1].argmax(axis=1)
        compared, equal = compared + clear.sum(), equal + (choice == chat["new_ids"])[clear].sum()
    print(f"{equal} of {compared} greedy tokens with a margin above 0.1 are golden")
    assert equal == compared > 60
    llm = LLM.from_model(model, Tokenizer.from_folder(folder), max_model_len=512)
    for chat, output in zip(
        CHATS, llm.generate([c["prompt_ids"] for c in CHATS], SamplingParams(temperature=0, max_tokens=40))
    ):
        got = output.outputs[0].token_ids
        differs = [i for i, (a, b) in enumerate(zip(got, chat["new_ids"])) if a != b]
        print(repr(output.outputs[0].text[:70]))
        assert not differs or chat["margins"][differs[0]] <= 0.1
