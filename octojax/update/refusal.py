"""What an update says where it cannot be spread over ranks."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from octojax.jaxprs.graph import Graph, Op
from octojax.update.layout import Layout, Rows

EXCHANGE_LIMIT_BYTES = 4096
"""Values up to this size may cross ranks; the norm of a leaf has 4 bytes."""

_REMEDY = (
    "An update runs on the ranks that own the parameters, and only values of up to "
    f"{EXCHANGE_LIMIT_BYTES} bytes (norms, flags, counters) cross ranks. Use a transformation "
    "that works leaf by leaf, or place these parameters on one rank"
)


def crosses(graph: Graph, value: int, layout: Layout, to: Layout, names: Sequence[str]) -> str:
    """Returns the message for a large value that is made on one rank and needed elsewhere."""
    return (
        f"the optimizer makes {_shape(graph, value)} on {place_name(layout)} from "
        f"{_leaves(graph, [value], names)}, but {place_name(to)} needs it. {_REMEDY}"
    )


def mixes(
    graph: Graph, op: Op, at: int, values: Sequence[tuple[int, Layout]], names: Sequence[str]
) -> str:
    """Returns the message for an operation on large `values` of several ranks."""
    parts = [
        f"{_shape(graph, v)} on {place_name(layout)} (from {_leaves(graph, [v], names)})"
        for v, layout in values
    ]
    where = origin(op)
    return (
        f"this optax transformation cannot be distributed: operation {at} "
        f"({op.primitive.name}{', in ' + where if where else ''}) takes {' and '.join(parts)}. "
        f"{_REMEDY}"
    )


def place_name(layout: Layout) -> str:
    """Returns a layout in words."""
    if isinstance(layout, int):
        return f"rank {layout}"
    if layout is None:
        return "every rank"
    ranks = ", ".join(map(str, layout.stack.ranks))
    by_rows = isinstance(layout, Rows)
    return f"ranks {ranks} ({f'rows of axis {layout.axis}' if by_rows else 'shares of a sum'})"


def _shape(graph: Graph, value: int) -> str:
    aval: Any = graph.avals[value]
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _leaves(graph: Graph, values: Sequence[int], names: Sequence[str], most: int = 4) -> str:
    """Returns names of the inputs that `values` are computed from."""
    producers = graph.producers()
    inputs: set[int] = set()
    visited: set[int] = set()
    todo = list(values)
    while todo:
        value = todo.pop()
        if value in visited:
            continue
        visited.add(value)
        if value < graph.num_inputs:
            inputs.add(value)
        else:
            todo += [a for a in graph.ops[producers[value]].inputs if not isinstance(a, Literal)]
    listed = [names[v] for v in sorted(inputs)]
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
