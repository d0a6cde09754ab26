"""Commands that read data by name, other formats than JSONL, and columns of other names."""

import gzip
import io
import json
from pathlib import Path

import pyarrow
import pytest
import yaml
from pyarrow import parquet

import cukit_cli
from cukit.commands.parser import parse
from cukit.datasets.named import NAMED
from cukit.datasets.sources import load_rows

ROOT = Path(__file__).parents[2]
QUESTIONS = [{"question": f"{a}+{a + 1}+1-2", "answer": f"#### {2 * a}"} for a in range(1, 9)]
TINY = str(ROOT / "data" / "tiny-qwen3")


def table(rows):
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


@pytest.fixture
def gsm8k(hub):
    readme = "---\nconfigs:\n- config_name: main\n  data_files:\n"
    readme += "".join(f"  - split: {split}\n    path: main/{split}-*\n" for split in ("train", "test")) + "---\n"
    files = {f"main/{split}-00000-of-00001.parquet": table(QUESTIONS) for split in ("train", "test")}
    hub.add("dataset", "openai/gsm8k", files | {"README.md": readme.encode()})
    return hub


def run(*argv):
    assert cukit_cli.main([str(word) for word in argv]) == 0


def test_prepare_writes_prompt_and_answer(gsm8k, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    run("data", "prepare", "gsm8k", "--output", path)
    wanted = [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in QUESTIONS]
    assert load_rows(path) == wanted
    printed = capsys.readouterr()
    assert f"{path}: 8 rows; train on them by --data {path} --reward_funcs gsm8k" in printed.out
    assert "not checked" not in printed.err
    run("data", "prepare", "--name", "gsm8k", "--split", "test", "--limit", 2, "--output", path)
    assert load_rows(path) == wanted[:2]
    run("data", "prepare", "gsm8k", "--output", path, "--prompt_template", "Q: {prompt}", "--chat_prompts", "false")
    assert load_rows(path)[0] == {"prompt": f"Q: {QUESTIONS[0]['question']}", "answer": QUESTIONS[0]["answer"]}


@pytest.mark.parametrize("name", NAMED)
def test_each_named_data_set_is_prepared(hub, tmp_path, capsys, name):
    """With the columns of the table; the hub's own may differ where the table says unseen."""
    known, path = NAMED[name], tmp_path / "rows.jsonl"
    repository, _, config = known.source.partition(":")
    row = {known.prompt: "1+1?", known.answer: "2", "more": 3}
    readme = f"---\nconfigs:\n- config_name: {config}\n  data_files: train.parquet\n---\n".encode()
    hub.add("dataset", repository, {"README.md": readme, "train.parquet": table([row])})
    run("data", "prepare", name, "--output", path)
    assert load_rows(path) == [{"prompt": [{"role": "user", "content": "1+1?"}], "answer": "2"}]
    assert ("not checked yet" in capsys.readouterr().err) == (not known.seen)
    hub.add("dataset", repository, {"README.md": readme, "train.parquet": table([{"q": "1", "a": "2"}])}, "other")
    run("data", "prepare", name, "--output", path, "--revision", "other", "--columns", "prompt=q,answer=a")
    assert load_rows(path)[0]["answer"] == "2"


def test_mistakes_of_data_commands(fails, gsm8k, tmp_path):
    line = fails("data", "prepare", "gsm8")
    assert "name must be one of gsm8k, " in line and "did you mean gsm8k?" in line
    assert "give it to --data" in fails("data", "prepare", "openai/summarize")
    assert "needs name" in fails("data", "prepare")
    line = fails("data", "prepare", "gsm8k", "--columns", "prompt=q", "--output", tmp_path / "x.jsonl")
    assert "no column 'q' (columns found: question, answer)" in line and not (tmp_path / "x.jsonl").exists()
    assert "data must be followed by prepare, show" in fails("data", "shwo")


def test_show_prints_columns_and_two_rows(gsm8k, tmp_path, capsys):
    run("data", "show", "openai/gsm8k:main:test")
    printed = capsys.readouterr().out
    assert printed.startswith("columns: question (text), answer (text)\nrow 0\n  question: ") and "row 1" in printed
    assert "row 2" not in printed and json.dumps(QUESTIONS[1]["answer"]) in printed
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"a": None, "b": [1], "c": 1.5, "d": "x" * 500, "e": {"f": True}}))
    run("data", "show", path, "--limit", 9)
    printed = capsys.readouterr().out
    assert "a (null), b (list), c (number), d (text), e (object)" in printed and "x" * 201 not in printed


def test_options_of_columns_are_read_from_words_and_yaml():
    argv = ["grpo", "--columns", "prompt=question,answer", "--prompt_template", "{prompt}", "--data", "a/b:c"]
    assert parse(cukit_cli.COMMANDS, argv)[1]["columns"] == {"prompt": "question", "answer": "answer"}
    for name in ("grpo", "sft", "eval", "data prepare", "data show"):
        found = parse(cukit_cli.COMMANDS, [*name.split(), "--columns", '{"a": "b c"}'])[1]
        assert found["columns"] == {"a": "b c"}


@pytest.mark.parametrize("name", ["rows.parquet", "rows.csv", "rows.json", "rows.jsonl.gz"])
def test_eval_reads_each_format(tmp_path, capsys, name):
    path = tmp_path / name
    lines = "".join(json.dumps(row) + "\n" for row in QUESTIONS[:2]).encode()
    cells = [("question", "answer"), *(row.values() for row in QUESTIONS[:2])]
    path.write_bytes(
        {
            "rows.parquet": table(QUESTIONS[:2]),
            "rows.csv": "".join(",".join(pair) + "\n" for pair in cells).encode(),
            "rows.json": json.dumps(QUESTIONS[:2]).encode(),
            "rows.jsonl.gz": gzip.compress(lines),
        }[name]
    )
    run("eval", "--model", TINY, "--data", path, "--reward_funcs", "gsm8k", "--max_tokens", 40)
    assert "of 2; " in capsys.readouterr().out


def test_eval_takes_the_split_test_and_the_prompts_options(gsm8k, capsys, fails):
    common = ["eval", "--model", TINY, "--data", "openai/gsm8k:main", "--reward_funcs", "gsm8k", "--max_tokens", "8"]
    run(*common, "--limit", 3, "--columns", "q=question,answer", "--prompt_template", "{q}")
    printed = capsys.readouterr()
    assert "of 3; openai/gsm8k:main" in printed.out
    assert any("/main/test-" in path for _, path in gsm8k.requests)
    assert not any("/main/train-" in path for _, path in gsm8k.requests)
    assert "max_prompt_length is 3; raise it" in fails(*common, "--max_prompt_length", 3)
    run(*common, "--max_prompt_length", 3, "--overlong_prompts", "cut")
    assert "8 of 8 prompts are longer than 3 tokens: cut to their last 3 tokens" in capsys.readouterr().err


def test_grpo_by_names_of_the_hub(gsm8k, tmp_path, capsys, fails):
    """Model and data by name, a template, prompts that are skipped, and the run's configuration again."""
    files = {path.name: path.read_bytes() for path in Path(TINY).iterdir()}
    gsm8k.add("model", "cukit/tiny", files)
    rows = [*QUESTIONS, {"question": "+".join("123456789" * 3), "answer": "#### 135"}]
    gsm8k.add("dataset", "me/sums", {"train.parquet": table(rows), "test.parquet": table(QUESTIONS[:2])})
    argv = ["grpo", "--model", "cukit/tiny", "--data", "me/sums", "--eval_data", "me/sums", "--reward_funcs", "gsm8k"]
    argv += ["--columns", "q=question,answer", "--prompt_template", "{q}", "--max_prompt_length", "30"]
    argv += ["--max_steps", "1", "--per_device_train_batch_size", "4", "--num_generations", "4", "--device", "cpu"]
    argv += ["--max_completion_length", "16", "--output_dir", str(tmp_path / "run")]
    line = fails(*argv)
    assert "train_dataset row 8: the prompt has" in line and "max_prompt_length is 30; raise it" in line
    run(*argv, "--overlong_prompts", "skip")
    printed = "".join(capsys.readouterr())
    assert printed.count("train_dataset: 1 of 9 prompts are longer than 30 tokens: skipped") == 1
    assert "me/sums: configuration default, split train" in printed and "split test" in printed
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["columns"] == {"q": "question", "answer": "answer"} and config["overlong_prompts"] == "skip"
    assert config["data"] == "me/sums" and config["model"] == "cukit/tiny"
    prompts = [row["prompt"][0]["content"] for row in map(json.loads, (tmp_path / "run/completions.jsonl").open())]
    assert set(prompts) <= {row["question"] for row in QUESTIONS}
    run("grpo", "--config", tmp_path / "run" / "config.yaml", "--output_dir", tmp_path / "again", "--dry_run")
    assert "skipped" in "".join(capsys.readouterr())
