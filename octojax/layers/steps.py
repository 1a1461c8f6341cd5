"""The activation equations of a loss in order, and what is alive after each."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from octojax import compat
from octojax.jaxprs.count import is_heavy, operations, sub_jaxprs
from octojax.layers import classify
from octojax.layers.borders import Step
from octojax.layers.boundary import MARK
from octojax.layers.classify import Classes, Depends


@dataclass(frozen=True)
class Walk:
    """`chosen[k]` is the index of the k-th activation equation, `live[k]` the values made so
    far by these and still read later, `steps[k]` its figures.
    """

    chosen: tuple[int, ...]
    live: tuple[tuple[Var, ...], ...]
    steps: tuple[Step, ...]


def walk(
    eqns: Sequence[JaxprEqn],
    depends: Classes,
    ends: Iterable[compat.Atom],
    given: Sequence[Var] = (),
    joined: Collection[int] = (),
) -> Walk:
    """Returns the walk over equations of which `ends` are read at the very end.

    `given` are activations that are alive before the first equation, `joined` the equations
    after which there is no cut.
    """
    chosen = tuple(
        at
        for at, eqn in enumerate(eqns)
        if eqn.effects or classify.joined(depends, eqn.invars).is_activation
    )
    live = _live([eqns[at] for at in chosen], ends, given)
    steps = tuple(_step(eqns[at], depends, alive, at in joined) for at, alive in zip(chosen, live))
    return Walk(chosen, live, steps)


def _live(
    eqns: Sequence[JaxprEqn], ends: Iterable[compat.Atom], given: Sequence[Var]
) -> tuple[tuple[Var, ...], ...]:
    last_use: dict[Var, int] = {}
    for k, eqn in enumerate(eqns):
        last_use.update((v, k) for v in eqn.invars if isinstance(v, Var))
    last_use.update((v, len(eqns)) for v in ends if isinstance(v, Var))
    alive: dict[Var, None] = dict.fromkeys(given)
    found = []
    for k, eqn in enumerate(eqns):
        alive.update((v, None) for v in eqn.outvars)
        alive = {v: None for v in alive if last_use.get(v, -1) > k}
        found.append(tuple(alive))
    return tuple(found)


def _step(eqn: JaxprEqn, depends: Classes, alive: tuple[Var, ...], joined: bool) -> Step:
    from_params = [classify.of(depends, x) == Depends.PARAM for x in eqn.invars]
    name = eqn.primitive.name
    embeds = name == "gather" and from_params[0]
    return Step(
        live_bytes=sum(compat.num_bytes(v.aval) for v in alive),
        made_bytes=sum(compat.num_bytes(v.aval) for v in eqn.outvars),
        work=operations(eqn),
        heavy=embeds or is_heavy(eqn),
        reads_params=any(from_params),
        embeds=embeds,
        begins=name.startswith("reduce") or (any(from_params) and any(sub_jaxprs(eqn))),
        marked=name == "name" and eqn.params.get("name") == MARK,
        joined=joined,
    )
