"""Who produces and who reads the values of a list of equations: the ground of every cut.

An equation list is in execution order and each variable is bound once. Variables are compared
by identity, as JAX does.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import jax
from jax.extend.core import DropVar, JaxprEqn, Literal, Var

Atom = Var | Literal


def is_var(atom: Atom | None) -> TypeGuard[Var]:
    """Whether the atom names a value; literals carry theirs."""
    return atom is not None and not isinstance(atom, Literal)


def aval_of(atom: Atom) -> Any:
    """Returns the type of the value: shape, dtype and more, in JAX's own record."""
    return atom.aval


def shape_of(atom: Atom) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype, to trace a function with."""
    aval = aval_of(atom)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def var_bytes(atom: Atom) -> int:
    """Returns the bytes that a stored copy of the value takes; a key counts its words."""
    aval = aval_of(atom)
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return math.prod(getattr(aval, "shape", ())) * itemsize


def stacked_aval(length: int, atom: Atom) -> Any:
    """Returns the type of `length` such values along a new first axis."""
    aval = aval_of(atom)
    return aval.update(shape=(length, *aval.shape), weak_type=False)


def makers(eqns: Sequence[JaxprEqn]) -> dict[Var, int]:
    """Returns which equation binds each variable."""
    return {v: at for at, eqn in enumerate(eqns) for v in eqn.outvars}


def free_vars(eqns: Sequence[JaxprEqn], outputs: Iterable[Atom] = ()) -> list[Var]:
    """Returns the variables that the equations and outputs read from outside, in reading order."""
    bound: set[Var] = set()
    free: dict[Var, None] = {}
    for eqn in eqns:
        free.update((v, None) for v in eqn.invars if is_var(v) and v not in bound)
        bound.update(eqn.outvars)
    free.update((v, None) for v in outputs if is_var(v) and v not in bound)
    return list(free)


def needed_for(
    eqns: Sequence[JaxprEqn], outputs: Iterable[Atom], keep_effects: bool = False
) -> set[int]:
    """Returns the equations that the outputs depend on, and effectful ones if asked for."""
    live = {v for v in outputs if is_var(v)}
    indices: set[int] = set()
    for at in range(len(eqns) - 1, -1, -1):
        eqn = eqns[at]
        effectful = keep_effects and bool(eqn.effects)
        if effectful or any(v in live for v in eqn.outvars):
            indices.add(at)
            live.update(v for v in eqn.invars if is_var(v))
    return indices


def eqns_for(
    eqns: Sequence[JaxprEqn], outputs: Iterable[Atom], keep_effects: bool = False
) -> list[JaxprEqn]:
    """Returns the equations of `needed_for`, in their order."""
    return [eqns[at] for at in sorted(needed_for(eqns, outputs, keep_effects))]


def reached_from(eqns: Sequence[JaxprEqn], sources: Iterable[Var]) -> set[Var]:
    """Returns every variable that depends on the sources, these included."""
    reached = set(sources)
    for eqn in eqns:
        if any(is_var(v) and v in reached for v in eqn.invars):
            reached.update(eqn.outvars)
    return reached


def substitute(eqns: Iterable[JaxprEqn], names: Mapping[Var, Atom]) -> list[JaxprEqn]:
    """Returns the equations reading `names[v]` for every `v` in it."""
    return [e.replace(invars=rename(e.invars, names)) for e in eqns]


def rename(atoms: Iterable[Atom], names: Mapping[Var, Atom]) -> list[Atom]:
    """Returns the atoms with those in `names` exchanged."""
    return [names.get(a, a) if is_var(a) else a for a in atoms]


def is_dropped(var: Var) -> bool:
    """Whether an equation's output is bound to no name."""
    return isinstance(var, DropVar)
