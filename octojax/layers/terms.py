"""Terms of a loss that depend on parameters alone: who adds them.

    loss = mean(ce) + 1e-4 * (|w0|^2 + |w1|^2 + ...)      one term per parameter

A term whose parameters one rank owns is no part of any stage: the owner adds its value and its
gradient once per step. A term that couples parameters of several ranks stays in the last stage,
divided by the number of microbatches, and the last rank holds copies of what it reads.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from octojax import compat
from octojax.compat import Atom, aval_of
from octojax.jaxprs.dataflow import rename, shape_of
from octojax.layers import classify
from octojax.layers.classify import Depends
from octojax.layers.find import LayeredLoss
from octojax.layers.normalize import NormalLoss
from octojax.stages.program import OwnTerm, Role


def place_terms(
    layered: LayeredLoss, owner: Callable[[int], int | None]
) -> tuple[LayeredLoss, tuple[OwnTerm, ...]]:
    """Returns the loss with the terms that stay in it, and the others.

    `owner(unit)` is the rank (or stage) that owns a parameter unit; None: no stage reads it.
    """
    traced, normal = layered.traced, layered.normal
    if not traced.terms:
        return layered, ()
    first = traced.num_emits + len(traced.state)
    own: list[OwnTerm] = []
    coupled: list[tuple[int, Atom]] = []
    for emit, atom in zip(traced.terms, normal.flat.outvars[first:], strict=True):
        units = normal.units_behind([atom]) if isinstance(atom, Var) else ()
        owners = {owner(unit) for unit in units}
        if len(owners) == 1 and None not in owners:
            own.append(_own_term(normal, emit, atom))
        else:
            coupled.append((emit, atom))
    return _with_coupled(layered, coupled, first), tuple(own)


def _own_term(normal: NormalLoss, emit: int, atom: Atom) -> OwnTerm:
    assert isinstance(atom, Var)
    eqns, sources = normal.recomputed([atom], ())
    sources = sorted(
        (v for v in sources if normal.inputs[v].role is Role.PARAM), key=lambda v: normal.inputs[v]
    )
    jaxpr = compat.new_jaxpr(sources, [atom], [normal.flat.eqns[at] for at in sorted(eqns)])
    return OwnTerm(emit, tuple(normal.inputs[v].index for v in sources), jaxpr)


def _with_coupled(
    layered: LayeredLoss, coupled: Sequence[tuple[int, Atom]], first: int
) -> LayeredLoss:
    """Returns the loss whose results contain the coupled terms' share of one microbatch."""
    normal, pieces = layered.normal, layered.traced.pieces
    eqns: list[JaxprEqn] = list(normal.flat.eqns)
    outvars = list(normal.flat.outvars[:first])
    depends = dict(layered.depends)
    steps, live = list(layered.steps), list(layered.live)
    for emit, atom in coupled:
        before = outvars[emit]
        _keep_alive(before, eqns, steps, live)
        scale = np.asarray(1 / pieces, aval_of(before).dtype)
        closed = jax.make_jaxpr(lambda x, term, scale=scale: x + term.astype(x.dtype) * scale)(
            shape_of(before), shape_of(atom)
        )
        names: dict[Var, Atom] = dict(zip(closed.jaxpr.invars, (before, atom), strict=True))
        for eqn in closed.jaxpr.eqns:
            fresh = eqn.replace(
                invars=rename(eqn.invars, names),
                outvars=[compat.new_var(v.aval) for v in eqn.outvars],
            )
            names.update(zip(eqn.outvars, fresh.outvars, strict=True))
            eqns.append(fresh)
            union = classify.union(depends, fresh.invars)
            runs = any(x is before for x in fresh.invars) or union.is_activation
            kind = Depends.PARAM | Depends.BATCH if runs else union
            depends.update((v, kind) for v in fresh.outvars)
            if runs:
                steps.append(len(eqns) - 1)
                live.append(())
        (outvars[emit],) = rename(closed.jaxpr.outvars, names)
    flat = replace(normal.flat, eqns=tuple(eqns), outvars=tuple(outvars))
    return replace(
        layered,
        normal=replace(normal, flat=flat),
        depends=depends,
        steps=tuple(steps),
        live=tuple(live),
    )


def _keep_alive(
    atom: Atom, eqns: Sequence[JaxprEqn], steps: Sequence[int], live: list[tuple[Var, ...]]
) -> None:
    """Sends an activation on to the last stage, which reads it now."""
    if isinstance(atom, Literal):
        return
    positions = [k for k, at in enumerate(steps) if any(v is atom for v in eqns[at].outvars)]
    for k in range(positions[0], len(live)) if positions else ():
        if atom not in live[k]:
            live[k] = (*live[k], atom)
