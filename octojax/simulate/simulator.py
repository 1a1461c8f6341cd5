"""From a schedule or plan and its costs to a timeline."""

from typing import Literal

from octojax.errors import PlanError
from octojax.ir import Machine, Plan, Profile, Schedule, Timeline
from octojax.ir.verify import verify
from octojax.simulate.costs import StageCosts, uniform_partition
from octojax.simulate.evaluate import trace
from octojax.simulate.links import Links
from octojax.simulate.rows import simulate_rows
from octojax.simulate.table import Table
from octojax.simulate.timelines import Free, timeline_of

Mode = Literal["async", "blocking"]


def simulate(
    schedule: Schedule | Plan,
    costs: StageCosts | Profile,
    machine: Machine | None = None,
    mode: Mode = "async",
    free: Free = "backward",
) -> Timeline:
    """Returns the timeline of one step.

    `costs` of a plan come from a profile by the plan's partition and recompute flags; a bare
    schedule cuts the profile uniformly. `machine` defaults to the profile's, else to ideal
    links. In mode "async" transfers run beside computation; in "blocking" a send and its
    receive occupy both ranks, just around the computation or where a lowered table has them.
    `free` chooses whether `peak_microbatches` counts until I or B ("backward") or until W or B.
    Raises `ScheduleError` for a table that is wrong or deadlocks, `PlanError` for costs of
    another number of stages.
    """
    verify_form(mode, free)
    if isinstance(costs, Profile) and machine is None:
        machine = costs.machine
    stage_costs = costs_of(schedule, costs)
    rows = schedule.schedule if isinstance(schedule, Plan) else schedule
    if mode == "blocking" or rows.has_transfers:
        return simulate_rows(schedule, stage_costs, machine, mode == "blocking", free)
    verify(schedule, num_stages=stage_costs.num_stages)
    table = Table.of(schedule)
    links = Links.of(machine, table.num_ranks)
    return timeline_of(table, stage_costs, trace(table, stage_costs, links), rows, free)


def verify_form(mode: str, free: str) -> None:
    """Raises `ValueError` for an unknown mode or way of counting."""
    for name, value, known in (
        ("mode", mode, ("async", "blocking")),
        ("free", free, ("backward", "weight")),
    ):
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}")


def costs_of(schedule: Schedule | Plan, costs: StageCosts | Profile) -> StageCosts:
    """Returns the costs per stage of a schedule or plan. See `simulate`."""
    if isinstance(costs, StageCosts):
        if costs.num_stages != schedule.num_stages:
            raise PlanError(
                f"costs are given for {costs.num_stages} stages, "
                f"but the schedule runs {schedule.num_stages}"
            )
        return costs
    if isinstance(schedule, Plan):
        return StageCosts.of(costs, schedule.partition, schedule.recompute)
    return StageCosts.of(costs, uniform_partition(costs.num_layers, schedule.num_stages))
