"""A schedule: the order of actions on every rank, one line of text per rank."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from octojax.errors import FormatError
from octojax.ir.action import Action, Item, Overlap, parse_item
from octojax.ir.files import csv_cells, csv_text, read_text
from octojax.ir.placement import Placement
from octojax.ir.shown import count, line, picture, short

_IDLE = "-"  # the line of a rank without work


@dataclass(frozen=True)
class Schedule:
    """The order of work on each rank: `ranks[r][i]` is what rank r runs as its i-th item.

    `str(schedule)` is one line per rank (`0F0 0F1 0B0 ...`) and `Schedule.parse` reads it
    back; a rank without work is `-`. Building one checks its form only; `octojax.ir.verify`
    checks its meaning.
    """

    ranks: tuple[tuple[Item, ...], ...]

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, rank)) or _IDLE for rank in self.ranks)

    def __repr__(self) -> str:
        first = " ".join(map(str, self.ranks[0][:9])) if self.ranks else ""
        return line("Schedule", "", (
            count(self.num_ranks, "rank"),
            count(self.num_stages, "stage"),
            count(self.num_microbatches, "microbatch"),
            f"{count(sum(map(len, self.ranks)), 'action')}: {short(first)}",
        ))  # fmt: skip

    def _repr_html_(self) -> str | None:
        return picture(self)

    @classmethod
    def parse(cls, text: str, name: str = "text") -> "Schedule":
        """Returns the schedule written as one line per rank, actions separated by blanks.

        Raises `FormatError` naming the source (`name`), row and cell.
        """
        lines = text.strip("\n").split("\n") if text.strip("\n") else []
        return cls(
            tuple(
                tuple(
                    _read(cell, name, row, at)
                    for at, cell in enumerate(line.split())
                    if cell != _IDLE
                )
                for row, line in enumerate(lines)
            )
        )

    def to_csv(self) -> str:
        """Returns the table in PyTorch's pipelining format: one row per rank, no padding."""
        return csv_text(self.ranks)

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> "Schedule":
        """Returns the schedule in a CSV table. Empty cells are skipped.

        Raises `FormatError` naming file (`name`), row and cell.
        """
        rows = csv_cells(text, name)
        if not rows:
            raise FormatError(f"{name}: empty table; expected one row of actions per rank")
        return cls(
            tuple(
                tuple(_read(cell, name, row, at) for at, cell in enumerate(cells) if cell.strip())
                for row, cells in enumerate(rows)
            )
        )

    @classmethod
    def load(cls, path: str | Path) -> "Schedule":
        """Returns the schedule in the CSV file at `path`."""
        return cls.from_csv(read_text(path), str(path))

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_csv(), encoding="utf-8")

    def actions(self) -> Iterator[tuple[int, int, Action]]:
        """Yields `(rank, position, action)` in rank order; a pair yields both its actions."""
        for rank, items in enumerate(self.ranks):
            for position, item in enumerate(items):
                for action in item.actions if isinstance(item, Overlap) else (item,):
                    yield rank, position, action

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @cached_property
    def num_stages(self) -> int:
        return 1 + max((a.stage for _, _, a in self.actions()), default=-1)

    @cached_property
    def num_microbatches(self) -> int:
        return 1 + max((a.microbatch for _, _, a in self.actions()), default=-1)

    @cached_property
    def placement(self) -> Placement:
        """The ranks whose rows hold each stage, ascending."""
        holders: list[set[int]] = [set() for _ in range(self.num_stages)]
        for rank, _, action in self.actions():
            holders[action.stage].add(rank)
        return Placement(tuple(tuple(sorted(ranks)) for ranks in holders), len(self.ranks))

    @cached_property
    def has_transfers(self) -> bool:
        """Whether the table is lowered: it spells out SEND and RECV actions."""
        return any(a.kind.transfers for _, _, a in self.actions())


def _read(cell: str, name: str, row: int, at: int) -> Item:
    try:
        return parse_item(cell)
    except FormatError as error:
        raise FormatError(f"{name}: row {row} (rank {row}), cell {at}: {error}") from None
