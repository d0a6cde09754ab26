"""generate --lora_modules: the model and its adapters answer one prompt, each as it does alone."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import cukit_cli
from cukit.commands.adapters import engine_options, named_adapters
from cukit.models.adapter_config import AdapterConfig
from cukit.models.adapter_files import save_adapter
from cukit.models.adapters import Adapter
from cukit.models.weights import load_model

FOLDER = Path(__file__).parents[2] / "data" / "tiny-qwen3"
ANSWER = ["--max_tokens", "12", "--temperature", "0", "--device", "cpu"]


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Two adapters of the bundled model, of ranks 3 and 20."""
    monkeypatch.chdir(tmp_path)
    for name, rank in (("first", 3), ("second", 20)):
        model = load_model(FOLDER)
        adapter = Adapter(model, AdapterConfig(rank, rank, base=str(FOLDER)))
        for view in adapter.parts().values():
            view[...] = np.random.default_rng(rank).normal(0, 1.5 * view.shape[1] ** -0.5, view.shape)
        save_adapter(adapter, name)
    return ["--lora_modules", "a=first", "b=second"]


def run(*argv):
    return cukit_cli.main(["generate", *argv])


@pytest.mark.parametrize("form", [[], ["--raw"]])
def test_each_answers_as_it_does_alone(folders, capsys, form):
    texts = []
    for model in (str(FOLDER), "first", "second"):
        assert run("--model", model, "--prompt", "1+2=", *ANSWER, *form) == 0
        texts.append(capsys.readouterr().out.strip("\n"))
    assert run("--model", str(FOLDER), "--prompt", "1+2=", *folders, *ANSWER, *form) == 0
    lines = "\n".join(f"=== {name}\n{text}" for name, text in zip((str(FOLDER), "a", "b"), texts))
    assert capsys.readouterr().out.strip("\n") == lines
    assert len(set(texts)) == 3


def test_the_engine_has_room_for_them(folders):
    options = engine_options(named_adapters(folders[1:]))
    assert options == {"enable_lora": True, "max_loras": 2, "max_lora_rank": 20} and engine_options([]) == {}


def test_a_dry_run_counts_them(folders, capsys):
    assert run("--model", str(FOLDER), "--prompt", "1", *folders, "--dry_run", "--device", "cpu") == 0
    assert "engine: adapters of requests" in capsys.readouterr().out


def test_a_run_that_has_not_ended_stands_for_its_newest_checkpoint(folders, options, write_checkpoint, capsys):
    for step, adapter in ((1, "second"), (2, "first")):
        checkpoint = write_checkpoint(Path(f"run/checkpoint-{step}"))
        for path in Path(adapter).iterdir():
            (checkpoint / path.name).write_bytes(path.read_bytes())
    Path("run/config.yaml").write_text("use_peft: true\n")
    newest = str(Path("run/checkpoint-2"))
    base = ("--model", str(FOLDER))
    assert options("generate", *base, "--lora_modules", "a=run", "b=second")["lora_modules"] == [
        f"a={newest}",
        "b=second",
    ]
    assert f"lora_modules a: {newest} (the newest checkpoint of this run)" in capsys.readouterr().err
    files = ("--data", "data/arithmetic/sft.jsonl", "--use_peft", "--lora_adapter_path", "run")
    assert options("sft", *base, *files)["lora_adapter_path"] == newest
    rewards = ("--data", "data/arithmetic/train.jsonl", "--reward_funcs", "gsm8k", "--critic_model", "run")
    assert options("ppo", *base, *rewards)["critic_model"] == newest


def test_a_run_goes_on_without_the_adapter_that_it_began_with(folders, capsys):
    Path("rows.jsonl").write_text('{"prompt": "1+2", "completion": "1+2=3"}\n' * 8)
    files = ["--model", str(FOLDER), "--data", "rows.jsonl", "--device", "cpu", "--output_dir", "run"]
    more = ["--per_device_train_batch_size", "2", "--save_steps", "1", "--max_steps"]
    assert cukit_cli.main(["sft", *files, *more, "2", "--use_peft", "--lora_adapter_path", "first"]) == 0
    factors = Path("run/adapter_model.safetensors").read_bytes()
    shutil.rmtree("run/checkpoint-2")
    shutil.rmtree("first")
    assert cukit_cli.main(["sft", "--resume_from_checkpoint", "run"]) == 0, capsys.readouterr().err
    assert Path("run/adapter_model.safetensors").read_bytes() == factors


def test_what_is_wrong_is_said_in_one_line(folders, capsys, monkeypatch):
    values = json.loads(Path("first/adapter_config.json").read_text())
    Path("first/adapter_config.json").write_text(json.dumps(values | {"use_dora": True}))
    for given, message in (
        (["a"], "lora_modules must be NAME=FOLDER, got 'a'"),
        (["a=/no/such"], "lora_modules: model folder '/no/such' does not exist"),
        (["a=x", "a=y"], "lora_modules has the name a twice"),
        (["a=first"], "use_dora=True cannot be taken"),
        ([f"a={FOLDER}"], "is no adapter folder: it needs adapter_config.json"),
    ):
        assert run("--model", str(FOLDER), "--prompt", "1", "--lora_modules", *given, "--device", "cpu") == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert message in error
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert run("--model", str(FOLDER), "--lora_modules", "b=second", "--device", "cpu") == 2
    assert "lora_modules compares answers to one prompt: give --prompt" in capsys.readouterr().err


def test_the_option_of_training_names_those_of_generate(fails):
    given = ("--lora_adapter_path", "first")
    ways = "give the adapter's folder as --model"
    beside = ", or beside its base as --lora_modules NAME=FOLDER"
    assert fails("generate", *given).endswith(f"unknown option --lora_adapter_path; {ways}{beside}")
    assert fails("chat", *given).endswith(f"unknown option --lora_adapter_path; {ways}")
    assert f"--lora_adapter_path ({ways}{beside})" in fails("generate", *given, "--nonsense", "1")
