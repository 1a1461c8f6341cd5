"""A search that begins where it is told: never worse, and what may not change stays."""

import json
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax.errors import PlanError, ScheduleError
from octojax.ir import LayerCost, Machine, Partition, Placement, Plan, Profile, Schedule
from octojax.ir.verify import verify
from octojax.passes import SplitBackward
from octojax.schedules import generate
from octojax.simulate import simulate
from octojax.tune import PHASES, tune
from octojax.tune.initial import Start

METHODS = ("best", "octopipe", "random")
FIG3 = Profile("fig3", tuple(LayerCost("x", 1.0, 1.0, 1.0) for _ in range(6)), Machine(), 2, 2)


@st.composite
def profiles(draw, ranks: int, layers: int) -> Profile:
    times = st.sampled_from([0.25, 0.5, 1.0, 1.75, 3.0])
    costs = [
        LayerCost("x", draw(times), draw(times), draw(times), residual_bytes=3, output_bytes=2)
        for _ in range(layers)
    ]
    machine = Machine(latency_s=draw(st.sampled_from([0.0, 0.1])), bandwidth_bytes_per_s=100.0)
    return Profile("p", tuple(costs), machine)


@st.composite
def plans(draw, ranks: int, layers: int, microbatches: int) -> Plan:
    """A published table on a partition of any sizes; backward whole or split; some recomputed."""
    name, chunks = draw(st.sampled_from([("1f1b", 1), ("gpipe", 1), ("interleaved", 2)]))
    table = generate(name, ranks, microbatches, chunks)
    stages = table.num_stages
    borders = sorted(draw(st.permutations(range(1, layers)))[: stages - 1])
    sizes = tuple(b - a for a, b in zip([0, *borders], [*borders, layers], strict=True))
    recompute = tuple(draw(st.lists(st.booleans(), min_size=stages, max_size=stages)))
    plan = Plan(Partition(sizes), table.placement, table, recompute, name)
    return SplitBackward()(plan) if draw(st.booleans()) else plan


def layers_of_ranks(plan: Plan) -> list[int]:
    sizes = plan.partition.sizes
    return [sum(sizes[s] for s in stages) for stages in plan.placement.ranks]


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_never_worse_and_what_may_not_change_stays(data):
    ranks = data.draw(st.integers(2, 3))
    layers, microbatches = data.draw(st.integers(2 * ranks, 9)), data.draw(st.sampled_from([3, 6]))
    profile = data.draw(profiles(ranks, layers))
    plan = data.draw(plans(ranks, layers, ranks * (microbatches // 3)))
    phases = data.draw(st.sets(st.sampled_from(PHASES), min_size=1))
    method = data.draw(st.sampled_from(METHODS))
    before = simulate(plan, profile).makespan_s
    result = tune(
        profile, ranks, plan.num_microbatches, start=plan, phases=phases, method=method,
        iterations=1, replicated=False,
    )  # fmt: skip
    found = result.plan
    verify(found)
    assert simulate(found, profile).makespan_s == pytest.approx(result.makespan_s, rel=1e-12)
    assert result.makespan_s <= before * (1 + 1e-12)
    if "partition" not in phases:
        assert layers_of_ranks(found) == layers_of_ranks(plan)
    if "placement" not in phases and "partition" in phases:
        assert found.placement == plan.placement
    if phases == {"schedule"}:
        assert (found.partition, found.placement) == (plan.partition, plan.placement)
    if phases == {"partition"}:
        assert found.schedule == plan.schedule
    for phase in set(PHASES) - phases:
        assert result.iterations[phase] == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("phases", "makespan"),
    [
        ({"partition"}, 24.0),
        ({"placement"}, 24.0),  # rank 1 keeps its four layers, 24 of work
        ({"schedule"}, 26.0),  # the proven optimum of this order of layers
        (set(PHASES), 19.0),
    ],
)
def test_fig3_phase_by_phase_from_the_papers_partition(method, phases, makespan):
    """Fig. 3 of the paper: stages of two and of four layers on two ranks."""
    result = tune(
        FIG3, start="partition:2,4", phases=phases, method=method, iterations=4, replicated=False
    )
    assert result.makespan_s == makespan
    if "partition" not in phases:
        assert layers_of_ranks(result.plan) == [2, 4]


def test_a_table_as_it_is_gets_the_best_partition():
    """Of whole 1F1B on two ranks, which takes 30 on 2 4."""
    table = generate("1f1b", 2, 2)
    plan = Plan(Partition((2, 4)), table.placement, table)
    result = tune(FIG3, start=plan, phases={"partition"})
    every = {
        a: simulate(Plan(Partition((a, 6 - a)), table.placement, table), FIG3).makespan_s
        for a in range(1, 6)
    }
    assert every[2] == 30
    assert result.makespan_s == min(every.values()) == every[result.plan.partition.sizes[0]]
    assert result.plan.schedule == table
    assert result.stop == "no improvement"


def test_placements_that_are_given_keep_their_order_when_borders_move():
    result = tune(FIG3, start=Placement.wave(2), phases={"partition"}, iterations=3)
    assert str(result.plan.placement) == "0 1 1 0"
    assert result.iterations["placement"] == result.iterations["schedule"] == 0


def test_text_and_records_mean_the_same():
    assert Start.of("partition:2,4") == Start.of(Partition((2, 4)))
    assert Start.of("placement:0,1,1,0") == Start.of(Placement.of((0, 1, 1, 0)))
    both = Start.of("partition:1,2,2,1 placement:0,1,1,0")
    assert both == Start(Partition((1, 2, 2, 1)), Placement.of((0, 1, 1, 0)))
    assert both == Start.of("placement:0,1,1,0;partition:1,2,2,1")


def test_a_plans_file_is_a_start(tmp_path):
    plan = tune(FIG3, iterations=0, replicated=False).plan
    plan.save(tmp_path / "plan.json")
    assert Start.of(str(tmp_path / "plan.json")).plan == plan


def test_stages_keep_the_orders_of_their_ranks_in_a_wave_of_equal_neighbours():
    """The two stages in the middle are on one rank: their border may move, not vanish."""
    layers = tuple(LayerCost("x", float(t), 1.0, 1.0) for t in (1, 3, 1, 2, 1, 1, 2, 1))
    result = tune(
        Profile("p", layers), 2, 4, start=Placement.wave(2), phases={"partition", "schedule"},
        iterations=3,
    )  # fmt: skip
    ranks = [r for (r,) in result.plan.placement.stages]
    assert ranks == [0, 1, 1, 0]
    assert [r for r, _ in groupby(ranks)] == [0, 1, 0]


def _broken() -> Plan:
    """1F1B whose first rank runs a backward before its forward."""
    table = generate("1f1b", 2, 2)
    row = table.ranks[0]
    schedule = Schedule(((row[-1], *row[:-1]), table.ranks[1]))
    return Plan(Partition((3, 3)), table.placement, schedule, name="broken")


ONE = generate("1f1b", 2, 2)


@pytest.mark.parametrize(
    ("start", "error", "message"),
    [
        ("partition:2,5", PlanError, "partition has 7 layers, asked are 6 .*another start"),
        ("partition:6", PlanError, "rank 1 of 2 has no stage"),
        ("placement:0,1,2", PlanError, r"placement has 3 ranks, asked are 2 .*--ranks 3"),
        ("placement:0,0", PlanError, "rank 1 of 2 has no stage"),
        ("placement:0,1,0,1,0,1,0", PlanError, "placement of 7 stages for 6 layers"),
        ("partition:2,4 placement:0,1,0", PlanError, "has 2 stages, the placement .* 3"),
        ("placement:0+1,0+1", PlanError, "held by two ranks"),
        ("partitoin:2,4", ValueError, "did you mean 'partition'"),
        ("partition:2,4 partition:3,3", ValueError, "cannot read 'partition:3,3'"),
        ("", ValueError, "expected a plan's file, partition:2,4"),
        ("partition:two,4", ValueError, "as a partition"),
        (_broken(), ScheduleError, "start: plan 'broken' cannot run"),
        (
            Plan(Partition((3, 3)), ONE.placement, generate("1f1b", 2, 3), name="x"),
            PlanError,
            "plan 'x' has 3 microbatches, asked are 2 .*partition and placement alone",
        ),
        (
            Plan(Partition((2, 2, 2)), Placement.sequential(3), generate("1f1b", 3, 2), name="x"),
            PlanError,
            "plan 'x' has 3 ranks, asked are 2",
        ),
        (
            Plan(Partition((3, 4)), ONE.placement, ONE, name="x"),
            PlanError,
            "plan 'x' has 7 layers, asked are 6 .*give the profile",
        ),
    ],
)
def test_starts_that_do_not_fit_are_refused_by_name(start, error, message):
    with pytest.raises(error, match=message):
        tune(FIG3, start=start, iterations=0)


def test_starts_of_other_types_and_methods_are_refused():
    with pytest.raises(TypeError, match="expected a Plan, a Partition"):
        tune(FIG3, start=(2, 4), iterations=0)
    with pytest.raises(ValueError, match="enumerates all plans and begins from none"):
        tune(FIG3, start="partition:2,4", method="exact")


PROFILE = Path(__file__).parents[1] / "data" / "profiles" / "jamba-s.calibrated.json"


def test_same_seed_same_plan_from_a_start():
    profile = Profile.load(PROFILE)
    plan = tune(profile, iterations=0).plan
    first, second = (
        tune(profile, iterations=2, seed=3, start=plan, phases={"placement", "schedule"}).to_json()
        for _ in range(2)
    )
    assert json.dumps(first["plan"]) == json.dumps(second["plan"])
    assert np.isfinite(first["makespan_s"])
