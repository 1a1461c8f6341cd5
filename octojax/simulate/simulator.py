"""From a schedule or plan and its costs to a timeline."""

from collections.abc import Callable
from typing import Literal, get_args

from octojax.errors import PlanError, ScheduleError
from octojax.ir import (
    Action,
    LoweredPlan,
    Machine,
    Plan,
    Profile,
    Schedule,
    Timeline,
    uniform_partition,
)
from octojax.ir.lowering import without_transfers
from octojax.ir.naive import lower_naively
from octojax.ir.verify import deliverable, verify
from octojax.ir.walk import Mode as WalkMode
from octojax.simulate.costs import StageCosts
from octojax.simulate.oracle import Meaning
from octojax.simulate.timelines import Free, simulated

Mode = Literal["async", "blocking"]

_SMALL = 600  # cells up to which plain Python is quicker than loading the compiled code


def simulate(
    schedule: Schedule | Plan | LoweredPlan,
    costs: StageCosts | Profile,
    machine: Machine | None = None,
    mode: Mode | None = None,
    free: Free = "backward",
    compiled: bool | None = None,
    seconds: Callable[[int, Action], float] | None = None,
) -> Timeline:
    """Returns the timeline of one step.

    `costs` of a plan come from a profile by the plan's partition and recompute flags; a bare
    schedule cuts the profile uniformly. `machine` defaults to the profile's, else to ideal
    links. In mode "async" transfers run beside computation; in "blocking" a send and its
    receive occupy both ranks, just around the computation or where a lowered table has them;
    None is what the machine says.
    `free` chooses whether `peak_microbatches` counts until I or B ("backward") or until W or B.
    `compiled` chooses between two implementations that agree to the last bit; None takes the
    compiled one for all but small tables. `seconds(rank, action)` says how long each action
    takes, as it was measured for instance, in place of the costs' times and the ranks' speeds.

    Raises `ScheduleError` for a table that is wrong or deadlocks, `PlanError` for costs of
    another number of stages, `ValueError` for an unknown mode or `seconds` with `compiled`.
    """
    if isinstance(costs, Profile):
        machine = costs.machine if machine is None else machine
        costs = costs.on(machine)
    if mode is None:
        mode = "blocking" if machine is not None and machine.blocking else "async"
    for name, value, known in (("mode", mode, Mode), ("free", free, Free)):
        if value not in get_args(known):
            raise ValueError(f"{name}={value!r} is unknown; choose of {', '.join(get_args(known))}")
    stage_costs = costs_of(schedule, costs)
    if compiled and seconds is not None:
        raise ValueError("the compiled simulator knows one time per stage and kind, not `seconds`")
    if isinstance(schedule, LoweredPlan):
        verify(schedule, delivers=False)
        return _walked(schedule, stage_costs, machine, mode, free, seconds)
    rows = schedule.schedule if isinstance(schedule, Plan) else schedule
    plain = without_transfers(rows) if rows.has_transfers else rows
    verify(_replaced(schedule, plain), num_stages=stage_costs.num_stages)
    if rows.has_transfers or mode == "blocking":
        table = rows if rows.has_transfers else lower_naively(rows)
        verify(table, delivers=False)
        lowered = LoweredPlan.of(_replaced(schedule, table))
        return _walked(lowered, stage_costs, machine, mode, free, seconds)
    if compiled is None:
        compiled = seconds is None and sum(map(len, plain.ranks)) > _SMALL
    if compiled:
        from octojax.simulate.compiled import compiled_timeline
        from octojax.simulate.links import Links
        from octojax.simulate.table import Table

        table = Table.of(_replaced(schedule, plain))
        return compiled_timeline(
            table, stage_costs, Links.of(machine, table.num_ranks), plain, free
        )
    lowered = LoweredPlan.of(_replaced(schedule, plain))
    meaning = Meaning(lowered, stage_costs, machine, seconds, schedule.placement)
    return simulated(meaning, meaning.walk(WalkMode.FREE), schedule.placement, free)


def _walked(
    lowered: LoweredPlan,
    costs: StageCosts,
    machine: Machine | None,
    mode: Mode,
    free: Free,
    seconds: Callable[[int, Action], float] | None,
) -> Timeline:
    """A table with its transfers spelled out, as it stands."""
    meaning = Meaning(lowered, costs, machine, seconds, lowered.placement)
    walk = meaning.walk(WalkMode.RENDEZVOUS if mode == "blocking" else WalkMode.POSTED)
    stuck = walk.stuck()
    if stuck and mode == "blocking":
        deliverable(lowered)
    if stuck:
        raise ScheduleError(
            f"the lowered table deadlocks even with asynchronous transfers, stuck at "
            f"{' '.join(str(x.item) for x in stuck)}. `octopipe check` shows what each rank waits "
            f"for"
        )
    return simulated(meaning, walk, lowered.placement, free)


def _replaced(schedule: Schedule | Plan, rows: Schedule) -> Schedule | Plan:
    return schedule.with_schedule(rows) if isinstance(schedule, Plan) else rows


def costs_of(schedule: Schedule | Plan | LoweredPlan, costs: StageCosts | Profile) -> StageCosts:
    """Returns the costs per stage of a schedule or plan. See `simulate`."""
    if isinstance(costs, StageCosts):
        if costs.num_stages != schedule.num_stages:
            raise PlanError(
                f"costs are given for {costs.num_stages} stages, "
                f"but the schedule runs {schedule.num_stages}"
            )
        return costs
    if not isinstance(schedule, Schedule):
        return StageCosts.of(costs, schedule.partition, schedule.recompute)
    return StageCosts.of(costs, uniform_partition(costs.kinds, schedule.num_stages))
