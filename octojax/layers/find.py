"""From a traced loss to its chain of layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Literal, Var

from octojax import compat
from octojax.errors import LossError
from octojax.ir.graph import Layer, LayerGraph
from octojax.jaxprs.count import is_heavy, operations
from octojax.layers import classify
from octojax.layers.boundary import MARK
from octojax.layers.borders import Step, find_borders
from octojax.layers.classify import Depends
from octojax.layers.names import name_layers
from octojax.layers.normalize import NormalLoss, normalize
from octojax.trace import TracedLoss


@dataclass(frozen=True)
class LayeredLoss:
    """A loss whose activation equations are dealt out to layers.

    `steps[k]` is the index in `normal.flat.eqns` of the k-th activation equation, `borders`
    are positions in `steps` after which one layer ends, `live[k]` the values that a cut after
    step k must send, in order of definition.
    """

    traced: TracedLoss
    normal: NormalLoss
    depends: Mapping[Var, Depends]
    steps: tuple[int, ...]
    borders: tuple[int, ...]
    live: tuple[tuple[Var, ...], ...]
    graph: LayerGraph

    @property
    def bounds(self) -> tuple[int, ...]:
        """Layer i holds steps `bounds[i]` to `bounds[i + 1] - 1`."""
        return (0, *(p + 1 for p in self.borders), len(self.steps))


def find_layers(traced: TracedLoss, min_layers: int = 1) -> LayeredLoss:
    """The layers of a loss, found from the values alive after each equation.

    Cuts finer than a block or half a block are made only where `min_layers` asks for them.

    Raises:
        LossError: the loss depends on no parameter, or on parameters only.
    """
    normal = normalize(traced)
    eqns = normal.flat.eqns
    depends = classify.classify(eqns, normal.depends)
    _check(classify.of(depends, normal.flat.outvars[0]))
    chosen = tuple(
        at
        for at, eqn in enumerate(eqns)
        if eqn.effects or classify.joined(depends, eqn.invars).is_activation
    )
    live = _live(eqns, chosen, normal.flat.outvars[0])
    steps = [_step(eqns[at], depends, alive) for at, alive in zip(chosen, live)]
    borders = find_borders(steps, min_layers)
    layers = _layers(normal, depends, chosen, borders, live)
    return LayeredLoss(traced, normal, depends, chosen, borders, live, LayerGraph(layers))


def _check(depends: Depends) -> None:
    if not depends & Depends.PARAM:
        raise LossError(
            "the loss depends on no parameter, so there is nothing to train. Check that the "
            "loss uses the parameters passed to it, not a copy that it closes over"
        )


def _live(
    eqns: Sequence[JaxprEqn], chosen: Sequence[int], loss: Var | Literal
) -> tuple[tuple[Var, ...], ...]:
    """After each step, the values made so far by steps and still read later.

    The loss counts as read at the very end, so that the last stage emits it.
    """
    last_use: dict[Var, int] = {}
    for k, at in enumerate(chosen):
        last_use.update((v, k) for v in eqns[at].invars if isinstance(v, Var))
    if isinstance(loss, Var):
        last_use[loss] = len(chosen)
    alive: dict[Var, None] = {}
    found = []
    for k, at in enumerate(chosen):
        alive.update((v, None) for v in eqns[at].outvars)
        alive = {v: None for v in alive if last_use.get(v, -1) > k}
        found.append(tuple(alive))
    return tuple(found)


def _step(eqn: JaxprEqn, depends: Mapping[Var, Depends], alive: tuple[Var, ...]) -> Step:
    from_params = [classify.of(depends, x) == Depends.PARAM for x in eqn.invars]
    embeds = eqn.primitive.name == "gather" and from_params[0]
    return Step(
        live_bytes=sum(compat.num_bytes(v.aval) for v in alive),
        work=operations(eqn),
        heavy=embeds or is_heavy(eqn),
        reads_params=any(from_params),
        embeds=embeds,
        marked=eqn.primitive.name == "name" and eqn.params.get("name") == MARK,
    )


def _layers(
    normal: NormalLoss,
    depends: Mapping[Var, Depends],
    chosen: Sequence[int],
    borders: Sequence[int],
    live: Sequence[tuple[Var, ...]],
) -> tuple[Layer, ...]:
    eqns = normal.flat.eqns
    ends = [*(p + 1 for p in borders), len(chosen)]
    groups = [chosen[start:stop] for start, stop in zip([0, *ends], ends)]
    reads = [units_read(normal, depends, group) for group in groups]
    named = name_layers(normal, depends, groups)
    return tuple(
        Layer(
            name=name,
            kind=kind,
            flops=sum(operations(eqns[at]) for at in group),
            param_bytes=sum(compat.num_bytes(normal.unit_avals[u]) for u in units),
            output_bytes=sum(compat.num_bytes(v.aval) for v in live[stop - 1]),
        )
        for (name, kind), group, units, stop in zip(named, groups, reads, ends)
    )


def units_read(
    normal: NormalLoss, depends: Mapping[Var, Depends], group: Sequence[int]
) -> tuple[int, ...]:
    """The parameter units that the equations of a group read, through what they recompute."""
    wanted = [
        v
        for at in group
        for v in normal.flat.eqns[at].invars
        if isinstance(v, Var) and not classify.of(depends, v).is_activation
    ]
    return normal.units_behind(wanted)
