"""Pairs of answers as ids: the row forms, how they end, what is left out and what is refused."""

import json
import shutil
from pathlib import Path

import pytest

from cukit.datasets.preferences import Pair, encode_pairs, turn_end
from cukit.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[2] / "data" / "tiny-qwen3"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(FOLDER)


def user(text):
    return [{"role": "user", "content": text}]


def assistant(text):
    return [{"role": "assistant", "content": text}]


def test_text_with_its_prompt_or_in_one_ends_with_the_end_token(tokenizer):
    apart = {"prompt": "1+1=", "chosen": "2", "rejected": "31"}
    together = {"chosen": "1+1=2", "rejected": "1+1=31<|im_end|>", "margin": 2}
    (first, second), left_out = encode_pairs([apart, together], tokenizer)
    assert left_out == 0 and first.margin == 0.0 and second.margin == 2.0
    assert (first.chosen, first.rejected) == (second.chosen, second.rejected)
    assert tokenizer.decode(first.rejected, skip_special_tokens=False) == "1+1=31<|im_end|>"
    assert first.num_tokens == 5 + 1 + 6 + 1


def test_a_conversation_ends_as_its_template_ends_it(tokenizer):
    apart = {"prompt": user("1+1"), "chosen": assistant("2"), "rejected": assistant("3")}
    together = {"chosen": user("1+1") + assistant("2"), "rejected": user("1+1") + assistant("3")}
    text_answers = {"prompt": user("1+1"), "chosen": "2", "rejected": "3"}
    question = {"question": "1+1", "chosen": "2", "rejected": "3"}
    found, _ = encode_pairs([apart, together, text_answers, question], tokenizer)
    assert found == [found[0]] * 4
    assert tokenizer.decode(found[0].chosen, skip_special_tokens=False) == (
        "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    )
    assert tokenizer.decode(turn_end(tokenizer), skip_special_tokens=False) == "<|im_end|>\n"
    assert found[0].chosen[-2:] == turn_end(tokenizer)


def test_arguments_of_the_chat_template(tmp_path):
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] += "{{- mark }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    marked = Tokenizer.from_folder(tmp_path)
    row = {"prompt": user("1"), "chosen": assistant("2"), "rejected": assistant("3")}
    (pair,), _ = encode_pairs([row], marked, chat_template_kwargs={"mark": "77"})
    assert marked.decode(pair.chosen, skip_special_tokens=False).endswith("2<|im_end|>\n77")
    end = marked.decode(turn_end(marked, {"mark": "77"}), skip_special_tokens=False)
    assert end == "<|im_end|>\n77"
    end = marked.decode(turn_end(marked, {"mark": "<|endoftext|>"}), skip_special_tokens=False)
    assert end == "<|im_end|>\n<|endoftext|>" and not marked.same_as(Tokenizer.from_folder(FOLDER))


def test_a_pair_with_one_long_answer_is_left_out(tokenizer):
    rows = [
        {"chosen": "1", "rejected": "2"},
        {"chosen": "1", "rejected": "2" * 9},
        {"chosen": "3" * 9, "rejected": "2"},
    ]
    pairs, left_out = encode_pairs(rows, tokenizer, max_length=9)
    assert left_out == 2 and pairs == encode_pairs(rows[:1], tokenizer)[0]
    assert len(encode_pairs(rows, tokenizer, max_length=10)[0]) == 3
    with pytest.raises(ValueError, match="all 1 pairs are longer than 9 tokens; raise max_length"):
        encode_pairs(rows[1:2], tokenizer, max_length=9)


@pytest.mark.parametrize(
    "row, message",
    [
        ({"chosen": "a"}, "no 'rejected' column (columns found: chosen)"),
        ({"prompt": "a", "completion": "b"}, "no 'chosen' column"),
        ({"chosen": 3, "rejected": "b"}, "column 'chosen' must be text or a list"),
        ({"chosen": "a", "rejected": []}, "column 'rejected' must be text or a list"),
        ({"prompt": "a", "chosen": "b", "rejected": assistant("c")}, "prompt and rejected must both be text or both"),
        ({"chosen": "a", "rejected": "b", "margin": "1"}, "column 'margin' must be a number, got '1'"),
        ({"chosen": "a", "rejected": "b", "margin": float("nan")}, "column 'margin' must be a number, got nan"),
        ({"chosen": "a", "rejected": "b", "margin": True}, "column 'margin' must be a number, got True"),
    ],
)
def test_rows_that_are_no_pairs_are_refused(tokenizer, row, message):
    with pytest.raises(ValueError) as error:
        encode_pairs([{"chosen": "a", "rejected": "b"}, row], tokenizer)
    assert str(error.value).startswith("data row 1: ") and message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_id_without_a_row_in_the_model_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"data row 0: token id \d+ has no row in the model, which has 3"):
        encode_pairs([{"chosen": "1", "rejected": "2"}], tokenizer, model_rows=3)


def test_many_rows_keep_their_order(tokenizer):
    """Rows are encoded 2,000 at a time."""
    rows = [{"chosen": str(i), "rejected": f"{i}+"} for i in range(2005)]
    pairs, _ = encode_pairs(rows, tokenizer)
    end = [tokenizer.eos_token_id]
    assert pairs == [Pair(tokenizer.encode(str(i)) + end, tokenizer.encode(f"{i}+") + end) for i in range(2005)]
