"""The layers of a model as its modules have them: one per element of a list of layers.

The front end cuts where few values are alive, which may be within a module, and joins what it
need not part. A published configuration counts modules: `layers.0`, `layers.1`, ...
"""

import re
from dataclasses import replace
from itertools import pairwise

from octojax.ir.graph import Layer, LayerGraph
from octojax.layers.find import LayeredLoss, units_read

_ELEMENT = re.compile(r"(.*?\.\d+)(?=\.|$)")


def blocks_of(layered: LayeredLoss) -> LayeredLoss:
    """Returns the loss with the borders between modules alone: `layers.3.mixer` and
    `layers.3.mlp` are one layer, `layers.3`."""
    layers = layered.graph.layers
    names = [_block(layer.name) for layer in layers]
    starts = [0, *(at for at in range(1, len(names)) if names[at] != names[at - 1]), len(names)]
    bounds = layered.bounds
    merged = []
    for first, stop in pairwise(starts):
        group = layered.steps[bounds[first] : bounds[stop]]
        units = units_read(layered.normal, layered.depends, group)
        merged.append(
            Layer(
                names[first],
                re.sub(r"\.\d+$", "", names[first]),
                sum(layer.flops for layer in layers[first:stop]),
                sum(map(layered.unit_bytes, units)),
                layers[stop - 1].output_bytes,
            )
        )
    borders = tuple(layered.borders[stop - 1] for stop in starts[1:-1])
    return replace(layered, borders=borders, graph=LayerGraph(tuple(merged)))


def _block(name: str) -> str:
    name = name.partition("/")[0]  # one of several layers of one name
    element = _ELEMENT.match(name)
    return element[1] if element else name.partition(".")[0]
