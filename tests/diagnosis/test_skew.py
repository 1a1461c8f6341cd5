"""A measured timeline whose clocks disagree says so."""

from dataclasses import replace

import pytest

from octojax.cli import main
from octojax.diagnosis.skew import clock_skew
from octojax.ir import Machine
from octojax.report import save_timeline
from octojax.schedules import generate
from octojax.simulate import StageCosts, simulate

STEP = simulate(generate("dualpipe", 4, 8), StageCosts.unit(4), Machine(latency_s=0.25))


def shifted(rank: int, seconds: float):
    """The step, with one rank's clock behind."""
    spans = (
        replace(s, start_s=s.start_s - seconds, end_s=s.end_s - seconds) if s.rank == rank else s
        for s in STEP.actions
    )
    return replace(STEP, actions=tuple(spans))


def test_clocks_that_agree():
    assert clock_skew(STEP) is None
    assert clock_skew(shifted(2, 0.2)) is None  # within the time that values travel


@pytest.mark.parametrize("rank", [1, 2])
def test_a_clock_that_is_behind_is_named_with_both_actions(rank):
    skew = clock_skew(shifted(rank, 0.75))
    assert skew is not None
    assert (skew.seconds, skew.target) == (0.5, rank)
    assert f"{skew.user} starts before {skew.maker} has ended" in str(skew)


def test_show_says_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    table = simulate(generate("1f1b", 2, 2), StageCosts.unit(2))
    late = [replace(s, start_s=s.start_s + 3, end_s=s.end_s + 3) for s in table.actions]
    spans = [a if a.rank else b for a, b in zip(table.actions, late, strict=True)]
    skewed = replace(table, makespan_s=table.makespan_s + 3, actions=tuple(spans))
    save_timeline(skewed, tmp_path / "measured.json")
    with pytest.raises(SystemExit) as stop:
        main(["show", str(tmp_path / "measured.json")])
    assert stop.value.code == 0
    assert "the clocks of ranks 0 and 1 differ by 3 s at least: 1F0" in capsys.readouterr().out
