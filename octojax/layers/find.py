"""From a traced loss to its chain of layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import Var

from octojax import compat
from octojax.errors import LossError
from octojax.ir.graph import Layer, LayerGraph
from octojax.jaxprs.count import operations
from octojax.layers import classify
from octojax.layers.borders import find_borders
from octojax.layers.classify import Depends
from octojax.layers.names import name_layers
from octojax.layers.normalize import NormalLoss, normalize
from octojax.layers.open import Remat
from octojax.layers.steps import Walk, walk
from octojax.layers.twins import side_by_side
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

    def unit_bytes(self, unit: int) -> int:
        """Bytes of a parameter unit."""
        return compat.num_bytes(self.normal.unit_avals[unit])


def find_layers(traced: TracedLoss, min_layers: int = 1) -> LayeredLoss:
    """Returns the layers of a loss, found from the values alive after each equation.

    Cuts finer than a block or half a block, and inside checkpointed blocks, are made only
    where `min_layers` asks for them. There may still be fewer.

    Raises:
        LossError: the loss depends on no parameter.
    """
    layered = _find(traced, normalize(traced, Remat.LARGE), min_layers)
    if layered.graph.num_layers >= min_layers:
        return layered
    return _find(traced, normalize(traced, Remat.ALL), min_layers)


def _find(traced: TracedLoss, normal: NormalLoss, min_layers: int) -> LayeredLoss:
    depends = classify.classify(normal.flat.eqns, normal.depends)
    loss = normal.flat.outvars[0]
    _check(classify.of(depends, loss))
    arrangement = side_by_side(normal, depends)
    normal = arrangement.normal
    walked = walk(normal.flat.eqns, depends, [loss], inseparable=arrangement.inseparable)
    borders = find_borders(walked.steps, min_layers)
    layers = _layers(normal, depends, walked, borders)
    return LayeredLoss(
        traced, normal, depends, walked.activations, borders, walked.live, LayerGraph(layers)
    )


def _check(depends: Depends) -> None:
    if not depends & Depends.PARAM:
        raise LossError(
            "the loss depends on no parameter, so there is nothing to train. Check that the "
            "loss uses the parameters passed to it, not a copy that it closes over"
        )


def _layers(
    normal: NormalLoss,
    depends: Mapping[Var, Depends],
    walked: Walk,
    borders: Sequence[int],
) -> tuple[Layer, ...]:
    eqns = normal.flat.eqns
    ends = [*(p + 1 for p in borders), len(walked.activations)]
    groups = [walked.activations[start:stop] for start, stop in zip([0, *ends], ends)]
    reads = [units_read(normal, depends, group) for group in groups]
    named = name_layers(normal, depends, groups)
    return tuple(
        Layer(
            name=name,
            kind=kind,
            flops=sum(operations(eqns[at]) for at in group),
            param_bytes=sum(compat.num_bytes(normal.unit_avals[u]) for u in units),
            output_bytes=sum(compat.num_bytes(v.aval) for v in walked.live[stop - 1]),
        )
        for (name, kind), group, units, stop in zip(named, groups, reads, ends)
    )


def units_read(
    normal: NormalLoss, depends: Mapping[Var, Depends], group: Sequence[int]
) -> tuple[int, ...]:
    """Returns the parameter units that a group's equations read, through what they recompute."""
    return normal.units_behind(
        classify.side_inputs((normal.flat.eqns[at] for at in group), depends)
    )
