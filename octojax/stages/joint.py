"""Traces a stage and its derivative as one list of equations, and tells the two apart.

    joint(inputs, cotangents):  forward equations | marker | backward equations

Every equation traced before the cotangents come into play belongs to the forward program, also
those that a `jax.checkpoint` will repeat; what follows belongs to the backward one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var, jaxpr_as_fun

from octojax.jaxprs.dataflow import (
    Atom,
    aval_of,
    is_var,
    reached_from,
    rename,
    shape_of,
    substitute,
)
from octojax.jaxprs.inline_calls import inline_calls
from octojax.jaxprs.thin_stacks import thin_stacks
from octojax.stages.program import Program, Ref, Role


@dataclass(frozen=True)
class Joint:
    """A stage's forward and backward equations over shared variables.

    `inputs` and `outputs` follow the reads and writes of the forward program. `cotangents` and
    `grads` say which gradients come in and which go out; a gradient that is zero whatever the
    cotangents are is not listed.
    """

    template: Program
    inputs: dict[Ref, Var]
    outputs: dict[Ref, Atom]
    cotangents: dict[Ref, Var]
    grads: dict[Ref, Atom]
    forward: tuple[JaxprEqn, ...]
    backward: tuple[JaxprEqn, ...]


def trace_joint(program: Program, wanted: Sequence[Ref], cotangents: Sequence[Ref]) -> Joint:
    """Returns the stage with its gradient for the reads in `wanted`.

    `cotangents` are OUTPUT_GRAD refs and possibly SEED, the cotangent of EMIT 0.
    """
    reads, writes = list(program.reads), list(program.writes)
    at = [reads.index(r) for r in wanted]
    pulled = [writes.index(primal_of(c)) for c in cotangents]
    run = jaxpr_as_fun(program.jaxpr)
    outs = program.jaxpr.jaxpr.outvars

    def joint(values, gradients):
        def differentiable(some):
            full = list(values)
            for i, x in zip(at, some, strict=True):
                full[i] = x
            results = run(*full)
            return [results[i] for i in pulled], results

        _, pull, results = jax.vjp(differentiable, [values[i] for i in at], has_aux=True)
        gradients = jax.lax.optimization_barrier(gradients)
        gradients = [
            jnp.reshape(g, aval_of(outs[i]).shape).astype(aval_of(outs[i]).dtype)
            for g, i in zip(gradients, pulled, strict=True)
        ]
        return results, pull(gradients)[0]

    values = [shape_of(v) for v in program.jaxpr.jaxpr.invars]
    gradients = [shape_of(outs[i]) for i in pulled]
    if not (at and pulled):
        return _without_backward(program, values)
    closed = inline_calls(jax.make_jaxpr(joint)(values, gradients))
    jaxpr = closed.jaxpr
    inputs = dict(zip(reads, jaxpr.invars, strict=False))
    incoming = jaxpr.invars[len(reads) :]
    marker = next(i for i, e in enumerate(jaxpr.eqns) if list(e.invars) == list(incoming))
    names: dict[Var, Atom] = dict(zip(jaxpr.eqns[marker].outvars, incoming, strict=True))
    forward, thinner = thin_stacks(jaxpr.eqns[:marker])
    names |= thinner
    backward = substitute(jaxpr.eqns[marker + 1 :], names)
    ends = rename(jaxpr.outvars, names)
    touched = reached_from(backward, incoming)
    grads: dict[Ref, Atom] = {
        Ref(_GRAD_OF[r.role], r.index): v
        for r, v in zip(wanted, ends[len(writes) :], strict=True)
        if is_var(v) and v in touched
    }
    return Joint(
        template=program,
        inputs=inputs,
        outputs=dict(zip(writes, ends, strict=False)),
        cotangents=dict(zip(cotangents, incoming, strict=True)),
        grads=grads,
        forward=tuple(forward),
        backward=tuple(backward),
    )


def primal_of(cotangent: Ref) -> Ref:
    """Returns the write whose cotangent this is."""
    if cotangent.role is Role.SEED:
        return Ref(Role.EMIT, 0)
    return Ref(Role.OUTPUT, cotangent.index)


_GRAD_OF = {Role.PARAM: Role.PARAM_GRAD, Role.INPUT: Role.INPUT_GRAD}


def _without_backward(program: Program, values: Sequence[jax.ShapeDtypeStruct]) -> Joint:
    closed = inline_calls(jax.make_jaxpr(jaxpr_as_fun(program.jaxpr))(*values))
    return Joint(
        template=program,
        inputs=dict(zip(program.reads, closed.jaxpr.invars, strict=True)),
        outputs=dict(zip(program.writes, closed.jaxpr.outvars, strict=True)),
        cotangents={},
        grads={},
        forward=tuple(closed.jaxpr.eqns),
        backward=(),
    )
