"""From the rows of a lowered plan to the work of each rank: what each unit reads and writes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from octojax.errors import ScheduleError
from octojax.executor.values import CROSSING, Place, Value, program_of, value_of
from octojax.ir import Action, Kind, LoweredPlan, Run
from octojax.stages.program import Program, Stage


@dataclass(frozen=True)
class Work:
    """One stage program at one place of the plan."""

    action: Action
    program: Program
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]


@dataclass(frozen=True)
class Group:
    """The works of one unit, which run as one compiled program."""

    unit: Run
    works: tuple[Work, ...]


def works(plan: LoweredPlan, stages: Sequence[Sequence[Stage]]) -> tuple[tuple[Group, ...], ...]:
    """Returns, per rank, the programs of its units in order.

    `stages[m][s]` is stage s for microbatch m.
    """
    recomputed = {
        (a.stage, a.microbatch) for _, _, a in plan.schedule.actions() if a.kind is Kind.RECOMPUTE
    }

    def of(action: Action) -> Iterator[Work]:
        place = (action.stage, action.microbatch)
        program = program_of(stages[action.microbatch][action.stage], action, place in recomputed)
        if program is not None and program.writes:  # else only other sizes have something to do
            reads = tuple(value_of(ref, *place) for ref in program.reads)
            writes = tuple(value_of(ref, *place) for ref in program.writes)
            yield Work(action, program, reads, writes)

    return tuple(
        tuple(Group(unit, tuple(w for a in unit.actions for w in of(a))) for unit in row)
        for row in plan.units
    )


def check_local(groups: Sequence[Sequence[Group]]) -> None:
    """Raises `ScheduleError` where a rank reads what only another rank, or a later item, makes.

    Residuals, kept values and module state never travel; everything is made before it is read.
    """
    rows = [[work for group in row for work in group.works] for row in groups]
    home_of: dict[Value, tuple[int, int]] = {}
    for rank, row in enumerate(rows):
        for at, work in enumerate(row):
            for value in work.writes:
                if value.place is not Place.TOTAL:
                    home_of.setdefault(value, (rank, at))
    wrong = []
    for rank, row in enumerate(rows):
        for at, work in enumerate(row):
            for value in work.reads:
                home = home_of.get(value)
                if home is None or (value.place in CROSSING and home[0] != rank):
                    continue
                if home[0] != rank:
                    wrong.append(
                        f"{work.action} on rank {rank} needs {value}, which rank {home[0]} makes"
                    )
                elif home[1] >= at:
                    maker = row[home[1]].action
                    why = (
                        "carries module state from microbatch to microbatch, so its forwards "
                        "must run in microbatch order"
                        if value.place is Place.STATE
                        else f"needs {value}"
                    )
                    wrong.append(f"{work.action} runs before {maker} on rank {rank}, but {why}")
    if wrong:
        raise ScheduleError(
            "the schedule cannot run:\n  "
            + "\n  ".join(dict.fromkeys(wrong))
            + "\nReorder these actions, or choose another schedule"
        )
