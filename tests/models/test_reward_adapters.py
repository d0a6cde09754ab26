"""Adapters of reward models against PEFT (task SEQ_CLS): scores, loss, gradients of the factors and of the score head;
folders in both directions; what is refused.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from cukit.models.adapter_config import AdapterConfig
from cukit.models.adapter_files import load_adapter, save_adapter
from cukit.models.adapters import Adapter, WithoutAdapter
from cukit.models.logprobs import pack_tokens
from cukit.models.scores import packed_scores, score_rows, sequence_scores
from cukit.models.weights import load_config, load_model
from cukit.trainers.reward import preference_loss

GOLDEN = Path(__file__).parents[1] / "golden"
ADAPTERS = {"lora_reward_llama": "llama_reward", "lora_reward_qwen3": "qwen3_tiny"}
WAYS = ("beside", "merged")


def adapted(name, way="beside", dtype="float64"):
    model = load_model(GOLDEN / ADAPTERS[name], dtype=dtype, head="score")
    load_adapter(model, GOLDEN / name, way)
    truth = np.load(GOLDEN / f"{name}.npz")
    return model, truth, [ids[:length].tolist() for ids, length in zip(truth["input_ids"], truth["lengths"])]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ADAPTERS)
def test_scores_loss_and_gradients_are_pefts(name, way, checkpointing):
    model, truth, rows = adapted(name, way)
    model.gradient_checkpointing, be = checkpointing, model.backend
    np.testing.assert_allclose(sequence_scores(model, rows), truth["scores"], rtol=1e-9)
    places = score_rows(rows)
    chosen, rejected = packed_scores(model, pack_tokens(be, rows), places[0::2], places[1::2])
    loss = preference_loss(chosen, rejected, np.zeros(2), 0.5)
    np.testing.assert_allclose(loss.item(), truth["loss"], rtol=1e-9)
    loss.backward()
    found = model.adapter.store.part_views(lambda bucket: bucket.grad)
    expected = {key.removeprefix("grad/"): truth[key] for key in truth.files if key.startswith("grad/")}
    assert found.keys() == expected.keys() and "base_model.model.score.weight" in found
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-7, atol=1e-11, err_msg=key)
    assert all(parameter.grad is None for parameter in model.store.parameters), "the base is frozen, its head too"


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_folder_loads_as_a_model(name):
    model, truth, rows = adapted(name)
    merged = load_model(GOLDEN / name, dtype="float64", head="score")
    assert merged.adapter is None
    np.testing.assert_allclose(sequence_scores(merged, rows), truth["scores"], rtol=1e-8)
    assert load_config(GOLDEN / name).head == load_config(GOLDEN / name, "score").head == "score"
    without = sequence_scores(load_model(GOLDEN / ADAPTERS[name], dtype="float64", head="score"), rows)
    np.testing.assert_array_equal(sequence_scores(WithoutAdapter(model), rows), without)
    assert np.abs(without - truth["scores"]).max() > 0.1


def test_what_we_write_is_what_peft_wrote(tmp_path):
    for name in ADAPTERS:
        model, _, _ = adapted(name, dtype="float32")
        save_adapter(model.adapter, tmp_path / name)
        ours, theirs = (load_file(folder / name / "adapter_model.safetensors") for folder in (tmp_path, GOLDEN))
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[key], theirs[key]) for key in ours)
        values = json.loads((tmp_path / name / "adapter_config.json").read_text())
        assert (values["task_type"], values["modules_to_save"]) == ("SEQ_CLS", ["score"])


def test_a_new_adapter_begins_with_the_models_head(tmp_path):
    model = load_model(GOLDEN / "llama_reward", head="score")
    before = sequence_scores(model, [[3, 4, 5]])
    adapter = Adapter(model, AdapterConfig(2, 4, with_score=True))
    assert np.array_equal(sequence_scores(model, [[3, 4, 5]]), before)
    head = adapter.parts()["base_model.model.score.weight"]
    assert head.dtype == np.float32 and not np.shares_memory(head, model.score.weight.data)
    head *= 2
    np.testing.assert_allclose(sequence_scores(model, [[3, 4, 5]]), 2 * before, rtol=1e-6)


def test_a_head_has_no_place_in_a_language_model(tmp_path):
    name = "lora_reward_qwen3"
    for folder, message in (
        (GOLDEN / name, "holds the adapter of a reward model: give a causal model here, and reward models as"),
        (GOLDEN / "llama_reward", "holds a reward model .*: give a causal model here"),
    ):
        with pytest.raises(ValueError, match=message):
            load_model(folder)
    model = load_model(GOLDEN / "qwen3_tiny")
    for act in (
        lambda: Adapter(model, AdapterConfig(2, 4, with_score=True)),
        lambda: load_adapter(model, GOLDEN / name),
    ):
        with pytest.raises(ValueError, match="this adapter is a reward model's .*: it has a score head"):
            act()
    assert model.adapter is None and all(parameter.requires_grad for parameter in model.parameters())
    shutil.copytree(GOLDEN / name, tmp_path / name)
    path = tmp_path / name / "adapter_config.json"
    base = str(GOLDEN / "qwen3_tiny")
    values = json.loads(path.read_text()) | {"base_model_name_or_path": base}
    for changes, message in (
        ({"task_type": "CAUSAL_LM", "modules_to_save": None}, "unexpected: base_model.model.score.weight"),
        (
            {"modules_to_save": ["score", "embed_tokens"]},
            "cannot be taken: whole modules .* a reward model's score head",
        ),
        ({"modules_to_save": ["classifier"]}, "cannot be taken: whole modules"),
    ):
        path.write_text(json.dumps(values | changes))
        with pytest.raises(ValueError, match=message):
            load_model(tmp_path / name, head="score")
