"""Where the values of an update lie: everywhere, on one rank, or row by row on several.

A leaf that is stacked over layers is one array to the optimizer and L rows to the ranks:

    w: f32[4, 16, 16]   on ranks 0 0 1 1      Rows(Stack((0, 0, 1, 1)), axis=0)
    w * w                                     the same: each row on its own rank
    transpose(w)        f32[16, 16, 4]        Rows(..., axis=2)
    reshape(w, [64, 16])                      Rows(..., axis=0, block=16)
    sum(w)              f32[]                 Partial(..., "add"): a share on every rank
"""

from dataclasses import dataclass
from functools import cached_property

EVERYWHERE = None
"""The layout of values that every rank has, or can compute from what every rank has."""


@dataclass(frozen=True)
class Stack:
    """The rows of stacked leaves that lie alike: row i on rank `owners[i]`."""

    owners: tuple[int, ...]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks with rows, ascending."""
        return tuple(sorted(set(self.owners)))

    @cached_property
    def rows_by_rank(self) -> dict[int, tuple[int, ...]]:
        """Per rank its rows, ascending."""
        return {
            rank: tuple(i for i, owner in enumerate(self.owners) if owner == rank)
            for rank in self.ranks
        }

    @cached_property
    def _hash(self) -> int:
        return hash(self.owners)

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class Rows:
    """An array whose `axis` is cut into the rows of a stack, `block` elements each."""

    stack: Stack
    axis: int = 0
    block: int = 1

    def row_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of one row; the axis stays."""
        return (*shape[: self.axis], self.block, *shape[self.axis + 1 :])

    def piece_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape in which a row is stored: without the axis where it has size 1."""
        row = self.row_shape(shape)
        return row if self.block != 1 else (*row[: self.axis], *row[self.axis + 1 :])


@dataclass(frozen=True)
class Partial:
    """A reduction over rows: every rank has its own rows' share, to be joined by `how`."""

    stack: Stack
    how: str


Layout = int | Rows | Partial | None
"""A rank, rows, shares of a reduction, or `EVERYWHERE`."""
