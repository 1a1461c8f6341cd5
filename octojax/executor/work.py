"""From a schedule's rows to the work of each rank: which values each item reads and writes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from octojax.errors import ScheduleError
from octojax.executor.values import CROSSING, Place, Value, program_of, value_of
from octojax.ir import Action, Kind, Schedule
from octojax.stages.program import Program, Stage


@dataclass(frozen=True)
class Work:
    """One stage program at one place of the schedule."""

    action: Action
    program: Program
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]


@dataclass(frozen=True)
class Group:
    """Works that run as one compiled program."""

    works: tuple[Work, ...]

    @property
    def name(self) -> str:
        return "+".join(str(w.action) for w in self.works)


def works(schedule: Schedule, stages: Sequence[Sequence[Stage]]) -> tuple[tuple[Work, ...], ...]:
    """Returns, per rank, the programs of its actions in order.

    `stages[m][s]` is stage s for microbatch m. Communication actions are left out, and so
    are actions with nothing to compute (W of a stage without parameters).
    """
    recomputed = {
        (a.stage, a.microbatch) for _, _, a in schedule.actions() if a.kind is Kind.RECOMPUTE
    }
    rows: list[list[Work]] = [[] for _ in schedule.ranks]
    for rank, _, action in schedule.actions():
        if not action.kind.computes:
            continue
        place = (action.stage, action.microbatch)
        stage = stages[action.microbatch][action.stage]
        program = program_of(stage, action, place in recomputed)
        if program is None or not program.writes:
            continue
        rows[rank].append(
            Work(
                action,
                program,
                tuple(value_of(ref, *place) for ref in program.reads),
                tuple(value_of(ref, *place) for ref in program.writes),
            )
        )
    return tuple(map(tuple, rows))


def forwards_only(schedule: Schedule) -> Schedule:
    """Returns the schedule of an evaluation: each rank's forwards in their training order."""
    rows: list[list[Action]] = [[] for _ in schedule.ranks]
    for rank, _, action in schedule.actions():
        if action.kind is Kind.FORWARD:
            rows[rank].append(action)
    return Schedule(tuple(map(tuple, rows)))


def fuse(rows: Sequence[Sequence[Work]]) -> tuple[tuple[Group, ...], ...]:
    """Returns each rank's works, joined where nothing else waits in between.

    `1F3` and `1B3` on the last rank, or `0I3` and `0W3` on the first, become one program:
    the first sends nothing, the second receives nothing and continues its values. A pair of
    kinds is joined only if it can be wherever the stage runs, so that joining replaces
    compiled programs and never adds any.
    """
    homes = _homes(rows)
    readers = _readers(rows)
    total: Counter[tuple[int, Kind]] = Counter(_kind(w) for row in rows for w in row)
    joinable: Counter[tuple[tuple[int, Kind], tuple[int, Kind]]] = Counter()
    for rank, row in enumerate(rows):
        for first, second in pairwise(row):
            if _continues(first, second, rank, homes, readers):
                joinable[_kind(first), _kind(second)] += 1
    accepted = {pair for pair, n in joinable.items() if n == total[pair[0]] and n == total[pair[1]]}
    joined = []
    for rank, row in enumerate(rows):
        groups: list[list[Work]] = []
        for work in row:
            last = groups[-1][-1] if groups else None
            if (
                last is not None
                and (_kind(last), _kind(work)) in accepted
                and _continues(last, work, rank, homes, readers)
            ):
                groups[-1].append(work)
            else:
                groups.append([work])
        joined.append(tuple(Group(tuple(g)) for g in groups))
    return tuple(joined)


def _kind(work: Work) -> tuple[int, Kind]:
    return work.action.stage, work.action.kind


def _homes(rows: Sequence[Sequence[Work]]) -> dict[Value, int]:
    """The rank that makes each value that may cross."""
    return {
        value: rank
        for rank, row in enumerate(rows)
        for work in row
        for value in work.writes
        if value.place in CROSSING
    }


def _readers(rows: Sequence[Sequence[Work]]) -> dict[Value, dict[int, Work]]:
    """The ranks that read each value, and the first work there that does."""
    readers: dict[Value, dict[int, Work]] = {}
    for rank, row in enumerate(rows):
        for work in row:
            for value in work.reads:
                readers.setdefault(value, {}).setdefault(rank, work)
    return readers


def _continues(
    first: Work,
    second: Work,
    rank: int,
    homes: dict[Value, int],
    readers: dict[Value, dict[int, Work]],
) -> bool:
    if first.action.microbatch != second.action.microbatch:
        return False
    sends = any(v.place in CROSSING and readers.get(v, {}).keys() - {rank} for v in first.writes)
    receives = any(
        v.place in CROSSING and homes.get(v, rank) != rank and readers[v][rank] is second
        for v in second.reads
    )
    shares = not set(first.writes).isdisjoint(second.reads) or (
        first.action.stage == second.action.stage
    )
    return shares and not sends and not receives


def check_local(rows: Sequence[Sequence[Work]]) -> None:
    """Raises `ScheduleError` where a rank reads what only another rank, or a later item, makes.

    Residuals, kept values and module state never travel; everything is made before it is read.
    """
    made: dict[Value, tuple[int, int]] = {}
    for rank, row in enumerate(rows):
        for at, work in enumerate(row):
            for value in work.writes:
                if value.place is not Place.TOTAL:
                    made.setdefault(value, (rank, at))
    wrong = []
    for rank, row in enumerate(rows):
        for at, work in enumerate(row):
            for value in work.reads:
                home = made.get(value)
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
