"""A scan or cond equation taken apart and put together again, in both JAX versions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from octojax.compat import new_jaxpr, scan_counts, scan_params
from octojax.jaxprs.dataflow import Atom, eqns_for, free_vars

NOTHING: Mapping[Var, Var] = MappingProxyType({})


@dataclass(frozen=True)
class Loop:
    """A scan or cond equation taken apart: body variables with the outer atoms they stand for."""

    eqn: JaxprEqn
    body: tuple[JaxprEqn, ...]
    consts: dict[Var, Atom]
    carry: tuple[tuple[Var, Atom], ...]  # (variable at the start of a step, initial value)
    xs: dict[Var, Atom]
    ends: tuple[Atom, ...]  # carries at the end of a step, then what is stacked
    outs: tuple[Var, ...]

    @property
    def length(self) -> int:
        return self.eqn.params["length"]


def open_loop(eqn: JaxprEqn) -> Loop:
    """Returns the parts of a scan equation."""
    body, params = eqn.params["jaxpr"].jaxpr, eqn.params
    n, carried = scan_counts(params)
    c = n + carried
    pairs = list(zip(body.invars, eqn.invars, strict=True))
    return Loop(
        eqn,
        tuple(body.eqns),
        dict(pairs[:n]),
        tuple(pairs[n:c]),
        dict(pairs[c:]),
        tuple(body.outvars),
        tuple(eqn.outvars),
    )


def close_loop(loop: Loop) -> JaxprEqn:
    """Returns the scan equation made of these parts; unread constants and inputs are left out."""
    pairs = [*loop.consts.items(), *loop.carry, *loop.xs.items()]
    body = new_jaxpr([v for v, _ in pairs], loop.ends, loop.body)
    counts = len(loop.consts), len(loop.carry), len(loop.xs), len(loop.ends) - len(loop.carry)
    params = scan_params({**loop.eqn.params, "jaxpr": body}, *counts)
    effects = frozenset(x for e in loop.body for x in e.effects)
    return loop.eqn.replace(
        invars=[a for _, a in pairs], outvars=list(loop.outs), params=params, effects=effects
    )


def settle_late(eqn: JaxprEqn, late: set[int]) -> set[int]:
    """Returns the late outputs that no step's other outputs depend on through the carry."""
    loop = open_loop(eqn)
    while True:
        early = [v for i, v in enumerate(loop.ends) if i not in late]
        needed = eqns_for(loop.body, early)
        read = set(free_vars(needed, early))
        wrong = {i for i in late if i < len(loop.carry) and loop.carry[i][0] in read}
        if not wrong:
            return late
        late = late - wrong


def restrict_loop(
    loop: Loop,
    body: Sequence[JaxprEqn],
    outputs: Sequence[int],
    stacked_inputs: Mapping[Var, Var] = NOTHING,
    stacks: Mapping[Var, Var] = NOTHING,
) -> Loop:
    """Returns the loop over `body` that makes the outputs at these positions, and more stacks.

    `stacks` are body values to be stacked under new names;
    `stacked_inputs` are body values that come in stacked, under the names of their stacks.
    """
    carries = len(loop.carry)
    carry = tuple(loop.carry[i] for i in outputs if i < carries)
    ends = [loop.ends[i] for i in outputs] + list(stacks)
    needed = eqns_for(body, ends)
    read = set(free_vars(needed, ends))
    return replace(
        loop,
        body=tuple(needed),
        consts={v: a for v, a in loop.consts.items() if v in read},
        carry=carry,
        xs={v: a for v, a in {**loop.xs, **stacked_inputs}.items() if v in read},
        ends=tuple(ends),
        outs=(*(loop.outs[i] for i in outputs), *stacks.values()),
    )


def close_cond(
    eqn: JaxprEqn,
    branches: Sequence[ClosedJaxpr],
    invars: Sequence[Atom],
    outvars: Sequence[Var],
) -> JaxprEqn:
    """Returns the cond over these branches without the operands that none of them reads."""
    opened = [b.jaxpr for b in branches]
    read = [set(free_vars(b.eqns, b.outvars)) for b in opened]
    used = [
        at
        for at in range(len(invars) - 1)
        if any(b.invars[at] in r for b, r in zip(opened, read, strict=True))
    ]
    trimmed = tuple(new_jaxpr([b.invars[at] for at in used], b.outvars, b.eqns) for b in opened)
    return eqn.replace(
        invars=[invars[0], *(invars[at + 1] for at in used)],
        outvars=list(outvars),
        params={**eqn.params, "branches": trimmed},
        effects=frozenset(x for b in trimmed for x in b.effects),
    )
