"""The rows: the layout of a step's inputs, and rows that come, move and leave."""

import numpy as np
import pytest

from cukit import SamplingParams
from cukit.backend import numpy as backend
from cukit.engine.request import Request
from cukit.engine.rows import FIELDS, Rows
from cukit.engine.text import StopTexts


def sequence(number, length=5, generated=1, blocks=(), **params):
    """A sequence with a drawn token at its end, all of its numbers from `number`."""
    params = SamplingParams(**{"temperature": 1 + number, "seed": number} | params)
    prompt = np.arange(length - generated, dtype=np.int32)
    request = Request(number, prompt, None, params, number, frozenset(params.stop_token_ids), StopTexts(), 99)
    seq = request.new_sequence()
    for token in range(generated):
        seq.append(100 * number + token, -np.float32(number))
    seq.block_table = list(blocks)
    return seq


def make_rows(capacity=7, precise=np.float32, max_model_len=20, block_size=4):
    return Rows(backend, precise, capacity, max_model_len, block_size, 1000)


@pytest.mark.parametrize("precise", [np.float32, np.float64])
def test_one_upload_brings_every_field(precise):
    rows = make_rows(7, precise)
    for number, name in enumerate(FIELDS):
        host, device = getattr(rows.host, name), getattr(rows.device, name)
        assert host.shape == device.shape == (7,)
        assert host.dtype == device.dtype == (precise if FIELDS[name] is float else FIELDS[name])
        host[...] = number
    rows.upload()
    for number, name in enumerate(FIELDS):  # fields that overlapped would have lost their numbers
        assert (getattr(rows.host, name) == number).all() and (getattr(rows.device, name) == number).all()
    views = rows.views(3)
    assert np.shares_memory(views.tokens, rows.device.tokens) and views.tokens.shape == (3,)
    assert views.block_tables.shape == (3, 5)


def test_the_last_row_takes_the_place_of_one_that_leaves():
    rows = make_rows()
    found = [sequence(1, blocks=[3, 5]), sequence(2, 9, 4, [7, 8, 9]), sequence(3, 6, 2, [10, 11])]
    expected = [(seq.token_ids.tolist(), seq.logprobs.tolist()) for seq in found]
    for seq in found:
        rows.enter(seq)
    assert rows.host.slot_mapping.tolist() == [5 * 4, 9 * 4, 11 * 4 + 1] + [-1] * 4
    rows.leave(found[0])
    assert (rows.count, [seq.row for seq in found]) == (2, [-1, 1, 0])
    assert rows.host.seeds[:2].tolist() == [3, 2] and rows.host.temperature[:2].tolist() == [4, 3]
    assert rows.host.context_lens.tolist() == [6, 9] + [0] * 5
    assert rows.host.slot_mapping.tolist() == [45, 36] + [-1] * 5
    assert [(seq.token_ids.tolist(), seq.logprobs.tolist()) for seq in found] == expected
    rows.upload()
    assert rows.block_tables[:2].tolist() == [[10, 11, 0, 0, 0], [7, 8, 9, 0, 0]]
    assert found[0].num_computed == 4
    rows.clear()
    assert [(seq.token_ids.tolist(), seq.logprobs.tolist()) for seq in found] == expected
    assert rows.count == 0 and not rows.host.context_lens.any()


def test_only_changes_of_block_tables_are_sent(monkeypatch):
    sent = []
    plain = backend.update_block_tables
    monkeypatch.setattr(backend, "update_block_tables", lambda *args: (sent.append(len(args[1])), plain(*args)))
    rows = make_rows()
    first, second = sequence(1, 8, blocks=[3, 5]), sequence(2, 5, blocks=[7])
    rows.enter(first)
    rows.enter(second)
    assert rows.without_place() == [second]
    rows.give_blocks([second], [6])
    rows.upload()
    assert sent == [4]
    rows.advance(np.array([1, 2], np.int32), np.zeros(2, np.float32))
    rows.upload()
    assert sent == [4]
    assert rows.without_place() == [first]
    rows.give_blocks([first], [9])
    rows.replace_last_block(second, 1)
    rows.upload()
    assert sent == [4, 2]
    assert rows.block_tables[:2].tolist() == [[3, 5, 9, 0, 0], [7, 1, 0, 0, 0]]
    assert rows.host.slot_mapping[:2].tolist() == [9 * 4, 1 * 4 + 1]


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_advance_names_the_rows_to_look_at(at_once):
    rows = make_rows(8)
    kinds = [{}, {"stop_token_ids": [5, 9]}, {"stop_token_ids": [6]}, {}, {}]
    found = [sequence(number, 3, blocks=[number], **kind) for number, kind in enumerate(kinds)]
    found[4].request.limit = 4
    rows.enter()  # nothing came
    for first in range(0, 5, at_once):
        rows.enter(*found[first : first + at_once])
    looked_at = rows.advance(np.array([9, 9, 9, 9, 9], np.int32), np.array([-1, -1, -1, np.nan, -1], np.float32))
    assert looked_at.tolist() == [1, 3, 4]
    assert rows.host.tokens.tolist() == [9] * 5 + [0] * 3 and rows.host.positions.tolist() == [3] * 5 + [0] * 3
    assert [seq.length for seq in found] == [4] * 5 and found[0].token_ids.tolist() == [0, 1, 0, 9]
    assert rows.host.slot_mapping[:5].tolist() == [0 * 4 + 3, 7, 11, 15, 19]


def test_settings_of_the_draw_move_with_their_row():
    rows = make_rows()
    found = [
        sequence(1, blocks=[1]),
        sequence(2, blocks=[2], repetition_penalty=1.5),
        sequence(3, blocks=[3], min_tokens=3, stop_token_ids=[7, 8]),
    ]
    rows.enter(found[0])
    assert rows.draw_plainly and rows.draw_settings() == (None, None, None)
    for seq in found[1:]:
        rows.enter(seq)
    rows.leave(found[0])
    assert not rows.draw_plainly
    banned, penalty, seen = rows.draw_settings()
    assert banned.tolist() == [[7, 8], [-1, -1]] and penalty.tolist() == [1, 1.5]
    assert not seen[0].any() and np.flatnonzero(seen[1]).tolist() == [0, 1, 2, 3, 200]
    rows.leave(found[1])
    assert rows.draw_settings()[1] is None
    rows.advance(np.array([1], np.int32), np.zeros(1, np.float32))
    assert not rows.draw_plainly
    rows.advance(np.array([1], np.int32), np.zeros(1, np.float32))
    assert rows.draw_plainly  # three tokens: the ban is over


def contents(rows):
    """What the rows in use are, and what a step reads of all rows."""
    of_rows = [
        (seq.request.request_id, seq.row, seq.token_ids.tolist(), seq.logprobs.tolist()) for seq in rows.sequences
    ]
    rows.upload()
    settings = [None if x is None else x.tolist() for x in rows.draw_settings()] if rows.count else []
    own = [getattr(rows, name)[: rows.count].tolist() for name in ("_room", "_limits", "_min_lengths", "_watched")]
    assert rows.block_tables[: rows.count].tolist() == [seq.block_table for seq in rows.sequences]
    return of_rows, settings, own, {name: getattr(rows.host, name).tolist() for name in FIELDS}


def test_rows_that_come_and_leave_together_are_as_one_after_the_other():
    rng = np.random.default_rng(0)
    for _ in range(40):
        count = int(rng.integers(1, 13))
        shapes = [(int(length), int(rng.integers(1, length))) for length in rng.integers(2, 19, count)]
        kinds = [{}, {"repetition_penalty": 1.5}, {"min_tokens": 9, "stop_token_ids": [7, 8]}]
        chosen, leaving = rng.integers(0, 3, count), rng.permutation(count)[: rng.integers(0, count + 1)].tolist()
        found = []
        for together in (True, False):
            rows = Rows(backend, np.float32, 13, 20, 4, 2000)
            sequences = [
                sequence(number, *shape, list(range(5 * number, 5 * number + 5)), **kinds[kind])
                for number, (shape, kind) in enumerate(zip(shapes, chosen, strict=True))
            ]
            if together:
                rows.enter(*sequences)
                rows.upload()
                rows.leave(*(sequences[place] for place in leaving))
            else:
                for seq in sequences:
                    rows.enter(seq)
                rows.upload()
                for place in leaving:
                    rows.leave(sequences[place])
            left = [(sequences[place].row, sequences[place].token_ids.tolist()) for place in leaving]
            assert [seq.row for seq in rows.sequences] == list(range(rows.count)) == list(range(count - len(leaving)))
            found.append((contents(rows), left, [seq.token_ids.tolist() for seq in sequences]))
        assert found[0] == found[1]


@pytest.mark.parametrize("part", ["_set_seen", "_move", "_empty"])
def test_an_interrupt_while_rows_come_or_leave_loses_no_token(part, monkeypatch):
    rows, found = make_rows(), [sequence(number, 5 + number, 2, [number]) for number in range(5)]
    expected = [(seq.token_ids.tolist(), seq.logprobs.tolist()) for seq in found]
    rows.enter(*found[:3])

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(rows, part, interrupt)
        rows.enter(*found[3:])
        rows.leave(found[0], found[2])
    rows.clear()
    assert [(seq.token_ids.tolist(), seq.logprobs.tolist()) for seq in found] == expected
    assert [seq.row for seq in found] == [-1] * 5 and not rows.adapters and not rows.host.context_lens.any()
    rows.enter(*found)
    assert [(seq.token_ids.tolist(), seq.logprobs.tolist()) for seq in found] == expected and rows.draw_plainly
