"""Models given by a function that makes them: their shapes now, their values part by part later."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.tree_util as tree

from octojax.errors import LossError


@dataclass(frozen=True)
class Construction:
    """A model, its parameters and state as a user gave them, any of them as a function.

    `model` is a function that returns an nnx module, linen variables or a tree of parameters, or
    what `octojax.frontends.adapt` takes; `params` and `state` likewise.
    """

    model: Any
    params: Any = None
    state: Any = None

    @property
    def is_lazy(self) -> bool:
        """Whether any part is a function, to be called inside a trace alone."""
        return any(map(is_constructor, (self.model, self.params, self.state)))

    def shapes(self) -> "Construction":
        """Returns the same with every function replaced by what it makes, of shapes.

        Raises `LossError` for a function that needs arguments, or uses random streams made
        outside of it.
        """
        parts = (self.model, self.params, self.state)
        return Construction(*(_abstract(x) if is_constructor(x) else x for x in parts))

    def values(self) -> "Construction":
        """Returns the same with every function called; for use inside a trace."""
        parts = (self.model, self.params, self.state)
        return Construction(*(_called(x) if is_constructor(x) else x for x in parts))


def is_constructor(value: Any) -> bool:
    """Whether a model (or parameters, or state) is a function that makes it."""
    if value is None or not callable(value) or not tree.all_leaves([value]):
        return False
    from flax import linen, nnx

    return not isinstance(value, (nnx.Module, linen.Module)) and not hasattr(value, "shape")


def _called(make: Callable[[], Any]) -> Any:
    """Returns what the function makes. Metadata of shardings is kept, but not acted upon: a part is
    made on its rank's devices."""
    from flax import nnx
    from flax.errors import TraceContextError

    default = nnx.using_eager_sharding()
    try:
        with nnx.use_eager_sharding(False):
            model = make()
    except TraceContextError as error:
        raise LossError(
            f"the function that makes the model uses random streams from outside of it ({error}). "
            f"Make them inside: lambda: Model(config, rngs=nnx.Rngs(0))"
        ) from error
    if isinstance(model, nnx.Module):
        for _, node in nnx.iter_graph(model):
            if isinstance(node, nnx.Variable):
                node.set_metadata("eager_sharding", default)
    return model


def _abstract(make: Callable[[], Any]) -> Any:
    from flax import nnx

    graph: list[Any] = []

    def parts() -> Any:
        model = _called(make)
        if not isinstance(model, nnx.Module):
            return model
        graphdef, values = nnx.split(model)
        graph.append(graphdef)
        return values

    try:
        model = jax.eval_shape(parts)
    except LossError:
        raise
    except TypeError as error:
        raise LossError(
            f"the model is a function, {make!r}, which makes no model when it is called without "
            f"arguments: {error}. Give lambda: Model(config, rngs=nnx.Rngs(0)), or a tree of "
            f"parameters"
        ) from error
    return nnx.merge(graph[-1], model) if graph else model
