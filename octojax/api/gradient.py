"""`octopipe.value_and_grad`: the pipeline without an optimizer."""

from collections.abc import Callable
from typing import Any

import jax

from octojax.api.options import options_of
from octojax.api.pipelined import PipelinedLoss
from octojax.api.structure import like
from octojax.frontends import adapt


def value_and_grad(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    has_aux: bool = False,
    mesh: Any = None,
    model: Any = None,
    **options: Any,
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Returns `f(params, batch) -> (loss, grads)`, a pipelined `jax.value_and_grad(loss_fn)`.

    `params` and `batch` are examples of the arguments: pytrees for `loss_fn(params, batch)`,
    or an nnx module for `loss_fn(module, batch)`, whose gradients then come as its state of
    parameters. With `has_aux`, `f` returns `((loss, aux), grads)`. Each gradient lies where
    its parameter lies. Options are those of `octopipe.compile`.

    `f` finds leaves by their paths, and raises `ValueError` listing all that are missing, that
    `params` or `batch` did not have, or that have another shape or type.

    Parameters are copied to their ranks in every call; a training loop of one's own that wants
    them to stay there uses `octopipe.compile`.
    """
    pure = adapt(params, loss_fn)
    loss = PipelinedLoss(pure, batch, options_of(model or params, **options), mesh)
    runner = loss.trainer

    def f(params: Any, batch: Any) -> tuple[Any, Any]:
        now = adapt(params, loss_fn)
        held = loss.place(now.params, now.state)
        results, value, aux = loss.run(runner, held, batch)
        grads = like(loss.tree(loss.filled(results)), now.params)
        grads = jax.tree.map(_beside, grads, now.params)
        return ((value, aux) if has_aux else value), grads

    return f


def _beside(gradient: jax.Array, param: Any) -> jax.Array:
    if isinstance(param, jax.Array):
        return jax.device_put(gradient, param.sharding)
    return jax.device_put(gradient, jax.devices()[0])
