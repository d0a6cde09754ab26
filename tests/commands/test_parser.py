"""Words of a command line and keys of a YAML file as options: what is a value, what wins, what is refused."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml

import cukit_cli
from cukit.commands import trl_names
from cukit.commands.argv import option_name
from cukit.commands.parser import command_options, make, parse
from cukit.options import flat_values
from cukit.trainers.config import SFTConfig
from cukit.trainers.grpo_config import GRPOConfig

GRPO = ("grpo", "--model", "m")


def written(tmp_path, text: str) -> str:
    (tmp_path / "run.yaml").write_text(text)
    return str(tmp_path / "run.yaml")


# ---- c1, c2: values stay as they are written -------------------------------------------------------------------------

VALUES = [
    "-- try re-run",
    "-5+3",
    "-1e-3",
    "--",
    "-",
    "---",
    "--1-2",
    "-h",
    "a-b",
    "max-steps",
    "--x y",
    "null",
    "none",
]


@pytest.mark.parametrize("value", VALUES)
def test_c1_values_are_untouched(value):
    assert parse(cukit_cli.COMMANDS, ["generate", "--prompt", value])[1] == {"prompt": value}
    assert parse(cukit_cli.COMMANDS, ["generate", f"--prompt={value}"])[1] == {"prompt": value}
    assert parse(cukit_cli.COMMANDS, ["sft", "--output-dir", value])[1] == {"output_dir": value}


def test_c1_any_text_is_a_value():
    """What does not look like --name, whatever it is; and after = everything."""
    rng = np.random.default_rng(0)
    alphabet = list("-=ab_ 1e+.\n\"'猫")
    for _ in range(500):
        text = "".join(rng.choice(alphabet, rng.integers(1, 9)))
        assert parse(cukit_cli.COMMANDS, ["generate", f"--prompt={text}"])[1] == {"prompt": text}
        if option_name(text) is None:
            assert parse(cukit_cli.COMMANDS, ["generate", "--prompt", text])[1] == {"prompt": text}


def test_c1_negative_numbers_and_lists(options):
    values = options(
        *GRPO, "--reward_weights", "-1e-3", "2", "--reward-funcs", "exact", "boxed", "--learning-rate=1e-4"
    )
    assert values["reward_weights"] == [-0.001, 2.0] and values["reward_funcs"] == ["exact", "boxed"]
    assert values["learning_rate"] == 1e-4
    assert options(*GRPO, "--stop", "a", "--stop=--END")["stop"] == ["a", "--END"]
    assert options(*GRPO, "--max_steps", "3", "--max_steps", "5")["max_steps"] == 5


@pytest.mark.parametrize(
    "argv, message",
    [
        (["generate", "-5"], "unexpected word '-5'"),
        (["generate", "--prompt", "two", "words"], "unexpected word 'words'"),
        (["generate", "--prompt", "--seed", "3"], "--prompt needs a value"),
        (["--seed", "3", "grpo"], "the command comes first"),
        (["kernels"], "kernels must be followed by build"),
        (["bench", "nothing"], "got 'nothing'"),
    ],
)
def test_c1_words_that_are_no_values(fails, argv, message):
    assert message in fails(*argv)


def test_c2_not_given_is_no_word_of_a_text(options, tmp_path):
    assert options("generate", "--prompt", "null")["prompt"] == "null"
    assert options(*GRPO, "--stop", "none", "--output_dir", "none")["stop"] == ["none"]
    # of a number, a truth value or an object it is none
    values = options(*GRPO, "--min_p", "none", "--bf16", "null", "--chat_template_kwargs", "null")
    assert (values["min_p"], values["bf16"], values["chat_template_kwargs"]) == (None, None, None)
    path = written(tmp_path, "model: m\neval_data: null\noutput_dir: 'null'\neval_steps: null\n")
    values = options("sft", "--config", path)
    assert (values["eval_data"], values["output_dir"], values["eval_steps"]) == (None, "null", None)


# ---- c3: what is given later wins ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, argv, holds",
    [
        ("eval_steps: 1", ["--eval_strategy", "no"], lambda c: c.evaluates == "no"),
        ("eval_steps: 1", ["--eval_strategy", "epoch"], lambda c: c.evaluates == "epoch"),
        ("eval_steps: 1", ["--eval_strategy", "steps"], lambda c: (c.evaluates, c.eval_steps) == ("steps", 1)),
        ("eval_strategy: no", ["--eval_steps", "4"], lambda c: (c.evaluates, c.eval_steps) == ("steps", 4)),
        ("eval_strategy: epoch", ["--eval_steps", "4"], lambda c: c.evaluates == "steps"),
        ("max_steps: 9", ["--num_train_epochs", "3"], lambda c: (c.max_steps, c.num_train_epochs) == (-1, 3)),
        ("num_train_epochs: 2", ["--max_steps", "9"], lambda c: c.max_steps == 9),
        ("num_train_epochs: 2", ["--max_steps", "-1"], lambda c: (c.max_steps, c.num_train_epochs) == (-1, 2)),
        ("warmup_steps: 5", ["--warmup_ratio", "0.1"], lambda c: c.num_warmup_steps(100) == 10),
        ("warmup_ratio: 0.1", ["--warmup_steps", "0"], lambda c: c.num_warmup_steps(100) == 0),
        ("warmup_ratio: 0.1", ["--warmup_steps", "3"], lambda c: c.num_warmup_steps(100) == 3),
        ("bf16: true", ["--dtype", "float32"], lambda c: c.dtype == "float32"),
        ("dtype: float32", ["--fp16"], lambda c: c.dtype == "float16"),
        ("fp16: true", ["--bf16", "false"], lambda c: c.dtype == "float16"),
        ("steps_per_generation: 4", ["--generation_batch_size", "8"], lambda c: c.generation_size == 8),
        ("generation_batch_size: 8", ["--steps_per_generation", "4"], lambda c: c.generation_size == 32),
        ("generation_kwargs: {top_k: 5, stop: x}", ["--top_k", "7"], lambda c: (c.top_k, c.stop) == (7, ["x"])),
        ("top_k: 7", ["--generation_kwargs", '{"top_k": 5}'], lambda c: c.top_k == 5),
        ("quantization: int8", ["--quantization", "none"], lambda c: c.quantization is None),
        ("use_peft: true\nlora_r: 4", ["--use_peft", "false"], lambda c: (c.use_peft, c.lora_r) == (False, 16)),
        ("use_peft: true\nlora_r: 4", ["--learning_rate", "1"], lambda c: (c.use_peft, c.lora_r) == (True, 4)),
    ],
)
def test_c3_what_is_given_later_wins(options, tmp_path, text, argv, holds):
    path = written(tmp_path, f"model: m\n{text}\n")
    config = make(GRPOConfig, options("grpo", "--config", path, *argv))
    assert holds(config), config
    # and so it stands in a run's config.yaml, from which a plain resume goes on
    again = {name: value for name, value in flat_values(config).items() if value is not None}
    assert holds(
        make(GRPOConfig, options("grpo", "--config", written(tmp_path, yaml.safe_dump({"model": "m"} | again))))
    )


def test_a_memory_limit_is_a_number_in_yaml_and_can_be_taken_back(options, tmp_path):
    argv = ["generate", "--config", written(tmp_path, "memory_limit: 3000000000\n")]
    assert options(*argv)["memory_limit"] == "3000000000"
    assert options(*argv, "--memory_limit", "none")["memory_limit"] is None


def test_c3_the_command_line_wins_over_the_recipe(options):
    config = make(
        SFTConfig, options("sft", "--num_train_epochs", "2", "--warmup_ratio", "0.5")
    )  # it has both the others
    assert config.max_steps == -1 and config.num_train_epochs == 2 and config.num_warmup_steps(10) == 5


def test_c3_in_one_place_the_rule_of_transformers_holds_and_is_said_once(caplog):
    caplog.set_level("WARNING", logger="cukit")
    config = [SFTConfig(max_steps=17, num_train_epochs=9, eval_strategy="no", eval_steps=13) for _ in range(2)][0]
    assert config.evaluates == "no" and config.max_steps == 17
    said = [record.message for record in caplog.records]
    assert said == [
        "max_steps=17 rules: num_train_epochs=9.0 is not used",
        "eval_strategy=no rules: eval_steps=13 is not used",
    ]


# ---- c4, c6, c11, c13, e10 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, message",
    [
        ("model: yes", "model must be text, got True; put it in quotes"),
        ("gradient_checkpointing: 3", "must be text, got 3: one of none, selective, full, auto"),
        ("quantization: off", "must be text, got False: one of int8, fp8, null"),
        ("output_dir: 007", "output_dir must be text, got 7; put it in quotes"),
        ("output_dir: 2026-11-28", "output_dir must be text"),
        ("reward_funcs: [1]", "reward_funcs must be a list of texts, got [1]"),
        ("bf16: maybe", "bf16 must be true or false, got 'maybe'"),
        ("seed: 1.5", "seed must be a whole number, got 1.5"),
        ("seed: yes", "seed must be a whole number, got True"),
        ("learning_rate: [1]", "learning_rate must be a number, got [1]"),
        ("chat_template_kwargs: 3", "chat_template_kwargs must be a JSON object, got 3"),
        ("max_steps: " + "9" * 6000, "run.yaml is not YAML: Exceeds the limit"),
    ],
)
def test_c4_types_of_yaml_values(fails, tmp_path, line, message):
    model = "" if line.startswith("model") else "model: m\n"
    assert message in fails("grpo", "--config", written(tmp_path, f"{model}{line}\n"))


def test_c6_values_given_now_win_over_the_runs_config(options, write_checkpoint, tmp_path):
    write_checkpoint(tmp_path / "run" / "checkpoint-2")
    (tmp_path / "run" / "config.yaml").write_text(
        "model: m\ndata: d\nlearning_rate: 0.1\nmax_steps: 2\neval_steps: 1\nreward_funcs: [exact]\noutput_dir: old\n"
    )
    resumed = ("grpo", "--resume_from_checkpoint", str(tmp_path / "run"))
    values = options(*resumed, "--learning_rate", "0.2", "--num_train_epochs", "4", "--eval_strategy", "no")
    config = make(GRPOConfig, values)
    assert (config.learning_rate, config.max_steps, config.num_train_epochs, config.evaluates) == (0.2, -1, 4.0, "no")
    assert values["output_dir"] == str(tmp_path / "run") and values["model"] == "m"
    assert make(GRPOConfig, options(*resumed)).learning_rate == 0.1


def test_a_run_of_another_method_names_the_command_that_goes_on_with_it(fails, write_checkpoint, tmp_path):
    run = tmp_path / "a run"
    place = write_checkpoint(run / "checkpoint-1")
    for made in ("sft", "reward"):
        (run / "run.json").write_text(json.dumps({"starts": [{"method": made}]}))
        line = fails("grpo", "--resume_from_checkpoint", place)
        assert f"{run} was made by {made}, not grpo; to go on with it: cukit {made} --resume_from_ch" in line
        assert line.endswith(f"a new run with its model: cukit grpo --model '{run}'") == (made == "sft")


def test_c11_sampling_options_reach_grpo(options):
    argv = ("--stop", "\n\n", "END", "--min_tokens", "2", "--stop_token_ids", "5", "--ignore_eos", "--top_k", "3")
    params = make(GRPOConfig, options(*GRPO, *argv)).sampling_params()
    assert (params.stop, params.min_tokens, params.stop_token_ids, params.ignore_eos, params.top_k) == (
        ["\n\n", "END"],
        2,
        [5],
        True,
        3,
    )


@pytest.mark.parametrize("command", ["grpo", "eval"])
def test_c13_a_reward_is_never_guessed_for_own_data(fails, options, capsys, tmp_path, command):
    path = written(tmp_path, "model: m\ndata: mine.jsonl\n")
    for argv in (["--data", "mine.jsonl"], ["--model", "m", "--data", "mine.jsonl"], ["--config", path]):
        line = fails(command, *argv)
        assert "never guessed" in line and all(name in line for name in ("exact", "boxed", "gsm8k", "file.py:function"))
    assert options(command, "--data", "mine.jsonl", "--reward_funcs", "exact")["reward_funcs"] == ["exact"]
    assert options(command, "--data", "data/arithmetic/train.jsonl")["reward_funcs"]  # the bundled task is no own data
    assert command == "eval" or "eval_data" not in options(command, "--data", "mine.jsonl", "--reward_funcs", "exact")


@pytest.mark.parametrize("command", ["grpo", "generate", "eval", "bench generate"])
def test_e10_the_engines_options_reach_every_command_that_makes_an_engine(options, command):
    argv = ("--exact", "true", "--enforce_eager", "--block_size", "32", "--num_kv_blocks", "9", "--max_num_seqs", "4")
    values = options(*command.split(), *argv, "--enable_prefix_caching", "false", "--gpu_memory_utilization", "0.5")
    (part,) = [part for part in cukit_cli.COMMANDS[command].parts if "exact" in part.options()]
    engine = make(part, values).engine
    assert (engine.exact, engine.enforce_eager, engine.block_size, engine.num_kv_blocks) == ("true", True, 32, 9)
    assert (engine.max_num_seqs, engine.enable_prefix_caching, engine.gpu_memory_utilization) == (4, False, 0.5)


# ---- c15: TRL's names ------------------------------------------------------------------------------------------------

TRL_YAML = """
model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: rows.jsonl
learning_rate: 1.0e-6
num_train_epochs: 1
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
gradient_checkpointing: true
num_generations: 8
max_completion_length: 256
reward_funcs: [accuracy_reward]
torch_dtype: bfloat16
beta: 0.0
loss_type: dapo
use_vllm: true
vllm_mode: colocate
vllm_gpu_memory_utilization: 0.3
report_to: wandb
push_to_hub: true
use_dora: true
load_in_4bit: true
optim: adamw_torch
attn_implementation: flash_attention_2
remove_unused_columns: false
max_prompt_len: 512
logging_steps: 10
"""


def test_c15_all_unknown_keys_at_once(fails, tmp_path):
    line = fails("grpo", "--config", written(tmp_path, TRL_YAML))
    taken, not_needed, not_yet, unknown = line.split("; ")[1:5]
    assert taken == "taken as: dataset_name as data, model_name_or_path as model, torch_dtype as dtype"
    assert not_needed.startswith("not needed: ") and not_yet.startswith("not there yet: ")
    for name in ("use_vllm", "vllm_mode", "vllm_gpu_memory_utilization", "optim", "attn_implementation"):
        assert name in not_needed, name
    for name in ("push_to_hub", "use_dora", "load_in_4bit"):
        assert name in not_yet, name
    assert "report_to" not in line  # an option
    assert unknown.startswith("unknown: max_prompt_len") and "remove_unused_columns" not in line  # it asks for nothing
    assert "save_total_limit" not in line  # once the guess for use_vllm


def test_c15_trls_own_names_are_taken(options, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1"}\n')
    text = f"model_name_or_path: m\ndataset_name: {rows}\nreward_funcs: exact\nuse_vllm: false\nreport_to: none\n"
    values = options("grpo", "--config", written(tmp_path, text))
    assert values["model"] == "m" and values["data"] == str(rows)
    values = options("grpo", "--model-name-or-path", "m", "--dataset_name=" + str(rows), "--reward_funcs", "exact")
    assert values["model"] == "m" and values["data"] == str(rows)


def test_c15_other_mistakes_with_names(fails, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    text = "model: a\nmodel_name_or_path: b\n"
    assert "model is given twice" in fails("sft", "--config", written(tmp_path, text))
    assert "--use_vllm (the engine is part of cukit" in fails("grpo", "--use_vllm", "true", "--use_dora", "true")
    line = fails("sft", "--model", "m", "--dataset_name", "trl-lib/Capybara")
    assert "trl-lib/Capybara" in line and "is no file or folder here and not wholly in the cache" in line
    assert "does not exist" in fails("sft", "--data", "nowhere/rows.jsonl")


def test_c15_no_name_of_the_table_is_an_option():
    known = set().union(*(command_options(command) for command in cukit_cli.COMMANDS.values()))
    for command in cukit_cli.COMMANDS.values():
        own = command_options(command)
        assert not own.keys() & trl_names.rows(own).keys()
    assert {row.text for row in trl_names.TABLE.values() if row.kind == trl_names.TAKEN} <= known


# ---- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cukit_cli.COMMANDS)
def test_help_is_grouped_and_has_examples_that_parse(name, capsys):
    command = cukit_cli.COMMANDS[name]
    with pytest.raises(SystemExit) as end:
        cukit_cli.main([*name.split(), "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and all(f"--{option} " in text for option in command_options(command))
    assert all(
        f"{group[0].upper()}{group[1:]}:" in text for group in {o.group for o in command_options(command).values()}
    )
    assert ("--config FILE" in text) is bool(command.parts)
    assert name == "doctor" or 2 <= len(command.examples) <= 3
    for example in command.examples:
        words = shlex.split(example.partition(" # ")[0].partition("| ")[2] or example.partition(" # ")[0])
        assert words[0] == "cukit" and parse(cukit_cli.COMMANDS, words[1:])[0] == name


def test_help_shows_a_lists_default_as_it_is_given(capsys):
    with pytest.raises(SystemExit):
        cukit_cli.main(["bench", "scale", "--help"])
    assert "[8 64 1024]" in capsys.readouterr().out


def test_help_as_a_value_is_a_value():
    assert parse(cukit_cli.COMMANDS, ["generate", "--prompt", "-h"])[1] == {"prompt": "-h"}
    with pytest.raises(SystemExit):
        parse(cukit_cli.COMMANDS, ["generate", "-h"])


def test_the_bundled_recipes_are_read(options):
    for command, recipe in (("grpo", "tiny-grpo.yaml"), ("sft", "tiny-sft.yaml"), ("reward", "tiny-reward.yaml")):
        path = Path(__file__).parents[2] / "data/recipes" / recipe
        values = options(command, "--config", str(path))
        assert values == options(command) and set(yaml.safe_load(path.read_text())) <= set(values)
