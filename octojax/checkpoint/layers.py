"""Stacked leaves of an optimizer state: as slices, which ranks hold, and as the whole leaf."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from octojax.checkpoint.leaves import words


def join_layers(sliced: Any, whole: Any) -> Any:
    """Returns the tree `sliced`, in which stacked leaves are tuples of slices, in the structure
    of `whole` (shapes): the slices stacked on the host.

    Raises `ValueError` naming the leaves that are not the stack of their slices: an optimizer
    may keep something else for a whole leaf than for each of its layers.
    """
    by_words = {words(p): x for p, x in jax.tree_util.tree_leaves_with_path(sliced)}
    paths, structure = jax.tree_util.tree_flatten_with_path(whole)
    found, wrong = [], []
    for path, shape in paths:
        key = words(path)
        if key in by_words:
            found.append(by_words[key])
            continue
        pieces: list[Any] = []
        while (*key, str(len(pieces))) in by_words:
            pieces.append(by_words[*key, str(len(pieces))])
        if not pieces or any((len(pieces), *np.shape(x)) != shape.shape for x in pieces):
            wrong.append(f"{'.'.join(key)} {list(shape.shape)}")
        found.append(pieces)
    if wrong:
        raise ValueError(f"not the stack of their slices: {', '.join(wrong)}")
    return structure.unflatten([_stacked(x) if isinstance(x, list) else x for x in found])


def _stacked(pieces: Sequence[Any]) -> Any:
    """Slices as one array; shapes as one shape."""
    first = pieces[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(pieces), *first.shape), first.dtype)
    return np.stack([np.asarray(x) for x in pieces])


def split_layers(whole: Any, sliced: Any) -> Any:
    """Returns the values of `whole` in the structure of `sliced`, leaf `i` of a tuple that
    stands for a stacked leaf being its slice i."""
    by_words = {words(p): x for p, x in jax.tree_util.tree_leaves_with_path(whole)}
    paths, structure = jax.tree_util.tree_flatten_with_path(sliced)
    leaves = []
    for path, _ in paths:
        key = words(path)
        leaves.append(by_words[key] if key in by_words else by_words[key[:-1]][int(key[-1])])
    return structure.unflatten(leaves)
