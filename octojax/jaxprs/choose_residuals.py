"""Chooses which values a forward pass stores for its backward pass, and what is repeated.

A stored value that is a view of something smaller, or a few additions and multiplications
away from what is there anyway, is replaced by its source; one that follows from weights alone
or from the batch alone by cheap operations (a causal mask, a rotary table, a weight cast to
bfloat16) is computed again.

    stored    xn, broadcast(r), causal_mask, t = tanh(a), 1 - t
    becomes   xn, r, t           and the backward program starts with the rest
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from octojax.jaxprs.dataflow import free_vars, is_var, makers, var_bytes
from octojax.jaxprs.operations import ARITHMETIC, CHEAP, VIEWS

_MAX_STEPS = 4
"""Arithmetic steps repeated to save one stored value; XLA fuses so few into their reader."""


@dataclass(frozen=True)
class Stored:
    """What is stored, and the equation indices to repeat (in order) to get all targets."""

    values: tuple[Var, ...]
    repeated: tuple[int, ...]


def choose_residuals(
    eqns: Sequence[JaxprEqn],
    targets: Iterable[Var],
    at_hand: set[Var],
    sources: Sequence[set[Var]] = (),
    existing: frozenset[Var] = frozenset(),
) -> Stored:
    """Returns the storage that gives back `targets`, values made by `eqns` or coming from outside.

    `at_hand` are the outside values that need no storage; other outside values are stored.
    What cheap operations make of one set of `sources` alone is repeated. The sets are apart,
    so that what mixes weights and batch, an embedding say, counts as an activation. Values in
    `existing` are in memory already, and would only stay for longer: they are preferred.
    """
    producer = makers(eqns)
    targets = list(dict.fromkeys(targets))
    outside = free_vars(eqns, targets)
    order = {v: at for at, v in enumerate((*outside, *producer))}  # the same in every process
    free = set().union(*(from_alone(eqns, some) for some in sources))
    stored = {v for v in targets if v not in at_hand and v not in free}
    todo = sorted(stored, key=order.__getitem__)
    while todo:  # the latest first, so that a source is looked at after all that it serves
        v = todo.pop()
        have = at_hand | free | (stored - {v})
        source = None if v in existing else _source(eqns, producer, v, have, existing)
        if source is None:
            continue
        stored.discard(v)
        new = source - stored
        stored |= new
        todo = sorted({*todo, *new}, key=order.__getitem__)
    _merge(eqns, producer, stored, at_hand | free, order)
    values = tuple(sorted(stored, key=order.__getitem__))
    return Stored(values, _repeated(eqns, producer, targets, at_hand | stored))


def _repeated(
    eqns: Sequence[JaxprEqn], producer: dict[Var, int], targets: Iterable[Var], have: set[Var]
) -> tuple[int, ...]:
    """Returns the equations that lead from `have` to the targets."""
    reached, repeated = set(have), set()
    todo = [v for v in targets if v not in reached]
    while todo:
        v = todo.pop()
        if v in reached:
            continue
        reached.add(v)
        repeated.add(producer[v])
        todo += [u for u in eqns[producer[v]].invars if is_var(u) and u not in reached]
    return tuple(sorted(repeated))


def from_alone(eqns: Sequence[JaxprEqn], sources: set[Var]) -> set[Var]:
    """Returns the values that cheap operations make of the sources and literals."""
    free: set[Var] = set()
    for eqn in eqns:
        cheap = eqn.primitive.name in CHEAP and not eqn.effects
        if cheap and all(not is_var(v) or v in sources or v in free for v in eqn.invars):
            free.update(eqn.outvars)
    return free


def _source(
    eqns: Sequence[JaxprEqn],
    producer: dict[Var, int],
    value: Var,
    have: set[Var],
    existing: frozenset[Var],
) -> set[Var] | None:
    """Returns what to store instead of `value`, or None where that gains nothing."""
    leaves = _leaves(eqns, producer, value, have | existing, _MAX_STEPS)
    if leaves is not None:
        longer = leaves - have
        if sum(map(var_bytes, longer)) <= var_bytes(value):
            return longer
    v = value
    while v in producer and eqns[producer[v]].primitive.name in VIEWS:
        operands = [u for u in eqns[producer[v]].invars if is_var(u)]
        if len(operands) != 1:
            return None
        v = operands[0]
        if var_bytes(v) < var_bytes(value):
            return {v}
    return None


def _merge(
    eqns: Sequence[JaxprEqn],
    producer: dict[Var, int],
    stored: set[Var],
    have: set[Var],
    order: dict[Var, int],
) -> None:
    """Exchanges several stored values for one that they all follow from, while that saves bytes.

    What squared ReLU stores, `2 h`, `h h` and `a > 0`, all follows from `a`.
    """
    served: dict[Var, set[Var]] = {}
    for v in sorted(stored, key=order.__getitem__):
        for s in _ancestors(eqns, producer, v, _MAX_STEPS) - stored - have:
            if _leaves(eqns, producer, v, have | {s}, _MAX_STEPS) is not None:
                served.setdefault(s, set()).add(v)
    while served:
        gains = {s: sum(map(var_bytes, some & stored)) - var_bytes(s) for s, some in served.items()}
        best = max(gains, key=lambda s: (gains[s], -order[s]))
        if gains[best] <= 0:
            return
        stored -= served.pop(best)
        stored.add(best)


def _ancestors(
    eqns: Sequence[JaxprEqn], producer: dict[Var, int], value: Var, steps: int
) -> set[Var]:
    """Returns what the value is made from by at most so many steps of plain arithmetic."""
    if value not in producer or not steps or eqns[producer[value]].primitive.name not in ARITHMETIC:
        return set()
    operands = set(filter(is_var, eqns[producer[value]].invars))
    return operands.union(*(_ancestors(eqns, producer, u, steps - 1) for u in operands))


def _leaves(
    eqns: Sequence[JaxprEqn], producer: dict[Var, int], value: Var, have: set[Var], steps: int
) -> set[Var] | None:
    """Returns from which of `have` a few steps of plain arithmetic make the value, if they do."""
    if value not in producer or not steps or eqns[producer[value]].primitive.name not in ARITHMETIC:
        return None
    sources: set[Var] = set()
    for u in filter(is_var, eqns[producer[value]].invars):
        leaves = {u} if u in have else _leaves(eqns, producer, u, have, steps - 1)
        if leaves is None:
            return None
        sources |= leaves
    return sources
