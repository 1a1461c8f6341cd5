"""Recomputation: inserted, hidden in bubbles, never at the price of more memory."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax.errors import PlanError, ScheduleError
from octojax.ir import Machine, Partition, Plan, Schedule
from octojax.ir.naive import lower_naively
from octojax.ir.verify import verify
from octojax.passes import Recompute, lowered
from octojax.schedules import generate
from octojax.simulate import StageCosts, simulate
from tests.simulate.random_tables import SETTINGS, machines, stage_costs, tables


def plan_of(schedule: Schedule) -> Plan:
    return Plan(Partition((1,) * schedule.num_stages), schedule.placement, schedule)


def kept(schedule: Schedule, flags=()) -> StageCosts:
    """Unit costs; a stage keeps eight times its input. The pass's own default."""
    unit = StageCosts.unit(schedule.num_stages)
    nbytes = np.tile([8.0, 0, 1, 1, 0], (schedule.num_stages, 1))
    recompute = np.array(flags or (False,) * schedule.num_stages)
    return replace(unit, nbytes=nbytes, recompute=recompute)


def test_insertion():
    plan = plan_of(Schedule.parse("0F0 0F1 0I0 0W0 0B1\n1F0 1B0 1F1 1B1"))
    result = Recompute(overlap=False, prepose=False)(plan)
    assert str(result.schedule) == "0F0 0F1 0R0 0I0 0W0 0R1 0B1\n1F0 1B0 1F1 1B1"
    assert result.recompute == (True, False), "1F is followed by 1B at once: nothing to gain"


def test_chosen_stages():
    plan = plan_of(Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1"))
    result = Recompute(stages=(1,), overlap=False, prepose=False)(plan)
    assert str(result.schedule) == "0F0 0F1 0B0 0B1\n1F0 1F1 1R0 1B0 1R1 1B1"
    assert result.recompute == (False, True)
    all_of_them = Recompute(drop_redundant=False, overlap=False, prepose=False)(
        plan_of(Schedule.parse("0F0 0B0"))
    )
    assert str(all_of_them.schedule) == "0F0 0R0 0B0"


def test_pairs_are_recomputed_before_them():
    plan = plan_of(Schedule.parse("0F0 (0F1;0B0)OVERLAP_F_B 0B1"))
    result = Recompute(overlap=False, prepose=False)(plan)
    assert str(result.schedule) == "0F0 0R0 (0F1;0B0)OVERLAP_F_B 0R1 0B1"


def test_unknown_stage():
    with pytest.raises(PlanError, match=r"stages \[7\] cannot be recomputed: .* 0 to 0"):
        Recompute(stages=(7,))(plan_of(Schedule.parse("0F0 0B0")))


@pytest.mark.parametrize(("p", "m", "inserted", "moved"), [(4, 8, 36, 35), (8, 16, 80, 73)])
def test_moves_into_bubbles_pay(p, m, inserted, moved):
    """Chimera: what waits for a gradient recomputes and runs ahead; peaks stay as they were."""
    plan = plan_of(generate("chimera", p, m))
    before = simulate(plan, kept(plan.schedule))
    makespans = []
    for options in ({"overlap": False, "prepose": False}, {}):
        result = Recompute(**options)(plan)
        verify(result)
        after = simulate(result, kept(plan.schedule, result.recompute))
        makespans.append(after.makespan_s)
        for a, b in zip(after.ranks, before.ranks, strict=True):
            assert a.peak_bytes <= b.peak_bytes
    assert makespans == [inserted, moved]


@settings(**SETTINGS | {"max_examples": 25})
@given(
    tables(max_microbatches=4).flatmap(
        lambda s: st.tuples(st.just(s), stage_costs(s.num_stages), machines(s.num_ranks))
    )
)
def test_random_plans(case):
    """Valid, no slower than recomputing in place, and no rank above its old peak."""
    schedule, costs, machine = case
    plan = plan_of(schedule)
    placed = Recompute(costs=costs, machine=machine, overlap=False, prepose=False)(plan)
    moved = Recompute(costs=costs, machine=machine)(plan)
    verify(moved)
    flagged = replace(costs, recompute=np.array(moved.recomputes))
    before, inserted, after = (
        simulate(plan, costs, machine),
        simulate(placed, flagged, machine),
        simulate(moved, flagged, machine),
    )
    assert after.makespan_s <= inserted.makespan_s
    if after.makespan_s < inserted.makespan_s:
        for a, b in zip(after.ranks, before.ranks, strict=True):
            assert a.peak_bytes <= b.peak_bytes


def test_recomputing_tables_can_be_lowered():
    plan = Recompute()(plan_of(generate("interleaved", 2, 4)))
    table = lowered(plan)
    verify(table)
    assert table.schedule == plan.schedule
    with pytest.raises(ScheduleError, match="recompute needs a table without SEND and RECV"):
        Recompute()(plan.with_schedule(lower_naively(plan.schedule)))
    assert simulate(plan, kept(plan.schedule, plan.recompute), Machine()).makespan_s > 0
