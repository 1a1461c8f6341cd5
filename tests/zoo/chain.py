"""Forward stages run one after the other, as the plainest of executors would."""

from typing import Any

import jax
import jax.numpy as jnp

from octojax import compat
from octojax.layers import StagedLoss
from octojax.stages.program import ParamUnit, Ref, Role


def unit_value(unit: ParamUnit, leaves: list[Any]) -> Any:
    """The array of a parameter unit, from the leaves of params, state and constants."""
    leaf = leaves[unit.leaf]
    return leaf if unit.index is None else leaf[unit.index]


def run_chain(staged: StagedLoss, params: Any, state: Any, batch: Any) -> tuple[list[Any], Any]:
    """The `(emits, new_state leaves)` of one microbatch through all stages in order."""
    state_leaves = [jnp.asarray(x) for x in jax.tree.leaves(state)]
    leaves = [*jax.tree.leaves(params), *state_leaves, *staged.constants]
    values = {
        **{Ref(Role.PARAM, u): unit_value(x, leaves) for u, x in enumerate(staged.units)},
        **{Ref(Role.STATE, i): x for i, x in enumerate(state_leaves)},
        **{Ref(Role.BATCH, i): x for i, x in enumerate(jax.tree.leaves(batch))},
    }
    inputs: dict[Ref, Any] = {}
    written: dict[Ref, Any] = {}
    for stage in staged.forwards:
        program = stage.forward
        args = [(values | inputs)[ref] for ref in program.reads]
        results = dict(zip(program.writes, compat.eval_jaxpr(program.jaxpr, args)))
        inputs = {
            Ref(Role.INPUT, ref.index): x for ref, x in results.items() if ref.role is Role.OUTPUT
        }
        written |= results
    counted = compat.eval_jaxpr(
        staged.counters.jaxpr, [values[ref] for ref in staged.counters.reads]
    )
    new_state = dict(enumerate(state_leaves)) | dict(zip(staged.counters.leaves, counted))
    for ref, x in written.items():
        if ref.role is Role.NEW_STATE:
            new_state[ref.index] = x
    emits = [written[Ref(Role.EMIT, i)] for i in range(len(staged.emits))]
    return emits, [new_state[i] for i in range(len(state_leaves))]
