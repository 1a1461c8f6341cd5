"""A loss of `flax.linen` variables: `{"params": ..., "batch_stats": ...}`."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.tree_util as tree

from octojax.errors import LossError
from octojax.frontends.pure import PureLoss, split_result


def adapt_linen(variables: Mapping[str, Any], loss_fn: Callable[[Any, Any], Any]) -> PureLoss:
    """The pure form of `loss_fn(variables, batch)`, where `variables` are those of `init`.

    The collection "params" is trained, the others are state. Collections that the loss updates
    are returned in one of two forms:

        loss, updates                 aux is exactly a dict of collections of `variables`
        loss, aux, updates
    """
    if "params" not in variables:
        raise LossError(
            f"linen variables have collections {sorted(variables)}, none is called 'params'. "
            f"Pass what model.init returned"
        )
    state = {name: tree_ for name, tree_ in variables.items() if name != "params"}

    def fn(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        loss, *rest = split_result(loss_fn({"params": params, **state}, batch), most=3)
        aux, updates = _updates(rest, state)
        return loss, aux, {**state, **updates}

    def merge(params: Any, state: Any) -> dict[str, Any]:
        return {"params": params, **state}

    def split(model: Any) -> tuple[Any, Any] | None:
        if not isinstance(model, Mapping) or "params" not in model:
            return None
        return model["params"], {name: x for name, x in model.items() if name != "params"}

    return PureLoss(fn, variables["params"], state, merge, split)


def _updates(rest: list[Any], state: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    if len(rest) == 2:
        aux, updates = rest
        unknown = sorted(set(updates) - set(state))
        if unknown:
            raise LossError(
                f"the loss returned updates of collections {unknown}; the model's variables "
                f"have {sorted(state) or 'none besides params'}"
            )
        return aux, updates
    aux = rest[0] if rest else None
    if isinstance(aux, Mapping) and aux and set(aux) <= set(state) and _same_form(aux, state):
        return None, aux
    return aux, {}


def _same_form(aux: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    return all(tree.tree_structure(aux[k]) == tree.tree_structure(state[k]) for k in aux)
