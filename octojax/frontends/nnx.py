"""A loss of a `flax.nnx` module."""

from collections.abc import Callable
from typing import Any

import jax.tree_util as tree
from flax import nnx

from octojax.errors import LossError
from octojax.frontends.pure import PureLoss, split_result
from octojax.trace import path_name


def adapt_nnx(
    model: nnx.Module, loss_fn: Callable[[Any, Any], Any], trainable: Any = nnx.Param
) -> PureLoss:
    """The pure form of `loss_fn(model, batch) -> loss or (loss, aux)`.

    `trainable` is an nnx filter; what it leaves out is state: frozen parameters, statistics,
    random streams. Variables shared inside the module stay one leaf. What the loss writes to
    state variables of `model` is the new state.

    Raises:
        LossError: (in tracing) the loss adds or removes variables, or writes to trained ones.
    """
    graphdef, params, state = nnx.split(model, trainable, ...)

    def fn(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        live = nnx.merge(graphdef, *_fresh((params, state)))
        loss, *aux = split_result(loss_fn(live, batch))
        _, new_params, new_state = nnx.split(live, trainable, ...)
        _check_unwritten(params, new_params)
        return loss, aux[0] if aux else None, new_state

    def merge(params: Any, state: Any) -> nnx.Module:
        return nnx.merge(graphdef, *_fresh((params, state)))

    return PureLoss(fn, *_fresh((params, state)), merge)


def _fresh(states: Any) -> Any:
    """The same values in variables of their own: a module writes to its variables in place."""
    return tree.tree_map(lambda leaf: leaf, states)


def _check_unwritten(before: Any, after: Any) -> None:
    old, new = (tree.tree_flatten_with_path(x)[0] for x in (before, after))
    names = [path_name(path) for path, _ in old]
    added = sorted({path_name(path) for path, _ in new} - set(names))
    written = [
        name for name, (_, x), (_, y) in zip(names, old, new) if len(old) == len(new) and x is not y
    ]
    if added or written or len(old) != len(new):
        raise LossError(
            f"the loss changes trained parameters: writes {written or 'none'}, adds "
            f"{added or 'none'}. Only the optimizer may; keep such values in another Variable type"
        )
