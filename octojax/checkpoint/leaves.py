"""The leaves of a checkpoint: their names, their bytes, and whether they are those expected."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from octojax.compat import is_key, key_impl
from octojax.errors import FormatError

Words = tuple[str, ...]
_UNKNOWN_TO_THE_FORMAT = frozenset({"uint2", "uint4", "float8_e4m3"})  # of TensorStore


@dataclass(frozen=True)
class Piece:
    """A block of a leaf that is stored by itself: of `shape`, from index `start` on, at the path
    `at` of the data of one process, in `folder` ("": those of a single process). The block has
    length 1 along `axis`, and is stored without it; None: it is stored as it is."""

    folder: str
    at: Words
    start: tuple[int, ...]
    shape: tuple[int, ...]
    axis: int | None = None


@dataclass(frozen=True)
class Row:
    """What the index says of a leaf. `at` is its path in the tree: its name, unless another's
    has the same text. `key` names the kind of PRNG whose keys these integers are. `pieces` are
    empty where it is stored whole, by one process."""

    name: Words
    shape: tuple[int, ...]
    dtype: str
    at: Words
    key: str | None = None
    pieces: tuple[Piece, ...] = ()

    def __str__(self) -> str:
        return ".".join(self.name)

    @property
    def stored(self) -> tuple[Piece, ...]:
        """The pieces; of a leaf that is stored whole, the one that it is."""
        whole = Piece("", self.at, (0,) * len(self.shape), self.shape)
        return self.pieces or (whole,)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


def words(path: Sequence[Any]) -> Words:
    """Returns a key path as words; a tree that is a single leaf is called `value`."""
    return tuple(map(_word, path)) or ("value",)


def _word(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))


def rows_of(trees: Mapping[str, Any]) -> dict[Row, np.ndarray]:
    """Returns the leaves of all trees on the host, by what the index says of them.

    Raises `TypeError` naming every leaf that is no array of numbers.
    """
    rows: dict[Row, np.ndarray] = {}
    wrong, places = [], set()
    for root, tree in trees.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = (root, *words(path))
            value = _on_host(leaf)
            if value is None or str(value.dtype) in _UNKNOWN_TO_THE_FORMAT:
                kind = type(leaf).__name__ if value is None else value.dtype
                wrong.append(f"{'.'.join(name)} is of type {kind}")
                continue
            at = unlike(name, places)
            places.add(".".join(at))
            kind = str(jax.random.key_impl(leaf)) if _is_key(leaf) else None
            rows[Row(name, value.shape, str(value.dtype), at, kind)] = value
    if wrong:
        raise _not_numbers(wrong)
    return rows


def check_storable(rows: Iterable[Row]) -> None:
    """Raises `TypeError` naming every leaf of a type that the format does not know."""
    wrong = [f"{row} is of type {row.dtype}" for row in rows if row.dtype in _UNKNOWN_TO_THE_FORMAT]
    if wrong:
        raise _not_numbers(wrong)


def _not_numbers(wrong: Sequence[str]) -> TypeError:
    return TypeError(
        f"a checkpoint holds arrays of numbers, but {'; '.join(wrong)}. Keep other things outside "
        f"of the trees; of unsigned numbers of 4 or 2 bits use the signed ones or uint8"
    )


def form_of(name: Words, aval: Any, at: Words | None = None) -> Row:
    """Returns the row of a leaf of this shape and type; keys count as their integers."""
    if not is_key(aval):
        return Row(name, tuple(aval.shape), str(np.dtype(aval.dtype)), at or name)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return Row(name, tuple(data.shape), str(data.dtype), at or name, key_impl(aval))


def unlike(name: Words, places: Iterable[str]) -> Words:
    """Returns the name, changed where taken: Orbax joins words by dots, and `a.b` is a word."""
    at, count = name, 0
    while ".".join(at) in places:
        count += 1
        at = (*name[:-1], f"{name[-1]}~{count}")
    return at


def _on_host(leaf: Any) -> np.ndarray | None:
    value = jax.random.key_data(leaf) if _is_key(leaf) else leaf
    if not hasattr(value, "dtype"):
        try:
            value = np.asarray(value, jax.numpy.result_type(value))
        except (TypeError, ValueError):
            return None
    value = np.asarray(value)
    return None if value.dtype.kind in "OSUMm" else value


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and is_key(leaf)


def nested(entries: Mapping[Words, Any]) -> Any:
    """Returns the entries as nested dicts; None without any."""
    tree: dict[str, Any] = {}
    for key, value in entries.items():
        at = tree
        for word in key[:-1]:
            at = at.setdefault(word, {})
        at[key[-1]] = value
    return tree or None


def verified(tree: Any, rows: Sequence[Row], folder: Path) -> dict[Words, Any]:
    """Returns the values of all leaves by name, checked against the index.

    Raises `FormatError` naming every leaf that is missing or is not what was saved.
    """
    values, wrong = {}, []
    for row in rows:
        value = _at(tree, row.at) if row.size else np.zeros(row.shape, np.dtype(row.dtype))
        if value is None:
            wrong.append(f"{row} is missing")
            continue
        value = np.asarray(value)
        if (value.shape, str(value.dtype)) != (row.shape, row.dtype):
            form = f"{row.dtype}{list(row.shape)}"
            wrong.append(f"{row} is {value.dtype}{list(value.shape)}, was saved as {form}")
        elif row.key is None:
            values[row.name] = value
        else:
            try:
                values[row.name] = jax.random.wrap_key_data(jax.numpy.asarray(value), impl=row.key)
            except (ValueError, TypeError) as error:
                wrong.append(f"{row} is no key of kind {row.key!r} ({error})")
    if wrong:
        raise FormatError(
            f"{folder} is damaged: {'; '.join(wrong)}. Load another checkpoint; this one's files "
            f"were changed after it was written"
        )
    return values


def _at(tree: Any, path: Words) -> Any:
    for word in path:
        if not isinstance(tree, Mapping) or word not in tree:
            return None
        tree = tree[word]
    return None if isinstance(tree, Mapping) else tree


def fit(template: Any, stored: Mapping[Words, Any], root: Path, name: str) -> Any:
    """Returns the stored leaves in the structure of `template`.

    Raises `FormatError` naming every leaf that is missing, left over or of another form.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(template)
    targets = {words(path): leaf for path, leaf in paths}
    wrong = [f"{'.'.join(key)} is not in the file" for key in targets if key not in stored]
    wrong += [f"{'.'.join(key)} is in the file only" for key in stored if key not in targets]
    for key, leaf in targets.items():
        if key not in stored:
            continue
        value = stored[key]
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.numpy.result_type(leaf)
        if (value.shape, value.dtype) != (np.shape(leaf), dtype):
            wrong.append(
                f"{'.'.join(key)} is {value.dtype}{list(value.shape)} in the file, "
                f"expected {dtype}{list(np.shape(leaf))}"
            )
    if wrong:
        raise FormatError(
            f"{root}: {len(wrong)} leaves of {name} do not fit: {'; '.join(wrong[:50])}"
            f"{'; ...' if len(wrong) > 50 else ''}. The checkpoint is of another model or "
            f"optimizer; build the one that it was saved with, or load it without a template"
        )
    return structure.unflatten([stored[words(path)] for path, _ in paths])
