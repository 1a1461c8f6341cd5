"""Save and restore a training state in the user's own layout, whatever the plan."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from octojax import checkpoint, processes

if TYPE_CHECKING:
    from octojax.api.step import TrainState, TrainStep


def save(step: "TrainStep", path: str | Path, state: "TrainState", overwrite: bool) -> None:
    """Writes `state` to the folder `path`. All processes bring what they hold to the first,
    which writes; all return when it is written."""
    loss = step.loss
    params, module_state = step.params(state), step.module_state(state)
    opt_state = step.opt_state(state)
    if jax.process_index() == 0:
        checkpoint.save(
            path,
            params,
            opt_state,
            step=state.step,
            module_state=module_state,
            plan=loss.plan,
            overwrite=overwrite,
        )
    if processes.several():
        processes.barrier("checkpoint")


def restore(step: "TrainStep", path: str | Path) -> tuple[Any, Any, Any, int]:
    """Returns parameters, module state, per-rank optimizer state and step number in `path`.

    Raises `FormatError` naming the leaves that are not those of the step's model and optimizer.
    """
    traced = step.loss.staged.traced
    stored = checkpoint.load(
        path,
        traced.params.unflatten(_shapes(traced.params)),
        step.update.plan.state_shapes,
        None if step.loss.pure.state is None else traced.state.unflatten(_shapes(traced.state)),
    )
    opt_state = step.update.scatter(stored.opt_state)
    return stored.params, stored.module_state, opt_state, stored.step


def _shapes(leaves: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in leaves.avals]
