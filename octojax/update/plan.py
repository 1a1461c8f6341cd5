"""What an optimizer update is once it is spread over ranks: plain data, one jaxpr per program.

    phase 0 on every rank --exchange of small values--> phase 1 on every rank --> ...

A program reads `End`s of its own rank and the vectors of bytes that an exchange brought. Within
a phase a rank runs its own program, then the program of the rows of a stack once per row that
it has, then one that packs what the rows offer to the exchange.
"""

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from octojax.update.layout import EVERYWHERE, Layout, Partial, Rows


class Role(enum.StrEnum):
    """What a value at the end of an update program is; `index` counts within the role."""

    PARAM = "param"  # index into `UpdatePlan.param_pieces`
    GRAD = "grad"  # index: the same piece
    STATE = "state"  # index into `UpdatePlan.state_pieces`
    EXTRA = "extra"  # index: flat leaf of the extra arguments, the same on every rank
    SAVED = "saved"  # index: number of a value that an earlier phase of this rank wrote
    GATHERED = "gathered"  # index: phase * num_ranks + source rank; bytes, see `Exchange`
    ROW = "row"  # index: the number of the row that a program runs on, as int32
    SAVED_ROW = "saved_row"  # index: number of a value * rows of its stack + row
    PIECE = "piece"  # index: the same; a row that moves between ranks
    ROW_BYTES = "row_bytes"  # bytes that a row adds to what its rank offers
    NEW_PARAM = "new_param"
    NEW_STATE = "new_state"
    PACKED = "packed"  # index: phase; bytes for the exchange after it
    COPY = "copy"  # index: parameter unit; for ranks that keep a copy of it
    SCALAR = "scalar"  # index into `UpdatePlan.scalars`


@dataclass(frozen=True, slots=True, order=True)
class End:
    role: Role
    index: int

    def __str__(self) -> str:
        return f"{self.role.value}{self.index}"


@dataclass(frozen=True)
class Binding:
    """What a program reads and writes when it runs."""

    reads: tuple[End, ...]
    writes: tuple[End, ...]


@dataclass(frozen=True)
class UpdateProgram:
    """One rank's work in one phase: a jaxpr that runs once per binding (rows of a stack), its
    inputs being the ends that a binding reads and its outputs those that it writes.

    The ends in `shared` are read by another program or binding too: never donated.
    """

    rank: int
    phase: int
    jaxpr: ClosedJaxpr
    bindings: tuple[Binding, ...]
    shared: frozenset[End] = frozenset()

    @property
    def reads(self) -> tuple[End, ...]:
        """What the first binding reads; those of the others have the same roles."""
        return self.bindings[0].reads

    @property
    def writes(self) -> tuple[End, ...]:
        """What the first binding writes."""
        return self.bindings[0].writes


@dataclass(frozen=True)
class Entry:
    """Where a value lies in the byte vector of its rank."""

    value: int
    rank: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Move:
    """A row of a large value that goes from one rank to another, under the same end."""

    end: End
    source: int
    target: int
    aval: Any


@dataclass(frozen=True)
class Exchange:
    """After a phase every rank offers `uint8[width]`, to those that read it later. Large values
    go by themselves, row by row."""

    width: int
    entries: tuple[Entry, ...]
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True)
class Message:
    """What one rank hands to another after a phase: the ends that it sends, the ends of the copies
    that the other keeps, and their types."""

    source: int
    target: int
    sent: tuple[End, ...]
    copies: tuple[End, ...]
    avals: tuple[Any, ...]


@dataclass(frozen=True)
class Phase:
    """`programs[r]` is None where rank r has nothing to do; then run those of the rows, then
    those that pack what rows offer; `exchange` follows, if any."""

    programs: tuple[UpdateProgram | None, ...]
    exchange: Exchange | None
    rows: tuple[UpdateProgram, ...] = ()
    packers: tuple[UpdateProgram, ...] = ()

    @property
    def every_program(self) -> tuple[UpdateProgram, ...]:
        """All programs of the phase, in the order in which they run."""
        return (*(p for p in self.programs if p is not None), *self.rows, *self.packers)


@dataclass(frozen=True)
class Distributed:
    """A function of leaves on several ranks, as phases. Parameters and state may be
    donated in `final_phase`, which writes the new ones."""

    phases: tuple[Phase, ...]
    final_phase: int
    num_ranks: int

    def with_scalars_on(self, ranks: Collection[int]) -> "Distributed":
        """Returns the function without the programs of other ranks that only join scalars."""

        def keep(program: UpdateProgram | None) -> UpdateProgram | None:
            if program is None or program.rank in ranks:
                return program
            joins = all(end.role is Role.SCALAR for end in program.writes)
            return None if joins else program

        phases = [replace(p, programs=tuple(map(keep, p.programs))) for p in self.phases]
        return replace(self, phases=tuple(phases))

    @property
    def outline(self) -> tuple[tuple[tuple[int, ...], tuple[tuple[int, int], ...]], ...]:
        """Per phase the ranks with work in it, and source and target of each message after it."""
        return tuple(
            (
                tuple(sorted({program.rank for program in phase.every_program})),
                tuple((message.source, message.target) for message in messages),
            )
            for phase, messages in zip(self.phases, self.messages, strict=True)
        )

    def gathered(self, phase: int, source: int) -> End:
        """Returns the end of the bytes that a rank offers after a phase, on those that read it."""
        return End(Role.GATHERED, phase * self.num_ranks + source)

    def sources(self, phase: int, rank: int) -> tuple[int, ...]:
        """Returns the ranks whose bytes of a phase a rank reads in later ones, ascending."""
        reads = {
            end.index
            for later in self.phases[phase + 1 :]
            for program in later.every_program
            if program.rank == rank
            for end in program.reads
            if end.role is Role.GATHERED and end.index // self.num_ranks == phase
        }
        return tuple(sorted(index % self.num_ranks for index in reads))

    @cached_property
    def messages(self) -> tuple[tuple[Message, ...], ...]:
        """Per phase what ranks hand to each other after it, in an order that all ranks keep.

        Bytes go from rank to rank, or by way of one rank where that takes fewer messages.
        """
        return tuple(
            () if p.exchange is None else self._messages(k, p.exchange)
            for k, p in enumerate(self.phases)
        )

    def _messages(self, phase: int, exchange: Exchange) -> tuple[Message, ...]:
        packed, vector = End(Role.PACKED, phase), jax.ShapeDtypeStruct((exchange.width,), np.uint8)
        reads = {rank: self.sources(phase, rank) for rank in range(self.num_ranks)}
        direct = [(s, t) for t, sources in reads.items() for s in sources if s != t]
        hub = max(reads, key=lambda rank: (len(reads[rank]), -rank))
        here = [(s, hub) for s in sorted({s for s, _ in direct}) if s != hub]
        there = [(hub, t) for t in sorted({t for _, t in direct}) if t != hub]
        relayed = len(here) + len(there) < len(direct)

        at = partial(self.gathered, phase)
        carried: dict[tuple[int, int], list[tuple[End, End, Any]]] = {}
        for s, t in here if relayed else sorted(direct):
            carried[s, t] = [(packed, at(s), vector)]
        for move in exchange.moves:
            pair = (move.source, move.target)
            if not (relayed and pair in there):
                carried.setdefault(pair, []).append((move.end, move.end, move.aval))
        for s, t in there if relayed else ():
            sources = [x for x in reads[t] if x != t]
            relay = [(packed if x == hub else at(x), at(x), vector) for x in sources]
            rows = [
                (m.end, m.end, m.aval) for m in exchange.moves if (m.source, m.target) == (s, t)
            ]
            carried[s, t] = relay + rows
        return tuple(
            Message(s, t, *map(tuple, zip(*values, strict=True)))  # type: ignore[arg-type]
            for (s, t), values in carried.items()
        )


@dataclass(frozen=True)
class Piece:
    """What one rank keeps of a leaf: all of it (`row` is None) or a row of a stacked one.

    `rank` is None where every rank keeps its own copy.
    """

    leaf: int
    row: int | None
    rank: int | None


@dataclass(frozen=True)
class UpdatePlan:
    """`optimizer.init` and `optimizer.update`, spread over the ranks that own the leaves.

    Names, avals and layouts are of the leaves of the user's trees; what ranks keep is counted
    in pieces, leaf by leaf and row by row.
    """

    num_ranks: int
    param_names: tuple[str, ...]
    param_avals: tuple[Any, ...]
    param_layouts: tuple[Layout, ...]
    params_tree: Any
    state_names: tuple[str, ...]
    state_avals: tuple[Any, ...]
    state_layouts: tuple[Layout, ...]
    state_tree: Any
    scalars: tuple[str, ...]
    extra_tree: Any
    operations: tuple[str, ...]
    """The primitives of the update, whatever the ranks."""

    init: Distributed
    update: Distributed

    @cached_property
    def param_pieces(self) -> tuple[Piece, ...]:
        """The pieces of the parameters and of their gradients."""
        return pieces_of(self.param_layouts)

    @cached_property
    def state_pieces(self) -> tuple[Piece, ...]:
        """The pieces of the optimizer state."""
        return pieces_of(self.state_layouts)

    @property
    def state_shapes(self) -> Any:
        """The optimizer state of the whole parameters, of shapes."""
        return self.state_tree.unflatten(self.state_avals)

    @cached_property
    def owners(self) -> tuple[int | None, ...]:
        """The rank of every piece of the parameters."""
        return tuple(piece.rank for piece in self.param_pieces)

    def params_on(self, rank: int) -> tuple[int, ...]:
        """Returns the pieces of the parameters that `rank` owns."""
        return tuple(i for i, owner in enumerate(self.owners) if owner == rank)

    def states_on(self, rank: int) -> tuple[int, ...]:
        """Returns the pieces of the state that `rank` holds, its own and the replicated ones."""
        return tuple(k for k, p in enumerate(self.state_pieces) if p.rank in (None, rank))

    def __str__(self) -> str:
        every = sum(layout is EVERYWHERE for layout in self.state_layouts)
        rows = [
            f"update of {len(self.param_layouts)} leaves on {self.num_ranks} ranks, "
            f"{len(self.state_layouts)} state leaves ({every} on every rank)"
        ]
        for k, phase in enumerate(self.update.phases):
            sizes = [0 if p is None else len(p.jaxpr.jaxpr.eqns) for p in phase.programs]
            line = f"phase {k}: operations per rank {sizes}"
            for stack in phase.rows:
                line += (
                    f", {len(stack.jaxpr.jaxpr.eqns)} on each of {len(stack.bindings)} rows of "
                    f"rank {stack.rank}"
                )
            sent = 0 if phase.exchange is None else len(phase.exchange.entries)
            moves = 0 if phase.exchange is None else len(phase.exchange.moves)
            rows.append(f"{line}, then {sent} values exchanged, {moves} rows moved")
        return "\n".join(rows)


def pieces_of(layouts: Sequence[Layout]) -> tuple[Piece, ...]:
    """Returns the pieces of leaves that lie as `layouts` say."""
    pieces = []
    for leaf, layout in enumerate(layouts):
        if isinstance(layout, Rows):
            pieces += [Piece(leaf, row, rank) for row, rank in enumerate(layout.stack.owners)]
        else:
            assert not isinstance(layout, Partial), "a share is no leaf"
            pieces.append(Piece(leaf, None, layout))
    return tuple(pieces)
