"""New module state in what a loss returned next to its value, wherever the user put it.

    loss, updates                         updates = {"batch_stats": ...}
    loss, (updates, logits)               ... and in any other order
    loss, {"batch_stats": ..., "logits": ...}
    loss, Outputs(logits, updates["batch_stats"])

State is known by its name and structure. What is no state is aux, in the form it came in, with
None where the state was.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import jax.tree_util as tree

from octojax.compat import path_name
from octojax.errors import LossError

Place = tuple[Any, ...]
"""A key path."""


def split_state(
    returned: Any, templates: Mapping[str, Any], companions: Mapping[str, Any] | None = None
) -> tuple[Any, dict[str, Any]]:
    """Returns what remains of `returned`, and new state by name, in the structure of `templates`.

    A part is new state if its key is a name in `templates`, or if its own keys and shapes are those
    of one state and no other. Names in `companions` count only next to one of these.

    Raises:
        LossError: a part under the name of a state has another structure, or two are one state.
    """
    parts: dict[str, list[tuple[str, Any]]] = {}

    def walk(node: Any, path: Place, parent: Any = None) -> Any:
        name = _name(node, path, templates)
        if companions and isinstance(parent, Mapping) and any(x in templates for x in parent):
            name = name or _name(node, path[-1:], companions, by_form=False)
        if name is not None:
            parts.setdefault(name, []).append((path_name(path, "aux"), node))
            return None
        pairs, treedef = tree.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
        if not pairs or not pairs[0][0]:
            return node
        return tree.tree_unflatten(
            treedef, [walk(child, (*path, *key), node) for key, child in pairs]
        )

    rest = walk(returned, ())
    _check_once(parts)
    forms = {**templates, **(companions or {})}
    states = {name: _like(forms[name], some[0][1]) for name, some in parts.items()}
    return (rest if tree.tree_leaves(rest) else None), states


def _name(node: Any, path: Place, templates: Mapping[str, Any], by_form: bool = True) -> str | None:
    """Returns the state that a part is, by its key or by its form."""
    key = str(getattr(path[-1], "key", getattr(path[-1], "name", ""))) if path else ""
    if key in templates:
        if _names(node) == _names(templates[key]):
            return key
        if isinstance(node, Mapping):
            _refuse_form(path_name(path, "aux"), templates[key], node)
    if not by_form or tree.all_leaves([node]):
        return None
    names = _names(node)
    same = [x for x, state in templates.items() if names == _names(state) and _alike(node, state)]
    if len(same) != 1:
        return None
    if not _is_keyed(templates[same[0]]):
        raise LossError(
            f"{path_name(path, 'aux')} has the shapes of the state, a tuple of arrays: is it the "
            f"new state, or other results? Return loss, aux, new_state"
        )
    return same[0]


def _names(node: Any) -> tuple[str, ...]:
    return tuple(sorted(path_name(path) for path, _ in tree.tree_flatten_with_path(node)[0]))


def _alike(node: Any, state: Any) -> bool:
    shapes = [sorted(map(str, map(jnp.shape, _arrays(x)))) for x in (node, state)]
    return shapes[0] == shapes[1] and bool(shapes[0])


def _arrays(node: Any) -> Iterator[Any]:
    return (x if hasattr(x, "shape") else 0.0 for x in tree.tree_leaves(node))


def _is_keyed(state: Any) -> bool:
    """Whether a state is known by its keys; a tuple of arrays might be anything."""
    paths = [path for path, _ in tree.tree_flatten_with_path(state)[0]]
    return any(not isinstance(key, tree.SequenceKey) for path in paths for key in path)


def _like(state: Any, node: Any) -> Any:
    """Returns the leaves of `node` in the structure of `state`: a `FrozenDict` for a dict."""
    by_name = {path_name(path): leaf for path, leaf in tree.tree_flatten_with_path(node)[0]}
    paths, treedef = tree.tree_flatten_with_path(state)
    return tree.tree_unflatten(treedef, [by_name[path_name(path)] for path, _ in paths])


def _refuse_form(where: str, state: Any, node: Any) -> None:
    old, new = set(_names(state)), set(_names(node))
    raise LossError(
        f"the loss returns {where} in another structure than the state it gets: new "
        f"{sorted(new - old) or 'nothing'}, gone {sorted(old - new) or 'nothing'}. Return the "
        f"whole collection (what apply(..., mutable=[...]) gives), call a metric otherwise, and "
        f"keep values sown for inspection out of the variables that training starts with"
    )


def _check_once(parts: Mapping[str, list[tuple[str, Any]]]) -> None:
    twice = {
        name: [where for where, _ in some]
        for name, some in parts.items()
        if any(not _is_same(node, some[0][1]) for _, node in some[1:])
    }
    if twice:
        listed = "; ".join(f"{name!r} at {' and '.join(where)}" for name, where in twice.items())
        raise LossError(
            f"the loss returns new state twice: {listed}. Return each state once: "
            f"loss, aux, new_state"
        )


def _is_same(a: Any, b: Any) -> bool:
    return all(x is y for x, y in zip(tree.tree_leaves(a), tree.tree_leaves(b), strict=True))
