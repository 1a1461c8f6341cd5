"""The simulator: a plan and its costs in, a timeline out. Its exact meaning: `simulator.py`."""

from octojax.simulate.costs import LayerCosts, StageCosts, uniform_partition
from octojax.simulate.evaluate import Evaluation, evaluate
from octojax.simulate.links import Links
from octojax.simulate.simulator import simulate
from octojax.simulate.table import Table

__all__ = [
    "Evaluation",
    "LayerCosts",
    "Links",
    "StageCosts",
    "Table",
    "evaluate",
    "simulate",
    "uniform_partition",
]
