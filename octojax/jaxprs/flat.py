"""A jaxpr as plain tuples, its constants next to it, and the means to rebuild it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Literal, Var

from octojax import compat
from octojax.compat import Atom
from octojax.jaxprs.dataflow import eqns_for, is_dropped

Emit = Callable[[JaxprEqn, dict[Var, Atom]], None]
"""Appends an equation over renamed variables, and notes what its outputs became."""


@dataclass(frozen=True)
class FlatJaxpr:
    """Equations over variables. `constants[k]` is the value of `constvars[k]`."""

    invars: tuple[Var, ...]
    constvars: tuple[Var, ...]
    constants: tuple[Any, ...]
    eqns: tuple[JaxprEqn, ...]
    outvars: tuple[Atom, ...]

    def __str__(self) -> str:
        rows = (f"  {eqn}" for eqn in self.eqns)
        return "\n".join(rows)


def flatten(jaxpr: Any) -> FlatJaxpr:
    """Returns the flat form of an open or closed jaxpr, which stays as it is."""
    inner, consts = compat.split_consts(jaxpr)
    return FlatJaxpr(
        tuple(inner.invars),
        tuple(inner.constvars),
        consts,
        tuple(inner.eqns),
        tuple(inner.outvars),
    )


class Builder:
    """Collects equations with fresh variables; `env` says what each old variable became.

    Local to one rewrite: one function creates, fills and reads it.
    """

    def __init__(self, source: FlatJaxpr) -> None:
        self.invars = source.invars
        self.eqns: list[JaxprEqn] = []
        self.constvars: list[Var] = list(source.constvars)
        self.constants: list[Any] = list(source.constants)
        self._variables = {id(value): var for var, value in zip(source.constvars, source.constants)}

    def constant(self, value: Any, var: Var) -> Var:
        """Returns the variable of a constant; equal objects share one."""
        shared = self._variables.get(id(value))
        if shared is not None:
            return shared
        fresh = compat.new_var(var.aval)
        self._variables[id(value)] = fresh
        self.constvars.append(fresh)
        self.constants.append(value)
        return fresh

    def emit(self, eqn: JaxprEqn, env: dict[Var, Atom]) -> None:
        """Appends a copy of `eqn` over the renamed variables."""
        outvars = self.copy(eqn, [read(env, x) for x in eqn.invars])
        env.update(zip(eqn.outvars, outvars))

    def copy(self, eqn: JaxprEqn, args: Sequence[Atom]) -> Sequence[Atom]:
        """Appends a copy of `eqn` that reads `args`; returns its outputs."""
        outvars = [self.output(v) for v in eqn.outvars]
        self.eqns.append(eqn.replace(invars=list(args), outvars=outvars))
        return outvars

    def output(self, var: Var) -> Var:
        """Returns the variable of an output in a copy of its equation."""
        return compat.new_var(var.aval)

    def append(
        self, primitive: Any, args: Sequence[Atom], params: dict[str, Any], aval: Any
    ) -> Var:
        """Appends an equation without effects; returns its one output."""
        out = compat.new_var(aval)
        self.eqns.append(compat.new_eqn(primitive, args, [out], params))
        return out

    def call(
        self,
        body: Any,
        args: Sequence[Atom],
        emit: "Emit | None" = None,
    ) -> list[Atom]:
        """Appends the equations of a (closed or open) jaxpr; returns its outputs."""
        inner, consts = compat.split_consts(body)
        env: dict[Var, Atom] = {
            var: self.constant(value, var) for var, value in zip(inner.constvars, consts)
        }
        env.update(zip(inner.invars, args, strict=True))
        for eqn in inner.eqns:
            (emit or self.emit)(eqn, env)
        return [read(env, x) for x in inner.outvars]

    def finish(self, outvars: Sequence[Atom]) -> FlatJaxpr:
        """Returns the jaxpr of the equations appended, with these outputs."""
        return FlatJaxpr(
            self.invars,
            tuple(self.constvars),
            tuple(self.constants),
            tuple(self.eqns),
            tuple(outvars),
        )


class LiteralBuilder(Builder):
    """A builder whose constants are literals, and whose dropped outputs stay so: what it makes has
    no `constvars`."""

    def __init__(self, invars: Sequence[Var]) -> None:
        super().__init__(FlatJaxpr(tuple(invars), (), (), (), ()))

    def constant(self, value: Any, var: Var) -> Any:
        return Literal(value, jax.typeof(value))

    def output(self, var: Var) -> Var:
        return var if is_dropped(var) else compat.new_var(var.aval)


def read(env: dict[Var, Atom], atom: Atom) -> Atom:
    """Returns what an atom became: literals and variables not renamed stay."""
    return atom if isinstance(atom, Literal) else env.get(atom, atom)


def rewrite(
    flat: FlatJaxpr, rule: Callable[[Builder, JaxprEqn, list[Atom]], Sequence[Atom] | None]
) -> FlatJaxpr:
    """Returns the jaxpr with every equation replaced by what `rule` appends, where it answers.

    `rule(builder, eqn, inputs)` appends equations and returns the atoms that stand for the
    equation's outputs, or returns None to keep the equation.
    """
    builder = Builder(flat)
    env: dict[Var, Atom] = {}
    for eqn in flat.eqns:
        outputs = rule(builder, eqn, [read(env, x) for x in eqn.invars])
        if outputs is None:
            builder.emit(eqn, env)
        else:
            env.update(zip(eqn.outvars, outputs, strict=True))
    return builder.finish([read(env, x) for x in flat.outvars])


def without_dead(flat: FlatJaxpr) -> FlatJaxpr:
    """Returns the jaxpr without equations that no output and no side effect depends on."""
    return replace(flat, eqns=tuple(eqns_for(flat.eqns, flat.outvars, keep_effects=True)))
