"""Which files are a split: the hub's rules, alone and against the `datasets` library."""

import random

import pytest

from cukit.datasets.layout import NoReadableFiles, choose, converted

README = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: [main/test-*, extra/**/*.parquet]
- config_name: other
  data_dir: sub
---
# A data set
"""
FILES = ["README.md", "main/train-0.parquet", "main/train-1.parquet", "main/test-0.parquet", "extra/a/b/c.parquet"]
FILES += ["extra/d.parquet", "sub/dev.csv", "sub/x_train.csv", "sub/.hidden/test.csv", "extra/.x/e.parquet"]


def files(readme=README, config=None, split=None, use="train", names=FILES):
    return choose(names, readme, "set", config, split, use).files


def test_the_readme_says_which_files():
    assert files(config="main") == ["main/train-0.parquet", "main/train-1.parquet"]
    assert files(config="main", use="test") == files(config="main", split="test")
    assert files(config="main", split="test") == ["main/test-0.parquet", "extra/a/b/c.parquet", "extra/d.parquet"]
    assert files(config="other") == ["sub/x_train.csv"] and files(config="other", use="test") == ["sub/dev.csv"]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({}, "^set has several configurations, choose one as NAME:CONFIG: main, other$"),
        ({"config": "mian"}, "^set has no configuration 'mian', it has: main, other"),
        ({"config": "main", "split": "dev"}, "^set, configuration 'main' has no split 'dev', it has: train, test"),
        ({"readme": "---\nconfigs: 3\n---\n"}, "must be a list of entries with a config_name"),
        (
            {"readme": "---\nconfigs:\n- config_name: a\n  data_files: 3\n---\n"},
            "no list of entries with split and path",
        ),
        ({"readme": "---\na: [\n---\n"}, "is not YAML"),
        ({"readme": "---\nconfigs:\n- config_name: a\n  data_files: '[z-a]*'\n---\n"}, "is no pattern"),
    ],
)
def test_what_is_not_clear_is_refused(choice, message):
    with pytest.raises(ValueError, match=message):
        files(**choice)


def test_the_default_configuration():
    one = "---\nconfigs:\n- config_name: a\n  data_files: a.csv\n- config_name: b\n  data_files: b.csv\n"
    names = ["a.csv", "b.csv"]
    assert files(one.replace("name: b", "name: default") + "---\n", names=names) == ["b.csv"]
    assert files(one + "  default: true\n---\n", names=names) == ["b.csv"]
    assert files("no front matter", names=names) == names


def test_files_that_are_not_there_or_not_read():
    listed = "---\nconfigs:\n- config_name: a\n  data_files: {}\n---\n"
    for readme, names in ((listed.format("x.csv"), ["y.csv"]), (listed.format("x.zip"), ["x.zip"]), ("", ["x.zip"])):
        with pytest.raises(NoReadableFiles):
            files(readme, names=names)


def test_the_hubs_conversion():
    names = ["default/train/0000.parquet", "default/train/0001.parquet", "default/test/0000.parquet", ".gitattributes"]
    readme = converted([*names, "other/partial-train/0000.parquet"])
    assert files(readme, names=names, config="default") == names[:2]
    assert files(readme, names=[*names, "other/partial-train/0000.parquet"], config="other") == [
        "other/partial-train/0000.parquet"
    ]
    assert converted([".gitattributes"]) == ""


def test_random_readmes_are_read_or_refused_in_one_line():
    draw = random.Random(0)
    for _ in range(500):
        text = list(README)
        for _ in range(draw.randrange(1, 8)):
            place = draw.randrange(len(text))
            text[place : place + draw.randrange(4)] = draw.choice(["", ":", "-", "\n", "[", "*", "'", "{", "&a", "\t"])
        try:
            assert set(files("".join(text), config="main")) <= set(FILES)
        except ValueError as error:
            assert "\n" not in str(error) and str(error).startswith("set")


WORDS = ["train", "test", "dev", "val", "validation", "eval", "latest", "training", "a", "train1", "retrain", "my_test"]


@pytest.mark.slow
def test_names_are_read_as_the_datasets_library_reads_them(tmp_path, datasets_library):
    draw = random.Random(1)
    for number in range(60):
        root = tmp_path / str(number)
        names = set()
        for _ in range(draw.randrange(1, 6)):
            parts = [draw.choice(WORDS) for _ in range(draw.randrange(3))]
            end = draw.choice(["", "-00000-of-00001", "_x", ".v1", " 2"])
            names.add("/".join([*(["data"] if draw.random() < 0.3 else []), *parts, draw.choice(WORDS) + end]) + ".csv")
        names = [name for name in names if not any(other.startswith(f"{name}/") for other in names)]
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text("a\n1\n")
        patterns = datasets_library.data_files.get_data_patterns(str(root))
        found = datasets_library.data_files.DataFilesDict.from_patterns(patterns, base_path=str(root))
        for split, paths in found.items():
            wanted = sorted({path.removeprefix(f"{root}/") for path in paths})  # the library may name a file twice
            assert choose(sorted(names), "", "set", None, split).files == wanted, (names, split)
