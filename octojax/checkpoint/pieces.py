"""Leaves of a checkpoint that are stored in pieces, by several processes, and read in slices."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octojax.checkpoint.folder import plain_path
from octojax.checkpoint.leaves import Piece, Row, Words, nested, verified
from octojax.errors import FormatError

TOGETHER_BYTES = 1 << 28
"""So much is written in one go, which TensorStore keeps a copy of meanwhile."""
Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class StoredLeaf:
    """A leaf on the disk: `shape`, `dtype`, and `[index]` reads no more than that.

    PRNG keys are the integers that they consist of.
    """

    row: Row
    places: Mapping[str, Path]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.row.shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.row.dtype)

    def __getitem__(self, index: Any) -> np.ndarray:
        bounds, whole = _bounds(index, self.shape)
        values = np.zeros([stop - start for start, stop in bounds], self.dtype)
        if values.size:
            for piece in self.row.stored:
                _fill(values, bounds, piece, self.places[piece.folder])
        return values[whole]


def _bounds(index: Any, shape: Sequence[int]) -> tuple[Bounds, tuple[Any, ...]]:
    """Returns the range of every axis, and what takes single indices out of what was read."""
    entries = index if isinstance(index, tuple) else (index,)
    if Ellipsis in entries:
        at = entries.index(Ellipsis)
        rest = len(shape) - (len(entries) - 1)
        entries = (*entries[:at], *(slice(None),) * rest, *entries[at + 1 :])
    entries = (*entries, *(slice(None),) * (len(shape) - len(entries)))
    bounds, whole = [], []
    for entry, size in zip(entries, shape, strict=True):
        if isinstance(entry, slice):
            start, stop, stride = entry.indices(size)
            if stride != 1:
                raise IndexError(f"stored leaves are read in ranges, asked for was {entry}")
            bounds.append((start, max(start, stop)))
            whole.append(slice(None))
        else:
            bounds.append((int(entry), int(entry) + 1))
            whole.append(0)
    return tuple(bounds), tuple(whole)


def _fill(values: np.ndarray, bounds: Bounds, piece: Piece, folder: Path) -> None:
    """Copies into `found`, which has the range `bounds`, what the piece has of it."""
    common = [
        (max(a, start), min(b, start + size))
        for (a, b), start, size in zip(bounds, piece.start, piece.shape, strict=True)
    ]
    if any(a >= b for a, b in common):
        return
    inside = [slice(a - start, b - start) for (a, b), start in zip(common, piece.start)]
    if piece.axis is not None:
        del inside[piece.axis]
    part = (
        _array(folder, piece)[tuple(inside)].read().result() if inside else _scalar(folder, piece)
    )
    if piece.axis is not None:
        part = np.expand_dims(part, piece.axis)
    values[tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(common, bounds))] = part


def _scalar(folder: Path, piece: Piece) -> Any:
    return _array(folder, piece).read().result()


def write_arrays(folder: Path, values: Mapping[Words, np.ndarray]) -> None:
    """Writes arrays by their paths as Orbax lays them out: zarr in an OCDBT database. (Orbax
    itself writes NumPy arrays in process 0 alone.)"""
    import tensorstore

    folder.mkdir(parents=True)
    with plain_path(folder) as place:
        todo = list(values.items())
        while todo:
            size = 0
            with tensorstore.Transaction() as together:
                while todo and size < TOGETHER_BYTES:
                    at, value = todo.pop(0)
                    size += value.nbytes
                    tensorstore.open(
                        {"driver": "zarr", "kvstore": _store(place, at)},
                        create=True,
                        dtype=tensorstore.dtype(value.dtype),
                        shape=value.shape,
                        transaction=together,
                    ).result().write(value).result()


def _store(folder: Path, at: Words) -> dict[str, Any]:
    base = {"driver": "file", "path": f"{folder}/"}
    return {"driver": "ocdbt", "base": base, "path": ".".join(at)}


def _array(folder: Path, piece: Piece) -> Any:
    """Returns the array of a piece, opened. Raises `FormatError` naming it."""
    import tensorstore

    store = _store(folder, piece.at)
    shape = [n for axis, n in enumerate(piece.shape) if axis != piece.axis]
    try:
        array = tensorstore.open({"driver": "zarr", "kvstore": store}, read=True).result()
    except Exception as error:
        raise FormatError(
            f"{folder} is damaged: {'.'.join(piece.at)} cannot be read ({_line(error)}). Load "
            f"another checkpoint"
        ) from error
    if list(array.shape) != shape:
        raise FormatError(
            f"{folder} is damaged: {'.'.join(piece.at)} has shape {list(array.shape)}, was saved "
            f"as {shape}. Load another checkpoint"
        )
    return array


@contextmanager
def places_of(tree: Path, rows: Sequence[Row]) -> Iterator[dict[str, Path]]:
    """Yields the folder of each process's data, by a name that TensorStore takes."""
    folders = {piece.folder for row in rows for piece in row.stored}
    with ExitStack() as stack:
        yield {f: stack.enter_context(plain_path(tree / f if f else tree)) for f in folders}


def join_pieces(rows: Sequence[Row], places: Mapping[str, Path], folder: Path) -> dict[Words, Any]:
    """Returns the whole values of all leaves by name. Raises `FormatError` naming one that
    cannot be read."""
    values = {row: StoredLeaf(row, places)[...] for row in rows}
    return verified(nested({row.at: x for row, x in values.items()}), rows, folder)


def _line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
