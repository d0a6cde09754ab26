"""TRL's names: a row for each, what its values become, and the migration page, which shows the same."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import cukit_cli
from cukit.commands.parser import command_options, make, resolve
from cukit.commands.trl_names import rows, translated
from cukit.commands.trl_table import NOT_NEEDED, NOT_YET, ROWS, TABLE, TAKEN
from cukit.trainers.config import SFTConfig
from cukit.trainers.grpo_config import GRPOConfig
from cukit.trainers.ppo_config import PPOConfig

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/MIGRATION.md"
STORED = json.loads((Path(__file__).parent / "trl_fields.json").read_text())["fields"]
FILES = {
    "TrainingArguments": "transformers/training_args.py",
    "_BaseConfig": "trl/trainer/base_config.py",
    "GRPOConfig": "trl/trainer/grpo_config.py",
    "PPOConfig": "trl/experimental/ppo/ppo_config.py",
    "SFTConfig": "trl/trainer/sft_config.py",
    "RewardConfig": "trl/trainer/reward_config.py",
    "ModelConfig": "trl/trainer/model_config.py",
    "ScriptArguments": "trl/scripts/utils.py",
    "DatasetMixtureConfig": "trl/scripts/utils.py",
    "GRPOScriptArguments": "trl/scripts/grpo.py",
}
OWNERS = {
    "GRPOConfig": "grpo",
    "GRPOScriptArguments": "grpo",
    "PPOConfig": "ppo",
    "SFTConfig": "sft",
    "RewardConfig": "reward",
}


def known(command: str) -> dict:
    return command_options(cukit_cli.COMMANDS[command])


def written(tmp_path, text: str) -> str:
    (tmp_path / "run.yaml").write_text(text)
    return str(tmp_path / "run.yaml")


# ---- every name has a row --------------------------------------------------------------------------------------------


def names_without_a_row(fields: dict[str, list[str]]) -> list[str]:
    found = []
    for owner, names in fields.items():
        for command in ("grpo", "ppo", "sft", "reward"):
            if OWNERS.get(owner, command) == command:
                found += [f"{owner}.{name}" for name in names if name not in known(command) and name not in TABLE]
    return found


def test_every_option_of_trl_is_an_option_here_or_has_a_row():
    assert set(STORED) == set(FILES) and sum(map(len, STORED.values())) > 200
    assert names_without_a_row(STORED) == []
    assert names_without_a_row(
        {"GRPOConfig": ["beta", "gamma"], "SFTConfig": ["beta"], "PPOConfig": ["gamma", "delta"]}
    ) == [
        "GRPOConfig.gamma",
        "SFTConfig.beta",
        "PPOConfig.delta",
    ]


def test_every_option_of_the_installed_trl_has_a_row():
    """Its sources are read, not imported, so that this needs no torch."""
    found = {}
    for owner, path in FILES.items():
        package, _, rest = path.partition("/")
        if (spec := importlib.util.find_spec(package)) is None:
            pytest.skip(f"{package} is not installed")
        tree = ast.parse((Path(spec.origin).parent / rest).read_text(encoding="utf-8"))
        (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
        found[owner] = [item.target.id for item in body if isinstance(item, ast.AnnAssign)]
    assert len(found["GRPOConfig"]) > 50 and names_without_a_row(found) == []


def test_a_row_is_well_formed():
    assert len(ROWS) == len(TABLE)  # no name twice
    options = known("grpo") | known("ppo") | known("sft") | known("reward")
    for row in ROWS:
        assert row.kind in (TAKEN, NOT_NEEDED, NOT_YET) and row.text, row
        assert (row.kind == TAKEN) == (row.text in options), row
        assert not row.becomes or all(new is not None for _, new in row.becomes), row


def test_a_name_that_becomes_an_option_needs_no_change_of_the_table():
    given = {"label_smoothing_factor": 0.2, "use_vllm": True}
    with pytest.raises(ValueError, match=r"not there yet: label_smoothing_factor \(this loss\)"):
        translated(given, ["beta"])
    found = translated(given, ["beta", "label_smoothing_factor"])
    assert found.values == {"label_smoothing_factor": 0.2} and [row.name for row in found.left_out] == ["use_vllm"]
    assert "label_smoothing_factor" in rows(["beta"]) and "label_smoothing_factor" not in rows(
        ["label_smoothing_factor"]
    )


# ---- what values become ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, values",
    [
        ("model_name_or_path: m", {"model": "m"}),
        ("{model_revision: v2, model_name_or_path: a/b}", {"model": "a/b@v2"}),
        ("{model_name_or_path: a/b, model_revision: main}", {"model": "a/b"}),
        ("dataset_name: a/b", {"data": "a/b"}),
        ("{dataset_config: main, dataset_name: openai/gsm8k}", {"data": "openai/gsm8k:main"}),
        (
            "{dataset_name: a/b, dataset_config: c, dataset_train_split: 'train[:9]', dataset_test_split: test}",
            {"data": "a/b:c:train[:9]"},
        ),
        ("{dataset_name: a/b, dataset_train_split: dev, dataset_config: null}", {"data": "a/b::dev"}),
        (
            "{dataset_name: a/b, dataset_config: c, eval_strategy: steps, eval_steps: 5}",
            {"data": "a/b:c", "eval_data": "a/b:c:test", "eval_strategy": "steps", "eval_steps": 5},
        ),
        (
            "{dataset_name: a/b, dataset_test_split: dev, eval_strategy: epoch}",
            {"data": "a/b", "eval_data": "a/b::dev", "eval_strategy": "epoch"},
        ),
        (
            "{dataset_name: a/b, eval_data: mine.jsonl, eval_strategy: epoch}",
            {"data": "a/b", "eval_data": "mine.jsonl", "eval_strategy": "epoch"},
        ),
        ("{dataset_name: a/b, eval_strategy: no}", {"data": "a/b", "eval_strategy": False}),
        (
            "{dataset_name: a/b, eval_strategy: no, eval_steps: 5}",
            {"data": "a/b", "eval_strategy": False, "eval_steps": 5},
        ),
        (
            "{dataset_name: a/b, dataset_config: c, eval_steps: 5}",
            {"data": "a/b:c", "eval_data": "a/b:c:test", "eval_steps": 5},
        ),
        ("{dataset_name: rows.jsonl, dataset_train_split: train}", {"data": "rows.jsonl"}),
        ("{dataset_name: rows.jsonl, eval_strategy: epoch}", {"data": "rows.jsonl", "eval_strategy": "epoch"}),
        ("use_cpu: true", {"device": "cpu"}),
        ("use_cpu: false", {}),
        ("save_strategy: no", {"save_steps": 0}),
        ("{save_strategy: steps, save_steps: 5}", {"save_steps": 5}),
        ("train_sampling_strategy: sequential", {"shuffle_dataset": False}),
        ("train_sampling_strategy: group_by_length", {}),
        ("activation_checkpointing: false", {"gradient_checkpointing": False}),
        ("torch_dtype: bfloat16", {"dtype": "bfloat16"}),
        ("{report_to: [wandb], run_name: a, project: b}", {"report_to": ["wandb"], "run_name": "a", "project": "b"}),
        ("generation_kwargs: {top_k: 3}", {"generation_kwargs": {"top_k": 3}}),
        (
            "{use_dora: false, lora_task_type: CAUSAL_LM, push_to_hub: no, deepspeed: null, label_smoothing_factor: 0}",
            {},
        ),
        ("{optim: ADAMW_TORCH, vllm_mode: colocate, hub_model_id: a/b, vllm_server_port: 7}", {}),
    ],
)
def test_values_that_are_taken(text, values):
    given = yaml.safe_load(text if text.startswith("{") else "{" + text + "}")
    options = known("grpo").keys() - {"label_smoothing_factor"}  # an option some day
    assert translated(given, options).values == values
    as_texts = {name: str(value) if isinstance(value, (bool, int)) else value for name, value in given.items()}
    found = translated(as_texts, options).values  # as a command line gives them
    assert {name: str(value) for name, value in found.items()} == {name: str(value) for name, value in values.items()}


@pytest.mark.parametrize(
    "optim, expected",
    [
        ("adamw_8bit", {"optimizer_state": "int8"}),
        ("adamw_bnb_8bit", {"optimizer_state": "int8"}),
        ("paged_adamw_8bit", {"optimizer_state": "int8"}),
        ("paged_adamw_32bit", {"offload_optimizer": True}),
        ("adamw_torch", {}),
    ],
)
def test_an_optimizer_of_trl_that_an_option_stands_for(optim, expected):
    found = translated({"optim": optim}, known("grpo"))
    assert found.values == expected and [row.name for row in found.left_out] == ([] if expected else ["optim"])
    config = make(GRPOConfig, found.values)
    assert all(getattr(config, name) == value for name, value in expected.items())
    if "optimizer_state" in expected:
        with pytest.raises(ValueError, match="optimizer_state is given twice, once as optim; give only one"):
            translated({"optim": optim, "optimizer_state": "bfloat16"}, known("grpo"))


@pytest.mark.parametrize(
    "text, message",
    [
        ("optim: adafactor", "not there yet: optim=adafactor (AdamW with float32 master weights is the one optimizer)"),
        ("vllm_mode: server", "not there yet: vllm_mode=server (the engine is part of cukit"),
        ("save_strategy: best", "not there yet: save_strategy=best (save_steps takes no such value)"),
        ("use_dora: true", "not there yet: use_dora (DoRA (LoRA and rsLoRA are))"),
        ("{push_to_hub: true, use_vllm: true}", "not needed: use_vllm (the engine"),
        ("{push_to_hub: true, model_name_or_path: m}", "taken as: model_name_or_path as model; not there yet"),
        ("dataset_config: main", "dataset_config in F needs dataset_name; or give data as NAME:CONFIG:SPLIT"),
        ("model_revision: v2", "model_revision in F needs model_name_or_path; or give model as NAME@REVISION"),
        ("{data: a, dataset_name: b}", "data is given twice in F, once as dataset_name"),
        ("{save_steps: 5, save_strategy: no}", "save_steps is given twice in F, once as save_strategy"),
        ("optim: '2026-99-99'", "not there yet: optim=2026-99-99"),
        ("optim: '[[[['", "not there yet: optim=[[[["),
        ("epsilom: 1", "unknown option 'epsilom' in F; did you mean epsilon?"),
        ("{epsilom: 1, max_seq_length: 5}", "unknown: epsilom (did you mean epsilon?), max_seq_length"),
    ],
)
def test_values_that_are_refused(text, message):
    given = yaml.safe_load(text if text.startswith("{") else "{" + text + "}")
    with pytest.raises(ValueError) as error:
        translated(given, known("grpo"), " in F")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_yaml_of_trl_is_taken_with_one_line_about_what_is_not_needed(options, capsys, tmp_path):
    text = (
        "model_name_or_path: m\ndataset_name: rows.jsonl\nreward_funcs: exact\nuse_vllm: true\nvllm_mode: colocate\n"
        "optim: adamw_torch_fused\nattn_implementation: flash_attention_2\nbf16: true\nwarmup_steps: 0.1\n"
    )
    values = options("grpo", "--config", written(tmp_path, text), "--ddp_bucket_cap_mb", "9", "--tf32")
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("not needed")] == [
        "not needed: --ddp_bucket_cap_mb (mpirun or srun starts the ranks, which exchange gradients by NCCL or MPI), "
        "--tf32 (the kernels are cukit's own)",
        f"not needed in {tmp_path}/run.yaml: attn_implementation (the kernels are cukit's own), optim (AdamW with "
        "float32 master weights is the one optimizer), use_vllm, vllm_mode (the engine is part of cukit and shares the "
        "trainer's weights)",
    ]
    config = make(GRPOConfig, values)
    assert (values["model"], values["data"], config.dtype, config.num_warmup_steps(50)) == (
        "m", "rows.jsonl", "bfloat16", 5,
    )  # fmt: skip


def test_words_of_a_command_line(options, fails, capsys):
    values = options(
        *("grpo", "--model_name_or_path", "m", "--dataset-name", "a/b.jsonl", "--reward_funcs", "exact", "boxed"),
        *("--save_strategy=no", "--use_cpu", "--report_to", "wandb,tensorboard", "--warmup_steps", "0.25"),
    )
    config = make(GRPOConfig, values)
    assert (values["data"], config.device, config.save_steps) == ("a/b.jsonl", "cpu", 0)
    assert config.report_to == ["wandb", "tensorboard"] and config.num_warmup_steps(100) == 25
    line = fails("sft", "--model", "m", "--push_to_hub", "--loss_type", "dft", "--packing_strategy", "bfd")
    assert "--push_to_hub (pushing to the hub)" in line and "--loss_type=dft" in line
    assert "not needed: --packing_strategy (rows are always packed" in line


def test_a_yaml_of_trls_ppo_is_taken(options, fails, capsys, tmp_path):
    text = (
        "model_name_or_path: m\ndataset_name: rows.jsonl\nreward_model_path: r\nresponse_length: 9\nstop_token_id: 7\n"
        "total_episodes: 640\nnum_mini_batches: 2\nnum_ppo_epochs: 3\nmissing_eos_penalty: 1.0\nexp_name: a\n"
        "local_rollout_forward_batch_size: 8\nnum_sample_generations: 10\nds3_gather_for_generation: true\n"
        "kl_estimator: k3\nwhiten_rewards: true\nmodel_adapter_name: null\nmini_batch_size: null\n"
    )
    values = options("ppo", "--config", written(tmp_path, text))
    config = make(PPOConfig, values)
    assert (values["model"], values["data"], config.reward_funcs) == ("m", "rows.jsonl", ["r"])
    assert (config.max_completion_length, config.stop_token_ids, config.total_episodes) == (9, [7], 640)
    assert (config.num_mini_batches, config.num_ppo_epochs, config.missing_eos_penalty) == (2, 3, 1.0)
    assert config.kl_estimator == "k3" and config.whiten_rewards
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("not needed"))
    for name in ("exp_name", "local_rollout_forward_batch_size", "num_sample_generations", "ds3_gather_for_generation"):
        assert name in line
    given = ("ppo", "--model", "m", "--data", "rows.jsonl", "--reward_model_path", "r")
    words = options(*given, "--stop_token_id", "7", "--stop_token", "eos")
    assert make(PPOConfig, words).stop_token_ids == [7] and make(PPOConfig, words).reward_funcs == ["r"]
    assert "--model_adapter_name (several adapters)" in fails(*given, "--model_adapter_name", "a")
    line = fails("ppo", "--config", written(tmp_path, text + "max_completion_length: 6\n"))
    assert re.search(r"max_completion_length is given twice in .*, once as response_length; give only one", line)


def test_trls_dotted_path_of_a_reward_is_a_file_and_a_function(tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/rewards.py").write_text("")
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    given = ["package.rewards.one", "mine.two", "exact", "other.three", "mine.py:two", "package/rewards.py:one"]
    given.append("mine.py")  # a file without a function is no dotted path
    wanted = ["package/rewards.py:one", "mine.py:two", *given[2:]]
    assert translated({"reward_funcs": given}, known("grpo")).values["reward_funcs"] == wanted
    assert translated({"reward_funcs": "mine.two"}, known("grpo")).values["reward_funcs"] == ["mine.py:two"]


def test_a_reward_model_is_one_more_reward():
    assert translated({"reward_model_name_or_path": "a/b"}, known("grpo")).values == {"reward_funcs": ["a/b"]}
    both = translated({"reward_model_name_or_path": "a/b", "reward_funcs": ["exact"]}, known("grpo"))
    assert both.values == {"reward_funcs": ["exact", "a/b"]} and not both.left_out
    assert translated({"reward_model_name_or_path": None}, known("grpo")).values == {}
    with pytest.raises(ValueError, match="unknown option 'reward_model_name_or_path'"):
        translated({"reward_model_name_or_path": "a/b"}, known("sft"))


def test_a_share_of_warmup_steps_is_a_ratio():
    assert GRPOConfig(warmup_steps=0.1, max_steps=100).num_warmup_steps(100) == 10
    assert SFTConfig(warmup_steps=0).num_warmup_steps(100) == 0 and SFTConfig(warmup_steps=7).warmup_steps == 7
    with pytest.raises(ValueError, match="warmup_steps=0.1 is a ratio, and warmup_ratio is given too"):
        GRPOConfig(warmup_steps=0.1, warmup_ratio=0.2)
    with pytest.raises(ValueError, match="warmup_steps must be a whole number, got 1.5"):
        GRPOConfig(warmup_steps=1.5)


def test_a_constructor_names_all_options_that_it_lacks():
    with pytest.raises(ValueError, match="GRPOConfig has no options 'use_vllm', 'vllm_mode'; docs/MIGRATION"):
        GRPOConfig(use_vllm=True, beta=0.1, vllm_mode="colocate")


# ---- the page --------------------------------------------------------------------------------------------------------


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def test_the_page_shows_the_table():
    spec = importlib.util.spec_from_file_location("make_migration", ROOT / "docs/make_migration.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = PAGE.read_text(encoding="utf-8")
    assert module.with_tables(text) == text, "run: python docs/make_migration.py"
    assert all(f"`{row.name}" in text for row in ROWS if row.name in rows(known("grpo")))


def test_the_pages_names_for_rlcus_options_are_options():
    text = PAGE.read_text(encoding="utf-8").partition("## From RL.cu")[2]
    lines = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `--")]
    theirs = {name for left, _ in lines for name in re.findall(r"`--([a-z-]+)`", left)}
    assert theirs == {
        *("model", "data", "batch-size", "num-gens", "accum", "max-comp", "max-seq", "temperature", "top-p", "top-k"),
        *("lr", "min-lr", "warmup", "total-steps", "schedule", "grad-clip", "max-model-len", "gpu-util", "save-dir"),
        *("log-steps", "save-steps", "seq-len"),
    }
    ours = {name for _, right in lines for name in re.findall(r"--([a-z_]+)", right)}
    assert len(ours) > 15 and ours <= {*known("grpo"), *known("sft")}


def test_the_pages_commands_and_yaml_are_understood(tmp_path, capsys, options, monkeypatch):
    monkeypatch.chdir(ROOT)
    theirs, ours = blocks("yaml")
    for text in (theirs, ours):
        values = options("grpo", "--config", written(tmp_path, text))
        assert values["max_steps"] == 3
    assert options("grpo", "--config", written(tmp_path, theirs)) == values
    (rlcu,) = (block for block in blocks("sh") if "--max_completion_length 4096" in block)
    words = rlcu.replace("\\\n", " ").split()[2:]
    config = make(GRPOConfig, resolve(cukit_cli.COMMANDS["grpo"], cukit_cli.parse(cukit_cli.COMMANDS, words)[1]))
    assert (config.generation_size, config.learning_rate, config.max_steps) == (64, 1e-6, 100)


@pytest.mark.slow
def test_the_pages_script_and_yaml_run(tmp_path):
    """As a reader would: the script that replaces TRL's, and TRL's own YAML, on the tiny model."""
    script = next(block for block in blocks("python") if "from cukit" in block)
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "trl.yaml").write_text(blocks("yaml")[0])
    cli = [str(ROOT / "cukit_cli.py"), "grpo", "--config", str(tmp_path / "trl.yaml")]
    for words in ([str(tmp_path / "train.py")], [*cli, "--output_dir", str(tmp_path / "yaml")]):
        result = subprocess.run([sys.executable, *words], cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""},
                                capture_output=True, text=True)  # fmt: skip
        assert result.returncode == 0, result.stderr
    for folder in (tmp_path / "grpo-tiny", tmp_path / "yaml"):
        steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert max(steps) == 3 and (folder / "model.safetensors").is_file()


KNOWN = list(command_options(cukit_cli.COMMANDS["grpo"]))


def test_arguments_of_the_models_loader_count_as_given_by_their_own_names():
    loader = {"torch_dtype": "bfloat16", "attn_implementation": "sdpa", "use_cache": False, "device_map": None}
    found = translated({"model": "m", "model_init_kwargs": loader | {"revision": "abc"}}, KNOWN)
    assert found.values == {"model": "m@abc", "dtype": "bfloat16"}
    assert translated({"model_init_kwargs": {"dtype": "float32"}}, KNOWN).values == {"dtype": "float32"}
    with pytest.raises(
        ValueError, match=r"not there yet: model_init_kwargs\.max_memory \(other arguments of the model"
    ):
        translated({"model_init_kwargs": {"max_memory": {0: "3GB"}, "dtype": "auto"}}, KNOWN)
    with pytest.raises(ValueError, match=r"^dtype is given twice, once as torch_dtype"):
        translated({"dtype": "float32", "model_init_kwargs": {"dtype": "bfloat16"}}, KNOWN)
    with pytest.raises(ValueError, match=r"^torch_dtype is given twice, once in model_init_kwargs"):
        translated({"torch_dtype": "float32", "model_init_kwargs": {"dtype": "bfloat16"}}, KNOWN)


def test_a_list_of_data_sets_is_no_name():
    assert translated({"dataset_name": ["a", "b"], "dataset_train_split": "train"}, KNOWN).values == {
        "data": ["a", "b"]
    }
