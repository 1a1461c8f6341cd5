"""A loss of plain pytrees."""

from collections.abc import Callable
from typing import Any

from octojax.frontends.pure import PureLoss, split_result


def adapt_functional(params: Any, loss_fn: Callable[..., Any], state: Any = None) -> PureLoss:
    """The pure form of `loss_fn(params, batch) -> loss or (loss, aux)`.

    With `state`, of `loss_fn(params, state, batch) -> (loss, aux, new_state)`.
    """
    if state is None:
        return PureLoss(_stateless(loss_fn), params, None, lambda params, state: params)
    return PureLoss(_stateful(loss_fn), params, state, lambda params, state: (params, state))


def _stateless(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    def fn(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        loss, *aux = split_result(loss_fn(params, batch))
        return loss, aux[0] if aux else None, state

    return fn


def _stateful(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    def fn(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        parts = split_result(loss_fn(params, state, batch), most=3)
        if len(parts) == 3:
            return parts
        return parts[0], parts[1] if len(parts) == 2 else None, state

    return fn
