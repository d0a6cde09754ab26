"""The report page: what it shows, what hostile text can do to it (nothing), damaged folders, thinning, the command."""

import base64
import hashlib
import json
import random
import re
import sys
import time
import tomllib
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from cukit.runs.folder import write_run_config
from cukit.runs.metrics import MetricsLogger
from cukit.runs.record import RunRecord
from cukit.runs.report import read, write_report_at_end
from cukit.runs.report.curves import MAX_POINTS, phases, short, thinned
from cukit.runs.report.read import number, read_run

from .conftest import STEPS
from .report_page import page_of


@pytest.fixture
def page(make_run, tmp_path):
    return page_of(make_run(), output=tmp_path / "page.html")


# ---- what it shows ---------------------------------------------------------------------------------------------------


def test_a_run_is_on_its_page(page):
    (run,) = page.data["runs"]
    metrics = {name: (run["axes"][axis], values) for name, axis, values in run["metrics"]}
    assert metrics["loss"] == (list(range(1, 13)), [-step for step in range(1, 13)])
    assert metrics["eval/accuracy"] == ([12], [0.75])
    assert metrics["elapsed seconds"][1] == list(range(1, 13))
    titles = {chart["title"]: chart["metric"] for chart in page.data["charts"]}
    assert titles["Held-out accuracy"] == "eval/accuracy" and titles["KL divergence"] == "kl"
    assert "Memory" not in titles and "Learning rate" not in titles  # nothing was logged for them
    assert run["phases"]["names"] == ["generate", "train", "other"] and run["phases"]["values"][2] == [0.25] * 12
    first = run["completions"][0]
    assert first["tokens"] == ["2", "+", "3"] and first["logprobs"] == [-0.1, -1.5, -4.0] and first["advantage"] == 0.5
    assert not first["eval"] and first["rewards"] == [["fine", 1.0]] and len(run["completions"]) == 2 * STEPS
    for shown in ("0.75", "learning_rate", "0.0001", "error: fine", "of 12, error: fine"):
        assert shown in page.text
    assert page.elements.count("polyline") == len(titles)  # without JavaScript


def test_runs_are_overlaid(make_run, tmp_path):
    first, second = make_run("a", text="one"), make_run("b", text="two", metric="memory/peak_gib")
    page = page_of(first, second, first, output=tmp_path / "both.html")
    assert [run["name"] for run in page.data["runs"]] == ["one", "two"]
    assert {"title": "Memory", "about": "memory/peak_gib", "metric": "memory/peak_gib"} in page.data["charts"]
    marked = [value for name, value in page.attributes if name == "class" and value == "differs"]
    assert len(marked) == 4  # run_name, stop, one, two; the learning rate is the same
    same = page_of(make_run("c/x", text="one"), first, output=tmp_path / "both.html")
    assert len({run["name"] for run in same.data["runs"]}) == 2


def test_a_resumed_run_keeps_its_history(tmp_path):
    folder = tmp_path / "run"
    logger = MetricsLogger(folder)
    logger.log(5, {"loss": 1.0})
    logger.close()
    write_run_config(folder, {"lr": 1e-3, "output_dir": "a"})
    RunRecord(folder, goes_on=False).begin(0, {"method": "sft"})  # killed: it has no end
    write_run_config(folder, {"lr": 1e-4, "output_dir": "b"}, resume_step=3)
    record = RunRecord(folder, goes_on=True)
    record.begin(3, {"method": "sft"})
    record.end("finished", 5)
    page = page_of(folder, output=None)
    assert "steps 0 to –, did not say how it ended" in page.text and "steps 3 to 5, finished" in page.text
    assert "options changed at step 3: lr 0.001 → 0.0001" in page.text and "output_dir a" not in page.text
    assert "at least" in page.text and page.data["runs"][0]["resumed"] == [3]
    assert len(read_run(folder, 0).starts) == 2
    RunRecord(folder, goes_on=False).begin(0, {})  # another run takes the folder
    assert len(read_run(folder, 0).starts) == 1


# ---- what hostile text can do ----------------------------------------------------------------------------------------

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "--><img src=x onerror=alert(1)>",
    "\"'><svg onload=alert(1)>",
    "]]></style></title></noscript><base href=//x>",
    "&lt;b&gt;&#60;i&#62;",
    "a\u2028b\u2029c\u0000\x1b[31m\u202e",
    "{{data}}{{script}}\\u003c/script>",
    "a\ud83d",
    "__proto__",
]


def hostile_texts():
    draw, pieces = random.Random(20261128), [*"<>&\"'/=-!`{}\\\n\r\u2028 sx", "script", "</", "<!--", "]]>", "{{data}}"]
    return HOSTILE + ["".join(draw.choices(pieces, k=draw.randint(1, 40))) for _ in range(20)]


@pytest.fixture
def make_worn_run(make_run, monkeypatch):
    """make_worn_run(name, text): a run that was resumed with other options, has a damaged line, and says `text`."""

    def make(name, text):
        monkeypatch.setattr(sys, "argv", [text, text])
        folder = make_run(name, text=text, metric=text, tokens=(text,) * 3)
        write_run_config(folder, {"run_name": text, text: 1, "stop": text}, resume_step=3)
        record = RunRecord(folder, goes_on=True)
        record.begin(3, {"method": text, "model": text})
        record.end(text, 5)
        with open(folder / "metrics.jsonl", "a") as file:
            file.write("damaged\n")
        return folder

    return make


@pytest.mark.parametrize("runs", [1, 2])
@pytest.mark.parametrize("text", hostile_texts(), ids=lambda text: ascii(text)[:30])
def test_no_element_comes_out_of_hostile_text(make_worn_run, tmp_path, text, runs):
    """In every place where a model, data, a file or a command line can write: the page has the elements it should."""
    path = tmp_path / "page.html"
    benign = page_of(*(make_worn_run(f"benign{i}", "fine") for i in range(runs)), output=path)
    page = page_of(*(make_worn_run(f"hostile{i}", text) for i in range(runs)), output=path)
    assert page.elements == benign.elements
    block = path.read_text(encoding="utf-8").split('id="data">')[1].split("</script>")[0]
    assert not set("<>&\u2028\u2029") & set(block)  # html.parser ends a script later than browsers do
    assert {name for name, _ in page.attributes} == {name for name, _ in benign.attributes}
    assert page.blocks["style"] == benign.blocks["style"] and page.blocks["script"] == benign.blocks["script"]
    run = page.data["runs"][0]
    row = run["completions"][0]
    assert row["text"] == text and row["prompt"] == [[text[:40], text]] and row["tokens"] == [text] * 3
    assert [text, 1.0] in row["rewards"] and text in [name for name, _, _ in run["metrics"]]


def test_the_policy_allows_the_pages_own_style_and_script_alone(page):
    policy = next(value for _, value in page.attributes if value and "default-src" in value)
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy and "http" not in policy
    for kind in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(page.blocks[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    names = {name for name, _ in page.attributes}
    assert not {"style", "src", "href", "srcdoc", "action"} & names
    assert not any(name.startswith("on") for name in names)


def test_the_script_sets_text_only_and_asks_for_nothing(page):
    script, style = page.blocks["script"], page.blocks["style"]
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|Function\(|fetch\(|XMLHttp|import\(|parseHTML"
    )
    assert not re.search(forbidden, script)
    assert set(re.findall(r"https?:[^\s\"']*", script + style)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"url\(|@import", style)


def test_the_page_is_small_and_its_parts_are_in_the_wheel():
    parts = resources.files("cukit.runs.report")
    setup = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["tool"]["setuptools"]
    files = {part.name for part in parts.iterdir() if part.is_file() and not part.name.endswith(".py")}
    assert set(setup["package-data"]["cukit.runs.report"]) == files
    assert sum(len((parts / f"page.{kind}").read_bytes()) for kind in ("html", "css", "js")) < 60_000


# ---- damaged folders -------------------------------------------------------------------------------------------------


def test_damaged_files_give_a_page_that_says_so(make_run, tmp_path):
    folder = make_run()
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'[1]\n{"step": "x"}\n{"step": -1}\n\xff\xfe\n' + b"[" * 100_000 + b'\n{"step": 13, "loss": Na')
    with open(folder / "completions.jsonl", "ab") as file:
        file.write(b'{"step": 13, "completion": "cut\n{"step": 14, "prompt": 5, "completion": null, "tokens": 3}\nxx')
    (folder / "config.yaml").write_text("a: [")
    (folder / "config.step-3.yaml").write_text("- 1")
    (folder / "run.json").write_text('{"starts": 7}')
    page = page_of(folder, output=tmp_path / "page.html")
    assert "6 damaged lines of metrics.jsonl left out" in page.text
    assert "2 damaged lines of completions.jsonl left out" in page.text and "config.yaml cannot be read" in page.text
    assert "run.json is damaged or empty" in page.text
    (run,) = page.data["runs"]
    assert run["completions"][-1] == {"step": 14, "eval": True, "prompt": [["", "5"]], "text": "", "rewards": []}
    assert page.data["charts"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "completions.jsonl", "config.yaml", "run.json"])
def test_a_folder_with_one_empty_file_gives_a_page(tmp_path, name):
    (tmp_path / name).touch()
    page = page_of(tmp_path, output=None)
    assert "no metrics were logged" in page.text and page.data["charts"] == []


def test_a_configuration_that_grows_or_contains_itself(tmp_path):
    """Nine lists of nine references each: nine billion words if they were written out."""
    lines = ["a0: &a0 [lol, lol]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    for name in ("config.yaml", "config.step-3.yaml"):
        (tmp_path / name).write_text("\n".join([*lines, "me: &me [*me]", f"long: {'x' * 10_000}", name[7:9] + ": 1"]))
    page = page_of(tmp_path, output=None)
    assert "lol, lol" in page.text and "..." in page.text and len(page.text) < 2_000_000
    (tmp_path / "completions.jsonl").write_text('{"step": 1, "prompt": ' + "[" * 900 + "]" * 900 + "}\n")
    assert page_of(tmp_path, output=None).data["runs"][0]["completions"][0]["step"] == 1


def test_values_of_any_kind_are_numbers_or_left_out(tmp_path):
    rows = [
        {"step": 1, "a": 1e999, "b": 10**400, "c": "x", "d": True, "e": [1], "f": None, "g": 2**60},
        {"step": 2, "a": 0.5, "f": None},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_run(tmp_path, 0).metrics
    assert set(found) == {"a", "g"} and np.isnan(found["a"][1][0])
    page = page_of(tmp_path, output=None)
    assert ["a", 0, [None, 0.5]] in page.data["runs"][0]["metrics"]
    assert np.isnan(number(10**400)) and np.isnan(number(True))


def test_random_damage_never_ends_in_anything_but_a_page(make_run, tmp_path):
    folder, draw = make_run(steps=3), random.Random(7)
    whole = {path: path.read_bytes() for path in folder.iterdir()}
    for _ in range(60):
        for path, content in whole.items():
            content = bytearray(content)
            for _ in range(draw.randint(0, 6)):
                content[draw.randrange(len(content))] = draw.randrange(256)
            path.write_bytes(content[: draw.randint(0, len(content))])
        page_of(folder, output=tmp_path / "page.html")


# ---- much of everything ----------------------------------------------------------------------------------------------


def test_thinning_keeps_ends_and_peaks(rng):
    values = rng.standard_normal(100_000)
    values[[777, 50_001]] = 1e6, -1e6
    values[10:20] = np.nan
    steps, kept = thinned(np.arange(100_000), values, 1000)
    assert 900 < len(kept) <= 1002 and steps[0] == 0 and steps[-1] == 99_999 and (np.diff(steps) > 0).all()
    assert {777, 50_001} <= set(steps.tolist()) and np.array_equal(kept, values[steps], equal_nan=True)
    few = thinned(np.arange(5), values[:5], 1000)[1]
    assert np.array_equal(few, values[:5])


def test_long_runs_give_small_pages(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    rows = ({"step": i, "loss": i % 97, "time/train": 1.0, "step_time": 2.0} for i in range(1, 20_001))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = page_of(folder, output=None)
    metrics = page.data["runs"][0]["metrics"]
    assert all(len(values) <= MAX_POINTS + 2 for _, _, values in metrics)
    assert len(page.data["runs"][0]["phases"]["steps"]) == 200
    assert phases(read_run(folder, 0))["values"] == [[1.0] * 200, [1.0] * 200]
    assert (folder / "report.html").stat().st_size < 200_000


def test_completions_are_taken_evenly(tmp_path):
    with open(tmp_path / "completions.jsonl", "w") as file:
        for step in range(1, 101):
            for _ in range(4):
                file.write(json.dumps({"step": step, "completion": "x" * 200, "advantage": 1}) + "\n")
    line = len((tmp_path / "completions.jsonl").read_bytes()) / 400
    run = read_run(tmp_path, int(line * 4 * 10) + 200)
    steps = sorted({row["step"] for row in run.completions})
    assert run.completion_steps == 100 and len(steps) == 10 and steps[0] == 1 and steps[-1] == 100
    assert max(np.diff(steps)) == 11 and len(run.completions) == 40
    assert len(read_run(tmp_path, 10**6).completions) == 400
    assert len(read_run(tmp_path, 1).completions) == 2  # one of the first and of the last step


def test_long_completions_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "MAX_TEXT", 5)
    monkeypatch.setattr(read, "MAX_TOKENS", 2)
    row = {"step": 1, "prompt": "p" * 9, "completion": "abcdef", "tokens": ["a"] * 3, "logprobs": [0.0, None, -1.0]}
    (tmp_path / "completions.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = read_run(tmp_path, 10**6).completions
    assert found["text"] == "abcde" and found["cut"] and found["prompt"] == [["", "ppppp"]]
    assert found["tokens"] == ["a", "a"] and found["logprobs"] == [0.0, None]


@pytest.mark.slow
def test_a_run_of_200_steps_takes_less_than_half_a_second(tmp_path):
    logger = MetricsLogger(tmp_path)
    entry = {"completion": "token " * 512, "advantage": 1.0, "tokens": ["token "] * 512, "logprobs": [-0.1234] * 512}
    for step in range(1, 201):
        logger.log(step, {f"metric/{i}": i / step for i in range(40)} | {"loss": 1.0})
        logger.log_completions(step, [entry] * 8)
    logger.close()
    times = []
    for _ in range(5):
        start = time.process_time()  # of this process: other work on the machine does not count
        write_report_at_end(tmp_path)
        times.append(time.process_time() - start)
    assert min(times) < 0.5


@pytest.mark.parametrize(
    "value, text", [(0.97891, "0.9789"), (2.6e-7, "2.6e-07"), (12345, "12,345"), (1.234e6, "1.23\xa0M"), (None, "–")]
)
def test_numbers_in_few_characters(value, text):
    assert short(value) == text
