"""The command line: options, recipes, the commands on a tiny model, and one line with exit code 2 for each mistake."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

import cukit_cli
from cukit.commands.chat import generation_defaults
from cukit.commands.parser import make
from cukit.runs.metrics import read_jsonl
from cukit.trainers.config import SFTConfig
from cukit.trainers.grpo_config import GRPOConfig
from cukit.trainers.reward_config import RewardConfig

ROOT = Path(__file__).parents[2]


# ---- options ---------------------------------------------------------------------------------------------------------


def test_without_arguments_the_recipe_runs_and_options_override_it(options, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # the bundled files are found from anywhere
    values = options("grpo", "--max-steps", "7", "--seed=3")
    assert values["max_steps"] == 7 and values["seed"] == 3
    recipe = yaml.safe_load((ROOT / "data/recipes/tiny-grpo.yaml").read_text())
    assert values["learning_rate"] == recipe["learning_rate"] and values["reward_funcs"] == recipe["reward_funcs"]
    assert all(Path(values[name]).exists() for name in ("model", "data", "eval_data"))


def test_with_a_model_the_dataclass_defaults_hold_and_bundled_files_are_announced(options, capsys):
    values = options("grpo", "--model", "somewhere")
    assert make(GRPOConfig, values) == GRPOConfig(reward_funcs=["gsm8k"])
    announced = capsys.readouterr().err
    assert (
        all(f"{name}: " in announced for name in ("data", "eval_data", "reward_funcs")) and "model: " not in announced
    )


def test_own_data_is_not_evaluated_on_the_bundled_rows(options):
    values = options("grpo", "--model", "somewhere", "--data", "mine.jsonl", "--reward_funcs", "exact")
    assert "eval_data" not in values


def test_yaml_gives_the_same_as_options(options, tmp_path):
    (tmp_path / "run.yaml").write_text(
        "model: m\ndata: d\nlearning_rate: 1e-4\neval_strategy: no\nscale_rewards: false\nmin_p: null\n"
        "reward_funcs: exact\nreward_weights: [1, 2]\nchat_template_kwargs: {enable_thinking: false}\n"
    )
    from_file = options(
        "grpo", "--config", str(tmp_path / "run.yaml"), "--learning_rate", "2e-4", "--reward_weights", "1"
    )
    given = options(
        "grpo",
        "--model",
        "m",
        "--data",
        "d",
        "--learning_rate",
        "2e-4",
        "--eval_strategy",
        "no",
        "--scale_rewards",
        "none",
        "--min_p",
        "none",
        "--reward_funcs",
        "exact",
        "--reward_weights",
        "1",
        "--chat_template_kwargs",
        '{"enable_thinking": false}',
    )
    assert make(GRPOConfig, from_file) == make(GRPOConfig, given)
    assert make(GRPOConfig, given).reward_weights == [1.0]


def test_flags_need_no_value(options):
    assert options("sft", "--packing", "--gradient_checkpointing", "false")["packing"] is True
    assert options("sft", "--gradient_checkpointing", "no")["gradient_checkpointing"] == "none"


@pytest.mark.parametrize(
    "words, level",
    [([], "full"), (["--packing"], "full"), (["true"], "full"), (["false"], "none"), (["0"], "none"), (["On"], "full"),
     (["none"], "none"), (["selective"], "selective"), (["auto"], "auto"), (["full", "--packing"], "full")],
)  # fmt: skip
@pytest.mark.parametrize("command", ["sft", "grpo", "ppo", "reward", "bench grpo", "bench ppo", "bench train"])
def test_a_level_may_be_a_bool(options, command, words, level):
    """As it was before there were levels, and as TRL spells it: also without a value."""
    if "--packing" in words and command != "sft":
        words = [word for word in words if word != "--packing"]
    assert options(*command.split(), "--gradient_checkpointing", *words)["gradient_checkpointing"] == level


def test_an_unknown_level_is_refused():
    assert SFTConfig().gradient_checkpointing == SFTConfig(gradient_checkpointing=True).gradient_checkpointing == "full"
    config = SFTConfig(gradient_checkpointing="auto")
    config.gradient_checkpointing = False
    assert config.gradient_checkpointing == "none"
    with pytest.raises(ValueError, match="must be one of none, selective, full, auto, got 'ful'"):
        SFTConfig(gradient_checkpointing="ful")
    with pytest.raises(ValueError, match="gradient_checkpointing must be text, got 1"):
        SFTConfig(gradient_checkpointing=1)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["grop"], "unknown command 'grop'; did you mean grpo?"),
        (["sft", "--max_step", "3"], "unknown option --max_step; did you mean --max_steps?"),
        (["grpo", "--num-generation=4"], "unknown option --num_generation; did you mean --num_generations?"),
        (["sft", "--num_generations", "4"], "unknown option --num_generations"),
        (["grpo", "--max_steps", "many"], "--max_steps must be a whole number, got 'many'"),
        (["grpo", "--max_steps", "1.5"], "--max_steps must be a whole number, got '1.5'"),
        (["grpo", "--beta", "x"], "--beta must be a number, got 'x'"),
        (["sft", "--packing", "maybe"], "--packing must be true or false, got 'maybe'"),
        (["grpo", "--chat_template_kwargs", "{"], "--chat_template_kwargs must be a JSON object"),
        (["grpo", "--max_steps"], "--max_steps needs a value"),
        (["grpo", "--config", "missing.yaml"], "config missing.yaml cannot be read"),
        (["grpo", "--num_generations", "1"], "num_generations=1"),
        (["grpo", "--num_generations", "3"], "128 % 3 = 2"),
        (["grpo", "--resume_from_checkpoint", "latest"], "output_dir"),
        (["grpo", "--resume_from_checkpoint", "True"], "resume_from_checkpoint=latest needs output_dir"),
        (["eval", "--limit", "0"], "limit must be at least 1"),
        (["merge", "/no/such", "--output", "a"], "adapter folder /no/such does not exist"),
        (
            ["merge", "a", "--output", "b", "--dtype", "float64"],
            "dtype must be one of auto, bfloat16, float16, float32",
        ),
        (["merge"], "this command needs model (--model): an adapter folder"),
        (
            ["merge", "a"],
            "needs output (--output): the model folder to write; for example: cukit merge runs/grpo-001 --o",
        ),
        (["generate", "--temperature", "-1", "--prompt", "x"], "temperature must be at least 0"),
    ],
)
def test_wrong_options(fails, argv, message):
    assert message in fails(*argv)


@pytest.mark.parametrize(
    "text, message",
    [
        ("model: m\nmax_step: 3\n", "unknown option 'max_step' in run.yaml; did you mean max_steps?"),
        ("data: [", "is not YAML"),
        ("- 1\n", "must hold 'option: value' lines"),
        ("data: d\n", "names no model"),
        ("model: m\nmax_steps: lots\n", "run.yaml: max_steps must be a whole number, got 'lots'"),
        ("model: m\nmax_steps:\n", "run.yaml: max_steps must be a whole number, got None"),
        ("model: m\nseed: 1\nmax_steps: 2\nseed: 3\n", "run.yaml: seed is given twice; give only one"),
    ],
)
def test_wrong_yaml(fails, tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(text)
    assert message in fails("grpo", "--config", "run.yaml")


def test_help_names_every_option(capsys):
    for command, config in (("grpo", GRPOConfig), ("sft", SFTConfig), ("reward", RewardConfig)):
        with pytest.raises(SystemExit) as end:
            cukit_cli.main([command, "--help"])
        text = capsys.readouterr().out
        assert end.value.code == 0 and all(f"--{name} " in text for name in config.options())


# ---- how a command ends ----------------------------------------------------------------------------------------------


def replace_doctor(monkeypatch, error):
    def run(values):
        raise error

    monkeypatch.setitem(cukit_cli.COMMANDS, "doctor", replace(cukit_cli.COMMANDS["doctor"], run=run))


def test_interruption_is_code_130(monkeypatch, capsys):
    replace_doctor(monkeypatch, KeyboardInterrupt())
    assert cukit_cli.main(["doctor"]) == 130
    assert capsys.readouterr().err.strip() == "interrupted"


def test_our_own_mistakes_keep_their_traceback(monkeypatch):
    replace_doctor(monkeypatch, RuntimeError("ours"))
    with pytest.raises(RuntimeError, match="ours"):
        cukit_cli.main(["doctor"])
    replace_doctor(monkeypatch, ValueError("theirs"))
    monkeypatch.setenv("CUKIT_TRACEBACK", "1")
    with pytest.raises(ValueError, match="theirs"):
        cukit_cli.main(["doctor"])


# ---- commands on a tiny model ----------------------------------------------------------------------------------------


def test_doctor(capsys):
    assert cukit_cli.main(["doctor"]) == 0
    assert "numpy " in capsys.readouterr().out


@pytest.mark.slow
def test_sft_writes_a_run_that_resumes_with_its_own_options(tiny, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(tiny.parent, run)
    assert (
        cukit_cli.main(["sft", "--resume_from_checkpoint", str(run), "--max_steps", "2", "--logging_steps", "1"]) == 0
    )
    assert {"checkpoint-1", "checkpoint-2", "config.yaml", "config.step-1.yaml", "metrics.jsonl"} <= {
        path.name for path in run.iterdir()
    }
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [1, 2]
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["data"].endswith("sft.jsonl") and config["init_from_config"] is True


def test_grpo_evaluates_before_and_after_and_names_the_run(options, tiny, tmp_path, capsys):
    lines = (ROOT / "data/arithmetic/test.jsonl").read_text().splitlines()[:4]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    run = tmp_path / "run"
    assert (
        cukit_cli.main(
            [
                "grpo",
                "--model",
                str(tiny),
                "--data",
                str(tmp_path / "rows.jsonl"),
                "--eval_data",
                str(tmp_path / "rows.jsonl"),
                "--reward_funcs",
                "gsm8k",
                "--max_steps",
                "1",
                "--logging_steps",
                "1",
                "--max_completion_length",
                "4",
                "--output_dir",
                str(run),
            ]
        )
        == 0
    )
    out = capsys.readouterr().out.splitlines()
    assert out[-3].startswith("held-out accuracy: ") and out[-2] == f"run folder: {run}"
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 1]
    values = options("grpo", "--config", str(run / "config.yaml"))
    assert make(GRPOConfig, values).max_completion_length == 4 and values["model"] == str(tiny)


def test_generate_streams_the_answer(tiny, capsys):
    argv = ["generate", "--model", str(tiny), "--prompt", "1+2", "--max_tokens", "5", "--seed", "1"]
    assert cukit_cli.main(argv) == 0
    streamed = capsys.readouterr().out
    assert cukit_cli.main([*argv, "--n", "2"]) == 0
    assert capsys.readouterr().out.split("\n---\n")[0] == streamed.removesuffix("\n")
    assert cukit_cli.main([*argv, "--raw"]) == 0
    assert capsys.readouterr().out != streamed


def test_generate_takes_the_sampling_of_the_model_folder(tiny, tmp_path):
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"top_k": 20, "temperature": 0.6, "max_new_tokens": 9, "eos_token_id": 1})
    )
    assert generation_defaults(tmp_path) == {"top_k": 20, "temperature": 0.6, "max_tokens": 9}
    (tmp_path / "generation_config.json").write_text('{"do_sample": false}')
    assert generation_defaults(tmp_path) == {"temperature": 0.0}
    assert generation_defaults(tmp_path / "none") == {}


def test_a_conversation_goes_on_after_a_mistake(tiny, monkeypatch, capsys):
    lines = iter(["1+2", "9" * 400, "/new", "", "3+4", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert cukit_cli.main(["generate", "--model", str(tiny), "--max_tokens", "3"]) == 0
    assert capsys.readouterr().out.count("error: ") == 1
    assert next(lines, None) is None


def test_eval_prints_the_accuracy(tiny, capsys, tmp_path):
    (tmp_path / "always.py").write_text("def always(completions, **columns):\n    return [1.0] * len(completions)\n")
    assert (
        cukit_cli.main(
            [
                "eval",
                "--model",
                str(tiny),
                "--limit",
                "3",
                "--max_tokens",
                "4",
                "--n",
                "2",
                "--reward_funcs",
                f"{tmp_path / 'always.py'}:always",
                "gsm8k",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert (
        out.startswith("accuracy 1.0000 (6 of 6; ")
        and "rewards/always/mean 1.0000" in out
        and "rewards/gsm8k/mean" in out
    )


def test_eval_limits_rewards_from_files_and_prints_what_they_record(tiny, capsys, fails, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import time\n"
        "def records(completions, log_metric, trainer_state, **columns):\n"
        "    log_metric('mine/count', len(completions) + trainer_state.global_step)\n"
        "    return [1.0] * len(completions)\n"
        "def slow(completions, **columns):\n"
        "    time.sleep(60)\n"
    )
    argv = ["eval", "--model", str(tiny), "--limit", "3", "--max_tokens", "4", "--reward_funcs"]
    assert cukit_cli.main([*argv, f"{path}:records", "length(target=4)"]) == 0
    out = capsys.readouterr().out
    assert "\n  mine/count 3.0000\n" in out and "rewards/length/mean" in out
    error = fails(*argv, f"{path}:slow", "--reward_timeout", "0.5")
    assert "reward 'slow': a call with 3 completions took longer than reward_timeout=0.5 s" in error


# ---- what a user can get wrong ---------------------------------------------------------------------------------------


def test_wrong_models(fails, tiny, tmp_path):
    assert "nowhere" in fails("generate", "--model", tmp_path / "nowhere", "--prompt", "x")
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny, damaged)
    whole = (tiny / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(whole[:-100])
    assert "model.safetensors" in fails("generate", "--model", damaged, "--prompt", "x")
    tensors = load_file(tiny / "model.safetensors")
    tensors["model.norm.weight"] = np.ones(3, np.float32)
    save_file(tensors, damaged / "model.safetensors")
    assert "model.norm.weight" in fails("eval", "--model", damaged)


@pytest.mark.parametrize(
    "text, named", [("", "rows.jsonl"), ('{"prompt": "1"}\n{"prompt": \n', "2"), ('{"prompt": "1"}\n7\n', "2")]
)
def test_wrong_data(fails, tiny, tmp_path, text, named):
    (tmp_path / "rows.jsonl").write_text(text)
    rows = ("--data", tmp_path / "rows.jsonl", "--reward_funcs", "exact")
    line = fails("grpo", "--model", tiny, *rows, "--output_dir", tmp_path / "run")
    assert "rows.jsonl" in line and named in line
    assert "nothing.jsonl" in fails("sft", "--model", tiny, "--data", tmp_path / "nothing.jsonl")


def test_wrong_rewards(fails, tiny, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def few(completions, **columns):\n    return [1.0]\n\n\ndef broken(**columns):\n    raise KeyError('gold')\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "1+2"}]}\n')

    def run(function):
        return fails(
            "grpo",
            "--model",
            tiny,
            "--data",
            tmp_path / "rows.jsonl",
            "--max_completion_length",
            "2",
            "--max_steps",
            "1",
            "--reward_funcs",
            function,
            "--output_dir",
            tmp_path / function.rpartition(":")[2],
        )

    assert "'few' returned 1 values for 8 completions" in run(f"{tmp_path / 'mine.py'}:few")
    assert "'broken' raised KeyError" in run(f"{tmp_path / 'mine.py'}:broken")
    assert "unknown reward 'gsm9k'" in run("gsm9k")


def test_a_prompt_longer_than_the_context(fails, tiny, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "1+" * 200}]}) + "\n")
    rows = ("--data", tmp_path / "rows.jsonl", "--reward_funcs", "exact")
    assert "256" in fails("grpo", "--model", tiny, *rows, "--output_dir", tmp_path / "run")
    assert "256" in fails("generate", "--model", tiny, "--prompt", "1+" * 200)


@pytest.mark.slow
def test_a_folder_that_holds_another_run(fails, tiny):
    assert "already holds a run" in fails("sft", "--max_steps", "1", "--output_dir", tiny.parent)
