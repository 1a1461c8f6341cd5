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
    """`activations[k]` is the index of the k-th activation equation, `live[k]` the values that are
    read after it, `steps[k]` its figures.
    """

    activations: tuple[int, ...]
    live: tuple[tuple[Var, ...], ...]
    steps: tuple[Step, ...]


def walk(
    eqns: Sequence[JaxprEqn],
    depends: Classes,
    ends: Iterable[compat.Atom],
    inputs: Sequence[Var] = (),
    inseparable: Collection[int] = (),
) -> Walk:
    """Returns the walk over equations of which `ends` are read at the very end.

    `inputs` are activations alive before the first equation, `inseparable` the equations
    after which there is no cut.
    """
    activations = classify.activations(eqns, depends)
    live = _live([eqns[at] for at in activations], ends, inputs)
    steps = tuple(
        _step(eqns[at], depends, alive, at in inseparable) for at, alive in zip(activations, live)
    )
    return Walk(activations, live, steps)


def _live(
    eqns: Sequence[JaxprEqn], ends: Iterable[compat.Atom], inputs: Sequence[Var]
) -> tuple[tuple[Var, ...], ...]:
    last_use: dict[Var, int] = {}
    for k, eqn in enumerate(eqns):
        last_use.update((v, k) for v in eqn.invars if isinstance(v, Var))
    last_use.update((v, len(eqns)) for v in ends if isinstance(v, Var))
    alive: dict[Var, None] = dict.fromkeys(inputs)
    live = []
    for k, eqn in enumerate(eqns):
        alive.update((v, None) for v in eqn.outvars)
        alive = {v: None for v in alive if last_use.get(v, -1) > k}
        live.append(tuple(alive))
    return tuple(live)


def _step(eqn: JaxprEqn, depends: Classes, alive: tuple[Var, ...], inseparable: bool) -> Step:
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
        inseparable=inseparable,
    )
