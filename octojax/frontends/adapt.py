"""Which front end a model takes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import jax.tree_util as tree

from octojax.compat import path_name
from octojax.errors import LossError
from octojax.frontends.constructor import Construction
from octojax.frontends.functional import adapt_functional
from octojax.frontends.pure import PureLoss


def adapt(
    model: Any,
    loss_fn: Callable[..., Any],
    params: Any = None,
    *,
    trainable: Any = None,
    state: Any = None,
) -> PureLoss:
    """Returns the pure loss of a model in any of the forms that users have.

        adapt(nnx_module, loss_fn)                  loss_fn(model, batch)
        adapt(linen_module, loss_fn, variables)     loss_fn(variables, batch)
        adapt(params, loss_fn)                      loss_fn(params, batch)
        adapt(params, loss_fn, state=state)         loss_fn(params, state, batch)

    Model, variables, params and state may each be a function without arguments that makes them
    (`lambda: Model(config, rngs=nnx.Rngs(0))`): it is traced, and makes no array here.

    `trainable` is an nnx filter (default `nnx.Param`), for nnx modules only.

    Raises:
        LossError: the model has no floating parameters, or options do not fit its kind.
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn is of type {type(loss_fn).__name__}, expected a function")
    construction = Construction(model, params, state)
    parts = construction.shapes() if construction.is_lazy else construction
    pure = _adapt(parts.model, loss_fn, parts.params, trainable, parts.state)
    if construction.is_lazy:
        pure = replace(pure, make=_maker(construction, pure))
    leaves = tree.tree_leaves(pure.params)
    if leaves and not any(_is_float(leaf) for leaf in leaves):
        kinds = sorted({str(getattr(leaf, "dtype", type(leaf).__name__)) for leaf in leaves})
        raise LossError(
            f"none of the {len(leaves)} parameters of {_what(parts.model)} is floating "
            f"({', '.join(kinds)}), so none has a gradient. Cast those to train to a float"
        )
    if not leaves:
        raise LossError(
            f"{_what(parts.model)} has no trained parameters. Pass a module with nnx.Param "
            f"variables, linen variables as params=, or a pytree of arrays"
        )
    return pure


def _maker(construction: Construction, pure: PureLoss) -> Callable[[], tuple[Any, Any]]:
    """Returns what makes the values of `pure.params` and `pure.state` anew, in their structure."""

    def make() -> tuple[Any, Any]:
        values = construction.values()
        whole = values.model if values.params is None or is_nnx(values.model) else values.params
        parts = pure.split(whole)
        return (whole, values.state) if parts is None else parts

    return make


def _is_float(leaf: Any) -> bool:
    if getattr(leaf, "dtype", None) is None:
        return isinstance(leaf, float)
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _adapt(
    model: Any, loss_fn: Callable[..., Any], params: Any, trainable: Any, state: Any
) -> PureLoss:
    if is_nnx(model):
        from octojax.frontends.nnx import adapt_nnx

        if params is not None or state is not None:
            raise LossError(
                f"{_what(model)} holds its own parameters and state; drop params= and state="
            )
        return adapt_nnx(model, loss_fn, **({} if trainable is None else {"trainable": trainable}))
    if trainable is not None:
        raise LossError(
            f"trainable= is a filter for nnx modules, the model is {_what(model)}. Keep frozen "
            f"weights out of its parameters: in state=, or closed over by the loss"
        )
    if is_linen(model):
        return _adapt_linen(model, loss_fn, params)
    trained = model if params is None else params
    _check_equinox(trained)
    return adapt_functional(trained, loss_fn, state)


def _adapt_linen(model: Any, loss_fn: Callable[..., Any], params: Any) -> PureLoss:
    from octojax.frontends.linen import adapt_linen

    if params is None:
        raise LossError(
            f"{_what(model)} is a linen module, whose parameters live outside: pass "
            f"params=model.init(key, inputs)"
        )
    if "params" in params:
        return adapt_linen(params, loss_fn)
    return adapt_functional(params, loss_fn)


def _check_equinox(params: Any) -> None:
    """Raises for Equinox modules with leaves that are no arrays: functions, flags, rates."""
    parts = tree.tree_flatten_with_path(params, is_leaf=_is_equinox)[0]
    wrong = [
        f"{path_name((*path, *inner))} ({type(leaf).__name__})"
        for path, module in parts
        if _is_equinox(module)
        for inner, leaf in tree.tree_flatten_with_path(module)[0]
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))
    ]
    if wrong:
        more = f" and {len(wrong) - 6} more" if len(wrong) > 6 else ""
        raise LossError(
            f"an Equinox module has leaves that are no arrays: {', '.join(wrong[:6])}{more}. Split "
            f"it, and put it together inside the loss:\n"
            f"    params, static = eqx.partition(model, eqx.is_inexact_array)\n"
            f"    def loss(params, batch): model = eqx.combine(params, static); ...\n"
            f"with params as the model; state of eqx.nn.make_with_state goes into state="
        )


def _is_equinox(value: Any) -> bool:
    return any(c.__module__.partition(".")[0] == "equinox" for c in type(value).__mro__)


def is_nnx(model: Any) -> bool:
    """Whether the model is an instance of `nnx.Module`."""
    from flax import nnx

    return isinstance(model, nnx.Module)


def is_linen(model: Any) -> bool:
    """Whether the model is an instance of `linen.Module`."""
    from flax import linen

    return isinstance(model, linen.Module)


def _what(model: Any) -> str:
    return f"{type(model).__name__!r}"
