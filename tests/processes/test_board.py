"""Boards of several processes in one, with a clock of their own: nobody waits."""

from types import SimpleNamespace

import pytest

from octojax.errors import PeerError
from octojax.processes import board as module
from octojax.processes.board import Board


class Store:
    """The coordinator's table."""

    def __init__(self):
        self.texts = {}

    def key_value_set(self, key, value, overwrite=False):
        self.texts[key] = value

    def key_value_dir_get(self, folder):
        return [(k, v) for k, v in self.texts.items() if k.startswith(folder)]


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=100.0)

    def sleep(seconds):
        now.s += seconds

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now.s, sleep=sleep))
    monkeypatch.setenv("OCTOPIPE_TIMEOUT_S", "10")
    monkeypatch.delenv("OCTOPIPE_FOLDER", raising=False)
    return now


@pytest.fixture
def boards(clock):
    store = Store()
    return [Board(store, p, 3) for p in range(3)]


def pass_time(boards, clock, seconds, but=()):
    """Every board looks four times a second."""
    for _ in range(round(4 * seconds)):
        clock.s += 0.25
        for board in boards:
            if board.me not in but:
                board.post()
                board.look()
                board._expire()


def start(board, topic):
    """Leaves the board in a call in which it waits; returns the errors that wake it."""
    errors = []
    board.log.enter(topic)
    board._waits[0] = module._Wait(
        "rank 0 waited 10 s for 1SEND_F0", 10.0, errors.append, module.time.monotonic()
    )
    return errors


def finish(board):
    board._waits.clear()
    board.log.leave()


def test_nothing_is_wrong_with_processes_that_do_the_same(boards, clock):
    for number in range(20):
        for board in boards:
            start(board, f"step {number}")
            pass_time(boards, clock, 0.5)
        for board in boards:
            finish(board)
            pass_time(boards, clock, 0.25)
    assert [b.trouble for b in boards] == [None] * 3


def test_one_that_saves_alone_is_named_at_once(boards, clock):
    woken = [start(b, "save" if b.me == 1 else "step 3") for b in boards]
    pass_time(boards, clock, 0.5)
    for board, errors in zip(boards, woken, strict=True):
        assert errors, board.me
    assert "call 1 is 'save' in process 1 and 'step 3' in this process" in str(woken[0][0])
    assert "'step 3' in process 0 and 'save' in this process" in str(woken[1][0])
    with pytest.raises(PeerError, match="out of step"), boards[0].call("step 4"):
        pass


def test_one_that_has_ended_early_is_named_once_somebody_waits(boards, clock):
    for board in boards:
        start(board, "step 0")
    for board in boards:
        finish(board)
    boards[2].end("ended", well=True)
    pass_time(boards, clock, 5, but=(2,))
    assert boards[0].trouble is None
    errors = start(boards[0], "step 1")
    pass_time(boards, clock, 0.5, but=(2,))
    assert "process 2 ended after call 1, 'step 0'" in str(errors[0])
    assert "did it have fewer batches" in str(errors[0])


def test_the_first_failure_is_the_cause_that_is_named(boards, clock):
    waits = start(boards[0], "step 0")
    boards[1].end("failed: ValueError: no", well=False)
    boards[2].look()
    boards[2].end("failed: ExecutionError: process 1 failed", well=False)
    pass_time(boards[:1], clock, 0.5)
    assert str(waits[0]) == "process 1 failed: ValueError: no"


def test_a_late_peer_is_an_error_that_says_where_it_is(boards, clock):
    boards[1].remark("its thread 'loader' failed: KeyError: 3")
    errors = start(boards[0], "step 0")
    pass_time(boards, clock, 9)
    assert not errors
    pass_time(boards, clock, 2)
    text = str(errors[0])
    assert text.startswith("rank 0 waited 10 s for 1SEND_F0. When last heard of, process 1: ")
    assert "it had made no call yet (its thread 'loader' failed: KeyError: 3)" in text


def test_who_is_busy_is_waited_for_as_long_as_it_lives(boards, clock):
    errors = start(boards[0], "step 0")
    with boards[1].busy("compiling"):
        pass_time(boards, clock, 100)
        assert not errors
        pass_time(boards, clock, 16, but=(1,))  # it is stopped
    assert "process 1" in str(errors[0])
    assert "no sign of life" in str(errors[0])


def test_a_silent_process_ends_the_others_wherever_they_are(boards, clock):
    pass_time(boards, clock, 13, but=(2,))
    assert boards[0].trouble is None
    pass_time(boards, clock, 3, but=(2,))
    assert "no sign of life" in str(boards[0].trouble)
    assert "process 2" in str(boards[0].trouble)
    assert boards[0].fatal_s is not None


def test_a_process_that_was_stopped_itself_blames_nobody(boards, clock):
    pass_time(boards, clock, 1)
    clock.s += 60  # nobody has looked: all were stopped
    pass_time(boards, clock, 1)
    assert [b.trouble for b in boards] == [None] * 3


def test_an_error_of_a_transfer_gets_its_cause(boards, clock):
    boards[1].end("was killed by SIGKILL", well=False)
    expected = r"process 1 was killed by SIGKILL. \(broke off\)"
    with pytest.raises(PeerError, match=expected), boards[0].call("step 0"):
        raise PeerError("broke off")


def test_refusals_that_all_make_alike_are_no_difference(boards, clock):
    for board in boards:
        with pytest.raises(ValueError, match="no"), board.call("step 0"):
            raise ValueError("no")
        pass_time(boards, clock, 3)
    assert [b.trouble for b in boards] == [None] * 3


def test_a_call_that_one_alone_has_left_is_named(boards, clock):
    errors = [start(b, "step 0") for b in boards[:2]]
    boards[2].log.enter("step 0")
    boards[2].log.leave("ValueError: no")
    pass_time(boards, clock, 0.25)
    assert not errors[0]  # it may be about to end for it, which says more
    pass_time(boards, clock, 2)
    assert "in process 2 'step 0' (call 1) failed: ValueError: no" in str(errors[0][0])


def test_the_launcher_s_notes_are_read(boards, clock, tmp_path):
    note = tmp_path / "ended.1"
    note.write_text("was killed by SIGKILL")
    boards[0]._notes = {1: note}
    pass_time(boards[:1], clock, 0.5)
    assert str(boards[0].trouble) == "process 1 was killed by SIGKILL"
