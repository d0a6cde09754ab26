"""lora_adapter_path: a run that begins with a trained adapter."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

import cukit_cli
from cukit import RewardConfig, SFTConfig
from cukit.models.adapter_files import adapter_config, fill
from cukit.trainers.lora import with_peft

from .conftest import FOLDER
from .test_lora import LORA, WAYS, assert_equal_factors, factors_of, peft_config

START = dict(use_peft=True, learning_rate=0.02)


@pytest.fixture
def first(make_sft):
    """A run with an adapter of rank 4 at all layers."""
    trainer = make_sft(**LORA, use_rslora=True, max_steps=2)
    trainer.train()
    return trainer


@pytest.mark.parametrize("way", WAYS)
def test_a_run_begins_with_the_factors_of_the_folder(make_sft, first, way):
    trainer = make_sft(**START, lora_way=way, lora_adapter_path=str(first.run_folder), max_steps=2)
    assert_equal_factors(trainer, first)
    config, before = trainer.model.adapter.config, factors_of(first)
    assert (config.r, config.targets, config.use_rslora) == (4, first.model.adapter.config.targets, True)
    trainer.train()
    assert all((view != before[name]).any() for name, view in factors_of(trainer).items())
    assert trainer.run_config()["lora_r"] == 4, "config.yaml says what the adapter is"


def test_it_resumes_bit_for_bit(make_sft, first, tmp_path):
    options = START | dict(lora_adapter_path=str(first.run_folder), lr_scheduler_type="constant")
    whole = make_sft(**options, max_steps=4)
    whole.train()
    folder = str(tmp_path / "cut")
    make_sft(**options, max_steps=2, output_dir=folder).train()
    again = make_sft(**options, max_steps=4, output_dir=folder)
    again.train(resume_from_checkpoint="latest")
    assert_equal_factors(whole, again)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"lora_r": 8},
            "lora_r=8, and lora_adapter_path=.* has 4: leave lora_r out, or give 4 where a config.yaml says",
        ),
        ({"lora_alpha": 3.0}, "lora_alpha=3.0, and lora_adapter_path=.* has 32"),
        ({"use_rslora": False}, "use_rslora=False, and lora_adapter_path=.* has True"),
        (
            {"lora_target_modules": ["q_proj"]},
            "lora_target_modules is another choice .*: leave it out, or give q_proj k_proj .* where",
        ),
        ({"lora_adapter_path": "/no/such"}, "lora_adapter_path: model folder '/no/such' does not exist"),
        ({"use_peft": False}, "without use_peft there is no use for lora_adapter_path"),
    ],
)
def test_another_kind_is_refused(make_sft, first, changes, message):
    with pytest.raises(ValueError, match=message) as raised:
        make_sft(**START | {"lora_adapter_path": str(first.run_folder)} | changes)
    assert "\n" not in str(raised.value)


def test_a_file_may_keep_the_options_of_an_adapter_that_it_turns_off(caplog, monkeypatch):
    monkeypatch.setattr("cukit.options._said", set())
    args = SFTConfig(use_peft=False, lora_r=8, lora_target_modules=["q_proj"])
    assert not args.use_peft and "use_peft is false: nothing is done with lora_r, lora_target_modules" in caplog.text


def test_equal_options_may_be_given(make_sft, first):
    given = dict(lora_r=4, lora_target_modules=["all-linear"], use_rslora=True)
    trainer = make_sft(**START, **given, lora_adapter_path=str(first.run_folder))
    assert_equal_factors(trainer, first)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"lora_r": 8}, "args has lora_r=8, and peft_config has 3: leave one of them out"),
        ({"lora_alpha": 32.0}, "lora_alpha=32.0, and peft_config has 12"),
        ({"use_rslora": False}, "use_rslora=False, and peft_config has True"),
        ({"lora_target_modules": ["q_proj"]}, "lora_target_modules=q_proj, and peft_config has v_proj down_proj"),
    ],
)
def test_options_that_differ_from_pefts_configuration_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        with_peft(SFTConfig(use_peft=True, **given), peft_config())


def test_options_that_equal_pefts_configuration_may_be_given():
    given = dict(lora_r=3, lora_alpha=12, use_rslora=True, lora_target_modules=["down_proj", "v_proj"])
    assert with_peft(SFTConfig(use_peft=True, **given), peft_config()).lora_r == 3


def test_an_adapter_is_no_whole_weights(make_sft, first):
    trainer = make_sft(max_steps=4, output_dir=str(first.run_folder))
    with pytest.raises(ValueError, match="checkpoint-2 holds an adapter, and this run trains whole weights: resume wi"):
        trainer.train(resume_from_checkpoint="latest")


def test_a_reward_model_and_a_language_model_do_not_share_one(first):
    args = RewardConfig(**START, lora_adapter_path=str(first.run_folder))
    with pytest.raises(ValueError, match="is a language model's adapter, and this trains the other kind of model"):
        with_peft(args, None, "score")


def test_commands_say_what_the_adapter_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = ["sft", "--model", str(FOLDER), "--data", "data/arithmetic/sft.jsonl", "--use_peft", "--device", "cpu"]
    steps = ["--max_steps", "1", "--learning_rate", "0.05"]
    assert cukit_cli.main([*argv, *steps, "--lora_r", "3", "--output_dir", "run"]) == 0
    capsys.readouterr()
    assert cukit_cli.main([*argv, "--lora_adapter_path", "run", "--dry_run"]) == 0
    assert "lora_r: 3\n" in capsys.readouterr().out
    assert cukit_cli.main([*argv, *steps, "--lora_adapter_path", "run", "--output_dir", "more"]) == 0
    assert adapter_config("more").r == 3
    assert json.loads((tmp_path / "more/adapter_config.json").read_text())["base_model_name_or_path"] == str(FOLDER)
    more = ["--config", "more/config.yaml", "--output_dir", "again"]
    assert cukit_cli.main(["sft", *more]) == 0, "the file that a run writes can be given"
    assert adapter_config("again").r == 3


def test_a_relative_path_to_the_same_model_is_the_same_model(make_sft, caplog, tmp_path, monkeypatch):
    trainer = make_sft(**LORA, max_steps=1)
    trainer.train()
    path, adapter = trainer.run_folder / "adapter_config.json", trainer.model.adapter
    (tmp_path / "base").mkdir()
    (trainer.run_folder / "beside").mkdir()
    monkeypatch.chdir(tmp_path)
    ours = {"base": tmp_path / "base", "beside": trainer.run_folder / "beside"}
    for theirs, base, wanted in (("base", "base", 0), ("beside", "beside", 0), ("base", "beside", 1)):
        caplog.clear()
        path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": theirs}))
        adapter.config = replace(adapter.config, base=str(ours[base]))
        fill(adapter, trainer.run_folder)
        assert len(caplog.records) == wanted


def test_a_class_in_place_of_pefts_configuration_is_refused():
    with pytest.raises(
        ValueError, match="must be a peft.LoraConfig or a dict of its fields, got <class '.*Namespace'>"
    ):
        with_peft(SFTConfig(), SimpleNamespace)


@pytest.mark.parametrize("given", [["down_proj,q_proj"], "q_proj, down_proj", ["q_proj", "down_proj", ""]])
def test_targets_may_have_commas(given):
    assert SFTConfig(use_peft=True, lora_target_modules=given).lora.adapter(None).targets == ("q_proj", "down_proj")
