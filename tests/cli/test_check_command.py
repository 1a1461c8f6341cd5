"""`octopipe check`: exit codes, and messages that help."""

import re
from functools import partial
from pathlib import Path

import pytest

from octojax.ir import Partition, Placement, Plan, Schedule

GOLDENS = Path(__file__).parents[1] / "goldens"


@pytest.fixture
def octopipe(command):
    return partial(command, "check")


def test_good_table(octopipe):
    code, out, err = octopipe(str(GOLDENS / "sail_1F1B_p4_m8_v1.csv"))
    assert (code, err) == (0, "")
    assert "ok: 4 ranks, 4 stages, 8 microbatches, 64 actions, 48 transfers" in out


def test_lowered_table(octopipe):
    code, out, _ = octopipe(str(GOLDENS / "torch_ZBVZeroBubble_p4_m8_v2.comms.csv"))
    assert code == 0
    assert "deliverable under rendezvous" in out


@pytest.mark.parametrize("path", sorted((GOLDENS / "negative").glob("*.csv")), ids=lambda p: p.name)
def test_bad_tables(octopipe, path):
    if path.name == "INDEX.csv":
        return
    asked = re.search(r"_m(\d+)", path.name)
    assert asked is not None
    code, out, err = octopipe(str(path), "--microbatches", asked[1])
    assert (code, err) == (1, "")
    assert path.name in out
    assert "rank 0" in out
    if "drops" not in path.name:
        assert "<-- rank" in out


def test_dropped_microbatches(octopipe):
    path = str(GOLDENS / "negative" / "NEGATIVE_chimera_p2_m4_drops.csv")
    assert octopipe(path)[0] == 0
    code, out, _ = octopipe(path, "--microbatches", "4")
    assert code == 1
    assert "4 microbatches were asked for, but the table runs only 2" in out


def test_plans(octopipe, tmp_path):
    schedule = Schedule.parse("0F0 0B0\n1F0 1B0")
    good = Plan(Partition((1, 2)), Placement.sequential(2), schedule)
    good.save(tmp_path / "good.json")
    assert octopipe(str(tmp_path / "good.json"))[0] == 0
    Plan(Partition((1, 2)), Placement.of((1, 0)), schedule).save(tmp_path / "bad.json")
    code, out, _ = octopipe(str(tmp_path / "bad.json"))
    assert code == 1
    assert "0F0 is misplaced" in out


def test_memory_of_a_plan(octopipe, tmp_path):
    from octojax.ir import LayerCost, Machine, Profile

    plan = Plan(Partition((1, 2)), Placement.sequential(2), Schedule.parse("0F0 0B0\n1F0 1B0"))
    plan.save(tmp_path / "plan.json")
    layers = (LayerCost("x", 1, 1, 1, state_bytes=100),) * 3
    for capacity, code, words in ((200, 0, "within its memory"), (150, 1, "it lacks 50 bytes")):
        Profile("p", layers, Machine(capacity_bytes=capacity)).save(tmp_path / "p.json")
        got, out, _ = octopipe(str(tmp_path / "plan.json"), "--profile", str(tmp_path / "p.json"))
        assert got == code
        assert words in out
    table = str(GOLDENS / "sail_1F1B_p4_m8_v1.csv")
    got, _, err = octopipe(table, "--profile", str(tmp_path / "p.json"))
    assert got == 2
    assert "--profile needs a plan" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,zero\n", "row 0 (rank 0), cell 1: cannot read 'zero' as an action"),
        ("", "empty table"),
        ("\n\n", "the table has 2 rows and no action"),
        ("0UNSHARD\n", "the table has 1 rows and no action"),
        ("\xff", "cannot read"),
    ],
)
def test_malformed_tables(octopipe, tmp_path, text, message):
    (tmp_path / "t.csv").write_text(text, encoding="utf-8")
    code, out, err = octopipe(str(tmp_path / "t.csv"))
    assert (code, out) == (2, "")
    assert message in err
    assert "t.csv" in err


def test_files_that_are_no_tables(octopipe, tmp_path):
    (tmp_path / "x.csv").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "x.json").write_text("[]")
    for name, message in (
        ("x.csv", "is not UTF-8 text"),
        ("x.json", "a plan is a JSON object, found list"),
        ("none.csv", "does not exist"),
        ("", "is a folder"),
    ):
        code, out, err = octopipe(str(tmp_path / name))
        assert (code, out) == (2, "")
        assert message in err


def test_bad_options(octopipe):
    table = str(GOLDENS / "sail_1F1B_p4_m8_v1.csv")
    for arguments in ((), (table, "--microbatches", "0"), (table, "--nope")):
        code, out, err = octopipe(*arguments)
        assert (code, out) == (2, "")
        assert err


def test_a_message_stays_short_where_a_cell_is_repeated(octopipe, tmp_path):
    (tmp_path / "t.csv").write_text(",".join(["0F0"] * 2000))
    code, out, _ = octopipe(str(tmp_path / "t.csv"))
    assert code == 1
    assert "position 0 of rank 0, 1 of rank 0, 2 of rank 0, 3 of rank 0 and 1996 more" in out
    assert out.count("doubled") == 1


def test_a_mistyped_number_is_no_endless_search(octopipe, tmp_path):
    for cell in ("0F99999999", "99999999F0"):
        (tmp_path / "t.csv").write_text(f"0F0,0B0,{cell}")
        code, out, _ = octopipe(str(tmp_path / "t.csv"))
        assert code == 1
        assert "and over 988 more" in out
