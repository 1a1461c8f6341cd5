"""Save and restore a training state in the user's own layout, whatever the plan."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import optax

from octojax import checkpoint, processes
from octojax.api.pipelined import PipelinedLoss
from octojax.checkpoint import join_layers, split_layers
from octojax.update import Update

if TYPE_CHECKING:
    from octojax.api.step import TrainState, TrainStep


def save(step: "TrainStep", path: str | Path, state: "TrainState", overwrite: bool) -> None:
    """Writes `state` to the folder `path`. All processes bring what they hold to the first,
    which writes; all return when it is written."""
    loss = step.loss
    params, module_state = step.params(state), step.module_state(state)
    opt_state = _opt_state(loss, step.update, step.optimizer, state.opt_state)
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


def _opt_state(
    loss: PipelinedLoss, update: Update, optimizer: optax.GradientTransformation, held: Any
) -> Any:
    """The state in the form of `optimizer.init(params)`. Where the optimizer keeps for a
    stacked leaf something else than the stack of what it keeps for its layers (factored second
    moments may), the layers' own."""
    params = loss.staged.traced.params
    whole = jax.eval_shape(optimizer.init, params.unflatten(_shapes(params)))
    plan = update.plan
    sliced = plan.state_tree.unflatten(plan.state_avals)
    gathered = plan.state_tree.unflatten(_everywhere(loss, update, held))
    return join_layers(gathered, whole) if _stacks(sliced, whole) else gathered


def _everywhere(loss: PipelinedLoss, update: Update, held: Any) -> list[Any]:
    """Every leaf of the optimizer state, in every process."""
    if loss.share is None:
        return jax.tree.leaves(update.gather(held))
    plan, found = update.plan, []
    for k, (owner, aval) in enumerate(zip(plan.state_owners, plan.state_avals, strict=True)):
        rank = update.ranks[0] if owner is None else owner  # every rank has its own copy
        mine = held[rank]
        value = None if mine is None else mine[plan.state_leaves(rank).index(k)]
        found.append(value if owner is None else loss.share.from_owner(value, rank, aval))
    return found


def _stacks(sliced: Any, whole: Any) -> bool:
    try:
        join_layers(sliced, whole)
    except ValueError:
        return False
    return True
