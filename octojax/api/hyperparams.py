"""Hyperparameters inside an optimizer state, by name."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp


def with_hyperparams(opt_state: Any, values: Mapping[str, Any]) -> Any:
    """Returns an optimizer state with hyperparameters of `optax.inject_hyperparams` set.

    Every part of the state with a dict `hyperparams` that has the name gets the value, cast to
    the type that is there. Raises `ValueError` naming the hyperparameters that no part has and
    those that there are.
    """
    parts = [x for x in jax.tree.leaves(opt_state, is_leaf=_injected) if _injected(x)]
    known = sorted({name for part in parts for name in part.hyperparams})
    missing = sorted(set(values) - set(known))
    if missing:
        there = f"it has {', '.join(known)}" if known else "it has none"
        raise ValueError(
            f"the optimizer state has no hyperparameter {', '.join(missing)}: {there}. Wrap the "
            f"optimizer, as in optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)"
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
