"""A loss of `flax.linen` variables: `{"params": ..., "batch_stats": ...}`."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.tree_util as tree

from octojax.errors import LossError
from octojax.frontends.overwritten import refuse_overwritten
from octojax.frontends.pure import PureLoss, split_result
from octojax.frontends.returned import split_state
from octojax.frontends.unwritten import check_unwritten


def adapt_linen(variables: Mapping[str, Any], loss_fn: Callable[[Any, Any], Any]) -> PureLoss:
    """Returns the pure form of `loss_fn(variables, batch)`, where `variables` are those of `init`.

    The collection "params" is trained, the others are state. Collections that the loss updates
    are returned next to aux or anywhere in it (see `octojax.frontends.returned`):

        loss, updates
        loss, aux, updates
        loss, (updates, logits)

    Raises:
        LossError: no collection is called "params"; (in tracing) what came back is no update of
            the model's collections, or changes the parameters.
    """
    if "params" not in variables:
        raise LossError(
            f"linen variables have collections {sorted(variables)}, none is called 'params'. "
            f"Pass what model.init returned"
        )
    refuse_overwritten(variables)
    state = {name: tree_ for name, tree_ in variables.items() if name != "params"}

    def run(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        loss, *rest = split_result(loss_fn({"params": params, **state}, batch), most=3)
        aux, updates = split_state(tuple(rest), state, companions={"params": params})
        return loss, _aux(rest, aux, state), {"params": params, **state, **updates}

    def fn(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        loss, aux, new = run(params, state, batch)
        new_params = new.pop("params")
        check_unwritten(lambda *args: run(*args)[2]["params"], (params, state, batch), new_params)
        return loss, aux, new

    def merge(params: Any, state: Any) -> dict[str, Any]:
        return {"params": params, **state}

    def split(model: Any) -> tuple[Any, Any] | None:
        if not isinstance(model, Mapping) or "params" not in model:
            return None
        return model["params"], {name: x for name, x in model.items() if name != "params"}

    return PureLoss(fn, variables["params"], state, merge, split)


def _size(value: Any) -> int:
    return len(tree.tree_leaves(value))


def _aux(returned: list[Any], rest: Any, state: Mapping[str, Any]) -> Any:
    """Returns what remains of the parts that the loss returned next to its value."""
    parts = [None] * len(returned) if rest is None else list(rest)
    untouched = all(_size(a) == _size(b) for a, b in zip(parts, returned, strict=True))
    if len(returned) == 2 and untouched and isinstance(returned[-1], Mapping) and returned[-1]:
        raise LossError(
            f"the loss returned updates of collections {sorted(returned[-1])}; the model's "
            f"variables have {sorted(state) or 'none besides params'}"
        )
    remaining = [part for part in parts if tree.tree_leaves(part)]
    return tuple(remaining) if len(remaining) > 1 else remaining[0] if remaining else None
