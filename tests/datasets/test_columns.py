"""Options that make prompts of rows: columns, template, system message, text or chat; and prompts that are too long."""

import pytest

from cukit import GRPOConfig, SFTConfig
from cukit.datasets.columns import dataset_rows, filled, shaped_row, shaped_rows
from cukit.datasets.config import PromptOptions, RowOptions
from cukit.datasets.demonstrations import fit_prompts


def user(text):
    return {"role": "user", "content": text}


def shaped(row, **options):
    return shaped_row(row, RowOptions(**options))


def test_columns_are_renamed_and_the_rest_left_out():
    row = {"question": "1+1", "answer": "2", "meta": {"level": 3, "a.b": 1}, "x": 0}
    assert shaped(row) is row
    assert shaped(row, columns="prompt=question, answer") == {"prompt": "1+1", "answer": "2"}
    assert shaped(row, columns={"level": "meta.level", "c": "meta.a.b"}) == {"level": 3, "c": 1}
    with pytest.raises(ValueError, match=r"^data row 1: columns asks for 'quest', which is not there .*question"):
        shaped_rows([{"quest": 1}, row], RowOptions(columns="prompt=quest"))


@pytest.mark.parametrize("text", ["", "a=b,,c", "a=b,a=c", "=b", "a="])
def test_malformed_columns(text):
    with pytest.raises(ValueError, match="columns"):
        RowOptions(columns=text)
    for wrong in ({"a": 1}, {}):
        with pytest.raises(ValueError, match="columns"):
            RowOptions(columns=wrong)


def test_columns_are_an_option_of_every_trainer():
    for cls in (GRPOConfig, SFTConfig):
        config = cls(columns="prompt=question,answer=answer", prompt_template="{prompt}!")
        assert config.columns == {"prompt": "question", "answer": "answer"} == config.rows.columns
        assert config.rows.wanted == ["question", "answer"] and config.rows.prompt_template == "{prompt}!"
        assert cls().rows.wanted is None


def test_a_template_fills_its_places():
    assert filled("{a} and {b}: \\boxed{} {{a}} }{", {"a": "1", "b": 2.5}) == "1 and 2.5: \\boxed{} {a} }{"
    assert filled("{a}", {"a": "{b} \\1 \\g<0>"}) == "{b} \\1 \\g<0>"
    for row, message in (
        ({"b": "1"}, r"place \{a\}, and there is no such column \(columns found: b\); write \{\{a\}\}"),
        ({"a": None}, "column 'a' must be text or a number, got None"),
        ({"a": [user("1")]}, "column 'a' must be text or a number"),
        ({"a": True}, "column 'a' must be text or a number"),
    ):
        with pytest.raises(ValueError, match=message):
            filled("{a}", row)
    for text in ("no place", "\\boxed{}", "{{a}}"):
        with pytest.raises(ValueError, match="prompt_template has no {column} place"):
            RowOptions(prompt_template=text)


def test_a_template_makes_the_kind_of_prompt_that_the_row_has():
    assert shaped({"prompt": "1+1"}, prompt_template="{prompt}=")["prompt"] == "1+1="
    assert shaped({"question": "1+1"}, prompt_template="{question}=")["prompt"] == [user("1+1=")]
    assert shaped({"input": "1+1"}, prompt_template="{input}=")["prompt"] == [user("1+1=")]
    assert shaped({"input": "1+1"}, prompt_template="{input}=", chat_prompts=False)["prompt"] == "1+1="
    assert shaped({"prompt": "1+1"}, prompt_template="{prompt}=", chat_prompts=True)["prompt"] == [user("1+1=")]


def test_text_or_chat():
    assert shaped({"prompt": "1"}, chat_prompts=True)["prompt"] == [user("1")]
    assert shaped({"prompt": [user("1")]}, chat_prompts=False)["prompt"] == "1"
    assert shaped({"problem": "1"}, chat_prompts=False)["prompt"] == "1"
    with pytest.raises(ValueError, match="chat_prompts=false needs a prompt of one user's message, got 2 messages"):
        shaped({"prompt": [user("1"), user("2")]}, chat_prompts=False)
    with pytest.raises(ValueError, match=r"no 'prompt' column \(columns found: text\)"):
        shaped({"text": "1"}, chat_prompts=True)


def test_a_system_prompt_stands_before_a_conversation():
    system = {"role": "system", "content": "Be brief."}
    own = {"role": "system", "content": "x"}
    for row in ({"question": "1"}, {"prompt": [user("1")]}, {"prompt": [own, user("1")]}):
        assert shaped(row, system_prompt="Be brief.")["prompt"] == [system, user("1")]
    assert shaped({"messages": [user("1")]}, system_prompt="Be brief.") == {"messages": [system, user("1")]}
    with pytest.raises(ValueError, match="needs a conversational prompt, and this one is text; add chat_prompts=true"):
        shaped({"prompt": "1"}, system_prompt="Be brief.")
    assert shaped({"prompt": "1"}, system_prompt="Be brief.", chat_prompts=True)["prompt"] == [system, user("1")]


def test_a_completion_follows_its_prompt():
    answer = [{"role": "assistant", "content": "2"}]
    assert shaped({"prompt": "1", "completion": "2"}, chat_prompts=True)["completion"] == answer
    assert shaped({"prompt": [user("1")], "completion": answer}, chat_prompts=False)["completion"] == "2"
    assert shaped({"question": "1", "answer": "2"}, system_prompt="x")["completion"] == answer
    assert shaped({"problem": "1", "solution": "2"}, prompt_template="{problem}", chat_prompts=False) == {
        "problem": "1",
        "solution": "2",
        "prompt": "1",
        "completion": "2",
    }
    assert "completion" not in shaped({"prompt": "1", "answer": "2"}, chat_prompts=True)


# ---- prompts that are too long ----

ROWS = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}]
IDS = [[1, 2, 3], [1, 2, 3, 4, 5], [1]]


def fit(context=100, **options):
    return fit_prompts(ROWS, IDS, PromptOptions(**options), context)


def test_prompts_that_fit_stay():
    assert fit(6) == (ROWS, IDS, None) == fit(max_prompt_length=5)


@pytest.mark.parametrize(("context", "own"), [(5, None), (100, 4), (5, 9)])
def test_long_prompts_are_refused_skipped_or_cut(context, own):
    options = {} if own is None else {"max_prompt_length": own}
    advice = "max_prompt_length is 4; raise it" if own == 4 else "the context only 5; shorten or remove that row, raise"
    with pytest.raises(ValueError, match=f"^row 1: .* 5 tokens and {advice}.*overlong_prompts skip or cut$"):
        fit(context, **options)
    rows, ids, said = fit(context, overlong_prompts="skip", **options)
    assert rows == [ROWS[0], ROWS[2]] and ids == [IDS[0], IDS[2]]
    assert said == "1 of 3 prompts are longer than 4 tokens: skipped"
    rows, ids, said = fit(context, overlong_prompts="cut", **options)
    assert rows == ROWS and ids == [[1, 2, 3], [2, 3, 4, 5], [1]] and "cut to their last 4 tokens" in said


def test_skipping_all_prompts_is_refused():
    with pytest.raises(ValueError, match="3 of 3 prompts .* leaves no row; raise max_prompt_length"):
        fit_prompts(ROWS, [[1, 2]] * 3, PromptOptions(max_prompt_length=1, overlong_prompts="skip"), 9)
    with pytest.raises(ValueError, match="overlong_prompts must be one of error, skip, cut, got 'drop'"):
        PromptOptions(overlong_prompts="drop")
    with pytest.raises(ValueError, match="max_prompt_length must be at least 1, got 0"):
        PromptOptions(max_prompt_length=0)


@pytest.mark.parametrize("column", ["image", "images"])
def test_an_image_column_is_said_once(caplog, monkeypatch, column):
    monkeypatch.setattr("cukit.options._said", set())
    caplog.set_level("WARNING", logger="cukit")
    rows = [{"prompt": "1", column: None}, {"prompt": "2", column: "x.png"}]
    for chosen in (rows, rows[:1]):
        assert dataset_rows(chosen, RowOptions()) == chosen
    dataset_rows(rows, RowOptions())
    said = [record.message for record in caplog.records]
    assert said == [f"the data has a column '{column}': models see text alone here, and rewards get the column"]
    monkeypatch.setattr("cukit.options._said", set())
    dataset_rows(rows, RowOptions(columns="prompt"))
    assert len(caplog.records) == 1
