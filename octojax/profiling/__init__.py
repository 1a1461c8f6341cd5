"""Profiles of models: measured on the devices at hand, or estimated for a described machine."""

from octojax.costs import Device, read_machine, seconds
from octojax.profiling.estimate import estimate
from octojax.profiling.links import Link, fit_line, measure_link
from octojax.profiling.measure import measure, measure_layers, measure_machine
from octojax.profiling.state import state_bytes
from octojax.profiling.timing import median_times

__all__ = [
    "Device",
    "Link",
    "estimate",
    "fit_line",
    "measure",
    "measure_layers",
    "measure_link",
    "measure_machine",
    "median_times",
    "read_machine",
    "seconds",
    "state_bytes",
]
