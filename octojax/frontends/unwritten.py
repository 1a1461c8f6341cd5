"""Whether a loss leaves the trained parameters as they are."""

from collections.abc import Callable
from typing import Any

import jax.tree_util as tree

from octojax import compat
from octojax.compat import path_name
from octojax.errors import LossError
from octojax.jaxprs.flat import flatten
from octojax.jaxprs.forward import forward_outputs


def check_unwritten(run: Callable[..., Any], args: tuple[Any, Any, Any], after: Any) -> None:
    """Raises if the loss wrote to trained parameters.

    `run(params, state, batch)` returns the parameters afterwards. It is traced once more only if
    some came back as other objects, as they do from transformations that pass them through.
    """
    old, new = (tree.tree_flatten_with_path(x)[0] for x in (args[0], after))
    names = [path_name(path) for path, _ in old]
    added = sorted({path_name(path) for path, _ in new} - set(names))
    changes: list[str] = []
    if not added and any(x is not y for (_, x), (_, y) in zip(old, new, strict=True)):
        flat = forward_outputs(flatten(compat.trace(run, *args)[0]))
        ends = zip(names, flat.invars, flat.outvars)
        changes = [name for name, before, value in ends if value is not before]
    if added or changes:
        raise LossError(
            f"the loss changes trained parameters: writes {changes or 'none'}, adds "
            f"{added or 'none'}. Only the optimizer may; keep such values in another Variable type"
        )
