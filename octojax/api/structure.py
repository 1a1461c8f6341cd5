"""A tree of values held against the leaves that a step was compiled for: by path, not by place."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.tree_util as tree
import numpy as np

from octojax.arrays import local
from octojax.programs.recipe import is_packed
from octojax.trace import Leaves, path_name

_MOST = 50  # offenders that a message lists; a tree of another model may have thousands


def leaves_like(value: Any, expected: Leaves, what: str) -> list[Any]:
    """Returns the leaves of `value` in the order of `expected`, each found by its path.

    The containers may be of other types where the paths are the same (a FrozenDict for a dict, a
    tuple for a list, an nnx state as pure dict); None is no leaf. Values count with the type that
    JAX gives them: NumPy float64 is float32 without x64, a Python float too, weak or not.

    Raises `ValueError` listing every path that is missing, or not in the model, or has another
    shape or type. `what` says in the error what was given.
    """
    paths, structure = tree.tree_flatten_with_path(value)
    if structure == expected.treedef:
        leaves: Sequence[Any] = [leaf for _, leaf in paths]
        missing: list[str] = []
        extra: list[str] = []
    else:
        leaves, missing, extra = _by_path(paths, expected)
    rows = zip(expected.names, leaves, expected.avals, strict=True)
    wrong = [
        text for name, x, aval in rows if x is not _NOTHING and (text := _differs(name, x, aval))
    ]
    if missing or extra or wrong:
        parts = (
            listed(f"{len(missing)} missing", missing),
            listed(f"{len(extra)} that the compiled model does not have", extra),
            listed(f"{len(wrong)} of another shape or type", wrong),
        )
        raise ValueError(
            f"{what} do not fit the model that was compiled ({len(expected)} leaves): "
            f"{'; '.join(filter(None, parts))}. Leaves go by their paths. Give a tree like that "
            f"of the model, or compile a step for the other one"
        )
    return list(leaves)


def readable(leaves: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """Returns values of the caller's that this process can read whole.

    Of those that are the same on devices of several processes it is what its own have. Raises
    `ValueError` listing those of which others have parts.
    """
    values = [local(leaf) for leaf in leaves]
    spread = [
        f"{name} {leaf.dtype}{list(leaf.shape)}"
        for name, leaf in zip(names, values, strict=True)
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    ]
    if spread:
        raise ValueError(
            f"{listed(f'{len(spread)} values', spread)} have parts on devices of some other "
            f"processes. Every process gives the whole value, such as a NumPy array, or an array "
            f"with a NamedSharding over devices of all processes; each puts its own part onto its "
            f"devices. (step.init takes a reader of slices, too)"
        )
    return values


def refuse_changed(rows: Iterable[tuple[str, Any, Any]]) -> None:
    """Raises `ValueError` listing all values of a training state that have another shape or type
    than they were compiled for; `rows` are names, values (None: another process's) and types."""
    wrong = [
        f"{name} is {value.dtype}{list(value.shape)}, compiled for {aval.dtype}{list(aval.shape)}"
        for name, value, aval in rows
        if value is not None and (value.shape, value.dtype) != (aval.shape, aval.dtype)
    ]
    if wrong:
        text = listed(f"{len(wrong)} values of this training state have been changed", wrong)
        raise ValueError(
            f"{text}. A step runs its state in the types that it was compiled for: begin with "
            f"step.init(params) of a step compiled for the other ones"
        )


def refuse_packed(params: Any) -> None:
    """Raises `ValueError` listing all parameters of less than a byte: no gradient is made of them,
    and no optimizer of `optax` takes them."""
    packed = [
        f"{path_name(path) or 'params'} is {leaf.dtype}{list(np.shape(leaf))}"
        for path, leaf in tree.tree_leaves_with_path(params)
        if hasattr(leaf, "dtype") and is_packed(leaf)
    ]
    if packed:
        text = listed(f"{len(packed)} parameters cannot be trained", packed)
        raise ValueError(
            f"{text}. Weights of 4 or 2 bits that stay as they are go into state= (a linen "
            f"collection or an nnx variable other than the parameters), into the batch (shared=), "
            f"or the loss closes over them. Weights that are trained are kept in float32 and "
            f"rounded in the loss"
        )


def valueless(value: Any) -> list[str]:
    """Returns the paths of leaves that are shapes without a value."""
    return [
        path_name(path) or "a leaf at the root"
        for path, leaf in tree.tree_leaves_with_path(value)
        if isinstance(leaf, jax.ShapeDtypeStruct)
    ]


def like(value: Any, template: Any) -> Any:
    """Returns `value` in the containers of `template`, whose leaves have the same paths."""
    paths, structure = tree.tree_flatten_with_path(template)
    if structure == tree.tree_structure(value):
        return value
    names = tuple(".".join(words(path)) for path, _ in paths)
    leaves, _, _ = _by_path(
        tree.tree_leaves_with_path(value), Leaves(structure, names, (None,) * len(names))
    )
    return structure.unflatten(leaves)


_NOTHING: Any = object()


def _by_path(
    paths: Sequence[tuple[Any, Any]], expected: Leaves
) -> tuple[list[Any], list[str], list[str]]:
    """Returns leaves in the order of `expected`, the paths that are missing, those left over."""
    keys = words_of(expected.treedef)
    values = {words(path): leaf for path, leaf in paths}
    if set(values) != set(keys):  # a wrapper's own word (`.value`) may be on one side alone
        bare = [without_value(key) for key in keys]
        bare_values = {without_value(key): leaf for key, leaf in values.items()}
        if len(set(bare)) == len(bare) and len(bare_values) == len(values):
            keys, values = bare, bare_values
    leaves = [values.get(key, _NOTHING) for key in keys]
    missing = [name for name, x in zip(expected.names, leaves, strict=True) if x is _NOTHING]
    expected_keys = set(keys)
    extra = [
        ".".join(without_value(key)) or "a leaf at the root"
        for key in values
        if key not in expected_keys
    ]
    return leaves, [name or "a leaf at the root" for name in missing], extra


def words(path: Sequence[Any]) -> tuple[str, ...]:
    """A key path as words, whatever the kinds of its containers."""
    return tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def words_of(treedef: Any) -> list[tuple[str, ...]]:
    """The paths of a structure's leaves, in order."""
    numbered = treedef.unflatten([_Leaf()] * treedef.num_leaves)
    return [words(path) for path, _ in tree.tree_leaves_with_path(numbered)]


class _Leaf:
    """Stands for a value: containers may look at those they are built of, but find no array."""


def without_value(key: tuple[str, ...]) -> tuple[str, ...]:
    """A path without the word for the value of a variable."""
    return key[:-1] if len(key) > 1 and key[-1] in ("value", "raw_value") else key


def _differs(name: str, leaf: Any, aval: Any) -> str | None:
    """What is wrong with a leaf; None if nothing."""
    name = name or "the leaf"
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return f"{name} is a shape without a value"
    try:
        shape, dtype = np.shape(leaf), _dtype(leaf)
    except TypeError:
        return f"{name} is of type {type(leaf).__name__}, expected an array"
    if shape == tuple(aval.shape) and dtype == _canonical(aval.dtype):
        return None
    expected = f"{_canonical(aval.dtype)}{list(aval.shape)}"
    return f"{name} is {dtype}{list(shape)}, compiled for {expected}"


def _dtype(leaf: Any) -> Any:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        if isinstance(leaf, str):  # JAX would take it for the name of a type
            raise TypeError
        dtype = jax.numpy.result_type(leaf)
    return _canonical(dtype)


def _canonical(dtype: Any) -> Any:
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    return jax.dtypes.canonicalize_dtype(dtype)


def listed(title: str, items: Sequence[str]) -> str:
    """Returns `title (item, item, ...)`, or nothing without items."""
    if not items:
        return ""
    more = f", and {len(items) - _MOST} more" if len(items) > _MOST else ""
    return f"{title} ({', '.join(items[:_MOST])}{more})"
