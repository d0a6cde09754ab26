"""LoRA adapters against PEFT: logits, loss and every gradient of A and B, in both ways; folders in PEFT's format."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cukit.autograd import no_grad
from cukit.models.adapter_config import TARGETS, AdapterConfig
from cukit.models.adapter_files import load_adapter, save_adapter
from cukit.models.adapters import Adapter, WithoutAdapter, adapter_sizes, weights_in_use
from cukit.models.config import LEVELS
from cukit.models.logprobs import pack, target_logprobs, token_logprobs
from cukit.models.weights import load_config, load_model, save_model, tokenizer_folders
from cukit.optim import AdamW

GOLDEN = Path(__file__).parents[1] / "golden"
ADAPTERS = {"lora_qwen3": "qwen3_tiny", "lora_qwen2": "qwen2_tiny", "lora_llama": "llama_tiny"}
ROWS = [[5, 9, 100, 7, 3], [8, 2], list(range(3, 40))]


def adapted(name, way, dtype="float64"):
    model = load_model(GOLDEN / ADAPTERS[name], dtype=dtype)
    load_adapter(model, GOLDEN / name, way)
    truth = np.load(GOLDEN / f"{name}.npz")
    rows = [ids[:length].tolist() for ids, length in zip(truth["input_ids"], truth["lengths"])]
    return model, truth, rows


def logits_of(model, rows):
    with no_grad():
        tokens, positions, attend = pack(model, rows)
        return model.logits(model.forward(tokens, positions, attend)).data[: sum(map(len, rows))]


def packed(padded, lengths):
    return np.concatenate([x[:length] for x, length in zip(padded, lengths)])


def loss_of(model, rows):
    logprobs, _ = target_logprobs(model, rows, [np.arange(len(row)) > 0 for row in rows])
    return logprobs.sum() * (-1.0 / logprobs.shape[0])


def check_gradients(model, truth, rows, prefix=""):
    loss = loss_of(model, rows)
    np.testing.assert_allclose(loss.item(), truth[f"{prefix}loss"], rtol=1e-9)
    loss.backward()
    found = model.adapter.store.part_views(lambda bucket: bucket.grad)
    names = [key.removeprefix(f"{prefix}grad/") for key in truth.files if key.startswith(f"{prefix}grad/")]
    assert found.keys() == set(names)
    for name in names:
        np.testing.assert_allclose(found[name], truth[f"{prefix}grad/{name}"], rtol=1e-7, atol=1e-10, err_msg=name)
    assert all(parameter.grad is None for parameter in model.store.parameters), "the base is frozen"


@pytest.mark.parametrize("checkpointing", LEVELS)
@pytest.mark.parametrize("name", ADAPTERS)
def test_beside_is_pefts(name, checkpointing):
    model, truth, rows = adapted(name, "beside")
    model.gradient_checkpointing = checkpointing
    np.testing.assert_allclose(logits_of(model, rows), packed(truth["logits"], truth["lengths"]), rtol=1e-5, atol=1e-5)
    check_gradients(model, truth, rows)


@pytest.mark.parametrize("checkpointing", LEVELS)
@pytest.mark.parametrize("name", ADAPTERS)
def test_merged_is_torchs_straight_through_rounding(name, checkpointing):
    model, truth, rows = adapted(name, "merged")
    model.gradient_checkpointing = checkpointing
    for _, one in model.adapter.linears:  # a float64 model whose merged copies are those of a bfloat16 one
        for adapted_rows, _, _ in one.factors.blocks:
            part = one.merged[adapted_rows]
            part[...] = part.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    wanted = packed(truth["merged/logits"], truth["lengths"])
    np.testing.assert_allclose(logits_of(model, rows), wanted, rtol=1e-5, atol=1e-5)
    check_gradients(model, truth, rows, "merged/")


@pytest.mark.parametrize("way", ["beside", "merged"])
def test_bfloat16_gradients_are_near(way):
    model, truth, rows = adapted("lora_qwen3", way, "bfloat16")
    loss_of(model, rows).backward()
    for name, view in model.adapter.store.part_views(lambda bucket: bucket.grad).items():
        true = truth[f"grad/{name}"]
        assert view.dtype == np.float32
        cosine = (view * true).sum() / np.sqrt((view**2).sum() * (true**2).sum())
        assert cosine > 0.97, (name, cosine)


@pytest.mark.parametrize("name", ADAPTERS)
def test_both_ways_and_a_merged_folder_agree(name):
    beside, _, rows = adapted(name, "beside")
    merged, _, _ = adapted(name, "merged")
    folder = load_model(GOLDEN / name, dtype="float64")  # an adapter's folder as a model
    assert folder.adapter is None and folder.parameters()[0].requires_grad
    expected = logits_of(beside, rows)
    for model in (merged, folder):
        np.testing.assert_allclose(logits_of(model, rows), expected, rtol=1e-9, atol=1e-9)
    assert load_config(GOLDEN / name) == load_config(GOLDEN / ADAPTERS[name])


# ---- a new adapter ----


def fresh(way="beside", dtype="float32", seed=3, targets=TARGETS, **more):
    model = load_model(GOLDEN / "qwen2_tiny", dtype=dtype)
    return model, Adapter(model, AdapterConfig(4, 8, targets, **more), way, seed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("way", ["beside", "merged"])
def test_a_new_adapter_changes_no_bit(way, dtype):
    before = logits_of(load_model(GOLDEN / "qwen2_tiny", dtype=dtype), ROWS)
    model, _ = fresh(way, dtype)
    assert logits_of(model, ROWS).tobytes() == before.tobytes()


def test_the_draw_depends_on_the_seed_alone():
    parts = {seed: fresh(seed=seed)[1].parts() for seed in (3, 4)}
    again = fresh("merged", "bfloat16", seed=3)[1].parts()
    for name, view in parts[3].items():
        assert view.dtype == np.float32
        assert np.array_equal(view, again[name])
        if "lora_A" in name:
            bound = view.shape[1] ** -0.5
            assert np.abs(view).max() <= bound and np.abs(view).max() > 0.9 * bound
            assert not np.array_equal(view, parts[4][name])
        else:
            assert not view.any()


@pytest.mark.parametrize("way", ["beside", "merged"])
def test_an_update_comes_into_force_by_refresh_and_the_base_stays(way):
    model, adapter = fresh(way, "bfloat16", targets=("k_proj", "o_proj", "up_proj"))
    base = [bucket.data.copy() for bucket in model.store.buckets]
    before = logits_of(model, ROWS)
    optimizer = AdamW(model.trained_store, 0.05)
    loss_of(model, ROWS).backward()
    assert optimizer.step()[1]
    addresses = [array.ctypes.data for array in weights_in_use(model)]
    assert logits_of(model, ROWS).tobytes() == before.tobytes()
    adapter.refresh()
    assert (logits_of(model, ROWS) != before).any()
    assert [array.ctypes.data for array in weights_in_use(model)] == addresses, "captured steps know them"
    assert all(np.array_equal(a, bucket.data) for a, bucket in zip(base, model.store.buckets))
    assert logits_of(WithoutAdapter(model), ROWS).tobytes() == before.tobytes()
    with adapter.off():
        assert logits_of(model, ROWS).tobytes() == before.tobytes()
    assert (logits_of(model, ROWS) != before).any(), "on again"


@pytest.mark.parametrize("way", ["beside", "merged"])
def test_log_probabilities_without_an_adapter_are_the_references(way):
    model, truth, rows = adapted("lora_qwen3", way)
    plain = load_model(GOLDEN / "qwen3_tiny", dtype="float64")
    assert all(map(np.array_equal, token_logprobs(WithoutAdapter(model), rows), token_logprobs(plain, rows)))


def test_sizes_are_those_of_the_arrays():
    for way in ("beside", "merged"):
        for targets in (TARGETS, ("q_proj", "v_proj"), ("up_proj",)):
            model, adapter = fresh(way, "bfloat16", targets=targets)
            factors, more = adapter_sizes(model, adapter.config, way)
            assert factors == adapter.num_parameters == sum(view.size for view in adapter.parts().values())
            used = sum(array.size for array in weights_in_use(model))
            replaced = sum(linear.weight.data.size for linear, _ in adapter.linears) if way == "merged" else 0
            assert factors + more == used + replaced - sum(parameter.data.size for parameter in model.parameters())


def test_a_second_adapter_is_refused():
    model, _ = fresh()
    with pytest.raises(ValueError, match="has an adapter already"):
        Adapter(model, AdapterConfig(4, 8))
    with pytest.raises(ValueError, match="one of beside, merged, got 'both'"):
        Adapter(load_model(GOLDEN / "qwen2_tiny"), AdapterConfig(4, 8), "both")


# ---- folders ----


def test_a_folder_comes_back_bit_for_bit(tmp_path):
    model, adapter = fresh(base=str(GOLDEN / "qwen2_tiny"), use_rslora=True)
    generator = np.random.default_rng(0)
    for view in adapter.parts().values():
        view[...] = generator.standard_normal(view.shape)
    adapter.refresh()
    save_model(model, tmp_path / "adapter")  # of a model with an adapter: the adapter
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    again = load_model(GOLDEN / "qwen2_tiny")
    other = load_adapter(again, tmp_path / "adapter")
    assert other.config == adapter.config
    assert all(np.array_equal(view, other.parts()[name]) for name, view in adapter.parts().items())
    assert logits_of(again, ROWS).tobytes() == logits_of(model, ROWS).tobytes()
    tokenizer, config = tokenizer_folders(tmp_path / "adapter")
    assert tokenizer == config == GOLDEN / "qwen2_tiny"


def test_our_names_are_pefts(tmp_path):
    model, _, _ = adapted("lora_llama", "beside", "float32")
    save_adapter(model.adapter, tmp_path)
    ours, theirs = (
        json.loads((folder / "adapter_config.json").read_text()) for folder in (tmp_path, GOLDEN / "lora_llama")
    )
    assert ours.keys() <= theirs.keys()
    assert ours["target_modules"] == ["gate_proj", "down_proj"]
    same = ours.keys() - {"target_modules"}
    assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}


@pytest.fixture
def broken(tmp_path):
    """broken(**changes of adapter_config.json) -> a copy of a golden adapter."""

    def make(**changes):
        folder = tmp_path / "adapter"
        shutil.copytree(GOLDEN / "lora_qwen2", folder, dirs_exist_ok=True)
        path = folder / "adapter_config.json"
        values = json.loads(path.read_text()) | {"base_model_name_or_path": str(GOLDEN / "qwen2_tiny")} | changes
        path.write_text(json.dumps(values))
        return folder

    return make


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"use_dora": True}, "use_dora=True cannot be taken: DoRA is not there: plain LoRA or rsLoRA is"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=.'lm_head'. cannot be taken: whole modules"),
        ({"bias": "all"}, "bias='all' cannot be taken: biases stay frozen"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern=.* cannot be taken: no rank_pattern is there"),
        ({"peft_type": "IA3"}, "peft_type IA3 is not there; LORA is"),
        ({"r": 0}, "r must be a whole number of at least 1, got 0"),
        ({"lora_alpha": None}, "lora_alpha must be a number, got None"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' changes the base's weights"),
        ({"r": 5}, "does not fit its model: .*lora_A.weight has shape .3, 48., this model needs .5, 48."),
        ({"target_modules": ["q_proj"]}, "does not fit its model: unexpected: .*down_proj.lora_A.weight"),
        ({"target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"]}, "missing: .*o_proj.lora_A.weight"),
        ({"base_model_name_or_path": None}, "does not say which model it belongs to: set base_model_name_or_path"),
        (
            {"base_model_name_or_path": "/no/such/folder"},
            "'/no/such/folder', is not there: set base_model_name_or_path",
        ),
        ({"base_model_name_or_path": "."}, "names its own folder"),
    ],
)
def test_what_cannot_be_taken_is_said_in_one_line(broken, changes, message, monkeypatch):
    folder = broken(**changes)
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=message) as raised:
        load_model(folder)
    assert "\n" not in str(raised.value)


def test_modules_that_peft_left_out_are_known_by_the_tensors(broken):
    """target_modules=all-linear with exclude_modules, a list or a pattern; the tensors are of what is left."""
    plain = logits_of(load_model(broken()), ROWS)
    for excluded in (["o_proj", "gate_proj"], ".*(o_proj|gate_proj)"):
        folder = broken(target_modules=list(TARGETS), exclude_modules=excluded)
        assert logits_of(load_model(folder), ROWS).tobytes() == plain.tobytes()


def test_damaged_files_are_said(broken, tmp_path):
    folder = broken()
    weights = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(weights[:-8])
    with pytest.raises(ValueError, match="truncated or not safetensors"):
        load_model(folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no adapter_model.safetensors"):
        load_model(folder)
    (folder / "adapter_config.json").write_text("[1")
    with pytest.raises(ValueError, match="is not valid JSON"):
        load_model(folder)


def test_whole_numbers_are_no_factors(broken):
    folder = broken()
    path = folder / "adapter_model.safetensors"
    save_file({name: tensor.astype(np.int8) for name, tensor in load_file(path).items()}, path)
    with pytest.raises(ValueError, match="is stored as int8; float32, float16, bfloat16, float64 are read"):
        load_model(folder)
