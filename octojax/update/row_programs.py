"""The program of one row of a stack in one phase; it runs once per row, on the row's rank.

What is the same for all rows is read: from the leaves that every rank keeps, from what an
exchange brought, or from what the rank's own program of the phase saved. Only scalars are
computed again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from octojax.jaxprs.graph import Atom, bind
from octojax.update.layout import EVERYWHERE, Partial, Rows, Stack
from octojax.update.pack import pack
from octojax.update.plan import Binding, End, Role, UpdateProgram
from octojax.update.routes import Routes, Want, as_leaf
from octojax.update.rows import RowRule, broadcast_rows

Node = tuple[int, Rows | Partial | None]
"""A value of the graph, as a row of it, its row's share, or (None) the whole."""

_NATIVE = "native"
"""An operation whose operands are in rows; its results are as they were placed."""

Step = tuple[int, Rows | str | None]
"""An operation by its position: on rows, just a row of a broadcast, or (None) on wholes."""


@dataclass(frozen=True)
class Read:
    """An input: the value that it is, its ends (one, or one per row) and the type of each."""

    node: Node
    ends: tuple[End, ...]
    aval: Any


@dataclass
class RowDraft:
    """What a row computes in one phase, by the numbers of the graph."""

    stack: Stack
    phase: int
    targets: tuple[Want, ...]
    offers: tuple[int, ...]
    moves: tuple[int, ...]
    saves: tuple[int, ...] = ()
    steps: dict[Step, RowRule | None] = field(default_factory=dict)
    reads: dict[Node, Read] = field(default_factory=dict)
    arrived: set[int] = field(default_factory=set)
    shared: set[int] = field(default_factory=set)
    """Values that the rank's own program saves for the rows."""

    numbered: bool = False
    """Whether the program needs to know its row."""

    @property
    def empty(self) -> bool:
        return not (self.targets or self.offers or self.moves or self.saves)


def row_drafts(routes: Routes, stack: Stack) -> list[RowDraft]:
    """Returns the work of a row of `stack` in every phase."""
    drafts: list[RowDraft] = []
    phase_of: dict[int, int] = {}
    for phase in range(routes.num_phases):
        draft = _Walk(routes, stack, phase, phase_of).run()
        drafts.append(draft)
        for at, form in draft.steps:
            for value in routes.graph.ops[at].outputs if form == _NATIVE else ():
                phase_of.setdefault(value, phase)
        for (value, _), read in draft.reads.items():
            if read.ends[0].role is Role.SAVED_ROW and value not in drafts[phase_of[value]].saves:
                earlier = drafts[phase_of[value]]
                earlier.saves = (*earlier.saves, value)
    return drafts


class _Walk:
    """Walks back from the targets of a row in one phase; lives for one call of `run`."""

    def __init__(self, routes: Routes, stack: Stack, phase: int, phase_of: dict[int, int]) -> None:
        self.routes, self.stack, self.phase, self.phase_of = routes, stack, phase, phase_of
        placed = routes.placed
        self.draft = RowDraft(
            stack,
            phase,
            tuple(
                want
                for want, due in zip(routes.wants, routes.due, strict=True)
                if due == phase and isinstance(want.layout, Rows) and want.layout.stack == stack
            ),
            self._mine(e.value for e in routes.entries(phase)),
            self._mine(
                v for v, _ in routes.row_moves(phase) if isinstance(placed.layouts[v], Rows)
            ),
        )

    def _mine(self, values: Iterable[int]) -> tuple[int, ...]:
        layouts = self.routes.placed.layouts
        mine = [
            v
            for v in values
            if isinstance(x := layouts[v], Rows | Partial) and x.stack == self.stack
        ]
        return tuple(dict.fromkeys(mine))

    def run(self) -> RowDraft:
        draft, layouts = self.draft, self.routes.placed.layouts
        todo: list[tuple[Atom, Any]] = [(want.atom, want.layout) for want in draft.targets]
        todo += [(value, layouts[value]) for value in (*draft.offers, *draft.moves)]
        visited: set[Node] = set()
        while todo:
            atom, form = todo.pop()
            if isinstance(atom, Literal):
                draft.numbered |= form is not None and bool(np.shape(atom.val))
            elif (atom, form) not in visited:
                visited.add((atom, form))
                todo += self._whole(atom) if form is None else self._row(atom, form)
        return draft

    def _whole(self, value: int) -> Sequence[tuple[Atom, Any]]:
        """Notes how a row gets a value that is the same for all; returns what that takes."""
        routes, draft = self.routes, self.draft
        if value in routes.arrivals and routes.arrivals[value][0] < self.phase:
            draft.arrived.add(value)
            return ()
        assert routes.placed.layouts[value] is EVERYWHERE, "brought by an exchange"
        if value < routes.graph.num_inputs:
            self._read((value, None), routes.ends[value])
            return ()
        at = routes.producers[value]
        if routes.light(at):
            draft.steps[at, None] = None
            return [(x, None) for x in routes.graph.ops[at].inputs]
        draft.shared.add(value)
        self._read((value, None), (End(Role.SAVED, value),))
        return ()

    def _row(self, value: int, form: Rows | Partial) -> Sequence[tuple[Atom, Any]]:
        """Notes how a row gets its part of a value; returns what that takes."""
        routes, stack = self.routes, self.stack
        rows = range(len(stack.owners))
        if routes.placed.layouts[value] == form:
            if value < routes.graph.num_inputs:
                self._read((value, form), routes.ends[value])
                return ()
            if value in self.phase_of and routes.worth_saving(value):
                ends = tuple(routes.piece(Role.SAVED_ROW, value, row, stack) for row in rows)
                self._read((value, form), ends)
                return ()
            at = routes.producers[value]
            return self._step(at, _NATIVE, routes.placed.rules[at])
        assert isinstance(form, Rows), "a share is read by no row"
        if routes.moves.get((value, form), self.phase) < self.phase:
            ends = tuple(routes.piece(Role.PIECE, value, row, stack) for row in rows)
            self._read((value, form), ends)
            return ()
        rule = self._cheap_rule(value, form)
        if rule is not None:
            return self._step(routes.producers[value], form, rule)
        self.draft.numbered = True
        return [(value, None)]

    def _cheap_rule(self, value: int, form: Rows) -> RowRule | None:
        """How to make just a row of a value that is a broadcast, or arithmetic on such."""
        routes = self.routes
        if routes.placed.layouts[value] is not EVERYWHERE or value not in routes.producers:
            return None
        return broadcast_rows(routes.graph.ops[routes.producers[value]], form, routes.graph.avals)

    def _step(self, at: int, form: Rows | str, rule: RowRule) -> Sequence[tuple[Atom, Any]]:
        self.draft.steps[at, form] = rule
        return list(zip(self.routes.graph.ops[at].inputs, rule.operands, strict=True))

    def _read(self, node: Node, ends: tuple[End, ...]) -> None:
        value, form = node
        aval, shape = self.routes.graph.avals[value], self.routes.graph.avals[value].shape
        if isinstance(form, Rows):
            stored = ends[0].role in (Role.PARAM, Role.GRAD, Role.STATE)
            shape = form.piece_shape(shape) if stored else form.row_shape(shape)
        self.draft.reads[node] = Read(node, ends, jax.ShapeDtypeStruct(shape, aval.dtype))


def row_program(routes: Routes, draft: RowDraft, rank: int) -> UpdateProgram:
    """Returns the program of the rows that `rank` has, bound once per row."""
    graph, stack, phase = routes.graph, draft.stack, draft.phase
    vectors, reads = routes.vectors(draft.arrived), list(draft.reads.values())
    rows = stack.rows_by_rank[rank]

    def run(*arguments: Any) -> list[Any]:
        row, arguments = (arguments[0], arguments[1:]) if draft.numbered else (None, arguments)
        gathered = dict(zip(vectors, arguments[: len(vectors)], strict=True))
        env: dict[Node, Any] = {(v, None): routes.unpacked(v, gathered) for v in draft.arrived}
        for read, value in zip(reads, arguments[len(vectors) :], strict=True):
            v, form = read.node
            if isinstance(form, Rows):
                value = value.reshape(form.row_shape(graph.avals[v].shape))
            env[read.node] = value
        return _Evaluation(routes, draft, env, row).outputs()

    avals = [jax.ShapeDtypeStruct((), np.int32)] if draft.numbered else []
    avals += [jax.ShapeDtypeStruct((routes.width(k),), np.uint8) for k, _ in vectors]
    avals += [read.aval for read in reads]
    bindings = tuple(
        Binding(
            (
                *([End(Role.ROW, row)] if draft.numbered else []),
                *(End(Role.GATHERED, k * routes.num_ranks + source) for k, source in vectors),
                *(read.ends[row if len(read.ends) > 1 else 0] for read in reads),
            ),
            (
                *(want.ends[row] for want in draft.targets),
                *(routes.piece(Role.SAVED_ROW, v, row, stack) for v in draft.saves),
                *(routes.piece(Role.PIECE, v, row, stack) for v in draft.moves),
                *([routes.row_bytes(phase, stack, row)] if draft.offers else []),
            ),
        )
        for row in rows
    )
    shared = frozenset(read.ends[0] for read in reads if read.node[1] is None)
    return UpdateProgram(rank, phase, jax.make_jaxpr(run)(*avals), bindings, shared)


class _Evaluation:
    """Runs a draft on one row while it is traced."""

    def __init__(self, routes: Routes, draft: RowDraft, env: dict[Node, Any], row: Any) -> None:
        self.routes, self.draft, self.env, self.row = routes, draft, env, row

    def outputs(self) -> list[Any]:
        """Returns new leaves, what is saved, what moves, and the bytes that are offered."""
        graph, draft, layouts = self.routes.graph, self.draft, self.routes.placed.layouts
        for (at, form), rule in sorted(draft.steps.items(), key=lambda step: step[0][0]):
            op = graph.ops[at]
            if rule is None:
                results = bind(op, op.params, [self.read(x, None) for x in op.inputs])
            else:
                operands = [self.read(x, r) for x, r in zip(op.inputs, rule.operands, strict=True)]
                results = bind(op, rule.params, operands)
            for value, result in zip(op.outputs, results, strict=True):
                node: Any = (value, layouts[value] if form == _NATIVE else form)
                self.env[node] = result
        results = [self._leaf(want) for want in draft.targets]
        results += [self.read(value, layouts[value]) for value in (*draft.saves, *draft.moves)]
        if draft.offers:
            offers = [self.read(value, layouts[value]) for value in draft.offers]
            results.append(pack(offers, sum(map(self.routes.row_size, draft.offers))))
        return results

    def _leaf(self, want: Want) -> Any:
        assert isinstance(want.layout, Rows), "a target of a row"
        value = self.read(want.atom, want.layout)
        row = as_leaf(value, want.layout.row_shape(want.aval.shape), want.aval.dtype)
        return row.reshape(want.layout.piece_shape(want.aval.shape))

    def read(self, atom: Atom, form: Any) -> Any:
        """Returns a value in the form asked for."""
        if isinstance(atom, Literal):
            return atom.val if form is None or not np.shape(atom.val) else self._cut(atom.val, form)
        if (atom, form) not in self.env:
            assert isinstance(form, Rows), "all wholes are there"
            self.env[atom, form] = self._cut(self.env[atom, None], form)
        return self.env[atom, form]

    def _cut(self, whole: Any, rows: Rows) -> Any:
        start = self.row * jnp.int32(rows.block)
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(whole), start, rows.block, rows.axis)
