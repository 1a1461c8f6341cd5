"""How the values that microbatches return make those of the whole batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from octojax.errors import LossError
from octojax.rows.state import Rows

RULES = ("sum", "mean", "max", "min", "all", "any", "first", "last", "rows")


@dataclass(frozen=True)
class Join:
    """`rule` is one of `RULES`; "mean" weighs by rows. With "rows", values are joined along
    `axis`, which holds `outer` blocks of rows (two, where a loss stacks two views of its batch).
    Rows that a reshape has dealt out to a fixed number of chunks lie along the axes `over`, in
    this order, of which `axis` is one: of the whole batch each chunk has other rows.
    """

    rule: str
    axis: int = 0
    outer: int = 1
    over: tuple[int, ...] = ()


def natural(state: Rows, micro: Any, whole: Any) -> Join:
    """Returns the rule that follows from what a value depends on.

    rows along an axis           concatenated there
    a sum over rows              sum (its coefficients are those of the whole batch)
    the same for all             last
    largest, smallest, all, any  the same over the microbatches
    other floating values        mean, weighted by rows
    other integers, booleans     sum, all
    """
    differ = [d for d, (a, b) in enumerate(zip(micro.shape, whole.shape)) if a != b]
    if differ:
        groups = [g for g in state.groups if differ[0] in g.dims and not g.partial]
        outer = groups[0].outer if groups else 1
        over = groups[0].dims if groups and len(groups[0].dims) > 1 else ()
        return Join("rows", differ[0], outer or 1, over)
    if state.join and not state.added:
        return Join(state.join)
    if not state.lumped and not state.groups and not state.each:
        if not state.draws:
            return Join("last")
        return Join("mean" if jnp.issubdtype(micro.dtype, jnp.inexact) else "last")
    if jnp.issubdtype(micro.dtype, jnp.inexact):
        return Join("sum")
    return Join("all" if micro.dtype == jnp.bool_ else "sum")


def declared(rules: Any, names: Sequence[str]) -> dict[int, Join]:
    """Returns the user's rules for leaves of aux: by path, by a path's beginning, or one.

    Raises `LossError` for an unknown rule, or a path that no leaf of aux has.
    """
    if rules is None:
        return {}
    table = _paths(rules) if isinstance(rules, Mapping) else {"": rules}
    unknown = [f"{path or 'aux'}: {rule!r}" for path, rule in table.items() if rule not in RULES]
    if unknown:
        raise LossError(
            f"unknown rule(s) in aux=: {', '.join(unknown)}. Rules are {', '.join(RULES)}"
        )
    joins: dict[int, Join] = {}
    idle = []
    for path, rule in sorted(table.items(), key=lambda item: len(item[0])):
        hits = [k for k, name in enumerate(names) if _begins(name.removeprefix("aux."), path)]
        joins.update((k, Join(rule)) for k in hits)
        if not hits:
            idle.append(path)
    if idle:
        raise LossError(
            f"aux= names {', '.join(idle)}, which the loss does not return; its aux has "
            f"{', '.join(x.removeprefix('aux.') for x in names) or 'no leaves'}"
        )
    return joins


def _paths(tree: Mapping[Any, Any], root: str = "") -> dict[str, Any]:
    rules: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{root}.{key}" if root else str(key)
        rules |= _paths(value, path) if isinstance(value, Mapping) else {path: value}
    return rules


def _begins(name: str, path: str) -> bool:
    return not path or name == path or name.startswith(f"{path}.") or name == "aux"
