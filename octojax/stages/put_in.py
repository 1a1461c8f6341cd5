"""Gradients that derivative rules of the user's put in, and that are no sums over rows.

amax.defvjp(forward, lambda kept, g: (g, new_amax(kept)))      the second reads no cotangent
scale.defvjp(forward, lambda kept, g: (g, max(abs(g))))        the second mixes all rows of it
"""

from collections.abc import Iterable, Mapping
from typing import Any

from jax.extend.core import Var

from octojax.jaxprs.dataflow import reached_from
from octojax.jaxprs.mixing import Rows, mixing_of
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


def mixed_units(stages: Iterable[Stage]) -> Mapping[int, Any]:
    """Returns the parameter units whose gradient is not a sum over the rows of the batch, each with
    the equation that mixes these, in its stage or in a later one."""
    mixed: dict[int, Any] = {}
    later: Any = None
    for stage in sorted(stages, key=lambda stage: stage.index, reverse=True):
        program = stage.backward
        jaxpr = program.jaxpr.jaxpr
        ends = zip(program.reads, jaxpr.invars, strict=True)
        known = mixing_of(jaxpr.eqns, {v: Rows.ROW for ref, v in ends if ref.role in _COTANGENTS})
        sent = later
        for ref, value in zip(program.writes, jaxpr.outvars, strict=True):
            cause = known.cause(value) or (later if known.of(value) else None)
            if ref.role is Role.PARAM_GRAD and cause is not None:
                mixed.setdefault(ref.index, cause)
            elif ref.role is Role.INPUT_GRAD and sent is None:
                sent = known.cause(value)
        later = sent
    return mixed
