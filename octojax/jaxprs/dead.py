"""Equations that nothing needs, removed."""

from dataclasses import replace

from octojax.jaxprs.dataflow import needed_for
from octojax.jaxprs.flat import FlatJaxpr


def without_dead(flat: FlatJaxpr) -> FlatJaxpr:
    """The jaxpr without equations that no output and no side effect depends on."""
    needed = needed_for(flat.eqns, flat.outvars, keep_effects=True)
    return replace(flat, eqns=tuple(eqn for at, eqn in enumerate(flat.eqns) if at in needed))
