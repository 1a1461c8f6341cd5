"""Traces a stage and its derivative as one list of equations, and tells the two apart.

    joint(inputs, cotangents):  forward equations | marker | backward equations

Every equation traced before the cotangents come into play belongs to the forward program, also
those that a `jax.checkpoint` will repeat; what follows belongs to the backward one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn, Var, jaxpr_as_fun

from octojax.jaxprs.dataflow import (
    Atom,
    aval_of,
    rename,
    shape_of,
    substitute,
)
from octojax.jaxprs.inline import inline_calls
from octojax.jaxprs.linear import is_zero, zero_values
from octojax.jaxprs.thin_stacks import thin_stacks
from octojax.stages.program import Program, Ref, Role


@dataclass(frozen=True)
class Joint:
    """A stage's forward and backward equations over shared variables.

    `inputs` and `outputs` follow the reads and writes of the forward program. `cotangents` and
    `grads` say which gradients come in and which go out. A parameter whose gradient is zero
    whatever comes in is not listed, nor is an input that no derivative reaches. A rule of the
    user's may make a gradient of no cotangent at all: a value of the forward, or a number.
    `silent` are inputs that a derivative reaches without a gradient, as after a rule that returns
    None for them: JAX still calls the rules of what they come from.
    """

    inputs: dict[Ref, Var]
    outputs: dict[Ref, Atom]
    cotangents: dict[Ref, Var]
    grads: dict[Ref, Atom]
    silent: frozenset[Ref]
    forward: tuple[JaxprEqn, ...]
    backward: tuple[JaxprEqn, ...]


def trace_joint(
    program: Program,
    targets: Sequence[Ref],
    cotangents: Sequence[Ref],
    silent: Sequence[Ref] = (),
) -> Joint:
    """Returns the stage with its gradient for the reads in `targets`.

    `cotangents` are OUTPUT_GRAD refs and possibly SEED, the cotangent of EMIT 0. `silent` are
    the OUTPUT_GRADs of the next stage's silent inputs.
    """
    reads, writes = list(program.reads), list(program.writes)
    place = {ref: i for i, ref in enumerate(reads)}
    at = [place[r] for r in targets]
    pulled = [writes.index(primal_of(c)) for c in cotangents]
    muted = [writes.index(primal_of(c)) for c in silent]
    run = jaxpr_as_fun(program.jaxpr)
    outs = program.jaxpr.jaxpr.outvars
    reached: dict[Ref, bool] = {}

    def joint(values, gradients):
        def differentiable(some):
            full = list(values)
            for i, x in zip(at, some, strict=True):
                full[i] = _watched(x, reads[i], reached) if reads[i].role is Role.INPUT else x
            results = run(*full)
            return [*(results[i] for i in pulled), *(_muted(results[i]) for i in muted)], results

        _, pull, results = jax.vjp(differentiable, [values[i] for i in at], has_aux=True)
        *gradients, _ = jax.lax.optimization_barrier(gradients)
        gradients = [
            jnp.reshape(g, aval_of(outs[i]).shape).astype(aval_of(outs[i]).dtype)
            for g, i in zip(gradients, pulled, strict=True)
        ]
        nothing = [jnp.zeros_like(results[i]) for i in muted]
        return results, pull([*gradients, *nothing])[0]

    values = [shape_of(v) for v in program.jaxpr.jaxpr.invars]
    gradients = [shape_of(outs[i]) for i in pulled]
    if not (at and (pulled or muted)):
        return _without_backward(program, values)
    marked = [*gradients, jax.ShapeDtypeStruct((), jnp.float32)]  # there may be no other
    closed = inline_calls(jax.make_jaxpr(joint)(values, marked))
    jaxpr = closed.jaxpr
    inputs = dict(zip(reads, jaxpr.invars, strict=False))
    incoming = jaxpr.invars[len(reads) :]
    marker = next(i for i, e in enumerate(jaxpr.eqns) if list(e.invars) == list(incoming))
    names: dict[Var, Atom] = dict(zip(jaxpr.eqns[marker].outvars, incoming, strict=True))
    forward, thinner = thin_stacks(jaxpr.eqns[:marker])
    names |= thinner
    backward = substitute(jaxpr.eqns[marker + 1 :], names)
    ends = rename(jaxpr.outvars, names)
    zeros = zero_values(backward)
    grads: dict[Ref, Atom] = {
        Ref(_GRAD_OF[r.role], r.index): v
        for r, v in zip(targets, ends[len(writes) :], strict=True)
        if (reached.get(r, False) if r.role is Role.INPUT else not is_zero(v, zeros))
    }
    return Joint(
        inputs=inputs,
        outputs=dict(zip(writes, ends, strict=False)),
        cotangents=dict(zip(cotangents, incoming, strict=False)),
        grads=grads,
        silent=frozenset(r for r, some in reached.items() if not some),
        forward=tuple(forward),
        backward=tuple(backward),
    )


def primal_of(cotangent: Ref) -> Ref:
    """Returns the write whose cotangent this is."""
    if cotangent.role is Role.SEED:
        return Ref(Role.EMIT, 0)
    return Ref(Role.OUTPUT, cotangent.index)


_GRAD_OF = {Role.PARAM: Role.PARAM_GRAD, Role.INPUT: Role.INPUT_GRAD}


def _watched(x: jax.Array, name: Ref, reached: dict[Ref, bool]) -> jax.Array:
    """Returns `x`; in tracing notes whether a derivative comes back, and with a gradient."""

    @jax.custom_vjp
    def watched(x):
        return x

    def back(_, gradient):
        reached[name] = not isinstance(gradient, SymbolicZero)
        return (gradient,)

    watched.defvjp(lambda x: (x.value, None), back, symbolic_zeros=True)
    return watched(x)


@jax.custom_vjp
def _muted(x: jax.Array) -> jax.Array:
    """Returns `x`, from which a derivative comes back without a gradient."""
    return x


_muted.defvjp(lambda x: (x, None), lambda _, gradient: (None,))


def _without_backward(program: Program, values: Sequence[jax.ShapeDtypeStruct]) -> Joint:
    closed = inline_calls(jax.make_jaxpr(jaxpr_as_fun(program.jaxpr))(*values))
    return Joint(
        inputs=dict(zip(program.reads, closed.jaxpr.invars, strict=True)),
        outputs=dict(zip(program.writes, closed.jaxpr.outvars, strict=True)),
        cotangents={},
        grads={},
        silent=frozenset(),
        forward=tuple(closed.jaxpr.eqns),
        backward=(),
    )
