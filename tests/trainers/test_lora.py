"""Training an adapter: what is updated, what samples, the reference model, checkpoints, options."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import cukit_cli
from cukit import LLM, GRPOConfig, SamplingParams, SFTConfig
from cukit.backend.numpy import linear as linear_module
from cukit.models.adapter_config import AdapterConfig
from cukit.models.adapter_files import fill, load_adapter
from cukit.models.adapters import Adapter, WithoutAdapter
from cukit.models.config import LEVELS
from cukit.models.logprobs import token_logprobs
from cukit.models.weights import load_model, save_model
from cukit.runs.checkpoint import load_checkpoint, newest_model, why_not_whole

from .conftest import FOLDER, demonstrations, logged, rows_without_times, weights_of

LORA = dict(use_peft=True, lora_r=4, lora_target_modules=["all-linear"], learning_rate=0.02)
WAYS = ("beside", "merged")


def factors_of(trainer):
    return {name: view.copy() for name, view in trainer.model.adapter.parts().items()}


def assert_equal_factors(first, second):
    for (name, x), y in zip(factors_of(first).items(), factors_of(second).values(), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)


# ---- what is trained, what samples ----


@pytest.mark.parametrize("checkpointing", LEVELS)
@pytest.mark.parametrize("way", WAYS)
def test_only_the_adapter_moves(make_sft, way, checkpointing):
    trainer = make_sft(**LORA, lora_way=way, gradient_checkpointing=checkpointing)
    base, before = weights_of(trainer.model), factors_of(trainer)
    trainer.train()
    assert all(np.array_equal(x, base[name]) for name, x in weights_of(trainer.model).items())
    moved = {name for name, x in factors_of(trainer).items() if not np.array_equal(x, before[name])}
    assert moved == set(before), "A and B of every part"
    assert logged(trainer, "loss")[-1] < logged(trainer, "loss")[0]


def test_the_first_factors_come_from_the_runs_seed(make_sft):
    first, again, other = (factors_of(make_sft(**LORA, seed=seed)) for seed in (1, 1, 2))
    for name, view in first.items():
        assert np.array_equal(view, again[name]) and ("lora_B" in name or not np.array_equal(view, other[name]))


def test_checkpointing_changes_no_bit(make_sft):
    runs = [make_sft(**LORA, gradient_checkpointing=level) for level in LEVELS]
    for run in runs:
        run.train()
    assert_equal_factors(*runs[:2])
    assert_equal_factors(*runs[1:])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_policy_that_samples_is_the_one_that_trains(make_grpo, way, dtype):
    """In the third step the engine must see the adapter after two updates, and its cast and merged copies."""
    trainer = make_grpo(**LORA, lora_way=way, max_steps=3, dtype=dtype)
    plain = make_grpo(**LORA, lora_way=way, max_steps=3, dtype=dtype)
    trainer.train()
    limit = 1e-4 if dtype == "float32" else 0.1
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < limit
    changed = [abs(a - b).max() for a, b in zip(scores(trainer.model), scores(plain.model))]
    assert max(changed) > 3 * limit, "otherwise the test sees nothing"


def scores(model):
    return token_logprobs(model, [[1, 5, 9, 12, 3, 7], [4, 4, 8]], vocab_size=20)


@pytest.mark.parametrize("way", WAYS)
def test_an_update_reaches_the_engines_copies(make_grpo, way):
    """bfloat16 on a CPU: the engine multiplies with float32 copies, of the merged weights and the factors too."""
    trainer = make_grpo(**LORA, lora_way=way, dtype="bfloat16")
    copied = []
    original = linear_module.WideCopies.__init__

    def noted(self, weights):
        copied.append({id(w) for w in weights})
        original(self, weights)

    linear_module.WideCopies.__init__ = noted
    try:
        trainer.rollout.generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0.0))
    finally:
        linear_module.WideCopies.__init__ = original
    for _, one in trainer.model.adapter.linears:
        arrays = [one.factors.down, one.factors.up] + ([one.merged] if way == "merged" else [])
        assert {id(array) for array in arrays} <= copied[-1]


@pytest.mark.parametrize("way", WAYS)
def test_the_reference_is_the_base(make_grpo, make_model, way):
    trainer = make_grpo(**LORA, lora_way=way, beta=0.1, max_steps=3)
    assert isinstance(trainer.reference, WithoutAdapter) and trainer.reference.store is trainer.model.store
    trainer.train()
    assert logged(trainer, "kl")[0] < 1e-6 < logged(trainer, "kl")[-1]
    assert all(map(np.array_equal, scores(trainer.reference), scores(make_model())))
    frozen = make_grpo(use_peft=False, beta=0.1)
    assert not isinstance(frozen.reference, WithoutAdapter)


def test_float16_scales_the_loss_although_the_factors_are_float32(make_sft, make_model):
    trainer = make_sft(model=make_model("float16"), **LORA)
    trainer.train()
    assert trainer.optimizer.scales_loss and logged(trainer, "loss_scale")[0] > 1


# ---- checkpoints ----


@pytest.mark.parametrize("way", WAYS)
def test_sft_resumes_bit_for_bit(make_sft, tmp_path, way):
    options, folder = LORA | dict(lora_way=way, lr_scheduler_type="constant"), tmp_path / "cut"
    make_sft(**options, max_steps=2, output_dir=str(folder)).train()
    whole = make_sft(**options, max_steps=4)
    whole.train()
    again = make_sft(**options, max_steps=4, output_dir=str(folder))
    again.train(resume_from_checkpoint="latest")
    assert_equal_factors(whole, again)
    assert rows_without_times(again.run_folder)[2:] == rows_without_times(whole.run_folder)[2:]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grpo_resumes_bit_for_bit(make_grpo, tmp_path, way, dtype):
    options = LORA | dict(lora_way=way, dtype=dtype, beta=0.05, num_iterations=2)
    whole = make_grpo(**options, max_steps=4)
    whole.train()
    folder = tmp_path / "cut"
    make_grpo(**options, max_steps=3, output_dir=str(folder)).train()  # in the middle of a generation batch
    again = make_grpo(**options, max_steps=4, output_dir=str(folder))
    again.train(resume_from_checkpoint="latest")
    assert_equal_factors(whole, again)


def test_a_checkpoint_holds_the_adapter_and_not_the_base(make_sft, make_model, tmp_path):
    trainer = make_sft(**LORA)
    trainer.train()
    folder = trainer.run_folder / "checkpoint-4"
    names = {path.name for path in folder.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert not names & {"config.json", "model.safetensors"}
    arrays, _ = load_checkpoint(folder)
    assert {name.rsplit(".", 1)[0] for name in arrays if name.startswith("base_model")} == set(factors_of(trainer))
    assert why_not_whole(folder) is None and newest_model(trainer.run_folder) == trainer.run_folder
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        moved = (folder / name).rename(tmp_path / name)
        assert why_not_whole(folder) == f"{name} is missing"
        moved.rename(folder / name)
    model = make_model()
    load_adapter(model, trainer.run_folder)
    assert all(map(np.array_equal, scores(model), scores(trainer.model)))
    trainer.save_model(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/adapter_config.json").read_text())["r"] == 4


def test_a_run_that_goes_on_has_no_final_adapter(make_sft, tmp_path):
    folder = tmp_path / "run"
    make_sft(**LORA, max_steps=2, output_dir=str(folder)).train()
    assert (folder / "adapter_config.json").is_file()
    seen = []
    again = make_sft(**LORA, max_steps=3, output_dir=str(folder), callbacks=[Note(seen, folder)])
    again.train(resume_from_checkpoint="latest")
    assert seen == [False] and (folder / "adapter_config.json").is_file()


class Note:
    """Whether the run folder is a model while a step is done."""

    def __init__(self, seen, folder):
        self.seen, self.folder = seen, folder

    def on_step_end(self, *_):
        self.seen.append(any((self.folder / name).exists() for name in ("adapter_config.json", "config.json")))

    def __getattr__(self, name):
        if name.startswith("on_"):
            return lambda *_: None
        raise AttributeError(name)


def test_a_model_that_brings_an_adapter_trains_it(make_sft, make_model):
    model = make_model()
    adapter = Adapter(model, AdapterConfig(2, 4, ("o_proj",)), "merged")
    trainer = make_sft(model=model)
    assert trainer.model.adapter is adapter and trainer.optimizer is None
    moments = {item.name: item.nbytes for item in trainer.plan.items}["policy: AdamW's moments"]
    trainer.train()
    assert moments == 8 * adapter.num_parameters and (trainer.run_folder / "adapter_config.json").is_file()
    assert all(view.any() for view in adapter.parts().values())


@pytest.mark.parametrize("way", WAYS)
def test_the_best_adapter_comes_back(make_sft, way):
    """A learning rate that breaks the adapter later: the first evaluation stays the best."""
    options = LORA | dict(learning_rate=0.01, lora_way=way, evaluate=demonstrations(4), eval_steps=1, max_steps=3)
    trainer = make_sft(**options, load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True)
    trainer.train()
    best = trainer.run_folder / f"checkpoint-{trainer.best.step}"
    assert trainer.best.step < 3
    stored = (trainer.run_folder / "adapter_model.safetensors").read_bytes()
    assert stored == (best / "adapter_model.safetensors").read_bytes()
    evaluation = dict(trainer.evaluations)[trainer.best.step]["eval/loss"]
    np.testing.assert_allclose(trainer.run_evaluation()["eval/loss"], evaluation, rtol=1e-6)


@pytest.mark.parametrize(
    "changes", [{"lora_r": 8}, {"lora_alpha": 5}, {"use_rslora": True}, {"lora_target_modules": ["q_proj"]}]
)
def test_another_adapter_is_refused_in_one_line(make_sft, tmp_path, changes):
    folder = tmp_path / "run"
    make_sft(**LORA, max_steps=1, output_dir=str(folder)).train()
    with pytest.raises(ValueError, match=f"holds another adapter: its {next(iter(changes))} is"):
        make_sft(**LORA | changes, max_steps=2, output_dir=str(folder)).train(resume_from_checkpoint="latest")


def test_whole_weights_are_no_adapters(make_sft, tmp_path):
    folder = tmp_path / "run"
    make_sft(max_steps=1, output_dir=str(folder)).train()
    with pytest.raises(ValueError, match="checkpoint-1 holds whole weights, and this run trains an adapter: resume w"):
        make_sft(**LORA, max_steps=2, output_dir=str(folder)).train(resume_from_checkpoint="latest")


def test_an_adapter_of_another_model_is_said(make_sft, caplog):
    trainer = make_sft(**LORA, max_steps=1)
    trainer.train()
    path = trainer.run_folder / "adapter_config.json"
    values = json.loads(path.read_text())
    adapter = trainer.model.adapter
    for theirs, ours, wanted in (("a", "b", 1), ("a", "a", 0), ("a", None, 0), (None, "b", 0)):
        caplog.clear()
        path.write_text(json.dumps(values | {"base_model_name_or_path": theirs}))
        adapter.config = replace(adapter.config, base=ours)
        fill(adapter, trainer.run_folder)
        assert len(caplog.records) == wanted
        assert not wanted or caplog.records[0].message.endswith("was trained on a, and this model is b")


# ---- options ----


def peft_config(**changes):
    """What peft.LoraConfig looks like to a trainer."""
    return SimpleNamespace(
        **dict(
            peft_type=SimpleNamespace(value="LORA"), task_type="CAUSAL_LM", r=3, lora_alpha=12,
            target_modules={"v_proj", "down_proj"}, lora_dropout=0.0, use_rslora=True, use_dora=False, bias="none",
            modules_to_save=None, init_lora_weights=True, rank_pattern={}, layers_to_transform=None,
        )
        | changes
    )  # fmt: skip


def test_pefts_configuration_is_taken_by_its_attributes(make_model, tokenizer, tmp_path):
    from cukit import SFTTrainer

    for number, config in enumerate((peft_config(), vars(peft_config()))):
        args = SFTConfig(output_dir=str(tmp_path / str(number)), max_steps=1)
        rows = demonstrations()
        trainer = SFTTrainer(make_model(), args, rows, processing_class=tokenizer, peft_config=config)
        adapter = trainer.model.adapter.config
        assert (adapter.r, adapter.alpha, adapter.targets) == (3, 12, ("v_proj", "down_proj"))
        assert adapter.scale == 12 / np.sqrt(3)
        assert trainer.run_config()["lora_r"] == 3 and trainer.run_config()["use_peft"]
    assert not args.use_peft, "the caller's options stay as they were"


def test_another_thing_than_pefts_configuration_is_refused(make_model, tokenizer, tmp_path):
    from cukit import SFTTrainer

    with pytest.raises(ValueError, match="peft_config must be a peft.LoraConfig or a dict of its fields, got 'q_proj'"):
        args = SFTConfig(output_dir=str(tmp_path / "run"))
        SFTTrainer(make_model(), args, demonstrations(), processing_class=tokenizer, peft_config="q_proj")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"use_dora": True}, "peft_config: use_dora=True cannot be taken: DoRA is not there"),
        ({"init_lora_weights": "gaussian"}, "init_lora_weights='gaussian' is not there: true is"),
        ({"lora_dropout": 0.1}, "lora_dropout must be 0, got 0.1"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": ["lm_head"]}, "target_modules has lm_head: give all-linear or some of q_proj"),
        ({"layers_to_transform": [1]}, "no layers_to_transform is there"),
    ],
)
def test_what_is_not_there_is_refused(make_model, tokenizer, tmp_path, changes, message):
    from cukit import SFTTrainer

    with pytest.raises(ValueError, match=message):
        args = SFTConfig(output_dir=str(tmp_path / "run"))
        SFTTrainer(make_model(), args, demonstrations(), processing_class=tokenizer, peft_config=peft_config(**changes))


@pytest.mark.parametrize(
    "cls, options, message",
    [
        (SFTConfig, {"use_peft": True, "lora_dropout": 0.05}, "lora_dropout must be 0, got 0.05"),
        (SFTConfig, {"lora_r": 8, "lora_way": "merged"}, "without use_peft there is no use for lora_r, lora_way"),
        (SFTConfig, {"use_peft": True, "init_from_config": True}, "saves an adapter without them; leave one out"),
        (SFTConfig, {"use_peft": True, "lora_r": 0}, "lora_r must be at least 1, got 0"),
        (SFTConfig, {"use_peft": True, "lora_target_modules": ["qkv"]}, "lora_target_modules has qkv: give all-linear"),
        (GRPOConfig, {"use_peft": True, "sync_ref_model": True, "beta": 0.1}, "sync_ref_model moves the reference"),
    ],
)
def test_options_that_cannot_be(cls, options, message):
    with pytest.raises(ValueError, match=message):
        cls(**options)


def test_trls_defaults_without_an_adapter_ask_for_nothing():
    args = SFTConfig(use_peft=False, lora_r=16, lora_alpha=32, lora_dropout=0.05, lora_target_modules=None)
    assert not args.use_peft


def test_the_plan_counts_factors_and_copies(make_grpo):
    found = {}
    for name, options in {"full": {}, "beside": LORA, "merged": LORA | {"lora_way": "merged"}}.items():
        trainer = make_grpo(**options, beta=0.1)
        items = {item.name: item.nbytes for item in trainer.plan.items}
        found[name] = items
        if name != "full":
            adapter = trainer.model.adapter
            assert items["policy: AdamW's moments"] == 8 * adapter.num_parameters
            assert items["policy: weights' gradients"] <= 4 * adapter.num_parameters
    assert "reference: weights in float32" in found["full"] and "reference: weights in float32" not in found["beside"]
    linears = sum(linear.weight.data.nbytes for linear, _ in trainer.model.adapter.linears)
    weights = "policy: weights in float32"
    assert found["merged"][weights] - found["beside"][weights] == linears


# ---- commands ----


@pytest.fixture
def bundled_run(tmp_path, monkeypatch):
    """A run folder of one step of sft with an adapter on the bundled model."""
    monkeypatch.chdir(tmp_path)
    argv = ["--model", str(FOLDER), "--data", "data/arithmetic/sft.jsonl", "--use_peft", "--lora_r", "2"]
    more = ["--max_steps", "1", "--learning_rate", "0.05", "--output_dir", "run", "--device", "cpu"]
    assert cukit_cli.main(["sft", *argv, *more]) == 0
    return tmp_path / "run"


def test_every_command_takes_an_adapter(bundled_run, tmp_path, capsys):
    assert cukit_cli.main(["generate", "--model", "run", "1+1", "--max_tokens", "4", "--device", "cpu"]) == 0
    assert cukit_cli.main(["eval", "--model", "run", "--limit", "2", "--max_tokens", "4", "--device", "cpu"]) == 0
    assert cukit_cli.main(["generate", "--model", "run", "1+1", "--dry_run", "--device", "cpu"]) == 0
    assert cukit_cli.main(["merge", "run", "--output", "merged"]) == 0
    merged, folder = (load_model(path) for path in ("merged", "run"))
    assert all(np.array_equal(x, weights_of(folder)[name]) for name, x in weights_of(merged).items())
    with LLM("run", device="cpu") as adapter, LLM("merged", device="cpu") as plain:
        assert adapter.eos_token_ids == plain.eos_token_ids
        params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=True)
        ids = [[1, 5, 9]]
        first, second = (llm.generate(ids, params)[0].outputs[0] for llm in (adapter, plain))
        assert first.token_ids == second.token_ids and first.logprobs == second.logprobs
    capsys.readouterr()
    assert cukit_cli.main(["merge", "merged", "--output", "other"]) == 2
    assert "merged is no adapter folder" in capsys.readouterr().err
    assert cukit_cli.main(["merge", "run", "--output", "merged"]) == 2
    assert "output merged holds a model" in capsys.readouterr().err


def test_an_adapter_on_an_adapter_is_refused(bundled_run, capsys):
    argv = ["sft", "--model", "run", "--data", "data/arithmetic/sft.jsonl", "--use_peft", "--device", "cpu"]
    assert cukit_cli.main(argv) == 2
    assert "is an adapter, and use_peft would put another one on it: merge it first" in capsys.readouterr().err


def test_a_base_beside_the_adapter_is_found_and_merge_takes_another(bundled_run, tmp_path, capsys):
    path = tmp_path / "run/adapter_config.json"
    values = json.loads(path.read_text())
    assert values["base_model_name_or_path"] == str(FOLDER)
    expected = weights_of(load_model("run"))
    save_model(load_model(FOLDER), tmp_path / "run/base")
    for base, found in (("base", True), (None, False)):
        path.unlink()  # the checkpoint's file has the same inode
        path.write_text(json.dumps(values | {"base_model_name_or_path": base}))
        if found:
            assert all(np.array_equal(x, expected[name]) for name, x in weights_of(load_model("run")).items())
    assert cukit_cli.main(["merge", "run", "--output", "a"]) == 2
    assert "does not say which model it belongs to" in capsys.readouterr().err
    assert cukit_cli.main(["merge", "run", "--output", "a", "--base", str(FOLDER)]) == 0
    assert all(np.array_equal(x, expected[name]) for name, x in weights_of(load_model("a")).items())
