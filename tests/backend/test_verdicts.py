"""What is kept on disk of comparisons of products."""

import random

import pytest

pytest.importorskip("cupy", reason="the CUDA shelf needs CuPy: pip install 'cukit[compile]'")

from cukit.backend.cuda.verdicts import Verdicts  # noqa: E402

KEYS = [(32, 3072, "bfloat16", False, 8192), (32, 3072, "bfloat16", False, "in order"), (7, 13, "float16", True, 1)]


def test_verdicts_outlive_the_process(tmp_path):
    first = Verdicts(tmp_path / "deep/file")
    for key, verdict in zip(KEYS, (True, False, True)):
        first.add(key, verdict)
    second = Verdicts(tmp_path / "deep/file")
    assert [second.get(key) for key in KEYS] == [True, False, True]
    assert second.get((32, 3072, "float16", False, 8192)) is None
    assert second.get((32, 3072, "bfloat16", True, 8192)) is None


def test_two_processes_write_one_file(tmp_path):
    pair = Verdicts(tmp_path / "file"), Verdicts(tmp_path / "file")
    for one, key in zip(pair, KEYS):
        one.add(key, True)
    assert [Verdicts(tmp_path / "file").get(key) for key in KEYS] == [True, True, None]


def test_damage_costs_only_what_it_hit(tmp_path):
    path, generator = tmp_path / "file", random.Random(0)
    whole = Verdicts(path)
    for rows in range(200):
        whole.add((8, 8, "float16", False, rows), rows % 2 == 0)
    data = bytearray(path.read_bytes())
    for _ in range(50):
        place = generator.randrange(len(data))
        data[place : place + generator.randrange(3)] = generator.randbytes(generator.randrange(3))
    path.write_bytes(data + b'[1,2,"float16",false,3\n[]\n{"a":1}\n[[1],2,"float16",false,3,true]\n')
    found = Verdicts(path)
    kept = [found.get((8, 8, "float16", False, rows)) for rows in range(200)]
    assert 100 < sum(value is not None for value in kept) < 200


def test_a_folder_that_cannot_be_written_loses_nothing_else(tmp_path):
    (tmp_path / "file").write_text("")
    verdicts = Verdicts(tmp_path / "file/below")
    verdicts.add(KEYS[0], True)
    assert verdicts.get(KEYS[0]) is True
