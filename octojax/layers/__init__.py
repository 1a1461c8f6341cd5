"""Layers of a loss, and the forward programs of the stages that they form."""

from octojax.layers.boundary import boundary
from octojax.layers.cut import Border, StagedLoss, cut_stages
from octojax.layers.find import LayeredLoss, find_layers
from octojax.layers.state import Counters, StateKind, StateLeaf

__all__ = [
    "Border",
    "Counters",
    "LayeredLoss",
    "StagedLoss",
    "StateKind",
    "StateLeaf",
    "boundary",
    "cut_stages",
    "find_layers",
]
