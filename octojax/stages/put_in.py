"""Gradients that derivative rules of the user's put in, whatever the loss is.

amax.defvjp(forward, lambda kept, g: (g, new_amax(kept)))      the second reads no cotangent
"""

from collections.abc import Iterable

from jax.extend.core import Var

from octojax.jaxprs.dataflow import reached_from
from octojax.stages.program import Role, Stage

_COTANGENTS = (Role.OUTPUT_GRAD, Role.SEED)


def put_in_units(stages: Iterable[Stage]) -> frozenset[int]:
    """Returns the parameter units of which a stage makes a gradient without any cotangent.

    A rule that adds its own to what comes back to the same value is not told apart.
    """
    return frozenset(unit for stage in stages for unit in _of_stage(stage))


def _of_stage(stage: Stage) -> Iterable[int]:
    program = stage.backward
    jaxpr = program.jaxpr.jaxpr
    ends = zip(program.reads, jaxpr.invars, strict=True)
    reached = reached_from(jaxpr.eqns, [v for ref, v in ends if ref.role in _COTANGENTS])
    for ref, value in zip(program.writes, jaxpr.outvars, strict=True):
        if ref.role is Role.PARAM_GRAD and not (isinstance(value, Var) and value in reached):
            yield ref.index
