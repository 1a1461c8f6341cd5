"""Save and restore a training state in the user's own layout, whatever the plan."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import optax

from octojax import checkpoint, processes
from octojax.api.pipelined import PipelinedLoss
from octojax.checkpoint import Slices, join_layers, split_layers
from octojax.programs.recipe import unstored
from octojax.update import Update

if TYPE_CHECKING:
    from octojax.api.step import TrainState, TrainStep


def save(step: "TrainStep", path: str | Path, state: "TrainState", overwrite: bool) -> None:
    """Writes `state` to the folder `path`; every process writes what its ranks hold."""
    loss = step.loss
    module_state = step.module_state(state)  # all processes take part in gathering it
    first = jax.process_index() == 0
    checkpoint.save(
        path,
        _params(loss, state.held.units),
        _opt_state(loss, step.update, step.optimizer, state.opt_state),
        step=state.step,
        module_state=module_state if first else None,
        plan=loss.plan,
        part=jax.process_index(),
        num_parts=jax.process_count(),
        barrier=(lambda: processes.barrier("checkpoint")) if processes.several() else None,
        overwrite=overwrite,
    )


def restore(step: "TrainStep", path: str | Path) -> tuple[Any, Any, Any, int]:
    """Returns parameters, module state, per-rank optimizer state and step number in `path`.

    Raises `FormatError` naming the leaves that are not those of the step's model and optimizer.
    """
    traced, plan = step.loss.staged.traced, step.update.plan
    sliced = plan.state_tree.unflatten(plan.state_avals)
    whole = jax.eval_shape(step.optimizer.init, traced.params.unflatten(_shapes(traced.params)))
    found = checkpoint.load(
        path,
        traced.params.unflatten(_shapes(traced.params)),
        whole if _stacks(sliced, whole) else sliced,
        None if step.loss.pure.state is None else traced.state.unflatten(_shapes(traced.state)),
    )
    opt_state = found.opt_state
    if _stacks(sliced, whole):
        opt_state = split_layers(opt_state, sliced)
    return found.params, found.module_state, step.update.scatter(opt_state), found.step


def _shapes(leaves: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in leaves.avals]


def _params(loss: PipelinedLoss, units: Any) -> Any:
    """The user's tree, with `Slices` where a leaf is cut and None where another process has it."""
    staged = loss.staged
    params = staged.traced.params
    here = loss.mesh.local_ranks
    leaves: list[Any] = [None] * len(params)
    slices: dict[int, dict[int, Any]] = {}
    for unit, (where, aval) in enumerate(zip(staged.units, staged.unit_avals, strict=True)):
        if where.leaf >= len(params):
            continue
        value = unstored(units[unit], aval) if loss.owners[unit] in here else None
        if where.index is None:
            leaves[where.leaf] = value
        else:
            slices.setdefault(where.leaf, {})[where.index] = value
    for leaf, pieces in slices.items():
        leaves[leaf] = Slices(tuple(pieces[i] for i in range(len(pieces))))
    return params.unflatten(leaves)


def _opt_state(
    loss: PipelinedLoss, update: Update, optimizer: optax.GradientTransformation, held: Any
) -> Any:
    """The state in the form of `optimizer.init(params)`. Where the optimizer keeps for a
    stacked leaf something else than the stack of what it keeps for its layers (factored second
    moments may), the layers' own."""
    params = loss.staged.traced.params
    whole = jax.eval_shape(optimizer.init, params.unflatten(_shapes(params)))
    sliced = update.plan.state_tree.unflatten(update.plan.state_avals)
    gathered = update.gather(held)
    return join_layers(gathered, whole) if _stacks(sliced, whole) else gathered


def _stacks(sliced: Any, whole: Any) -> bool:
    try:
        join_layers(sliced, whole)
    except ValueError:
        return False
    return True
