"""What is wrong with a table, and the error that lists it and draws where."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from octojax.errors import ScheduleError
from octojax.ir.action import Action, Item, Overlap
from octojax.ir.instruction import Run
from octojax.ir.lowered import LoweredPlan
from octojax.ir.lowering import actions_of
from octojax.ir.marked import Place, mark
from octojax.ir.schedule import Schedule
from octojax.ir.walk import Stuck

ENOUGH = 1000  # offenders looked for: a mistyped 0F99999999 lacks a hundred million actions
_MOST = 12  # offenders listed in full

ADVICE_COUNT = (
    "Every stage and microbatch needs one F and one B (or one I and one W), once, on the rank "
    "that holds the stage."
)
ADVICE_ORDER = (
    "A backward needs its own forward first, a W its own I, all on one rank. To find the pass "
    "that did this, compare the table before and after each pass (octopipe lower --dump FOLDER)."
)
ADVICE_CYCLE = (
    "Each of these ranks waits for an action that stands behind another's wait. Move one of "
    "the marked actions behind what it waits for."
)
ADVICE_TRANSFER = (
    "Each value that crosses ranks needs one SEND after its producer and one RECV before its "
    "consumer. `octopipe lower FILE --passes transfers,reorder` drops all transfers and places "
    "them anew."
)
ADVICE_RENDEZVOUS = (
    "Both sides of a transfer must come up in an order that all ranks agree on. "
    "`octopipe lower FILE` finds such an order for any valid table; with `--blocking`, one for "
    "transfers that occupy both their ranks."
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong, and the cell where, if it has one."""

    text: str
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One action of a table: its rank, its cell, and its turn within the cell.

    The actions of an overlapped pair have the same turn, joined ones follow each other.
    """

    rank: int
    position: int
    turn: int
    action: Action

    @property
    def place(self) -> Place:
        return (self.rank, self.position)


@dataclass(frozen=True)
class Table:
    """A schedule or lowered plan as the checks see it: its cells, and the actions in them."""

    rows: Sequence[Sequence[object]]
    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, subject: Schedule | LoweredPlan) -> "Table":
        entries: list[Entry] = []
        for rank, row in enumerate(subject.ranks):
            for position, x in enumerate(row):
                if isinstance(x, (Action, Overlap)):
                    cells: tuple[Item, ...] = (x,)
                elif isinstance(x, Run):
                    cells = x.items
                else:
                    cell = x.cell
                    cells = () if isinstance(cell, str) else (cell,)
                entries += [
                    Entry(rank, position, turn, action)
                    for turn, item in enumerate(cells)
                    for action in actions_of(item)
                ]
        return cls(subject.ranks, tuple(entries))

    def refuse(self, faults: Sequence[Fault], advice: str, summary: str = "") -> NoReturn:
        """Raises `ScheduleError` that lists the faults and draws the table with them marked."""
        ordered = sorted(faults, key=lambda fault: fault.place is None)  # those to mark first
        texts = list(dict.fromkeys(fault.text for fault in ordered))
        lines = texts[:_MOST]
        if len(texts) > _MOST:
            over = "over " if len(faults) >= ENOUGH else ""
            lines.append(f"... and {over}{len(texts) - _MOST} more")
        places = [fault.place for fault in ordered if fault.place is not None]
        raise ScheduleError(
            "\n".join([*([summary] if summary else []), *lines, mark(self.rows, places), advice])
        )

    def refuse_stuck(self, stuck: Sequence[Stuck], advice: str, what: str, how: str = "") -> None:
        """Raises `ScheduleError` for ranks that wait for ever, with the cycle if there is one."""
        if not stuck:
            return
        places = {
            str(cell): (rank, position)
            for rank, row in enumerate(self.rows)
            for position, cell in enumerate(row)
        }
        for entry in self.entries:  # of a cell of several, each action's name too
            places.setdefault(str(entry.action), entry.place)
        summary, cycle = f"{what} deadlocks", _cycle(stuck, places)
        if how:
            summary += f" {how}"
        if how or not cycle:
            summary += f", stuck at {' '.join(str(x.item) for x in stuck)}"
        if cycle:
            summary += f"{',' if how else ''} in a cycle: {cycle}"
        faults = [Fault(_waiting(x, places), (x.rank, x.position)) for x in stuck]
        self.refuse(faults, advice, summary)


def _waiting(stuck: Stuck, places: dict[str, Place]) -> str:
    text = f"rank {stuck.rank} waits at {stuck.item} (position {stuck.position}) "
    if stuck.needs not in places:
        return f"{text}for {stuck.needs}, which is nowhere in the table"
    rank, position = places[stuck.needs]
    return f"{text}for {stuck.needs}, which rank {rank} has at position {position}"


def _cycle(stuck: Sequence[Stuck], places: dict[str, Place]) -> str:
    """Follows who waits for whom from the first stuck rank until a rank comes up again."""
    by_rank = {x.rank: x for x in stuck}
    path = [stuck[0].rank]
    while True:
        target = places.get(by_rank[path[-1]].needs, (-1, -1))[0]
        if target not in by_rank:
            return ""
        if target in path:
            around = [*path[path.index(target) :], target]
            return " -> ".join(f"rank {r} ({by_rank[r].item})" for r in around)
        path.append(target)
