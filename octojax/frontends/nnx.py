"""A loss of a `flax.nnx` module."""

from collections.abc import Callable, Iterable
from typing import Any

import jax.tree_util as tree
from flax import nnx

from octojax.frontends.overwritten import OVERWRITTEN, refuse_overwritten
from octojax.frontends.pure import Path, PureLoss, split_result
from octojax.frontends.unwritten import check_unwritten


def adapt_nnx(
    model: nnx.Module, loss_fn: Callable[[Any, Any], Any], trainable: Any = nnx.Param
) -> PureLoss:
    """Returns the pure form of `loss_fn(model, batch) -> loss or (loss, aux)`.

    `trainable` is an nnx filter; what it leaves out is state: frozen parameters, statistics,
    random streams. Variables shared inside the module stay one leaf. What the loss writes to
    state variables of `model` is the new state.

    Raises:
        LossError: variables are overwritten with their gradient (fp8); (in tracing) the loss adds
            or removes variables, or writes to trained ones.
    """
    graphdef, params, state = nnx.split(model, trainable, ...)
    _refuse_overwritten(params, state)

    def run(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        live = nnx.merge(graphdef, *_fresh((params, state)))
        result = loss_fn(live, batch)
        _, new_params, new_state = nnx.split(live, trainable, ...)
        return new_params, new_state, result

    def fn(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        new_params, new_state, result = run(params, state, batch)
        loss, *aux = split_result(result)
        check_unwritten(lambda *args: run(*args)[0], (params, state, batch), new_params)
        return loss, aux[0] if aux else None, new_state

    def merge(params: Any, state: Any) -> nnx.Module:
        return nnx.merge(graphdef, *_fresh((params, state)))

    def split_model(model: Any) -> tuple[Any, Any] | None:
        if not isinstance(model, nnx.Module):
            return None
        return _fresh(tuple(nnx.split(model, trainable, ...)[1:]))

    params, state = _fresh((params, state))
    return PureLoss(fn, params, state, merge, split_model, aliases=_aliases(model))


def _aliases(model: nnx.Module) -> dict[Path, tuple[Path, ...]]:
    """Returns the other paths of every variable that the module has at several.

    A shared module shares all of its variables; the first path is the one that states have.
    """
    groups = [[_words(path) for path in group] for group in nnx.find_duplicates(model)]
    aliases = {}
    for path, _ in nnx.to_flat_state(nnx.state(model)):
        own = _words(path)
        others = {
            other + own[len(first) :]
            for first, *rest in groups
            if own[: len(first)] == first
            for other in rest
        }
        if others:
            aliases[own] = tuple(sorted(others))
    return aliases


def _words(path: Iterable[Any]) -> Path:
    return tuple(map(str, path))


def _refuse_overwritten(*states: Any) -> None:
    """Such variables come with linen modules (`nnx.bridge.ToNNX`), or with a type of their name."""
    collections: dict[str, list[str]] = {}
    for state in states:
        for path, variable in nnx.to_flat_state(state):
            name = nnx.variable_name_from_type(type(variable), allow_register=True)
            collections.setdefault(name, []).append(".".join(map(str, path)))
    refuse_overwritten(collections, collections.get(OVERWRITTEN, ()))


def _fresh(states: Any) -> Any:
    """Returns the values in variables of their own: a module writes to its own in place."""
    return tree.tree_map(lambda leaf: leaf, states)
