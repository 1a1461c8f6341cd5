"""A loss of plain pytrees."""

from collections.abc import Callable, Mapping
from typing import Any

from octojax.errors import LossError
from octojax.frontends.overwritten import refuse_overwritten
from octojax.frontends.pure import PureLoss, split_result
from octojax.frontends.returned import split_state


def adapt_functional(params: Any, loss_fn: Callable[..., Any], state: Any = None) -> PureLoss:
    """Returns the pure form of `loss_fn(params, batch) -> loss or (loss, aux)`.

    With `state`, of `loss_fn(params, state, batch) -> (loss, aux, new_state)`; the new state
    may also be a part of aux: `(loss, (new_state, aux))` in the manner of Haiku.

    Raises `LossError` for a collection that is overwritten with its gradient (fp8).
    """
    for tree in (params, state):
        if isinstance(tree, Mapping):
            refuse_overwritten(tree)
    if state is None:
        return PureLoss(_stateless(loss_fn, params), params, None, lambda params, state: params)
    return PureLoss(_stateful(loss_fn), params, state, lambda params, state: (params, state))


def _stateless(loss_fn: Callable[..., Any], trained: Any) -> Callable[..., Any]:
    collections = (
        {name: tree_ for name, tree_ in trained.items() if name != "params"}
        if isinstance(trained, Mapping) and "params" in trained
        else {}
    )

    def fn(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        loss, *aux = split_result(loss_fn(params, batch))
        returned = split_state(aux, collections)[1] if aux and collections else {}
        if returned:
            raise LossError(
                f"the loss returns new values of {sorted(returned)}, which are among the "
                f"parameters that the optimizer trains. Pass the linen module as the model with "
                f"params=variables, or these as state=: loss(params, state, batch) -> loss, aux, "
                f"new_state"
            )
        return loss, aux[0] if aux else None, state

    return fn


def _stateful(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    def fn(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        parts = split_result(loss_fn(params, state, batch), most=3)
        if len(parts) == 3:
            return parts
        aux, new = split_state(parts[1], {"state": state}) if len(parts) == 2 else (None, {})
        return parts[0], aux, new.get("state", state)

    return fn
