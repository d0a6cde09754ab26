"""Folders with FP8 weights: read to the last bit, refused by name."""

import json
import logging

import numpy as np
import pytest
from safetensors.numpy import load_file

import cukit_cli
from cukit import LLM, SamplingParams
from cukit.models.config import ModelConfig
from cukit.models.fp8_config import read_fp8
from cukit.models.weights import load_config, load_model, save_model

from .fp8_folders import COMPRESSED, GOLDEN, compressed_config, make_folder, write_safetensors

KINDS = [
    {"strategy": "tensor"},
    {"strategy": "channel"},
    {"strategy": "channel", "scale_dtype": "bfloat16"},
    {"strategy": "block"},
    {"strategy": "block", "qwen": True},
    {"strategy": "block", "qwen": True, "scale_dtype": "bfloat16", "block": (128, 128)},
    {"strategy": "tensor", "name": "llama_tiny"},
    {"strategy": "channel", "name": "qwen2_tiny"},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_weights_are_codes_times_scales(kind, tmp_path):
    numbers = make_folder(tmp_path / "model", **kind)
    for dtype in ("float64", "float32", "bfloat16"):
        model = load_model(tmp_path / "model", dtype=dtype)
        for name, view in model.parts().items():
            stored = np.asarray(view).astype(np.float64)
            # a product is rounded to float32 and, for bfloat16, once more
            np.testing.assert_allclose(stored, numbers[name], rtol=2.0**-8 if dtype == "bfloat16" else 2.0**-23)
    plain = load_model(GOLDEN / kind.get("name", "qwen3_tiny"), dtype="float32")
    for name, view in plain.parts().items():
        error = np.abs(np.asarray(view) - numbers[name]).max()
        assert error <= np.abs(view).max() / 14, f"{name}: the generator's own rounding"


def test_what_is_saved_is_plain(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("cukit.options._said", set())
    caplog.set_level(logging.WARNING)
    make_folder(tmp_path / "model")
    model = load_model(tmp_path / "model", dtype="bfloat16")
    line = "FP8 weights (compressed-tensors) are brought to the model's dtype; activations are not quantised"
    assert line in caplog.text
    save_model(model, tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())
    assert load_config(tmp_path / "saved").fp8 is None
    again = load_model(tmp_path / "saved", dtype="bfloat16").parts()
    assert all(np.array_equal(view, again[name]) for name, view in model.parts().items())


def test_the_engines_codes_are_the_files(tmp_path):
    """--quantization fp8 on such a folder: a channel's largest code is 448, so the engine finds the codes again."""
    make_folder(tmp_path / "model", "channel")
    model = load_model(tmp_path / "model", dtype="bfloat16")
    linear = model.layers[0].mlp.down_proj
    q, scale = np.zeros(linear.weight.shape, np.uint8), np.zeros(linear.weight.shape[0], np.float32)
    model.backend.quantize_weight(q, scale, linear.weight.data)
    from cukit.models.fp8_files import read_raw

    path, name = tmp_path / "model/model.safetensors", "model.layers.0.mlp.down_proj.weight"
    assert np.array_equal(q, read_raw(path, name))
    np.testing.assert_allclose(scale, read_raw(path, name + "_scale")[:, 0], rtol=2.0**-8)
    llm = LLM(tmp_path / "model", quantization="fp8", kv_cache_dtype="fp8")
    assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3))[0].outputs[0].token_ids) == 3


def test_scales_of_activations_and_of_a_cache_are_left(tmp_path):
    make_folder(tmp_path / "model")
    expected = load_model(tmp_path / "model", dtype="float32").parts()

    def more(tensors):
        one = np.ones(1, np.float32)
        return tensors | {
            "model.layers.0.self_attn.q_proj.input_scale": one,
            "model.layers.0.self_attn.k_scale": one,
            "model.layers.1.self_attn.v_scale": one,
        }

    rewrite(tmp_path / "model", more)
    found = load_model(tmp_path / "model", dtype="float32").parts()
    assert all(np.array_equal(found[name], view) for name, view in expected.items())


def rewrite(folder, change):
    """Write the tensors anew, after change(tensors)."""
    from safetensors import safe_open

    from cukit.models.fp8_files import read_raw

    path = folder / "model.safetensors"
    with safe_open(path, framework="np") as file:
        tensors = {name: read_raw(path, name) for name in file.keys()}
    write_safetensors(change(tensors), path)


DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda t: {k: v for k, v in t.items() if k != DOWN + "_scale"}, f"{DOWN} holds FP8 codes and has no"),
        (lambda t: t | {DOWN + "_scale": np.ones((3, 1), np.float32)}, f"{DOWN} has shape .* its scale \\[3, 1\\]"),
        (lambda t: t | {DOWN: np.ones(t[DOWN].shape, np.float32)}, "is the scale of a weight that is not F8_E4M3"),
        (lambda t: t | {DOWN: np.full(t[DOWN].shape, 0x7F, np.uint8)}, "not finite"),
        (lambda t: t | {DOWN: t[DOWN][:-1]}, "has shape"),
        (
            lambda t: t | {"model.norm.weight": np.zeros(t["model.norm.weight"].shape, np.uint8)},
            "model.norm.weight holds",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(change, named, tmp_path):
    make_folder(tmp_path / "model")
    rewrite(tmp_path / "model", change)
    with pytest.raises(ValueError, match=named) as error:
        load_model(tmp_path / "model", dtype="float32")
    assert "\n" not in str(error.value)


def test_codes_without_a_word_in_config_json_are_refused(tmp_path):
    make_folder(tmp_path / "model")
    path = tmp_path / "model/config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="stored as F8_E4M3"):
        load_model(tmp_path / "model")


GROUP = COMPRESSED["config_groups"]["group_0"]


@pytest.mark.parametrize(
    "quantization, named",
    [
        *(({"quant_method": name, "bits": 4}, name) for name in ("gptq", "awq", "bitsandbytes", "hqq", "fbgemm_fp8")),
        ({}, "quant_method=None"),
        ("gptq", "must be an object"),
        (COMPRESSED | {"format": "pack-quantized"}, "format='pack-quantized'"),
        (COMPRESSED | {"format": "int-quantized"}, "format='int-quantized'"),
        (
            COMPRESSED | {"config_groups": {"g": GROUP | {"weights": GROUP["weights"] | {"num_bits": 4}}}},
            r"weights of \(4",
        ),
        (compressed_config("group"), "strategy='group'"),
        (compressed_config("block", [0, 128]), "a block must be"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": "128"}, "a block must be"),
    ],
)
@pytest.mark.parametrize("key", ["quantization_config"])
def test_other_methods_are_refused_with_the_way_out(quantization, named, key):
    raw = json.loads((GOLDEN / "qwen3_tiny/config.json").read_text())
    with pytest.raises(ValueError, match=named) as error:
        ModelConfig.from_json(raw | {key: quantization})
    assert key in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("qwen", [False, True])
def test_the_command_line_and_a_run(qwen, tmp_path, capsys):
    """generate and eval's engine read such a folder; training begins from its numbers and saves a plain folder."""
    folder, run = str(tmp_path / "model"), tmp_path / "run"
    make_folder(tmp_path / "model", "block", name=GOLDEN.parents[1] / "data/tiny-qwen3", qwen=qwen)
    engine = ["--quantization", "int8", "--kv_cache_dtype", "fp8", "--device", "cpu"]
    assert cukit_cli.main(["generate", "--model", folder, "--prompt", "1+1", "--max_tokens", "3", *engine]) == 0
    argv = ["grpo", "--model", folder, "--reward_funcs", "exact", "--max_steps", "1", "--output_dir", str(run), *engine]
    sizes = ["--per_device_train_batch_size", "4", "--num_generations", "2", "--max_completion_length", "4"]
    data = ["--data", str(GOLDEN.parents[1] / "data/arithmetic/train.jsonl"), "--eval_on_start", "false"]
    assert cukit_cli.main([*argv, *sizes, *data]) == 0
    assert load_config(run).fp8 is None and load_model(run, dtype="float32") is not None


def test_random_files_are_read_as_they_were_written(tmp_path):
    """The reader of raw tensors against the library, for the types that both know, at random shapes."""
    from cukit.models.fp8_files import read_raw

    generator = np.random.default_rng(0)
    for number in range(30):
        shapes = [tuple(generator.integers(0, 6, generator.integers(1, 3))) for _ in range(4)]
        dtypes = generator.choice(["float32", "float16", "bfloat16"], 4)
        tensors = {
            f"t{i}": generator.standard_normal(shape).astype(load_dtype(dtype))
            for i, (shape, dtype) in enumerate(zip(shapes, dtypes))
        }
        tensors["codes"] = generator.integers(0, 256, (3, number), dtype=np.uint8)
        path = tmp_path / f"{number}.safetensors"
        write_safetensors(tensors, path)
        for name, array in tensors.items():
            found = read_raw(path, name)
            assert found.shape == array.shape
            assert np.array_equal(found, array if name == "codes" else array.astype(np.float32))
        write_safetensors({name: x for name, x in tensors.items() if name != "codes"}, path)
        assert {name: x.tobytes() for name, x in load_file(path).items()} == {
            name: x.tobytes() for name, x in tensors.items() if name != "codes"
        }


@pytest.mark.parametrize("seed", range(200))
def test_a_random_description_is_read_or_refused_in_one_line(seed):
    generator = np.random.default_rng(seed)
    values = [None, 7, "float", [], [1], {}, True, "block", "channel", [128, 128], 8, 0.5]

    def junk(value):
        """The value with parts of it replaced."""
        if generator.random() < 0.15:
            return values[generator.integers(len(values))]
        return {key: junk(part) for key, part in value.items()} if isinstance(value, dict) else value

    try:
        read_fp8({"quantization_config": junk(compressed_config("block", [16, 16]))})
    except ValueError as error:
        assert "\n" not in str(error)


def load_dtype(name):
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
