"""Reward models: scores, loss and gradients of transformers, folders in both directions, what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from cukit.autograd import no_grad
from cukit.backend import backend_for
from cukit.engine.shapes import parameter_counts
from cukit.models.config import ModelConfig
from cukit.models.decoder import Decoder
from cukit.models.logprobs import pack_tokens
from cukit.models.scores import last_tokens, packed_scores, score_rows, sequence_scores
from cukit.models.weights import load_config, load_model, save_model

GOLDEN = Path(__file__).parents[1] / "golden"
CLASSIFIERS = ("qwen3_reward", "qwen2_reward", "llama_reward")
ROWS = [[5, 9, 30, 7], [8], [3, 4, 5]]


def load(name, dtype="float32"):
    truth = np.load(GOLDEN / f"{name}.npz")
    rows = [ids[:n].tolist() for ids, n in zip(truth["ids"], truth["lengths"])]
    return load_model(GOLDEN / name, dtype=dtype, head="score"), truth, rows


@pytest.mark.parametrize("name", CLASSIFIERS)
@pytest.mark.parametrize("most", [1, 13, 1000])
def test_scores_are_those_of_transformers(name, most):
    model, truth, rows = load(name)
    scores = sequence_scores(model, rows, max_tokens_per_batch=most)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, truth["scores"], atol=1e-5)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_gradients_are_those_of_transformers(name):
    """Of the scores, weighted as the Bradley-Terry loss of the golden pairs weighs them."""
    model, truth, rows = load(name, "float64")
    be = model.backend
    (scores,) = packed_scores(model, pack_tokens(be, rows), score_rows(rows, model.config.pad_token_id))
    margin = truth["scores"][0::2] - truth["scores"][1::2] - truth["margins"]
    weights = np.repeat(-1 / (1 + np.exp(margin.astype(float))) / 3, 2) * np.tile([1, -1], 3)
    scores.backward(weights)
    grads = model.store.part_views(lambda bucket: bucket.grad)
    expected = {key.removeprefix("grad/"): truth[key] for key in truth.files if key.startswith("grad/")}
    assert grads.keys() == expected.keys() and "score.weight" in grads and "lm_head.weight" not in grads
    for key, value in expected.items():
        np.testing.assert_allclose(grads[key], value, atol=3e-6, err_msg=key)


def test_a_score_is_read_at_the_last_token_that_is_not_padding():
    assert last_tokens([[4, 5, 6], [7]]) == [2, 0]
    assert last_tokens([[4, 2, 5, 2, 2], [2, 2], [4]], pad_token_id=2) == [2, 0, 0]
    assert score_rows([[4, 2], [5, 6, 7]], 2).tolist() == [0, 4]


@pytest.mark.parametrize("name", CLASSIFIERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_comes_back_as_it_was(name, dtype, tmp_path):
    model = load_model(GOLDEN / name, dtype=dtype, head="score")
    assert model.score.weight.dtype == np.float32
    save_model(model, tmp_path)
    again = load_model(tmp_path, dtype=dtype, head="score")
    assert load_config(tmp_path) == replace(model.config, torch_dtype=dtype) and model.config.head == "score"
    assert load_file(tmp_path / "model.safetensors").keys() == load_file(GOLDEN / name / "model.safetensors").keys()
    np.testing.assert_array_equal(sequence_scores(model, ROWS), sequence_scores(again, ROWS))


@pytest.mark.parametrize("tied", [True, False])
def test_a_causal_folder_becomes_a_classifier_with_a_fresh_head(tied, tmp_path):
    source = GOLDEN / ("qwen3_tiny" if tied else "llama_tiny")
    causal = load_model(source)
    zeros, drawn, other = (load_model(source, head="score", score_seed=seed) for seed in (None, 3, 4))
    assert not zeros.score.weight.data.any()
    first, second = (model.score.weight.data for model in (drawn, other))
    assert first.dtype == np.float32 and not np.array_equal(first, second)
    assert 0.7 < first.std() * (48 + 1) ** 0.5 < 1.3
    np.testing.assert_array_equal(first, load_model(source, head="score", score_seed=3).score.weight.data)
    for name, part in causal.parts().items():
        if name != "lm_head.weight":
            np.testing.assert_array_equal(part, drawn.parts()[name])
    assert "lm_head.weight" not in drawn.parts()
    save_model(drawn, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == [causal.config.architecture.replace("CausalLM", "SequenceClassification")]
    assert raw["id2label"] == {"0": "LABEL_0"} and raw["label2id"] == {"LABEL_0": 0} and raw["pad_token_id"] == 0
    again = load_model(tmp_path, head="score", score_seed=7)  # a head that is there is read, not drawn
    np.testing.assert_array_equal(again.score.weight.data, first)


def refused(function) -> str:
    with pytest.raises(ValueError) as error:
        function()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_classifier_is_no_causal_model():
    line = refused(lambda: load_model(GOLDEN / "qwen3_reward"))
    assert "qwen3_reward holds a reward model (Qwen3ForSequenceClassification)" in line and "causal model" in line
    config = load_config(GOLDEN / "qwen3_reward")
    assert "no language-model head" in refused(lambda: Decoder(config, backend_for("cpu"), "float32"))


@pytest.mark.parametrize(
    "change, number",
    [
        ({"id2label": {"0": "a", "1": "b"}}, "2"),
        ({"id2label": None}, "2"),
        ({"id2label": None, "num_labels": 5}, "5"),
        ({"id2label": {"0": "a", "1": "b"}, "num_labels": 1}, "2"),
    ],
)
def test_another_number_of_labels_is_refused(change, number):
    raw = json.loads((GOLDEN / "qwen3_reward" / "config.json").read_text())
    assert ModelConfig.from_json(raw).head == "score"
    assert ModelConfig.from_json(raw | {"id2label": None, "num_labels": 1}).head == "score"
    line = refused(lambda: ModelConfig.from_json(raw | change))
    assert f"num_labels={number} is not supported" in line


def test_a_classifier_without_its_head_is_refused(tmp_path):
    folder = Path(shutil.copytree(GOLDEN / "qwen3_tiny", tmp_path / "model"))
    raw = load_config(folder).as_classifier().raw
    (folder / "config.json").write_text(json.dumps(raw))
    assert "missing: score.weight" in refused(lambda: load_model(folder, head="score"))


def test_a_copy_is_a_classifier_and_the_planner_counts_its_head():
    model = load_model(GOLDEN / "llama_reward", head="score")
    copy = model.frozen_copy()
    np.testing.assert_array_equal(sequence_scores(model, ROWS), sequence_scores(copy, ROWS))
    assert copy.vocab_size == model.vocab_size == 61
    numbers = sum(parameter.data.size for parameter in model.parameters())
    assert sum(parameter_counts(model.config)) == sum(parameter_counts(model.config, head=False)) == numbers


def test_drawn_weights_of_a_classifier():
    model = load_model(GOLDEN / "qwen3_reward", head="score")
    model.init_weights(1)
    assert 0.5 < model.score.weight.data.std() * 17**0.5 < 1.6
    with no_grad():
        assert np.isfinite(sequence_scores(model, ROWS)).all()
