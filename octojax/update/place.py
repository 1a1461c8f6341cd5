"""On which rank, and after which exchange, each operation of an optimizer update runs.

    inputs of one rank                       -> that rank
    inputs of no rank (constants, counters)  -> everywhere it is asked for
    large inputs of one rank, small of others -> that rank, the small ones are exchanged
    only small inputs, of several ranks      -> everywhere, all of them are exchanged
    a total of several ranks and one's share -> everywhere
    large inputs of several ranks            -> refused

A value that is exchanged after phase k is there for everybody in phase k + 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend.core import Literal

from octojax.compat import num_bytes
from octojax.errors import PlanError
from octojax.update.graph import Atom, Graph, Op

EXCHANGE_LIMIT_BYTES = 4096
"""Values up to this size may cross ranks; the norm of a leaf has 4 bytes."""

EVERYWHERE = None
"""The rank of values that every rank has, or can compute from what every rank has."""

Rank = int | None


@dataclass(frozen=True)
class Placed:
    """Per value of a graph its rank and phase, and what is exchanged after each phase."""

    ranks: tuple[Rank, ...]
    phases: tuple[int, ...]
    exchanged: tuple[tuple[int, ...], ...]
    """`exchanged[k]` are the values that travel between phase k and phase k + 1."""

    @property
    def num_exchanges(self) -> int:
        return len(self.exchanged)


def place(
    graph: Graph,
    input_ranks: Sequence[Rank],
    wanted: Sequence[tuple[Atom, Rank]],
    names: Sequence[str],
    limit_bytes: int = EXCHANGE_LIMIT_BYTES,
) -> Placed:
    """Returns rank and phase of every value, so that each wanted one can be had on its rank.

    `names` are those of the inputs, for messages. Raises `PlanError` where one operation
    needs large values of several ranks.
    """
    ranks: list[Rank] = [EVERYWHERE] * len(graph.avals)
    phases = [0] * len(graph.avals)
    ranks[: graph.num_inputs] = input_ranks
    exchanged: dict[int, set[int]] = {}

    def bring(atom: Atom, rank: Rank) -> int:
        """The phase in which `rank` has the value; notes the exchange it takes."""
        if isinstance(atom, Literal):
            return 0
        if ranks[atom] is EVERYWHERE or ranks[atom] == rank:
            return phases[atom]
        exchanged.setdefault(phases[atom], set()).add(atom)
        return phases[atom] + 1

    for at, op in enumerate(graph.ops):
        rank = _rank_of(graph, op, at, ranks, names, limit_bytes)
        if rank is not EVERYWHERE and _joins_partial(graph, op, ranks, phases):
            rank = EVERYWHERE
        phase = max((bring(atom, rank) for atom in op.inputs), default=0)
        for value in op.outputs:
            ranks[value], phases[value] = rank, phase
    for atom, rank in wanted:
        if not isinstance(atom, Literal) and ranks[atom] not in (EVERYWHERE, rank):
            _refuse_large(graph, atom, ranks, rank, names, limit_bytes)
            bring(atom, rank)
    rounds = range(1 + max(exchanged, default=-1))
    return Placed(
        tuple(ranks), tuple(phases), tuple(tuple(sorted(exchanged.get(k, ()))) for k in rounds)
    )


def _rank_of(
    graph: Graph,
    op: Op,
    at: int,
    ranks: Sequence[Rank],
    names: Sequence[str],
    limit_bytes: int,
) -> Rank:
    held = [v for v in op.inputs if not isinstance(v, Literal) and ranks[v] is not EVERYWHERE]
    homes = {ranks[v] for v in held}
    if len(homes) <= 1:
        return homes.pop() if homes else EVERYWHERE
    large = {ranks[v] for v in held if num_bytes(graph.avals[v]) > limit_bytes}
    if len(large) > 1:
        raise PlanError(_mixes(graph, op, at, held, ranks, names, limit_bytes))
    if large:
        return large.pop()
    arrays = {ranks[v] for v in held if graph.avals[v].shape}
    return arrays.pop() if len(arrays) == 1 else EVERYWHERE


_JOINS = frozenset({"add", "add_any", "and", "or", "max", "min", "concatenate"})


def _joins_partial(graph: Graph, op: Op, ranks: Sequence[Rank], phases: Sequence[int]) -> bool:
    """Whether an operation adds one rank's scalar to a total that all ranks have by then.

    ((a0 + b0) + c1) + d1: the first sum across ranks is everybody's after an exchange, and so
    are those after it. Left on rank 1, the total would need a second exchange.
    """
    if op.primitive.name not in _JOINS:
        return False
    values = [v for v in op.inputs if not isinstance(v, Literal)]
    total = max((phases[v] for v in values if ranks[v] is EVERYWHERE), default=0)
    held = [v for v in values if ranks[v] is not EVERYWHERE]
    return all(num_bytes(graph.avals[v]) <= 8 and phases[v] < total for v in held)


def _refuse_large(
    graph: Graph,
    value: int,
    ranks: Sequence[Rank],
    wanted: Rank,
    names: Sequence[str],
    limit_bytes: int,
) -> None:
    if num_bytes(graph.avals[value]) <= limit_bytes:
        return
    to = "every rank" if wanted is EVERYWHERE else f"rank {wanted}"
    raise PlanError(
        f"the optimizer makes {_shape(graph, value)} on rank {ranks[value]} from "
        f"{_leaves(graph, [value], names)}, but {to} needs it. {_REMEDY}"
    )


_REMEDY = (
    "An update runs on the ranks that own the parameters, and only values of up to "
    f"{EXCHANGE_LIMIT_BYTES} bytes (norms, flags, counters) cross ranks. Use a transformation "
    "that works leaf by leaf, or place these parameters on one rank"
)


def _mixes(
    graph: Graph,
    op: Op,
    at: int,
    held: Sequence[int],
    ranks: Sequence[Rank],
    names: Sequence[str],
    limit_bytes: int,
) -> str:
    parts = [
        f"{_shape(graph, v)} on rank {ranks[v]} (from {_leaves(graph, [v], names)})"
        for v in held
        if num_bytes(graph.avals[v]) > limit_bytes
    ]
    where = origin(op)
    return (
        f"this optax transformation cannot be distributed: operation {at} "
        f"({op.primitive.name}{', in ' + where if where else ''}) takes {' and '.join(parts)}. "
        f"{_REMEDY}"
    )


def _shape(graph: Graph, value: int) -> str:
    aval = graph.avals[value]
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _leaves(graph: Graph, values: Sequence[int], names: Sequence[str], most: int = 4) -> str:
    """Names of the inputs that `values` are computed from."""
    producers = graph.producers()
    found: set[int] = set()
    seen: set[int] = set()
    todo = list(values)
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        if value < graph.num_inputs:
            found.add(value)
        else:
            todo += [a for a in graph.ops[producers[value]].inputs if not isinstance(a, Literal)]
    listed = [names[v] for v in sorted(found)]
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def origin(op: Op) -> str:
    """Returns the function of optax that an operation was traced from, or an empty text."""
    traceback = getattr(getattr(op.source, "source_info", None), "traceback", None)
    if traceback is None:
        return ""
    for frame in traceback.frames:
        if "optax" in frame.file_name and "update" in frame.function_name:
            module = frame.file_name.replace("\\", "/").rsplit("/", 1)[-1]
            return f"optax {module}:{frame.line_num} {frame.function_name}"
    return ""
