"""The one form that every front end makes of a user's model and loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octojax.errors import LossError
from octojax.frontends.constructor import is_constructor

Path = tuple[str, ...]


@dataclass(frozen=True)
class PureLoss:
    """A pure loss of pytrees.

    `fn(params, state, batch) -> (loss, aux, new_state)`; `params` holds what is trained,
    `state` the rest: frozen weights, statistics, counters, keys. `merge(params, state)` returns
    the user's kind of object with these values; `split` takes such an object apart, or returns
    None for another one (a tree of the parameters alone, say).

    Where the user gave a function that makes the model, `params` and `state` are shapes, and
    `make()` returns their values: to be traced, as nobody may hold all of them.

    `aliases[path]` are the other paths at which the model has the parameter or variable of that
    path (tied weights), as words.
    """

    fn: Callable[[Any, Any, Any], tuple[Any, Any, Any]]
    params: Any
    state: Any
    merge: Callable[[Any, Any], Any]
    split: Callable[[Any], tuple[Any, Any] | None] = lambda model: None
    make: Callable[[], tuple[Any, Any]] | None = None
    aliases: Mapping[Path, tuple[Path, ...]] = field(default_factory=dict)

    def example(self, model: Any) -> Any:
        """Returns `model`, or where it is a function, the model that it makes, of shapes."""
        return self.merge(self.params, self.state) if is_constructor(model) else model


def split_result(result: Any, most: int = 2) -> tuple[Any, ...]:
    """Returns the parts of what a user's loss returned: `loss`, or a tuple that begins with it."""
    if not isinstance(result, tuple):
        return (result,)
    if 1 <= len(result) <= most:
        return result
    forms = "loss, (loss, aux)" + (" or (loss, aux, new_state)" if most > 2 else "")
    raise LossError(f"the loss returned a tuple of {len(result)} parts, expected {forms}")
