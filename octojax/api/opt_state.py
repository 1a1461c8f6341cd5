"""The optimizer state as the user's tree, and hyperparameters inside it by name."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from octojax.api.state_layout import StateLayout
from octojax.update import OptState, UpdatePlan, gather_state


def opt_state_of(plan: UpdatePlan, opt_state: OptState, layout: StateLayout) -> Any:
    """Returns the tree that `optimizer.init(params)` makes, of what the ranks hold, in every
    process. All processes call this."""
    return gather_state(plan, opt_state, None if layout.share is None else layout.from_owner)


def with_hyperparams(opt_state: Any, values: Mapping[str, Any]) -> Any:
    """Returns an optimizer state with hyperparameters of `optax.inject_hyperparams` set.

    Every part of the state with a dict `hyperparams` that has the name gets the value, cast to
    the type that is there. Raises `ValueError` naming the hyperparameters that no part has, with
    those that there are, and those that a schedule sets anew in every step.
    """
    parts: list[Any] = [x for x in jax.tree.leaves(opt_state, is_leaf=_injected) if _injected(x)]
    names = sorted({name for part in parts for name in part.hyperparams})
    missing = sorted(set(values) - set(names))
    if missing:
        there = f"it has {', '.join(names)}" if names else "it has none"
        raise ValueError(
            f"the optimizer state has no hyperparameter {', '.join(missing)}: {there}. Wrap the "
            f"optimizer, as in optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)"
        )

    scheduled = {n for x in parts for n in getattr(x, "hyperparams_states", ())} & set(values)
    if scheduled:
        raise ValueError(
            f"a schedule sets {', '.join(sorted(scheduled))} anew in every step, so that another "
            f"value would be lost; give the optimizer a number in the place of the schedule"
        )

    def replace(part: Any) -> Any:
        if not _injected(part):
            return part
        new = {
            name: jnp.broadcast_to(jnp.asarray(values[name], old.dtype), old.shape)
            if name in values
            else old
            for name, old in part.hyperparams.items()
        }
        return part._replace(hyperparams=new)

    return jax.tree.map(replace, opt_state, is_leaf=_injected)


def _injected(part: Any) -> bool:
    return isinstance(getattr(part, "hyperparams", None), dict) and hasattr(part, "_replace")
