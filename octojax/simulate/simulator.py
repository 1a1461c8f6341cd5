"""From a schedule or plan and its costs to a timeline."""

from collections.abc import Callable
from typing import Literal, get_args

from octojax.errors import PlanError
from octojax.ir import Action, Machine, Plan, Profile, Schedule, Timeline, uniform_partition
from octojax.ir.lowering import lower_naively, without_transfers
from octojax.ir.verify import verify
from octojax.simulate.costs import StageCosts
from octojax.simulate.oracle import Meaning, run
from octojax.simulate.rows import run_blocking, run_posted
from octojax.simulate.timelines import Free, timeline_of

Mode = Literal["async", "blocking"]

_SMALL = 600  # cells up to which plain Python is quicker than loading the compiled code


def simulate(
    schedule: Schedule | Plan,
    costs: StageCosts | Profile,
    machine: Machine | None = None,
    mode: Mode = "async",
    free: Free = "backward",
    compiled: bool | None = None,
    seconds: Callable[[int, Action], float] | None = None,
) -> Timeline:
    """Returns the timeline of one step.

    `costs` of a plan come from a profile by the plan's partition and recompute flags; a bare
    schedule cuts the profile uniformly. `machine` defaults to the profile's, else to ideal
    links. In mode "async" transfers run beside computation; in "blocking" a send and its
    receive occupy both ranks, just around the computation or where a lowered table has them.
    `free` chooses whether `peak_microbatches` counts until I or B ("backward") or until W or B.
    `compiled` chooses between two implementations that agree to the last bit; None takes the
    compiled one for all but small tables. `seconds(rank, action)` says how long each action
    takes, as it was measured for instance, in place of the costs' times and the ranks' speeds.

    Raises `ScheduleError` for a table that is wrong or deadlocks, `PlanError` for costs of
    another number of stages, `ValueError` for an unknown mode or `seconds` with `compiled`.
    """
    for name, value, known in (("mode", mode, Mode), ("free", free, Free)):
        if value not in get_args(known):
            raise ValueError(f"{name}={value!r} is unknown; choose of {', '.join(get_args(known))}")
    if isinstance(costs, Profile) and machine is None:
        machine = costs.machine
    stage_costs = costs_of(schedule, costs)
    rows = schedule.schedule if isinstance(schedule, Plan) else schedule
    plain = without_transfers(rows) if rows.has_transfers else rows
    verify(_replaced(schedule, plain), num_stages=stage_costs.num_stages)
    lowered = mode == "blocking" or rows.has_transfers
    if compiled and seconds is not None:
        raise ValueError("the compiled simulator knows one time per stage and kind, not `seconds`")
    if compiled is None:
        compiled = seconds is None and sum(map(len, plain.ranks)) > _SMALL
    if compiled and not lowered:
        from octojax.simulate.compiled import compiled_timeline
        from octojax.simulate.links import Links
        from octojax.simulate.table import Table

        table = Table.of(_replaced(schedule, plain))
        return compiled_timeline(
            table, stage_costs, Links.of(machine, table.num_ranks), plain, free
        )
    meaning = Meaning(plain, stage_costs, machine, seconds)
    if not lowered:
        done = run(meaning)
    elif mode == "blocking":
        done = run_blocking(rows if rows.has_transfers else lower_naively(rows), meaning)
    else:
        done = run_posted(rows, meaning)
    return timeline_of(meaning, done, schedule.placement, free)


def _replaced(schedule: Schedule | Plan, rows: Schedule) -> Schedule | Plan:
    return schedule.with_schedule(rows) if isinstance(schedule, Plan) else rows


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
    return StageCosts.of(costs, uniform_partition(costs.kinds, schedule.num_stages))
