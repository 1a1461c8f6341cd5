"""Processes that have other values, make other calls, or end: the others are told which and how."""

from pathlib import Path

import pytest

from octojax.launch import exit_code, launch

SCRIPT = str(Path(__file__).parent / "falls.py")


def run(*arguments: str, processes: int = 2, timeout_s: float = 30.0):
    lines: dict[int, list[str]] = {p: [] for p in range(processes)}
    exits = launch(
        [SCRIPT, *arguments],
        processes,
        timeout_s=timeout_s,
        echo=lambda process, line: lines[process].append(line),
    )
    return exits, ["\n".join(lines[p]) for p in range(processes)]


def test_values_that_differ_are_named_before_they_mix(tmp_path):
    exits, said = run("values", str(tmp_path))
    assert [e.code for e in exits] == [0, 0], "\n".join(said)
    assert all("all equal" in text for text in said)


def test_a_skipped_batch_is_an_error_in_the_next_step():
    exits, said = run("fall", "skip")
    assert [e.code for e in exits] == [1, 1]
    for text in said:
        assert "the processes are out of step" in text
        assert "'step 3'" in text
    assert "in process 1 'step 3' (call 6) failed: ValueError: this batch differs" in said[0]


def test_an_exit_code_is_kept_and_the_others_are_told():
    exits, said = run("fall", "exit")
    assert [e.code for e in exits] == [1, 3], "\n".join(said)
    assert exit_code(exits) == 3
    assert "process 1, after 'step 2', ended by sys.exit(3)" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "cause"),
    [
        ("return", 0, "process 1 ended after call 5, 'step 2', while this process is in call 6"),
        ("raw exit", 5, "process 1"),
        ("hard exit", 7, "process 1 exited with code 7"),
        ("evaluate", 1, "'evaluation at step 3' in process 1 and 'step 3' in this process"),
        ("parameters", 1, "'parameters at step 3' in process 1 and 'step 3' in this process"),
        ("save", 1, "'save of step 3' in process 1 and 'step 3' in this process"),
        ("thread", 1, "its thread 'loader' failed: ZeroDivisionError"),
    ],
)
def test_other_ways_to_fall_out_of_step(how, code, cause, tmp_path):
    exits, said = run("fall", how, str(tmp_path / "checkpoint"), timeout_s=10.0)
    assert [e.code for e in exits] == [1, code], "\n".join(said)
    assert cause in said[0], said[0]
