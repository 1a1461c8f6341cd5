"""A model called twice, laid so that both passes go through each of its layers together.

    embed(a) f(a) g(a) embed(b) f(b) g(b) loss      a siamese network, DPO, two crops of an image
      becomes
    embed(a) embed(b) | f(a) f(b) | g(a) g(b) | loss      each layer stands once, in one stage

*Twins* are equations that do the same with the same parameters, to values that twins made, or
that no twin made. Each goes where the first of its kind stands; what it needs goes before it.
A pass that reads what another made (a tied depth) has no twins there and stays behind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var

from octojax.layers import classify
from octojax.layers.classify import Classes, Depends
from octojax.layers.normalize import NormalLoss
from octojax.stages.program import Role

_SIZES = frozenset({"shape", "new_sizes", "slice_sizes", "limit_indices", "sizes"})
"""Parameters of equations that say how long something is: the two passes' lengths may differ."""


@dataclass(frozen=True)
class Arrangement:
    """The loss in its new order. `inseparable` are activation equations that the next one is a twin
    of: no cut may part them."""

    normal: NormalLoss
    inseparable: frozenset[int]


def side_by_side(normal: NormalLoss, depends: Classes) -> Arrangement:
    """Returns the loss with twins side by side; as it is where it has none."""
    eqns = normal.flat.eqns
    active = classify.activations(eqns, depends)
    place, twins = _places(normal, depends, active)
    if all(place[at] >= at for at in active):
        return Arrangement(normal, frozenset())
    others = [at for at in range(len(eqns)) if at not in place]
    order = others + sorted(active, key=lambda at: (place[at], at))
    inseparable = frozenset(
        k
        for k, (a, b) in enumerate(pairwise(order))
        if a in place and b in twins and place[a] == place[b]
    )
    flat = replace(normal.flat, eqns=tuple(eqns[at] for at in order))
    return Arrangement(replace(normal, flat=flat), inseparable)


def _places(
    normal: NormalLoss, depends: Classes, active: Sequence[int]
) -> tuple[dict[int, float], set[int]]:
    """Returns where each activation equation belongs, and those that follow a twin of theirs."""
    eqns = normal.flat.eqns
    makers = {v: at for at in active for v in eqns[at].outvars}
    operands = {
        at: [makers[v] for v in eqns[at].invars if isinstance(v, Var) and v in makers]
        for at in active
    }
    shared = _shared(normal, depends, active, operands)
    kinds = _kinds(normal, depends, active, makers, shared)
    first: dict[Any, int] = {}
    place: dict[int, float] = {}
    twins: set[int] = set()
    for at in active:
        shifts = [place[k] for k in operands[at] if place[k] < k]
        twin = first.setdefault(kinds[at], at) if at in shared else at
        if twin != at:
            place[at] = place[twin]
            twins.add(at)
        elif shifts and at in shared:
            place[at] = max(place[k] for k in operands[at])
        else:
            place[at] = at
    for at in reversed(active):
        for k in operands[at]:
            if k not in shared and place[at] < at:
                place[k] = min(place[k], place[at] - 0.5 if at in shared else place[at])
    return place, twins


def _shared(
    normal: NormalLoss,
    depends: Classes,
    active: Sequence[int],
    operands: Mapping[int, Sequence[int]],
) -> set[int]:
    """Returns the equations that read a parameter which others read too, and what follows them."""
    reads = {at: _units(normal, depends, normal.flat.eqns[at]) for at in active}
    count: dict[int, int] = {}
    for units in reads.values():
        for unit in units:
            count[unit] = count.get(unit, 0) + 1
    shared: set[int] = set()
    for at in active:
        if any(count[u] > 1 for u in reads[at]) or any(k in shared for k in operands[at]):
            shared.add(at)
    return shared


def _units(normal: NormalLoss, depends: Classes, eqn: JaxprEqn) -> tuple[int, ...]:
    params = [
        v for v in eqn.invars if isinstance(v, Var) and classify.of(depends, v) == Depends.PARAM
    ]
    return normal.units_behind(params) if params else ()


def _kinds(
    normal: NormalLoss,
    depends: Classes,
    active: Sequence[int],
    makers: Mapping[Var, int],
    shared: set[int],
) -> dict[int, Any]:
    """Returns a key per shared equation: equal for twins.

    Two equations on the very same activations, with other masks say, belong to one pass.
    """
    eqns = normal.flat.eqns
    numbers: dict[Any, int] = {}
    weights: dict[Var, Any] = {}  # of values made of parameters alone
    for at, eqn in enumerate(eqns):
        if at not in shared and classify.union(depends, eqn.invars) == Depends.PARAM:
            key = (_does(eqn), tuple(_weight(normal, weights, x) for x in eqn.invars))
            number = numbers.setdefault(key, len(numbers))
            weights.update((v, (number, k)) for k, v in enumerate(eqn.outvars))
    kinds: dict[int, Any] = {}
    counts: dict[Any, int] = {}

    def operand(x: Any) -> Any:
        if isinstance(x, Var) and (at := makers.get(x)) is not None:
            return (kinds[at], eqns[at].outvars.index(x)) if at in shared else "outside"
        if isinstance(x, Literal) or classify.of(depends, x) == Depends.PARAM:
            return _weight(normal, weights, x)
        return "outside"

    for at in active:
        if at not in shared:
            continue
        eqn = eqns[at]
        key = numbers.setdefault(
            (_does(eqn), tuple(map(operand, eqn.invars)), at if eqn.effects else None),
            len(numbers),
        )
        inputs = tuple(id(v) for v in eqn.invars if isinstance(v, Var) and v in makers)
        again = counts.get((key, inputs), 0)
        counts[key, inputs] = again + 1
        kinds[at] = (key, again if inputs else 0)
    return kinds


def _does(eqn: JaxprEqn) -> tuple[Any, ...]:
    """What an equation does, whatever the sizes of its operands."""
    plain = (
        (name, repr(value))
        for name, value in sorted(eqn.params.items())
        if name not in _SIZES and isinstance(value, (bool, int, float, str, tuple, type(None)))
    )
    bodies = any(hasattr(x, "eqns") or hasattr(x, "jaxpr") for x in eqn.params.values())
    return (eqn.primitive.name, () if bodies else tuple(plain))


def _weight(normal: NormalLoss, weights: Mapping[Var, Any], x: Any) -> Any:
    if isinstance(x, Literal):
        return repr(x.val)
    ref = normal.inputs.get(x)
    if ref is not None and ref.role is Role.PARAM:
        return ref
    return weights.get(x, "outside")
