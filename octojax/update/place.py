"""On which rank, and after which exchange, each operation of an optimizer update runs.

    inputs of one rank                        -> that rank
    inputs of no rank (constants, counters)   -> everywhere it is asked for
    rows of one stack, one by one             -> each row on its own rank
    a reduction over rows                     -> a share per rank; the shares are exchanged
    large rows that an operation needs whole  -> gathered on one rank, the same for all such uses
    large inputs of one rank, small of others -> that rank, the small ones are exchanged
    only small inputs, of several ranks       -> everywhere, all of them are exchanged
    a total of several ranks and one's share  -> everywhere
    large inputs of several ranks             -> refused

A value that is exchanged after phase k is there for everybody in phase k + 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import Literal

from octojax.compat import num_bytes
from octojax.errors import PlanError
from octojax.jaxprs.graph import Atom, Graph, Op
from octojax.update.layout import EVERYWHERE, Layout, Partial, Rows
from octojax.update.refusal import EXCHANGE_LIMIT_BYTES, crosses, mixes
from octojax.update.rows import RowRule, row_rule


@dataclass(frozen=True)
class Placed:
    """Per value of a graph its layout and phase, and what is exchanged after each phase."""

    layouts: tuple[Layout, ...]
    phases: tuple[int, ...]
    exchanged: tuple[tuple[int, ...], ...]
    """`exchanged[k]` are the small values that travel between phase k and phase k + 1."""

    row_moves: tuple[tuple[tuple[int, int | Rows], ...], ...]
    """`row_moves[k]` are large values that travel row by row then: rows to a rank that needs the
    whole, or the whole of a rank to the ranks of its rows."""

    rules: Mapping[int, RowRule]
    """By position, how an operation acts on rows."""

    @property
    def gathered(self) -> tuple[int, ...]:
        """The values that one rank gathers from their rows."""
        return tuple(v for phase in self.row_moves for v, to in phase if isinstance(to, int))


def place(
    graph: Graph,
    inputs: Sequence[Layout],
    targets: Sequence[tuple[Atom, Layout]],
    names: Sequence[str],
    limit_bytes: int = EXCHANGE_LIMIT_BYTES,
    roots: Sequence[int | None] = (),
) -> Placed:
    """Returns layout and phase of every value, such that each target can be had where it is due.

    `targets` are values and where they are to lie, `inputs` are the layouts of the inputs and
    `names` theirs, for messages. `roots` says which leaf of the parameters each input belongs
    to: what belongs to one leaf is gathered on one rank. Raises `PlanError` where one operation
    needs large values of several ranks.
    """
    placer = _Placer(graph, inputs, names, limit_bytes, roots)
    for at, op in enumerate(graph.ops):
        placer.place(at, op)
    for atom, layout in targets:
        placer.bring(atom, layout)
    rounds = range(1 + max((*placer.exchanged, *placer.row_moves), default=-1))
    return Placed(
        tuple(placer.layouts),
        tuple(placer.phases),
        tuple(tuple(sorted(placer.exchanged.get(k, ()))) for k in rounds),
        tuple(tuple(placer.row_moves.get(k, ())) for k in rounds),
        placer.rules,
    )


class _Placer:
    """Walks a graph once; lives for one call of `place`."""

    def __init__(
        self,
        graph: Graph,
        inputs: Sequence[Layout],
        names: Sequence[str],
        limit_bytes: int,
        roots: Sequence[int | None],
    ) -> None:
        self.graph, self.names, self.limit = graph, names, limit_bytes
        self.layouts: list[Layout] = [EVERYWHERE] * len(graph.avals)
        self.layouts[: graph.num_inputs] = inputs
        self.phases = [0] * len(graph.avals)
        self.exchanged: dict[int, set[int]] = {}
        self.row_moves: dict[int, dict[tuple[int, int | Rows], None]] = {}
        self.rules: dict[int, RowRule] = {}
        self._roots: dict[int, int] = {v: x for v, x in enumerate(roots) if x is not None}
        self._homes: dict[tuple[str, int], int] = {}
        self._loads: dict[int, int] = {}

    def place(self, at: int, op: Op) -> None:
        rule = self._row_rule(op)
        if rule is not None:
            self.rules[at] = rule
            operands: Sequence[Layout] = rule.operands
            outputs: Sequence[Layout] = rule.outputs
        else:
            rank = self._rank_of(op, at)
            if rank is not EVERYWHERE and self._joins_partial(op):
                rank = EVERYWHERE
            operands, outputs = [rank] * len(op.inputs), [rank] * len(op.outputs)
        phase = max((self.bring(x, to) for x, to in zip(op.inputs, operands)), default=0)
        roots = [self._roots[x] for x in op.inputs if isinstance(x, int) and x in self._roots]
        for value, layout in zip(op.outputs, outputs, strict=True):
            self.layouts[value], self.phases[value] = layout, phase
            if roots:
                self._roots[value] = roots[0]

    def bring(self, atom: Atom, to: Layout) -> int:
        """Returns the phase in which the value can be had there; notes the exchange it takes."""
        if isinstance(atom, Literal):
            return 0
        layout, phase = self.layouts[atom], self.phases[atom]
        if layout is EVERYWHERE or layout == to:
            return phase
        if isinstance(layout, Partial) or not self._large(atom):
            self.exchanged.setdefault(phase, set()).add(atom)
            return phase + 1
        if isinstance(layout, Rows) == isinstance(to, Rows) or to is EVERYWHERE:
            raise PlanError(crosses(self.graph, atom, layout, to, self.names))
        self.row_moves.setdefault(phase, {})[atom, to] = None  # type: ignore[index]
        return phase + 1

    def _large(self, value: int) -> bool:
        return num_bytes(self.graph.avals[value]) > self.limit

    def _row_rule(self, op: Op) -> RowRule | None:
        layouts = [EVERYWHERE if isinstance(x, Literal) else self.layouts[x] for x in op.inputs]
        if not any(isinstance(x, Rows) for x in layouts):
            return None
        rule = row_rule(op, layouts, self.graph.avals)
        if rule is None:
            return None
        for x, layout, rows in zip(op.inputs, layouts, rule.operands, strict=True):
            if rows is None and isinstance(layout, int) and self._large(x):  # type: ignore[arg-type]
                return None
        return rule if self._worth_sharing(op, rule) else None

    def _worth_sharing(self, op: Op, rule: RowRule) -> bool:
        """Whether shares of a reduction are clearly less to send than the rows themselves."""
        whole = sum(
            num_bytes(self.graph.avals[x])  # type: ignore[index]
            for x, rows in zip(op.inputs, rule.operands, strict=True)
            if rows is not None and not isinstance(x, Literal)
        )
        return all(
            not self._large(value)
            or 4 * len(layout.stack.ranks) * num_bytes(self.graph.avals[value]) <= whole
            for value, layout in zip(op.outputs, rule.outputs, strict=True)
            if isinstance(layout, Partial)
        )

    def _rank_of(self, op: Op, at: int) -> int | None:
        remote = [
            v for v in op.inputs if not isinstance(v, Literal) and self.layouts[v] is not EVERYWHERE
        ]
        homes = {self.layouts[v] for v in remote}
        if not homes:
            return EVERYWHERE
        if len(homes) == 1 and isinstance(next(iter(homes)), int):
            return homes.pop()  # type: ignore[return-value]
        large = [v for v in remote if self._large(v) and not isinstance(self.layouts[v], Partial)]
        whole = {x for v in large if isinstance(x := self.layouts[v], int)}
        several = len(large) > 1 and op.primitive.name == "concatenate"
        if len(whole) > 1 or (several and any(isinstance(self.layouts[v], Rows) for v in large)):
            mixed = [(v, self.layouts[v]) for v in large]
            raise PlanError(mixes(self.graph, op, at, mixed, self.names))
        if whole:
            return whole.pop()
        if large:
            return self._home(large)
        if any(isinstance(x, Rows) for x in homes):
            return EVERYWHERE
        arrays = [self.layouts[v] for v in remote if self.graph.avals[v].shape]
        ranks = {x for x in arrays if isinstance(x, int)}
        return ranks.pop() if len(ranks) == 1 else EVERYWHERE

    def _home(self, values: Sequence[int]) -> int:
        """Returns the rank that gathers rows: where those of the same leaf are gathered already,
        or the rank of the stack that gathers least so far."""
        first = values[0]
        key = ("leaf", self._roots[first]) if first in self._roots else ("value", first)
        if key not in self._homes:
            layout = self.layouts[first]
            assert isinstance(layout, Rows), "only rows are gathered"
            home = min(layout.stack.ranks, key=lambda rank: (self._loads.get(rank, 0), rank))
            self._homes[key] = home
            size = num_bytes(self.graph.avals[first])
            self._loads[home] = self._loads.get(home, 0) + size
        return self._homes[key]

    def _joins_partial(self, op: Op) -> bool:
        """Whether an operation adds one rank's scalar to a total that all ranks have by then.

        ((a0 + b0) + c1) + d1: the first sum across ranks is everybody's after an exchange, and
        so are those after it. Left on rank 1, the total would need a second exchange.
        """
        if op.primitive.name not in _JOINS:
            return False
        values = [v for v in op.inputs if not isinstance(v, Literal)]
        shared = [v for v in values if self.layouts[v] is EVERYWHERE]
        total = max((self.phases[v] for v in shared), default=0)
        return all(
            num_bytes(self.graph.avals[v]) <= 8 and self.phases[v] < total
            for v in values
            if self.layouts[v] is not EVERYWHERE
        )


_JOINS = frozenset({"add", "add_any", "and", "or", "max", "min", "concatenate"})
