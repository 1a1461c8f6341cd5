"""Lowered transfers: deliverable, hidden, in one order; for golden and random tables."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax.ir import Action, Machine, Partition, Plan, Schedule
from octojax.ir.lowering import transfers_of, without_transfers
from octojax.ir.progress import Progress, makes, reads
from octojax.ir.verify import deliverable, naive_deadlock, verify
from octojax.passes import LowerTransfers, ReorderComm, transfer_order
from octojax.simulate import StageCosts, simulate
from tests.simulate.random_tables import SETTINGS, machines, stage_costs, tables

GOLDENS = Path(__file__).parents[1] / "goldens"
FILES = sorted(
    p.name
    for p in GOLDENS.glob("*.csv")
    if p.name != "INDEX.csv" and not p.name.endswith(".comms.csv")
)


def test_naive_rule():
    before = Schedule.parse("0F0 0B0\n1F0 1B0")
    after = Schedule.parse("0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0")
    assert LowerTransfers()(before) == after
    assert LowerTransfers()(after) == after


def test_one_forward_one_backward():
    """The naive rule sends 0F1 forward while 1B0 is sent back. Receiving 0F1 first is the cure."""
    schedule = Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    result = ReorderComm(machine=Machine(latency_s=0.01), costs=StageCosts.unit(2)).reorder(
        schedule
    )
    assert result.naive_stuck == ("0SEND_F1", "1SEND_B0")
    assert str(result.schedule) == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
        "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1"
    )
    assert [str(t) for t in result.order] == ["0SEND_F0", "0SEND_F1", "1SEND_B0", "1SEND_B1"]


def test_mismatch_is_repaired():
    """Overlap-friendly 1F1B: the forward two ahead would wait for a rank that waits for it."""
    schedule = Schedule.load(GOLDENS / "alpa_1f1b_overlap_friendly_p2_m4.csv")
    result = ReorderComm().reorder(schedule)
    assert result.refused == 3
    assert result.tried > result.refused
    assert without_transfers(result.schedule) == schedule


def _consistent(lowered: Schedule, order) -> None:
    """Every rank issues its transfers in the one order."""
    turn = {t.send: n for n, t in enumerate(order)} | {t.receive: n for n, t in enumerate(order)}
    for row in lowered.ranks:
        turns = [turn[x] for x in row if isinstance(x, Action) and x.kind.transfers]
        assert turns == sorted(turns)


@pytest.mark.parametrize("file", FILES)
def test_every_golden_table_is_deliverable(file):
    schedule = Schedule.load(GOLDENS / file)
    result = ReorderComm().reorder(schedule)
    verify(result.schedule)
    assert without_transfers(result.schedule) == schedule
    assert sorted(result.order) == sorted(transfers_of(schedule))
    _consistent(result.schedule, result.order)
    assert (result.naive_stuck == ()) == (naive_deadlock(schedule) == ())


@pytest.mark.parametrize(
    "name",
    [
        "torch_Interleaved1F1B_p2_m4_v3", "torch_Interleaved1F1B_p4_m8_v2",
        "torch_ZBVZeroBubble_p4_m8_v2", "torch_DualPipeV_p4_m8_v2", "torch_LoopedBFS_p4_m8_v2",
    ],
)  # fmt: skip
def test_no_slower_than_pytorchs_lowering_when_transfers_block(name):
    """The kinds of table whose late receives hang (pytorch/pytorch#172668)."""
    theirs = Schedule.load(GOLDENS / f"{name}.comms.csv")
    bare = Schedule.load(GOLDENS / f"{name}.csv")
    costs = StageCosts.unit(bare.num_stages)
    for latency in (0.0, 0.1):
        machine = Machine(latency_s=latency)
        ours = ReorderComm(costs, Machine(latency_s=0.01))(bare)
        assert (
            simulate(ours, costs, machine, "blocking").makespan_s
            <= simulate(theirs, costs, machine, "blocking").makespan_s
        )


@settings(**SETTINGS)
@given(tables(recompute=True))
def test_any_table_becomes_deliverable(schedule):
    for eager in (False, True):
        result = ReorderComm(eager=eager).reorder(schedule)
        verify(result.schedule, schedule.num_microbatches, schedule.num_stages)
        assert without_transfers(result.schedule) == schedule
        _consistent(result.schedule, result.order)
    costs = StageCosts.unit(schedule.num_stages)
    assert simulate(result.schedule, costs).makespan_s == simulate(schedule, costs).makespan_s


@settings(**SETTINGS)
@given(
    tables().flatmap(
        lambda s: st.tuples(st.just(s), stage_costs(s.num_stages), machines(s.num_ranks))
    )
)
def test_any_costs_and_links(case):
    schedule, costs, machine = case
    first = ReorderComm(costs, machine).reorder(schedule)
    deliverable(first.schedule)
    assert ReorderComm(costs, machine).reorder(schedule) == first


@settings(**SETTINGS)
@given(tables())
def test_transfer_order_is_a_linear_extension(schedule):
    """A rank that sends in this order never needs, to make a value, one that comes later."""
    order = transfer_order(schedule)
    assert Counter(order) == Counter(transfers_of(schedule))
    turn = {("F" if t.kind == "F" else "B", t.stage, t.microbatch): n for n, t in enumerate(order)}
    best: dict = {}
    for rank, position in Progress(schedule, rendezvous=False).order:
        item = schedule.ranks[rank][position]
        parts = item.actions if not isinstance(item, Action) else (item,)
        needs = [v for a in parts for v in reads(a, schedule.num_stages - 1)]
        latest = max([best.get(("rank", rank), -1), *(best.get(v, -1) for v in needs)])
        latest = max(
            [latest, *(turn[v] for v in needs if v in turn and _crosses(v, rank, order, turn))]
        )
        best["rank", rank] = latest
        for action in parts:
            made = makes(action)
            if made is not None:
                best[made] = latest
                if made in turn:
                    assert turn[made] > latest


def _crosses(value, rank, order, turn) -> bool:
    return order[turn[value]].target == rank


def test_plans_keep_their_other_parts():
    schedule = Schedule.parse("0F0 0B0\n1F0 1B0")
    plan = Plan(Partition((1, 2)), schedule.placement, schedule, (True, False), "x")
    lowered = ReorderComm()(plan)
    assert (lowered.partition, lowered.recompute, lowered.name) == (
        plan.partition,
        (True, False),
        "x",
    )
    assert lowered.schedule.has_transfers


def test_tables_of_one_rank_have_no_transfers():
    schedule = Schedule.parse("0F0 1F0 1B0 0B0")
    assert ReorderComm().reorder(schedule).order == ()
    assert ReorderComm()(schedule) == schedule
