"""Save and restore a training state in the user's own layout, whatever the plan."""

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from octojax import checkpoint, errors, processes
from octojax.api.agreement import value_facts
from octojax.errors import ExecutionError, OctoPipeError
from octojax.trace import path_name

if TYPE_CHECKING:
    from octojax.api.step import TrainState, TrainStep


def save(step: "TrainStep", path: str | Path, state: "TrainState", overwrite: bool) -> None:
    """Writes `state` to the folder `path`. All processes bring what they hold to the first,
    which writes, however long it takes; all return when it is written, or raise its error."""
    loss = step.loss
    _in_first(lambda: checkpoint.check_writable(path, overwrite), f"step.save, step {state.step}")
    params, module_state = step.params(state), step.module_state(state)
    opt_state = step.opt_state(state)

    def write() -> None:
        checkpoint.save(
            path,
            params,
            opt_state,
            step=state.step,
            module_state=module_state,
            plan=loss.plan,
            overwrite=overwrite,
        )

    _in_first(write, "step.save, written")


def _in_first(work: Callable[[], None], topic: str) -> None:
    """Does `work` in process 0; returns, or raises its error, in every process."""
    error: Exception | None = None
    if jax.process_index() == 0:
        try:
            with processes.busy("writing the checkpoint"):
                work()
        except Exception as raised:
            error = raised
    told = "" if error is None else json.dumps([type(error).__name__, str(error)])
    text = processes.everyone(told, topic)[0]
    if error is not None:
        raise error
    if text:
        kind, message = json.loads(text)
        raise _kind(kind)(message)


def _kind(name: str) -> type[Exception]:
    """The type of an error by its name, if it is one of ours or of Python's."""
    kind = getattr(errors, name, getattr(builtins, name, None))
    if isinstance(kind, type) and issubclass(kind, (OSError, OctoPipeError)):
        return kind
    return {"ValueError": ValueError, "TypeError": TypeError}.get(name, ExecutionError)


def restore(step: "TrainStep", path: str | Path) -> tuple[Any, Any, Any, int]:
    """Returns parameters, module state, per-rank optimizer state and step number in `path`.

    Raises `FormatError` naming the leaves that are not those of the step's model and optimizer;
    in several processes `ExecutionError` where the path holds no checkpoint for one of them.
    """
    stored = _load(step, path)
    opt_state = step.update.scatter(stored.opt_state)
    return stored.params, stored.module_state, opt_state, stored.step


def _load(step: "TrainStep", path: str | Path) -> checkpoint.Checkpoint:
    """Every process reads the checkpoint; all have the same step, or none goes on."""
    traced = step.loss.staged.traced
    stored, error = None, None
    try:
        with processes.busy("reading the checkpoint"):
            stored = checkpoint.load(
                path,
                traced.params.unflatten(_shapes(traced.params)),
                step.update_plan.state_shapes,
                None
                if step.loss.pure.state is None
                else traced.state.unflatten(_shapes(traced.state)),
            )
    except Exception as raised:
        error = raised
    mine = "" if stored is None else f"step {stored.step}"
    told = processes.everyone(mine or f"{type(error).__name__}: {error}", "step.restore")
    if error is not None:
        raise error
    assert stored is not None
    others = [f"process {p}: {text}" for p, text in enumerate(told) if text != mine]
    if others:
        raise ExecutionError(
            f"this process has read {mine} from {path}, but {'; '.join(others)}. Every process "
            f"must read the same checkpoint: give a path that all see"
        )
    if processes.several() and step.loss.options.compare_values:
        trees = {
            "params": stored.params,
            "opt_state": stored.opt_state,
            "module_state": stored.module_state,
        }
        paths = jax.tree_util.tree_leaves_with_path(trees)
        names = [path_name(path) for path, _ in paths]
        remedy = "Every process must read the same checkpoint: give a path that all see"
        processes.agree(value_facts(names, [x for _, x in paths]), "the checkpoint", remedy)
    return stored


def _shapes(leaves: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in leaves.avals]
