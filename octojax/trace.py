"""A user's loss of one microbatch as a jaxpr whose ends have names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.tree_util as tree

from octojax import compat
from octojax.compat import path_name as path_name
from octojax.errors import LossError
from octojax.jaxprs.flat import FlatJaxpr, flatten
from octojax.jaxprs.forward import forward_outputs

PureFn = Callable[[Any, Any, Any], tuple[Any, Any, Any]]


@dataclass(frozen=True)
class Leaves:
    """The flat leaves of one argument or result: `treedef`, key paths, avals."""

    treedef: Any
    names: tuple[str, ...]
    avals: tuple[Any, ...]

    def __len__(self) -> int:
        return len(self.avals)

    def unflatten(self, leaves: Any) -> Any:
        return tree.tree_unflatten(self.treedef, list(leaves))


@dataclass(frozen=True)
class TracedLoss:
    """The jaxpr of `fn(params, state, batch) -> (loss, aux, new_state)` of one microbatch.

    Inputs of `flat` are the leaves of params, state, batch, in this order. Outputs are the loss,
    the leaves of aux (together: the emits), and the leaves of the new state, which has the
    structure and avals of `state`. Further outputs are terms of the emits `terms`, one each:
    scalars that depend on parameters alone and are to be added once per step. Losses of `pieces`
    such microbatches (and data shards) add up to that of the whole batch.
    """

    flat: FlatJaxpr
    params: Leaves
    state: Leaves
    batch: Leaves
    aux: Leaves
    terms: tuple[int, ...] = ()
    pieces: int = 1

    @property
    def num_emits(self) -> int:
        return 1 + len(self.aux)


def trace_loss(fn: PureFn, params: Any, batch: Any, state: Any = None) -> TracedLoss:
    """The traced loss of one microbatch. Arrays or shapes will do as arguments.

    Raises:
        LossError: the loss is not a real floating scalar, or the state changes its form.
    """
    args = tuple(_leaves(x, what) for x, what in ((params, ""), (state, ""), (batch, "")))
    shapes = [x.unflatten(map(_shape, x.avals)) for x in args]
    jaxpr, (loss, aux, new_state) = compat.trace(fn, *shapes)
    _check_loss(loss)
    _check_state(args[1], _leaves(new_state, ""))
    flat = forward_outputs(flatten(jaxpr))
    return TracedLoss(flat, *args, aux=_leaves(aux, "aux"))


def _leaves(value: Any, root: str) -> Leaves:
    paths, treedef = tree.tree_flatten_with_path(value)
    names = tuple(path_name(path, root) for path, _ in paths)
    return Leaves(treedef, names, tuple(_aval(leaf, name) for name, (_, leaf) in zip(names, paths)))


def _aval(leaf: Any, name: str) -> Any:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, weak_type=bool(getattr(leaf, "weak_type", False))
        )
    try:
        return jax.typeof(leaf)
    except TypeError:
        raise LossError(
            f"leaf {name or 'at the root'!r} is a {type(leaf).__name__}: {leaf!r}. Parameters, "
            f"state, batch and aux are pytrees of arrays; close over anything else"
        ) from None


def _shape(aval: Any) -> Any:
    weak_type = bool(getattr(aval, "weak_type", False))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak_type)


def _check_loss(loss: Any) -> None:
    leaves = tree.tree_leaves(loss)
    if len(leaves) != 1 or not hasattr(loss, "shape"):
        raise LossError(
            f"the loss is a {type(loss).__name__} of {len(leaves)} arrays, expected one scalar. "
            f"Return `loss` or `(loss, aux)` with everything else in aux"
        )
    if loss.shape != ():
        raise LossError(
            f"the loss has shape {loss.shape}, expected a scalar (). "
            f"Reduce it, e.g. with jnp.mean(loss)"
        )
    if not compat.is_float(loss) or jax.numpy.iscomplexobj(loss):
        raise LossError(
            f"the loss has dtype {loss.dtype}, expected a real float. "
            f"An integer or complex loss has no gradient: cast or take its real part"
        )


def _check_state(before: Leaves, after: Leaves) -> None:
    if before.treedef != after.treedef:
        extra = sorted(set(after.names) - set(before.names))
        gone = sorted(set(before.names) - set(after.names))
        raise LossError(
            f"the loss changes the structure of the state: new {extra or 'nothing'}, "
            f"gone {gone or 'nothing'}. Return a state of the same structure "
            f"(values sown for inspection belong into aux; pop them inside the loss)"
        )
    changed = [
        f"{name}: {old.dtype}{list(old.shape)} -> {new.dtype}{list(new.shape)}"
        for name, old, new in zip(before.names, before.avals, after.avals)
        if (old.shape, old.dtype) != (new.shape, new.dtype)
    ]
    if changed:
        raise LossError(
            f"the loss changes shape or dtype of state: {'; '.join(changed)}. "
            f"State is carried from microbatch to microbatch and must keep its form"
        )
