"""Real processes that talk through gloo on 127.0.0.1; see `scripts.py` for what they run."""

import time
from pathlib import Path

import pytest

from octojax.launch import Exit, launch

SCRIPT = str(Path(__file__).parent / "scripts.py")


def run(processes: int, *arguments: str, devices: int = 1, timeout_s: float = 30.0):
    lines: list[tuple[int, str]] = []
    exits = launch(
        [SCRIPT, *arguments],
        processes,
        devices_per_process=devices,
        timeout_s=timeout_s,
        echo=lambda process, line: lines.append((process, line)),
    )
    return exits, lines


def said(lines, process: int) -> str:
    return "\n".join(line for p, line in lines if p == process)


def assert_all_equal(exits: tuple[Exit, ...], lines) -> None:
    assert [e.code for e in exits] == [0] * len(exits), "\n".join(f"[{p}] {x}" for p, x in lines)
    assert all("all equal" in said(lines, e.process_id) for e in exits)


@pytest.mark.parametrize(("processes", "devices"), [(2, 1), (2, 2)])
def test_random_irregular_plans(processes, devices):
    assert_all_equal(*run(processes, "irregular", "0", "4", devices=devices))


def test_named_schedules():
    names = ("gpipe", "interleaved:2", "zb-h1", "zb-v", "dualpipe-v", "chimera")
    assert_all_equal(*run(2, "named", *names))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 40, 8))
def test_many_random_irregular_plans(first):
    assert_all_equal(*run(2 + first // 8 % 3, "irregular", str(first), "8"))


@pytest.mark.slow
def test_receive_early_tables_that_hang_elsewhere():
    """pytorch/pytorch#172668: the same five tables, in our order of transfers."""
    assert_all_equal(*run(2, "named", "interleaved:2"))
    names = ("interleaved:2", "zb-v", "dualpipe-v", "looped-bfs:2")
    assert_all_equal(*run(4, "named", *names))


def test_updates_are_those_of_one_process():
    assert_all_equal(*run(2, "update"))


def test_processes_with_different_plans_refuse_to_start():
    exits, lines = run(2, "differ")
    assert [e.code for e in exits] == [1, 1]
    for process in (0, 1):
        text = said(lines, process)
        assert "the processes are not about to run the same thing" in text
        assert "plan: process 0 has" in text


@pytest.mark.parametrize("how", ["kill", "stop", "raise"])
def test_a_lost_peer_is_an_error_in_time(how):
    begin = time.monotonic()
    exits, lines = run(2, "fail", how, timeout_s=8.0)
    assert time.monotonic() - begin < 60
    assert exits[0].code == 1, lines
    assert exits[1].code != 0
    text = said(lines, 0)
    assert "ExecutionError: rank 0" in text
    assert "1SEND_B" in text
    assert "rank 1" in text
    if how == "raise":
        assert "broken on purpose" in said(lines, 1)


def test_a_peer_that_never_starts_is_an_error_in_time(monkeypatch):
    monkeypatch.setenv("OCTOPIPE_NUM_PROCESSES", "2")
    script = "import os; os.environ['OCTOPIPE_NUM_PROCESSES'] = '2'\n"
    script += "from octojax.processes import initialize; initialize()"
    lines: list[str] = []
    begin = time.monotonic()
    exits = launch(["-c", script], 1, timeout_s=3.0, echo=lambda _, line: lines.append(line))
    assert time.monotonic() - begin < 60
    assert exits[0].code != 0
