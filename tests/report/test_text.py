"""The terminal picture: exact for unit costs, in proportion for any."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax.ir import ActionSpan, RankSummary, Schedule, Timeline, parse_item
from octojax.report import Panel, render_text
from octojax.simulate import StageCosts, simulate


def one_f_one_b() -> Timeline:
    table = Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    return simulate(table, StageCosts.unit(2, 1, 1, 1, 2))


def rows(text: str) -> list[str]:
    return [line.split(" ", 2)[2] for line in text.splitlines() if line.startswith("rank ")]


def test_unit_costs_are_drawn_to_scale():
    text = render_text([Panel("1f1b", one_f_one_b())], width=52, colour=False)
    assert text.startswith("1f1b: 9 s, bubbles 33.3%\n")
    assert rows(text)[:2] == [
        "0F0f|0F1f|..........0B0bbbbbb|.....0B1bbbbbb|",
        ".....1F0f|1B0bbbbbb|1F1f|1B1bbbbbb|..........",
    ]
    axis = text.splitlines()[1]
    assert axis.index("0 s") == len("rank 0 ")
    assert "B  backward" in text
    assert "... bubble   3F7" in text


def test_account_lists_every_rank():
    text = render_text([Panel("1f1b", one_f_one_b())], width=100, colour=False)
    table = text[text.index(" rank ") :].splitlines()
    assert table[1].split() == ["0", "6", "s", "3", "s", "33.3%", "0", "s", "3", "s", "2", "-"]
    assert table[2].split() == ["1", "6", "s", "3", "s", "33.3%", "3", "s", "0", "s", "1", "-"]


def test_bound_and_its_gap_stand_in_the_heading():
    text = render_text([Panel("tuned", one_f_one_b(), bound_s=8.0)], width=80, colour=False)
    assert "within 12.5% of the lower bound 8 s" in text.splitlines()[0]


def test_two_timelines_share_one_axis():
    short = simulate(Schedule.parse("0F0 0B0"), StageCosts.unit(1, 1, 1, 1, 2))
    text = render_text([Panel("a", one_f_one_b()), Panel("b", short)], width=47, colour=False)
    drawn = rows(text)
    assert drawn[0].startswith("0F0|0F1|")
    assert drawn[2].startswith("0F0|0B0bbbb|....")
    assert len(drawn[0]) == len(drawn[2])


def test_colours_only_where_asked_for():
    panels = [Panel("1f1b", one_f_one_b())]
    assert "\x1b[" not in render_text(panels, width=60, colour=False)
    coloured = render_text(panels, width=60, colour=True)
    assert "\x1b[" in coloured
    plain = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert "0F0" in plain


def test_an_overlapped_pair_shows_both_halves():
    span = ActionSpan(0, parse_item("(0F1;0B0)OVERLAP_F_B"), 0.0, 2.0)
    timeline = Timeline(2.0, (span,), (), (RankSummary(2.0, 0.0, 0.0, 0.0, 1, 0.0),))
    text = render_text([Panel("pair", timeline)], width=47, colour=False)
    assert rows(text)[0] == "0F1ffffffffffffffff|0B0bbbbbbbbbbbbbbbb|"


def test_an_empty_timeline_is_drawn():
    idle = Timeline(0.0, (), (), (RankSummary(0.0, 0.0, 0.0, 0.0, 0, 0.0),))
    assert rows(render_text([Panel("nothing", idle)], width=47, colour=False))[0] == "." * 40


@settings(deadline=None, max_examples=40)
@given(
    costs=st.lists(st.floats(0.01, 10.0), min_size=3, max_size=3),
    width=st.integers(47, 200),
)
def test_widths_follow_the_costs(costs, width):
    """Every bar is as wide as its time, to the column on which its ends are rounded."""
    timeline = simulate(
        Schedule.parse("0F0 0F1 0I0 0W0 0I1 0W1\n1F0 1F1 1I0 1W0 1I1 1W1"),
        StageCosts.unit(2, *costs),
    )
    text = render_text([Panel("any", timeline)], width=width, colour=False)
    for rank, row in enumerate(rows(text)[:2]):
        columns = len(row)
        assert columns <= width - len("rank 0 ")
        busy = sum(c != "." for c in row)
        expected = timeline.ranks[rank].busy_s / timeline.makespan_s * columns
        assert busy == pytest.approx(expected, abs=len(timeline.actions))


def dense(microbatches: int) -> Timeline:
    table = Schedule.parse(" ".join(f"0F{m} 0I{m} 0W{m}" for m in range(microbatches)))
    return simulate(table, StageCosts.unit(1, 3.0, 5.0, 2.0))


@pytest.mark.parametrize("microbatches", [40, 100, 1000])
@pytest.mark.parametrize("colour", [False, True])
def test_actions_narrower_than_a_column_show_their_shares(microbatches, colour):
    text = render_text([Panel("many", dense(microbatches))], width=80, colour=colour)
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    row = rows(text)[0]
    assert set(row) <= set("fiw")
    for kind, share in (("f", 0.3), ("i", 0.5), ("w", 0.2)):
        assert row.count(kind) == pytest.approx(share * len(row), abs=1.5)
    assert "small letters: several actions in a column" in " ".join(text.split())


def test_dense_rows_show_bubbles_by_their_share():
    spans = tuple(ActionSpan(0, parse_item(f"0F{m}"), m, m + 0.75) for m in range(400))
    timeline = Timeline(400.0, spans, (), (RankSummary(300.0, 100.0, 0.0, 100.0, 1, 0.0),))
    row = rows(render_text([Panel("gaps", timeline)], width=80, colour=False))[0]
    assert row.count(".") == pytest.approx(len(row) / 4, abs=1.5)


def test_a_short_action_alone_is_seen():
    spans = (ActionSpan(0, parse_item("0F0"), 50.0, 50.01),)
    timeline = Timeline(100.0, spans, (), (RankSummary(0.01, 99.99, 99.99, 0.0, 1, 0.0),))
    assert rows(render_text([Panel("one", timeline)], width=80, colour=False))[0].count("F") == 1


@pytest.mark.parametrize("width", [60, 80, 100])
def test_labels_in_colour_do_not_run_together(width):
    order = " ".join(f"0F{m} 0B{m}" for m in range(14))
    timeline = simulate(Schedule.parse(order), StageCosts.unit(1, 1, 1, 1, 2))
    text = render_text([Panel("colour", timeline)], width=width, colour=True)
    row = next(line for line in text.splitlines() if "rank 0" in line)
    cells = re.findall(r"\x1b\[[0-9;]*48;2[0-9;]*m([^\x1b]*)", row)
    assert len(cells) == 28
    assert all(len(c) < 2 or c.endswith(" ") for c in cells)


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_kinds_are_letters_where_colour_is_not_wanted(monkeypatch, name, value):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    panels = [Panel("1f1b", one_f_one_b())]
    assert "\x1b[" in render_text(panels, width=52)
    monkeypatch.setenv(name, value)
    text = render_text(panels, width=52)
    assert "\x1b[" not in text
    assert rows(text)[0] == "0F0f|0F1f|..........0B0bbbbbb|.....0B1bbbbbb|"


def test_names_that_look_like_markup_are_shown_as_they_are():
    timeline = simulate(Schedule.parse("0F0 0B0"), StageCosts.unit(1))
    text = render_text([Panel("[bold]x[/bold] [/y] :smile:", timeline)], 100, colour=False)
    assert text.count("[bold]x[/bold] [/y] :smile:") == 2
