"""`octopipe.value_and_grad`: the pipeline without an optimizer."""

from collections.abc import Callable
from typing import Any

import jax

from octojax import compat
from octojax.api.options import options_of
from octojax.api.pipelined import PipelinedLoss
from octojax.api.structure import like
from octojax.arrays import put
from octojax.frontends import adapt
from octojax.processes import call


def value_and_grad(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    has_aux: bool = False,
    mesh: Any = None,
    model: Any = None,
    **options: Any,
) -> "PipelinedGradient":
    """Returns `f(params, batch) -> (loss, grads)`, a pipelined `jax.value_and_grad(loss_fn)`.

    `params` and `batch` are examples of the arguments: pytrees for `loss_fn(params, batch)`,
    or an nnx module for `loss_fn(module, batch)`, whose gradients then come as its state of
    parameters. With `has_aux`, `f` returns `((loss, aux), grads)`. Each gradient lies where
    its parameter lies, also over the devices of several processes. Options are those of
    `octopipe.compile`.

    `f` finds leaves by their paths, and raises `ValueError` listing all that are missing, that
    `params` or `batch` did not have, or that have another shape or type.

    Parameters are copied to their ranks in every call; a training loop of one's own that wants
    them to stay there uses `octopipe.compile`.
    """
    with call("compile"), compat.jit_enabled(), compat.without_mesh() as callers:
        pure = adapt(params, loss_fn)
        settings = options_of(model or pure.example(params), **options)
        if settings.zero:
            raise ValueError(
                f"zero={settings.zero} spreads what octopipe.compile keeps between steps; "
                f"value_and_grad keeps nothing. Leave zero= out"
            )
        loss = PipelinedLoss(pure, batch, settings, mesh, callers=callers)
        _ = loss.trainer
    return PipelinedGradient(loss, loss_fn, has_aux)


class PipelinedGradient:
    """What `value_and_grad` returns: `f(params, batch) -> (loss, grads)`.

    Calls from several threads run one after the other. `f.close()`, or `with
    octopipe.value_and_grad(...) as f:`, ends its threads and lets go of its programs; one that
    nobody holds any more does so by itself.
    """

    def __init__(self, loss: PipelinedLoss, loss_fn: Callable[..., Any], has_aux: bool) -> None:
        self.loss, self.loss_fn, self.has_aux = loss, loss_fn, has_aux

    def __call__(self, params: Any, batch: Any) -> tuple[Any, Any]:
        loss, now = self.loss, adapt(params, self.loss_fn)

        def work() -> tuple[Any, Any, Any]:
            model = loss.place(loss.source(now.params, now.state))
            values = jax.tree.leaves((now.params, now.state))
            results, value, aux = loss.run(loss.trainer, model, batch, values=values)
            gradients = loss.filled(results)
            if loss.mesh.spans_processes:
                gradients = loss.layout.gathered_units(gradients)
            return value, aux, loss.tree(gradients)

        with call("value_and_grad"):
            value, aux, gradients = loss.calls.run(work, "value_and_grad")
        grads = jax.tree.map(_on_same_devices, like(gradients, now.params), now.params)
        return ((value, aux) if self.has_aux else value), grads

    def close(self) -> None:
        """Ends the threads; later calls raise `ExecutionError`. Twice is once."""
        self.loss.close("this pipelined value_and_grad")

    def __enter__(self) -> "PipelinedGradient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _on_same_devices(gradient: jax.Array, param: Any) -> jax.Array:
    if isinstance(param, jax.Array):
        return put(gradient, param.sharding)
    return jax.device_put(gradient, jax.local_devices()[0])
