"""Reordered transfers: deliverable, hidden, in one order; for golden and random tables."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax.ir import LoweredPlan, Machine, Partition, Plan, Run, Schedule
from octojax.ir.delivery import deliverable, mismatches
from octojax.ir.verify import verify
from octojax.passes import PlaceTransfers, ReorderComm, lowered
from octojax.passes.one_order import meaning_of
from octojax.schedules import generate
from octojax.simulate import StageCosts, simulate
from tests.simulate.random_tables import SETTINGS, machines, stage_costs, tables

GOLDENS = Path(__file__).parents[1] / "goldens"
FILES = sorted(
    p.name
    for p in GOLDENS.glob("*.csv")
    if p.name != "INDEX.csv" and not p.name.endswith(".comms.csv")
)


def reordered(schedule: Schedule, **options) -> LoweredPlan:
    return ReorderComm(**options)(PlaceTransfers()(schedule))


def test_beside_computation_receives_are_posted_before_what_runs_meanwhile():
    schedule = Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    assert reordered(schedule).lines == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    )


def test_blocking_transfers_come_when_both_ranks_are_free():
    """The naive rule sends 0F1 forward while 1B0 is sent back. Receiving 0F1 first is the cure."""
    schedule = Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    assert reordered(schedule, mode="blocking").lines == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1",
    )


def test_mismatches_are_counted():
    """1F1B: rank 0 sends 0F1 before it receives from 1B0, rank 1 the other way round."""
    naive = PlaceTransfers()(Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"))
    assert list(map(str, mismatches(naive))) == ["1SEND_B0"]
    assert mismatches(ReorderComm()(naive)) == ()
    assert mismatches(PlaceTransfers()(generate("gpipe", 2, 4))) == ()


def _consistent(plan: LoweredPlan) -> None:
    """Every rank has its transfers in one order: any two ranks agree on those they share."""
    turn = {}
    for row in plan.ranks:
        for n, x in enumerate(x for x in row if not isinstance(x, Run)):
            turn.setdefault(x.transfer, []).append(n)
    rows = [[x.transfer for x in row if not isinstance(x, Run)] for row in plan.ranks]
    for a in rows:
        for b in rows:
            assert [t for t in a if t in set(b)] == [t for t in b if t in set(a)]
    assert all(len(both) == 2 for both in turn.values())
    assert mismatches(plan) == ()


@pytest.mark.parametrize("file", FILES)
def test_every_golden_table_is_deliverable_and_as_quick_as_without_transfers(file):
    schedule = Schedule.load(GOLDENS / file)
    costs, machine = StageCosts.unit(schedule.num_stages), Machine(latency_s=1.0)
    plan = reordered(schedule, costs=costs, machine=machine)
    verify(plan)
    assert plan.schedule == schedule
    _consistent(plan)
    assert (
        simulate(plan, costs, machine).makespan_s == simulate(schedule, costs, machine).makespan_s
    )


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
        ours = reordered(bare, mode="blocking", costs=costs, machine=Machine(latency_s=0.01))
        assert (
            simulate(ours, costs, machine, "blocking").makespan_s
            <= simulate(theirs, costs, machine, "blocking").makespan_s
        )


def test_interleaved_with_a_latency_of_one():
    """Beside computation nothing is lost to receives; blocking, knowing the costs never hurts."""
    schedule = generate("interleaved", 8, 16, 2)
    costs, machine = StageCosts.unit(16), Machine(latency_s=1.0)
    bare = simulate(schedule, costs, machine).makespan_s
    assert bare == 147
    blind = reordered(schedule)
    assert simulate(blind, costs, machine).makespan_s <= bare
    knowing = reordered(schedule, costs=costs, machine=machine)
    assert simulate(knowing, costs, machine).makespan_s <= bare
    makespans = [
        simulate(plan, costs, machine, "blocking").makespan_s
        for plan in (
            reordered(schedule, mode="blocking", costs=costs, machine=machine),
            reordered(schedule, mode="blocking"),
        )
    ]
    assert makespans[0] <= makespans[1] <= 324


def test_the_order_is_that_of_a_machine_whose_transfers_block():
    """The default pipeline asks the machine; knowing latency or costs never makes it slower."""
    schedule = generate("interleaved", 8, 16, 2)
    costs, machine = StageCosts.unit(16), Machine(latency_s=1.0, blocking=True)
    makespans = [
        simulate(lowered(schedule, **known), costs, machine).makespan_s
        for known in (
            {"machine": Machine(blocking=True)},
            {"machine": machine},
            {"costs": costs, "machine": machine},
        )
    ]
    assert max(makespans) <= 324
    assert max(makespans[1:]) <= makespans[0]
    beside = lowered(schedule, costs=costs, machine=Machine(latency_s=1.0))
    assert simulate(beside, costs, Machine(latency_s=1.0)).makespan_s <= 147
    assert simulate(beside, costs, machine).makespan_s > 324  # made for other transfers
    assert ReorderComm(mode="async")(PlaceTransfers()(schedule)) == ReorderComm()(
        PlaceTransfers()(schedule)
    )


def test_stalls_are_reported_per_receive():
    schedule = generate("interleaved", 8, 16, 2)
    costs, machine = StageCosts.unit(16), Machine(latency_s=1.0)
    timeline = simulate(lowered(schedule), costs, machine)
    waits = sum(rank.transfer_wait_s for rank in timeline.ranks)
    assert sum(timeline.stalls_s.values()) == pytest.approx(waits)
    assert waits > 0


@settings(**SETTINGS)
@given(
    tables(recompute=True).flatmap(
        lambda s: st.tuples(st.just(s), stage_costs(s.num_stages), machines(s.num_ranks))
    )
)
def test_any_table_becomes_deliverable_and_loses_no_time(case):
    schedule, costs, machine = case
    naive = PlaceTransfers()(schedule)
    plan = ReorderComm(costs=costs, machine=machine)(naive)
    verify(plan, schedule.num_microbatches, schedule.num_stages)
    assert plan.schedule == schedule
    _consistent(plan)
    assert (
        simulate(plan, costs, machine).makespan_s == simulate(schedule, costs, machine).makespan_s
    )
    blocking = [
        ReorderComm(mode="blocking", costs=costs, machine=machine)(naive),
        ReorderComm(mode="blocking")(naive),
    ]
    for table in blocking:
        deliverable(table)
        _consistent(table)
    times = [simulate(table, costs, machine, "blocking").makespan_s for table in blocking]
    assert times[0] <= times[1]


def test_plans_keep_their_other_parts():
    schedule = Schedule.parse("0F0 0B0\n1F0 1B0")
    plan = Plan(Partition((1, 2)), schedule.placement, schedule, (True, False), "x")
    lowered = ReorderComm()(PlaceTransfers()(plan))
    assert (lowered.partition, lowered.recompute, lowered.name) == (
        plan.partition,
        (True, False),
        "x",
    )


def test_tables_of_one_rank_have_no_transfers():
    schedule = Schedule.parse("0F0 1F0 1B0 0B0")
    assert reordered(schedule).lines == ("0F0 1F0 1B0 0B0",)
    assert meaning_of(reordered(schedule), None, None).schedule == schedule
