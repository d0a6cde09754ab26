"""Measurements of models with an adapter."""

import json

import numpy as np
import pytest

import cukit_cli
from cukit.backend import backend_for
from cukit.bench import TrainBench, train
from cukit.bench.adapter_cases import adapter_cases
from cukit.bench.cases import Workbench
from cukit.bench.subject import build_model, choose_subject

LORA = ["--use_peft", "--lora_r", "3", "--lora_target_modules", "all-linear"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cases_have_arguments_that_their_functions_take(dtype):
    subject = choose_subject(TrainBench(model="tiny", device="cpu", dtype=dtype))
    cases = list(adapter_cases(Workbench(subject, 12, 3, 20, 2, 0)))
    beside = {"linear_beside_forward", "linear_beside_backward_input"}
    assert {case.name for case in cases} == beside | {"merge_adapter", "change_rows"}
    for case in cases:
        getattr(backend_for("cpu"), case.name)(*case.arguments())
        assert case.bytes > 0 and case.flops > 0


@pytest.mark.parametrize("way", ["beside", "merged"])
@pytest.mark.parametrize("what", ["train", "grpo", "generate"])
def test_a_benchmark_runs_with_an_adapter(what, way, tmp_path, capsys):
    sizes = {
        "train": ["--rows", "3", "--tokens_per_row", "12", "--completion", "7"],
        "grpo": ["--prompts", "2", "--num_generations", "3", "--prompt_length", "5", "--max_completion_length", "7"],
        "generate": ["--scale", "0.02"],
    }[what]
    output = tmp_path / "report.json"
    argv = ["bench", what, *sizes, "--repeats", "1", "--device", "cpu", "--output", str(output), *LORA]
    assert cukit_cli.main([*argv, "--lora_way", way]) == 0
    report = json.loads(output.read_text())
    assert report["rows"] and report["options"]["lora"]["lora_way"] == way
    assert f"and an adapter ({way}, rank 3)" in capsys.readouterr().out.replace("\n", " ")


def test_training_moves_the_adapter_alone_and_brings_it_into_force(monkeypatch):
    options = TrainBench(model="tiny", device="cpu", use_peft=True, lora_way="merged", rows=2, tokens_per_row=8,
                         completion=4, repeats=1)  # fmt: skip
    models = []
    monkeypatch.setattr(train, "build_model", lambda *given: models.append(build_model(*given)) or models[0])
    train.run(options)
    plain = build_model(choose_subject(options), options.seed)
    assert all(map(np.array_equal, models[0].parts().values(), plain.parts().values()))
    layer, before = models[0].layers[0].self_attn.qkv_proj, plain.layers[0].self_attn.qkv_proj
    assert (layer.adapter.merged != before.weight.data).any()
