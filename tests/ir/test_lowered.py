"""Lowered plans: text, CSV and JSON that read back, and what a reader refuses."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax.errors import FormatError, ScheduleError
from octojax.ir import Cargo, Kind, LoweredPlan, Schedule, Transfer, Unit, Wiring
from octojax.ir.exchange import with_update
from octojax.ir.naive import lower_naively
from octojax.ir.transfer import parse_exchange
from octojax.ir.verify import verify
from octojax.passes import lowered
from octojax.schedules import generate
from tests.simulate.random_tables import SETTINGS, tables


@settings(**SETTINGS)
@given(tables(recompute=True))
def test_everything_reads_back(schedule):
    plan = lowered(schedule)
    assert LoweredPlan.parse(str(plan)) == plan
    assert LoweredPlan.from_json(plan.to_json()) == plan
    assert LoweredPlan.from_csv(plan.to_csv()).ranks == plan.ranks
    assert LoweredPlan.parse("\n".join(plan.lines)).ranks == plan.ranks


def test_files(tmp_path):
    plan = lowered(generate("dualpipe", 4, 8))
    for name in ("plan.json", "plan.csv"):
        plan.save(tmp_path / name)
        assert LoweredPlan.load(tmp_path / name).ranks == plan.ranks
    verify(LoweredPlan.load(tmp_path / "plan.json"))


@st.composite
def wirings(draw):
    stages = draw(st.integers(1, 5))
    some = st.lists(st.integers(0, stages - 1), max_size=3, unique=True).map(
        lambda x: tuple(sorted(x))
    )
    kinds = st.sampled_from([Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.BACKWARD])
    return Wiring(
        stages,
        tuple(draw(st.lists(st.builds(Unit, some, some), max_size=6))),
        tuple(draw(st.lists(some.filter(bool), max_size=3))),
        draw(st.frozensets(st.tuples(st.sampled_from(list(Cargo)[:2]), st.integers(0, 4)))),
        draw(st.frozensets(st.tuples(st.integers(0, 4), kinds))),
    )


@settings(**SETTINGS)
@given(wirings())
def test_wirings_read_back(wiring):
    assert Wiring.parse(str(wiring), wiring.num_stages) == wiring
    assert Wiring.from_json(wiring.to_json()) == wiring


@settings(**SETTINGS)
@given(st.lists(st.integers(0, 40), unique=True).map(lambda x: tuple(sorted(x))), st.booleans())
def test_exchanges_read_back(parts, sends):
    transfer = Transfer(3, 0, Cargo.SUMS, parts=parts)
    assert parse_exchange(transfer.cell(sends)) == (sends, transfer)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0X0", "row 0 (rank 0), cell 1: cannot read '0X0'"),
        ("0F0 0B0 SEND_G(0->1;a)", "cannot read"),
        ("0F0 0B0 SEND_G(0->1;3-)", "'3-' is no number or range"),
        ("0F0+0SEND_F0 0B0", "0SEND_F0 cannot be joined with others"),
        ("-", "no action in 1 rows"),
        ("lowered x\npartition 1\n0F0 0B0", "the heading lacks placement, recompute, wiring"),
    ],
)
def test_what_cannot_be_read(text, message):
    with pytest.raises(FormatError) as error:
        LoweredPlan.parse(text)
    assert message in str(error.value)


def test_what_no_value_needs_is_refused():
    with pytest.raises(ScheduleError, match="0SEND_F0 moves a value that does not cross ranks"):
        LoweredPlan.parse("0F0 0SEND_F0 1F0 1B0 0B0")


def plan_with(row: int, old: str, new: str) -> LoweredPlan:
    plan = lowered(generate("dualpipe", 2, 4))
    lines = list(plan.lines)
    assert old in lines[row]
    lines[row] = lines[row].replace(old, new)
    return LoweredPlan.parse("\n".join(lines))


@pytest.mark.parametrize(
    ("row", "old", "new", "message"),
    [
        (0, " RECV_G(1->0;0-1)", "", r"RECV_G\(1->0;0-1\) is missing on rank 0"),
        (1, "SEND_G(1->0;0-1)", "SEND_G(1->0;0)", r"SEND_G\(1->0;0\) on rank 1 moves what no"),
        (1, "SEND_E(1->0;0)", "SEND_E(1->0;0) SEND_E(1->0;0)", "is doubled on rank 1"),
        (1, "SEND_G(1->0;0-1) SEND_E(1->0;0)", "SEND_E(1->0;0) SEND_G(1->0;0-1)", "in a cycle"),
    ],
)
def test_a_step_that_does_not_end_as_it_should_is_refused(row, old, new, message):
    with pytest.raises(ScheduleError, match=message):
        verify(plan_with(row, old, new))


def test_joined_actions_keep_their_order():
    with pytest.raises(ScheduleError, match="runs 0B0 at position 0, but 0F0, which it needs, in"):
        verify(LoweredPlan.parse("0B0+0F0"))
    verify(LoweredPlan.parse("0F0+0B0"))


def test_the_cycle_of_a_rendezvous_is_drawn():
    with pytest.raises(ScheduleError) as error:
        verify(LoweredPlan.of(lower_naively(generate("1f1b", 2, 4))))
    assert (
        "the table deadlocks under blocking rendezvous, stuck at 0SEND_F1 1SEND_B0, in a cycle: "
        "rank 0 (0SEND_F1) -> rank 1 (1SEND_B0) -> rank 0 (0SEND_F1)"
    ) in str(error.value)
    assert "`octopipe lower FILE` finds such an order" in str(error.value)


def test_an_evaluation_runs_forwards_alone():
    plan = lowered(Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")).forwards_only()
    assert plan.lines == ("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1RECV_F1 1F0 1F1")


UPDATED = """0F0 0SEND_F0 0RECV_B0 0B0 UPDATE0 RECV_U(1->0;0) SEND_U(0->1;0) UPDATE1
1RECV_F0 1F0 1B0 1SEND_B0 UPDATE0 SEND_U(1->0;0) RECV_U(0->1;0) UPDATE1"""


def test_an_update_ends_the_rows():
    bare = lowered(Schedule.parse("0F0 0B0\n1F0 1B0"), "transfers")
    both = ((0, 1), ((1, 0), (0, 1)))
    plan = with_update(bare, [both, ((0, 1), ())])
    assert "\n".join(plan.lines) == UPDATED
    verify(plan)
    assert plan.without_update() == bare
    assert with_update(plan, [both, ((0, 1), ())]) == plan
    assert plan.forwards_only() == bare.forwards_only()
    for again in (LoweredPlan.parse(str(plan)), LoweredPlan.from_json(plan.to_json())):
        assert again == plan
    assert LoweredPlan.from_csv(plan.to_csv()).ranks == plan.ranks


def test_new_copies_come_after_the_update():
    plan = lowered(generate("dualpipe", 2, 4))
    updated = with_update(plan, [((0, 1), ((1, 0),))])
    assert updated.lines[0].endswith("UPDATE0 RECV_U(1->0;0) SEND_P(0->1;0-1)")
    verify(updated)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (" RECV_U(1->0;0)", "", r"RECV_U\(1->0;0\) is missing, the other side of SEND_U"),
        (" SEND_U(1->0;0)", "", r"SEND_U\(1->0;0\) is missing, the other side of RECV_U"),
        ("UPDATE0 RECV_U(1", "UPDATE1 RECV_U(1", r"UPDATE1 comes after UPDATE1 on rank 0"),
        ("0F0 ", "UPDATE7 0F0 ", r"UPDATE7 stands at position 0 of rank 0, before 0B0"),
        ("UPDATE0 SEND_U(1", "SEND_U(1->0;0) UPDATE0 SEND_U(1", r"SEND_U.* is doubled on rank 1"),
        ("RECV_U(1->0;0) SEND_U(0->1;0)", "SEND_U(0->1;0) RECV_U(1->0;0)", "deadlocks"),
        ("UPDATE1\n", "UPDATE1 SEND_U(1->0;1)\n", r"is misplaced: rank 0 has it, not rank 1"),
    ],
)
def test_an_update_that_does_not_deliver_is_refused(old, new, message):
    assert old in UPDATED
    with pytest.raises(ScheduleError, match=message):
        verify(LoweredPlan.parse(UPDATED.replace(old, new, 1)))
