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
        **{Ref(Role.STATE, s.index): s.value(state_leaves) for s in staged.state},
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
    new_state = {s.index: s.value(state_leaves) for s in staged.state}
    new_state |= dict(zip(staged.counters.leaves, counted))
    for ref, x in written.items():
        if ref.role is Role.NEW_STATE:
            new_state[ref.index] = x
    leaves_of: dict[int, list[Any]] = {}
    for s in staged.state:
        leaves_of.setdefault(s.leaf, []).append(new_state[s.index])
    stacked = {s.leaf for s in staged.state if s.row is not None}
    emits = [written[Ref(Role.EMIT, i)] for i in range(len(staged.emits))]
    return emits, [jnp.stack(x) if i in stacked else x[0] for i, x in leaves_of.items()]
