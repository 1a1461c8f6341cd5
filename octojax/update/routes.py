"""What the cut into programs shares: the ends of a function, and how exchanged values lie."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from octojax.compat import num_bytes
from octojax.jaxprs.graph import Atom, Graph
from octojax.update.layout import EVERYWHERE, Layout, Partial, Rows, Stack
from octojax.update.pack import join_rows, join_shares, unpack
from octojax.update.place import Placed
from octojax.update.plan import End, Entry, Role

HEAVY = frozenset(
    {
        "cholesky", "conv_general_dilated", "cumsum", "dot_general", "eigh", "fft",
        "householder_product", "lu", "qr", "random_bits", "scan", "sort", "svd", "top_k",
        "triangular_solve", "while",
    }
)  # fmt: skip
"""Primitives whose results are stored between phases and not computed twice."""

_LIGHT_BYTES = 64
"""Values up to this size are computed anew for every row; larger ones once per rank."""


@dataclass(frozen=True)
class Want:
    """An output of the function: its ends (one, or one per row), its value, its layout, and the
    whole leaf's shape and type."""

    ends: tuple[End, ...]
    atom: Atom
    layout: Layout
    aval: Any


@dataclass(frozen=True)
class Routes:
    """A placed graph with its ends: `ends[v]` are those of input v, one or one per row."""

    graph: Graph
    placed: Placed
    ends: tuple[tuple[End, ...], ...]
    wants: tuple[Want, ...]
    num_ranks: int

    @cached_property
    def ready(self) -> tuple[int, ...]:
        """Per want the first phase in which the value can be had where it is wanted."""
        return tuple(map(self._ready, self.wants))

    def _ready(self, want: Want) -> int:
        if isinstance(want.atom, Literal):
            return 0
        here = self.placed.layouts[want.atom] in (EVERYWHERE, want.layout)
        return self.placed.phases[want.atom] + (0 if here else 1)

    @cached_property
    def final(self) -> int:
        """The phase in which all new leaves are written."""
        leaves = [
            at
            for want, at in zip(self.wants, self.ready, strict=True)
            if want.ends[0].role is not Role.SCALAR
        ]
        return max(leaves, default=0)

    @cached_property
    def due(self) -> tuple[int, ...]:
        """Per want the phase in which it is written."""
        return tuple(max(self.final, at) for at in self.ready)

    @cached_property
    def num_phases(self) -> int:
        return 1 + max(self.due, default=0)

    @cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """Every stack that some value is cut into."""
        layouts = [*self.placed.layouts, *(want.layout for want in self.wants)]
        return tuple(dict.fromkeys(x.stack for x in layouts if isinstance(x, Rows | Partial)))

    @cached_property
    def producers(self) -> dict[int, int]:
        return self.graph.producers()

    @cached_property
    def layouts_of_bytes(self) -> tuple[tuple[Entry, ...], ...]:
        """Per exchange, where each value lies in the byte vector of its ranks."""
        return tuple(map(self._layout, range(self.num_phases - 1)))

    @cached_property
    def arrivals(self) -> dict[int, tuple[int, tuple[Entry, ...]]]:
        """Per exchanged value, after which phase, and where it lies."""
        arrivals: dict[int, tuple[int, tuple[Entry, ...]]] = {}
        for k, entries in enumerate(self.layouts_of_bytes):
            for entry in entries:
                arrivals[entry.value] = (k, (*arrivals.get(entry.value, (k, ()))[1], entry))
        return arrivals

    @cached_property
    def moves(self) -> dict[tuple[int, int | Rows], int]:
        """Per value that moves by rows and where to, after which phase."""
        return {move: k for k, moves in enumerate(self.placed.row_moves) for move in moves}

    def _layout(self, phase: int) -> tuple[Entry, ...]:
        filled = [0] * self.num_ranks
        entries = []
        for value in self.placed.exchanged[phase]:
            for rank, size in self._offered(value):
                entries.append(Entry(value, rank, filled[rank], size))
                filled[rank] += size
        return tuple(entries)

    def _offered(self, value: int) -> list[tuple[int, int]]:
        """Returns the ranks that offer a value, and the bytes that each brings."""
        layout, size = self.placed.layouts[value], num_bytes(self.graph.avals[value])
        if isinstance(layout, int):
            return [(layout, size)]
        assert layout is not None, "a value that is everywhere needs no exchange"
        if isinstance(layout, Partial):
            return [(rank, size) for rank in layout.stack.ranks]
        each = size // len(layout.stack.owners)
        return [(r, each * len(rows)) for r, rows in layout.stack.rows_by_rank.items()]

    def entries(self, phase: int) -> tuple[Entry, ...]:
        """Returns what is exchanged after a phase; nothing after the last."""
        return self.layouts_of_bytes[phase] if phase < len(self.layouts_of_bytes) else ()

    def row_moves(self, phase: int) -> tuple[tuple[int, int | Rows], ...]:
        """Returns the large values that move by rows after a phase, and where to."""
        return self.placed.row_moves[phase] if phase < self.num_phases - 1 else ()

    def width(self, phase: int) -> int:
        """Returns how many bytes every rank offers after a phase."""
        return max((e.offset + e.nbytes for e in self.entries(phase)), default=0)

    def vectors(self, values: Iterable[int]) -> list[tuple[int, int]]:
        """Returns the vectors that brought `values`, by phase and source rank."""
        arrivals = [self.arrivals[value] for value in values]
        return sorted({(k, entry.rank) for k, entries in arrivals for entry in entries})

    def unpacked(self, value: int, vectors: dict[tuple[int, int], Any]) -> Any:
        """Returns a value from the vectors that brought it, by phase and source rank."""
        phase, entries = self.arrivals[value]
        layout, aval = self.placed.layouts[value], self.graph.avals[value]
        if isinstance(layout, int):
            (entry,) = entries
            return unpack(vectors[phase, entry.rank], entry.offset, aval.shape, aval.dtype)
        if isinstance(layout, Partial):
            shares = [
                unpack(vectors[phase, e.rank], e.offset, aval.shape, aval.dtype) for e in entries
            ]
            return join_shares(jnp.stack(shares), layout)
        assert isinstance(layout, Rows)
        row = layout.row_shape(aval.shape)
        pieces = [
            unpack(
                vectors[phase, e.rank],
                e.offset,
                (len(layout.stack.rows_by_rank[e.rank]), *row),
                aval.dtype,
            )
            for e in entries
        ]
        return join_rows(pieces, layout)

    def piece(self, role: Role, value: int, row: int, stack: Stack) -> End:
        """Returns the end of one row of a value."""
        return End(role, value * len(stack.owners) + row)

    def row_size(self, value: int) -> int:
        """Returns how many bytes a row brings of a value that is offered to an exchange."""
        layout, size = self.placed.layouts[value], num_bytes(self.graph.avals[value])
        return size // len(layout.stack.owners) if isinstance(layout, Rows) else size

    def row_bytes(self, phase: int, stack: Stack, row: int) -> End:
        """Returns the end of what a row adds to the bytes that its rank offers."""
        before = sum(len(s.owners) for s in self.stacks[: self.stacks.index(stack)])
        total = sum(len(s.owners) for s in self.stacks)
        return End(Role.ROW_BYTES, phase * total + before + row)

    def worth_saving(self, value: int) -> bool:
        """Whether a value is stored for later phases, and not computed again."""
        op = self.graph.ops[self.producers[value]]
        if op.primitive.name in HEAVY:
            return True
        size = num_bytes(self.graph.avals[value])
        read = [num_bytes(self.graph.avals[x]) for x in op.inputs if not isinstance(x, Literal)]
        return max(read, default=0) > 8 * size

    def light(self, at: int) -> bool:
        """Whether an operation is so small that every row may do it by itself."""
        op = self.graph.ops[at]
        values = [x for x in (*op.inputs, *op.outputs) if not isinstance(x, Literal)]
        small = all(num_bytes(self.graph.avals[x]) <= _LIGHT_BYTES for x in values)
        return small and op.primitive.name not in HEAVY


def as_leaf(value: Any, shape: Sequence[int], dtype: Any) -> Any:
    """Returns a value, or a constant, with exactly the shape and type of the leaf it becomes."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return value
    return jnp.broadcast_to(jnp.asarray(value).astype(dtype), shape)
