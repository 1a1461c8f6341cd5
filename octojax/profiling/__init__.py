"""Profiles of models, measured on the devices at hand. The cost model is `octojax.costs`."""

from octojax.profiling.layers import shapes_of
from octojax.profiling.links import Link, fit_line, measure_link
from octojax.profiling.measure import measure, measure_layers, measure_machine
from octojax.profiling.state import state_bytes
from octojax.profiling.timing import median_times

__all__ = [
    "Link",
    "fit_line",
    "measure",
    "measure_layers",
    "measure_link",
    "measure_machine",
    "median_times",
    "shapes_of",
    "state_bytes",
]
