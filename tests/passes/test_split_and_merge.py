"""Splitting a backward and joining it again."""

from hypothesis import given, settings

from octojax.ir import Action, Kind, Partition, Placement, Plan, Schedule
from octojax.ir.verify import verify
from octojax.passes import MergeBackward, SplitBackward
from octojax.simulate import StageCosts, simulate
from tests.simulate.random_tables import SETTINGS, tables


def test_split():
    before = Schedule.parse("0F0 0B0 (0F1;1B0)OVERLAP_F_B\n1F0 1I0 1W0")
    after = Schedule.parse("0F0 0I0 0W0 (0F1;1B0)OVERLAP_F_B\n1F0 1I0 1W0")
    assert SplitBackward()(before) == after


def test_merge():
    before = Schedule.parse("0F0 0I0 0F1 0W0 0I1 0W1")
    assert MergeBackward()(before) == Schedule.parse("0F0 0I0 0F1 0W0 0B1")
    assert MergeBackward(only_adjacent=False)(before) == Schedule.parse("0F0 0B0 0F1 0B1")


def test_a_plan_stays_a_plan():
    plan = Plan(Partition((2,)), Placement.of((0,)), Schedule.parse("0F0 0B0"), (True,), "x")
    split = SplitBackward()(plan)
    assert split == Plan(
        plan.partition, plan.placement, Schedule.parse("0F0 0I0 0W0"), (True,), "x"
    )
    assert MergeBackward()(split) == plan


@settings(**SETTINGS)
@given(tables(recompute=True))
def test_split_keeps_tables_valid(schedule):
    split = SplitBackward()(schedule)
    verify(split, schedule.num_microbatches, schedule.num_stages)
    assert not any(
        isinstance(x, Action) and x.kind is Kind.BACKWARD for r in split.ranks for x in r
    )
    costs = StageCosts.unit(schedule.num_stages)
    assert simulate(split, costs).makespan_s <= simulate(schedule, costs).makespan_s


@settings(**SETTINGS)
@given(tables())
def test_merge_undoes_split(schedule):
    fused = MergeBackward(only_adjacent=False)(schedule)
    verify(fused, schedule.num_microbatches, schedule.num_stages)
    assert not any(a.kind in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD) for _, _, a in fused.actions())
    assert MergeBackward()(SplitBackward()(fused)) == fused
