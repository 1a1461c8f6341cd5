"""Cut a placed graph into one program per rank and phase, and one per row of a stack.

A program holds exactly the operations that its targets need: in every phase what is offered
to the exchange, in the final phase the new leaves. An operation asked for again in a later
phase is run again when it is cheap (elementwise: reading the leaf once more costs less than
storing what was made of it), and saved when it reduces or multiplies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from octojax.jaxprs.graph import Atom, Graph, bind
from octojax.update.layout import EVERYWHERE, Partial, Rows
from octojax.update.pack import join_shares, pack, unpack
from octojax.update.place import Placed
from octojax.update.plan import (
    Binding,
    Distributed,
    End,
    Entry,
    Exchange,
    Move,
    Phase,
    Role,
    UpdateProgram,
)
from octojax.update.routes import Routes, Want, as_leaf
from octojax.update.row_programs import RowDraft, row_drafts, row_program


@dataclass(frozen=True)
class _Draft:
    """What one rank computes in one phase, by the numbers of the graph."""

    targets: tuple[Want, ...]
    offers: tuple[Entry, ...]
    scattered: tuple[tuple[int, Rows], ...]
    """Values of this rank whose rows go to the rows' ranks."""

    ops: tuple[int, ...]
    inputs: tuple[tuple[End, int], ...]
    arrived: tuple[int, ...]
    """Values that an exchange brought."""

    gathered: tuple[int, ...]
    """Values whose rows came to this rank."""

    saves: tuple[int, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.targets or self.offers or self.scattered or self.saves)


def distribute(
    graph: Graph,
    placed: Placed,
    ends: Sequence[tuple[End, ...]],
    wants: Sequence[Want],
    num_ranks: int,
) -> Distributed:
    """Returns the programs of every phase. `ends[v]` are the ends of input v of the graph: one,
    or one per row."""
    routes = Routes(graph, placed, tuple(ends), tuple(wants), num_ranks)
    rows = [row_drafts(routes, stack) for stack in routes.stacks]
    drafts = [_rank_drafts(routes, rank, rows) for rank in range(num_ranks)]
    phases = tuple(
        _phase(routes, k, drafts, [stack[k] for stack in rows]) for k in range(routes.num_phases)
    )
    return Distributed(phases, routes.final, num_ranks)


def _rank_drafts(
    routes: Routes, rank: int, rows: Sequence[Sequence[RowDraft]]
) -> tuple[_Draft, ...]:
    """Returns the rank's work in every phase; what a later phase reads is saved by the first."""
    drafts: list[_Draft] = []
    phase_of: dict[int, int] = {}

    def save(at: int, value: int) -> None:
        drafts[at] = replace(drafts[at], saves=tuple(sorted({*drafts[at].saves, value})))

    for phase in range(routes.num_phases):
        mine = [stack[phase] for stack in rows if rank in stack[phase].stack.ranks]
        shared = {value for draft in mine for value in draft.shared}
        reusable = {v for v in shared if v in phase_of and routes.worth_saving(v)}
        draft = _draft(routes, rank, phase, phase_of, tuple(sorted(shared - reusable)))
        for value in reusable:
            save(phase_of[value], value)
        for end, value in draft.inputs:
            if end.role is Role.SAVED:
                save(phase_of[value], value)
        drafts.append(draft)
        for op in draft.ops:
            for value in routes.graph.ops[op].outputs:
                phase_of.setdefault(value, phase)
    return tuple(drafts)


def _draft(
    routes: Routes, rank: int, phase: int, phase_of: dict[int, int], saves: tuple[int, ...]
) -> _Draft:
    """Walks back from the targets to what the rank has at the start of the phase."""
    graph, placed = routes.graph, routes.placed
    targets = tuple(
        want
        for want, due in zip(routes.wants, routes.due, strict=True)
        if due == phase and not isinstance(want.layout, Rows) and want.layout in (EVERYWHERE, rank)
    )
    offers = tuple(e for e in routes.entries(phase) if placed.layouts[e.value] == e.rank == rank)
    scattered = tuple(
        (v, to)
        for v, to in routes.row_moves(phase)
        if isinstance(to, Rows) and placed.layouts[v] == rank
    )
    ops: set[int] = set()
    inputs: dict[End, int] = {}
    arrived: set[int] = set()
    gathered: set[int] = set()
    visited: set[int] = set()
    todo: list[Atom] = [want.atom for want in targets] + [entry.value for entry in offers]
    todo += [value for value, _ in scattered] + list(saves)
    while todo:
        atom = todo.pop()
        if isinstance(atom, Literal) or atom in visited:
            continue
        visited.add(atom)
        if atom < graph.num_inputs and placed.layouts[atom] in (EVERYWHERE, rank):
            (inputs_end,) = routes.ends[atom]
            inputs[inputs_end] = atom
        elif atom in routes.arrivals and routes.arrivals[atom][0] < phase:
            arrived.add(atom)
        elif routes.moves.get((atom, rank), phase) < phase:
            gathered.add(atom)
        elif atom in phase_of and routes.worth_saving(atom):
            inputs[End(Role.SAVED, atom)] = atom
        else:
            ops.add(routes.producers[atom])
            todo += graph.ops[routes.producers[atom]].inputs
    return _Draft(
        targets,
        offers,
        scattered,
        tuple(sorted(ops)),
        tuple(sorted(inputs.items())),
        tuple(sorted(arrived)),
        tuple(sorted(gathered)),
        saves,
    )


def _phase(
    routes: Routes,
    phase: int,
    drafts: Sequence[Sequence[_Draft]],
    rows: Sequence[RowDraft],
) -> Phase:
    exchange = _exchange(routes, phase)
    row_programs = tuple(
        row_program(routes, draft, rank)
        for draft in rows
        if not draft.empty
        for rank in draft.stack.ranks
    )
    shared = {
        rank: frozenset().union(*(p.shared for p in row_programs if p.rank == rank))
        for rank in range(routes.num_ranks)
    }
    offering = {rank for draft in rows if draft.offers for rank in draft.stack.ranks}
    programs = tuple(
        None
        if every[phase].empty
        else _rank_program(routes, rank, phase, every[phase], rank in offering, shared[rank])
        for rank, every in enumerate(drafts)
    )
    packers = tuple(
        _packer(routes, rank, phase, drafts[rank][phase], rows) for rank in sorted(offering)
    )
    return Phase(programs, exchange, row_programs, packers)


def _exchange(routes: Routes, phase: int) -> Exchange | None:
    if phase >= routes.num_phases - 1:
        return None
    return Exchange(routes.width(phase), routes.entries(phase), _moves(routes, phase))


def _moves(routes: Routes, phase: int) -> tuple[Move, ...]:
    """Returns the rows that change ranks after a phase; one that is where it is needed stays."""
    moves = []
    for value, to in routes.row_moves(phase):
        layout, aval = routes.placed.layouts[value], routes.graph.avals[value]
        rows = layout if isinstance(layout, Rows) else to
        assert isinstance(rows, Rows), "one side has the rows"
        piece = jax.ShapeDtypeStruct(rows.row_shape(aval.shape), aval.dtype)
        for row, owner in enumerate(rows.stack.owners):
            source, target = (owner, to) if rows is layout else (layout, owner)
            assert isinstance(source, int)
            assert isinstance(target, int)
            if source != target:
                end = routes.piece(Role.PIECE, value, row, rows.stack)
                moves.append(Move(end, source, target, piece))
    return tuple(moves)


def _rank_program(
    routes: Routes,
    rank: int,
    phase: int,
    draft: _Draft,
    rows_offer: bool,
    shared: frozenset[End],
) -> UpdateProgram:
    graph, width = routes.graph, routes.width(phase)
    sources = {
        (routes.arrivals[v][0], e.rank) for v in draft.arrived for e in routes.arrivals[v][1]
    }
    vectors = sorted(sources)
    pieces = [
        (v, layout, routes.piece(Role.PIECE, v, row, layout.stack))
        for v in draft.gathered
        if isinstance(layout := routes.placed.layouts[v], Rows)
        for row in range(len(layout.stack.owners))
    ]
    offers = [entry.value for entry in draft.offers]

    def run(*arguments: Any) -> list[Any]:
        first, second = len(vectors), len(vectors) + len(draft.inputs)
        by_source = dict(zip(vectors, arguments[:first], strict=True))
        env = {v: routes.unpacked(v, by_source) for v in draft.arrived}
        env |= {v: x for (_, v), x in zip(draft.inputs, arguments[first:second], strict=True)}
        env |= _whole_of_pieces(pieces, arguments[second:])

        def read(atom: Atom) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        for at in draft.ops:
            op = graph.ops[at]
            env.update(
                zip(op.outputs, bind(op, op.params, list(map(read, op.inputs))), strict=True)
            )
        outputs = [as_leaf(read(x.atom), x.aval.shape, x.aval.dtype) for x in draft.targets]
        outputs += [read(value) for value in draft.saves]
        outputs += [row for v, to in draft.scattered for row in _split(env[v], to)]
        if rows_offer:
            return outputs + [read(value) for value in offers]
        return outputs + ([pack(list(map(read, offers)), width)] if offers else [])

    avals = [jax.ShapeDtypeStruct((routes.width(k),), np.uint8) for k, _ in vectors]
    avals += [_struct(graph.avals[v]) for _, v in draft.inputs]
    avals += [
        jax.ShapeDtypeStruct(layout.row_shape(graph.avals[v].shape), graph.avals[v].dtype)
        for v, layout, _ in pieces
    ]
    reads = [End(Role.GATHERED, k * routes.num_ranks + source) for k, source in vectors]
    reads += [end for end, _ in draft.inputs] + [end for *_, end in pieces]
    writes = [want.ends[0] for want in draft.targets]
    writes += [End(Role.SAVED, value) for value in draft.saves]
    writes += [
        routes.piece(Role.PIECE, v, row, to.stack)
        for v, to in draft.scattered
        for row in range(len(to.stack.owners))
    ]
    if rows_offer:
        writes += [End(Role.SAVED, value) for value in offers]
    elif offers:
        writes.append(End(Role.PACKED, phase))
    binding = Binding(tuple(reads), tuple(writes))
    return UpdateProgram(rank, phase, jax.make_jaxpr(run)(*avals), (binding,), shared)


def _packer(
    routes: Routes, rank: int, phase: int, draft: _Draft, rows: Sequence[RowDraft]
) -> UpdateProgram:
    """Returns the program that joins what a rank's rows offer, and packs it with its own."""
    graph, layouts, width = routes.graph, routes.placed.layouts, routes.width(phase)
    offering = [x for x in rows if x.offers and rank in x.stack.ranks]
    entries = [e for e in routes.entries(phase) if e.rank == rank]
    own = [entry.value for entry in draft.offers]

    def run(*arguments: Any) -> list[Any]:
        values = dict(zip(own, arguments, strict=False))
        at = len(own)
        for each in offering:
            count = len(each.stack.rows_by_rank[rank])
            matrix, offset = jnp.stack(arguments[at : at + count]), 0
            at += count
            for value in each.offers:
                layout, aval = layouts[value], graph.avals[value]
                shape = layout.row_shape(aval.shape) if isinstance(layout, Rows) else aval.shape
                brought = unpack(matrix, offset, shape, aval.dtype)
                partial = isinstance(layout, Partial)
                values[value] = join_shares(brought, layout) if partial else brought
                offset += routes.row_size(value)
        return [pack([values[entry.value] for entry in entries], width)]

    avals = [_struct(graph.avals[value]) for value in own]
    reads = [End(Role.SAVED, value) for value in own]
    for each in offering:
        size = sum(map(routes.row_size, each.offers))
        for row in each.stack.rows_by_rank[rank]:
            avals.append(jax.ShapeDtypeStruct((size,), np.uint8))
            reads.append(routes.row_bytes(phase, each.stack, row))
    binding = Binding(tuple(reads), (End(Role.PACKED, phase),))
    return UpdateProgram(rank, phase, jax.make_jaxpr(run)(*avals), (binding,))


def _whole_of_pieces(
    pieces: Sequence[tuple[int, Rows, End]], arrays: Sequence[Any]
) -> dict[int, Any]:
    by_value: dict[int, tuple[Rows, list[Any]]] = {}
    for (value, layout, _), array in zip(pieces, arrays, strict=True):
        by_value.setdefault(value, (layout, []))[1].append(array)
    return {v: jnp.concatenate(rows, axis=to.axis) for v, (to, rows) in by_value.items()}


def _split(whole: Any, rows: Rows) -> list[Any]:
    count = len(rows.stack.owners)
    return [
        jax.lax.slice_in_dim(whole, at * rows.block, (at + 1) * rows.block, axis=rows.axis)
        for at in range(count)
    ]


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
