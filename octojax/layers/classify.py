"""What each value of a loss depends on, which decides where it is computed.

    PARAM only           param-only    recomputed inside each stage that reads it
    BATCH, STATE, none   batch-only    recomputed inside each stage that reads it
    PARAM and (BATCH or STATE)         an activation: computed once, sent on

Frozen float state (running statistics in evaluation) counts as PARAM, so that a frozen layer's
output is sent on like any other; keys and counters do not, so that dropout masks are rebuilt
where they are used.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence

from jax.extend.core import JaxprEqn, Literal, Var

from octojax import compat
from octojax.compat import Atom
from octojax.jaxprs.flat import FlatJaxpr
from octojax.trace import TracedLoss


class Depends(enum.IntFlag):
    NOTHING = 0
    PARAM = 1
    STATE = 2
    BATCH = 4

    @property
    def is_activation(self) -> bool:
        return bool(self & Depends.PARAM) and bool(self & (Depends.BATCH | Depends.STATE))


Classes = Mapping[Var, Depends]


def of(classes: Classes, atom: Atom) -> Depends:
    """Returns what one atom depends on; literals and constants on nothing."""
    return Depends.NOTHING if isinstance(atom, Literal) else classes.get(atom, Depends.NOTHING)


def union(classes: Classes, atoms: Iterable[Atom]) -> Depends:
    """Returns what a value computed from all of these depends on."""
    depends = Depends.NOTHING
    for atom in atoms:
        depends |= of(classes, atom)
    return depends


def classify(eqns: Iterable[JaxprEqn], sources: Classes) -> dict[Var, Depends]:
    """Returns what every value of these equations depends on, from what the sources do.

    What an equation with a side effect makes counts as an activation: it runs once.
    """
    classes = dict(sources)
    for eqn in eqns:
        depends = union(classes, eqn.invars)
        if eqn.effects:
            depends |= Depends.PARAM | Depends.BATCH
        classes.update((var, depends) for var in eqn.outvars)
    return classes


def activations(eqns: Sequence[JaxprEqn], depends: Classes) -> tuple[int, ...]:
    """Returns the equations that make activations or have an effect, by position."""
    return tuple(
        at for at, eqn in enumerate(eqns) if eqn.effects or union(depends, eqn.invars).is_activation
    )


def side_inputs(eqns: Iterable[JaxprEqn], depends: Classes) -> list[Var]:
    """Returns what the equations read besides activations, as often as they read it."""
    operands = (v for eqn in eqns for v in eqn.invars if isinstance(v, Var))
    return [v for v in operands if not of(depends, v).is_activation]


def sources(traced: TracedLoss, flat: FlatJaxpr) -> dict[Var, Depends]:
    """Returns what the inputs of the loss count as."""
    num_params, num_state = len(traced.params), len(traced.state)
    classes: dict[Var, Depends] = {}
    for index, var in enumerate(flat.invars):
        if index < num_params:
            classes[var] = Depends.PARAM
        elif index < num_params + num_state:
            classes[var] = _state_class(var, read_only=is_read_only(traced, index - num_params))
        else:
            classes[var] = Depends.BATCH
    return classes


def is_read_only(traced: TracedLoss, leaf: int) -> bool:
    """Whether a state leaf leaves the loss as it came in."""
    return (
        traced.flat.outvars[traced.num_emits + leaf]
        is traced.flat.invars[len(traced.params) + leaf]
    )


def _state_class(var: Var, read_only: bool) -> Depends:
    if not read_only:
        return Depends.STATE
    return Depends.PARAM if compat.is_float(var.aval) else Depends.NOTHING
