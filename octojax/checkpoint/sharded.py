"""A checkpoint that every process writes its part of, and that is read in slices.

process 0    lock, name of the new folder     index of all pieces, which makes it valid
every one                  its pieces, to the disk
"""

import builtins
import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from octojax import errors
from octojax.checkpoint import folder
from octojax.checkpoint.index import Index, piece_of, piece_text, write_index
from octojax.checkpoint.leaves import Piece, Row, Words, form_of, words
from octojax.checkpoint.pieces import StoredLeaf, places_of, write_arrays
from octojax.checkpoint.store import (
    check_writable,
    read_newest,
    tidied,
    unwritten,
    write_tree,
)
from octojax.errors import FormatError
from octojax.ir.plan import Plan

Meet = Callable[[str], Sequence[str]]
"""Tells every process a text; returns those of all. Raises where one of them has ended."""


@dataclass(frozen=True)
class Shard:
    """A block of a leaf that this process has. `value` is an array (PRNG keys as integers) of
    the block, without `axis`, along which it has length 1."""

    name: Words
    start: tuple[int, ...]
    shape: tuple[int, ...]
    axis: int | None
    value: Any


def save_shards(
    path: str | Path,
    rows: Sequence[Row],
    shards: Sequence[Shard],
    *,
    step: int,
    plan: Plan | None,
    overwrite: bool,
    process: int,
    alone: bool,
    meet: Meet,
) -> None:
    """Writes a checkpoint of `rows`, of which this process brings `shards`; all call it alike.

    What holds of `octojax.checkpoint.save` holds here: whenever a process ends, there is the old
    checkpoint or the new one. Raises the error of the first process that has one, in all.
    """
    root = folder.local_folder(path)
    with contextlib.ExitStack() as stack:
        opened = _agree(meet, lambda: _open(stack, root, overwrite) if process == 0 else "")[0]
        tree = opened or "tree"
        try:
            part = "" if alone else f"process-{process}"
            parts = _agree(meet, lambda: _write_part(root / tree, rows, shards, part))
        except BaseException:
            if process == 0:
                _give_up(root, stack)
            raise

        def finish() -> str:
            if process == 0:
                try:
                    _finish(root, tree, rows, parts, step, plan)
                finally:
                    _give_up(root, stack)
            return ""

        _agree(meet, finish)


def _agree(meet: Meet, work: Callable[[], str]) -> list[str]:
    """Does `work` and tells what it returns; raises its error, or that of another process."""
    error: Exception | None = None
    text = ""
    try:
        text = json.dumps(["", work()])
    except Exception as raised:
        error, text = raised, json.dumps([type(raised).__name__, str(raised)])
    answers = [json.loads(x) for x in meet(text)]
    if error is not None:
        raise error
    for kind, message in answers:
        if kind:
            raise _kind(kind)(message)
    return [message for _, message in answers]


def _kind(name: str) -> type[Exception]:
    """Returns the type of an error by its name, if it is one of ours or of Python's."""
    kind = getattr(errors, name, getattr(builtins, name, None))
    if isinstance(kind, type) and issubclass(kind, (OSError, errors.OctoPipeError)):
        return kind
    return {"ValueError": ValueError, "TypeError": TypeError}.get(name, errors.ExecutionError)


def _open(stack: contextlib.ExitStack, root: Path, overwrite: bool) -> str:
    """Takes the lock; returns the name of the folder that all are to write to."""
    check_writable(root, overwrite)
    root.mkdir(parents=True, exist_ok=True)
    lock = stack.enter_context(folder.sole_writer(root))
    check_writable(root, overwrite)
    old = tidied(lock, root)
    new = "tree" if not os.path.lexists(root / "tree") else f"tree-{uuid.uuid4().hex[:8]}"
    lock.note(new, old)
    stack.callback(lambda: tidied(lock, root))
    return new


def _give_up(root: Path, stack: contextlib.ExitStack) -> None:
    """Removes what is no checkpoint's, and lets go of the lock."""
    stack.close()
    with contextlib.suppress(OSError):
        root.rmdir()  # a new one, with nothing in it


def _write_part(tree: Path, rows: Sequence[Row], shards: Sequence[Shard], part: str) -> str:
    """Writes the shards of this process to its folder; returns pieces and digests as text."""
    at = {row.name: row.at for row in rows}
    shapes = {row.name: row.shape for row in rows}
    counts: dict[Words, int] = {}
    values: dict[Words, Any] = {}
    pieces: list[tuple[Words, Piece]] = []
    for shard in shards:
        if 0 in shard.shape:
            continue
        if not part and shard.shape == shapes[shard.name]:
            values[at[shard.name]] = shard.value
            continue
        number = counts[shard.name] = counts.get(shard.name, -1) + 1
        place = (*at[shard.name], str(number))
        values[place] = shard.value
        pieces.append((shard.name, Piece(part, place, shard.start, shard.shape, shard.axis)))
    with unwritten(tree.parent):
        target = tree / part if part else tree
        if values:
            (write_arrays if part else write_tree)(target, values)
            digests = folder.sync(target)
        else:
            digests = {}
    entries = [[list(name), piece_text(piece)] for name, piece in pieces]
    files = {f"{part}/{name}" if part else name: digest for name, digest in digests.items()}
    return json.dumps([entries, files])


def _finish(
    root: Path, tree: str, rows: Sequence[Row], parts: Sequence[str], step: int, plan: Plan | None
) -> None:
    pieces: dict[Words, list[Piece]] = {}
    digests: dict[str, str] = {}
    for entries, files in map(json.loads, parts):
        digests.update(files)
        for name, text in entries:
            row = next(len(r.shape) for r in rows if list(r.name) == name)
            pieces.setdefault(tuple(name), []).append(piece_of(text, row))
    whole = tuple(replace(row, pieces=tuple(pieces.get(row.name, ()))) for row in rows)
    with unwritten(root):
        folder.sync_folder(root / tree)
        write_index(root, Index(int(step), plan, whole, tree, digests))


# ---------------------------------------------------------------------- reading


@dataclass(frozen=True)
class StoredTrees:
    """A checkpoint that is open: its leaves by name, each read in slices."""

    root: Path
    index: Index
    leaves: Mapping[Words, StoredLeaf]

    @property
    def digest(self) -> str:
        """Tells this checkpoint from others of the same step."""
        text = json.dumps([self.index.tree, sorted(self.index.digests.items())])
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def fit(self, template: Any, name: str) -> list[StoredLeaf]:
        """Returns the leaves of the tree called `name`, in the order of those of `template`.

        Raises `FormatError` naming every leaf that is missing, left over or of another form.
        """
        stored = {key[1:]: leaf for key, leaf in self.leaves.items() if key[0] == name}
        paths = jax.tree_util.tree_leaves_with_path(template)
        targets = {words(path): leaf for path, leaf in paths}
        wrong = [f"{'.'.join(key)} is not in the file" for key in targets if key not in stored]
        wrong += [f"{'.'.join(key)} is in the file only" for key in stored if key not in targets]
        for key, leaf in targets.items():
            expected = _form(form_of((), leaf))
            if key in stored and (form := _form(stored[key].row)) != expected:
                wrong.append(f"{'.'.join(key)} is {form} in the file, expected {expected}")
        if wrong:
            raise FormatError(
                f"{self.root}: {len(wrong)} leaves of {name} do not fit: {'; '.join(wrong[:50])}"
                f"{'; ...' if len(wrong) > 50 else ''}. The checkpoint is of another model or "
                f"optimizer; build the one that it was saved with, or load it without a template"
            )
        return [stored[words(path)] for path, _ in paths]


def _form(row: Row) -> str:
    return f"{row.dtype}{list(row.shape)}" + (f" ({row.key} keys)" if row.key else "")


@contextmanager
def opened(path: str | Path, process: int = 0, count: int = 1) -> Iterator[StoredTrees]:
    """Yields the checkpoint in `path`, open for reading.

    Its files are compared with their digests; of `count` processes, each sees to its share.
    Raises `FormatError` and `FileNotFoundError` as `octojax.checkpoint.load` does.
    """
    root = folder.local_folder(path)

    def verify(index: Index) -> None:
        mine = sorted(index.digests)[process::count]
        folder.verify(root / index.tree, {name: index.digests[name] for name in mine})
        if not (root / index.tree).is_dir() and any(row.size for row in index.rows):
            raise FormatError(f"{root / index.tree} is missing, which the index names as its data")

    index, _ = read_newest(root, verify)
    with places_of(root / index.tree, index.rows) as places:
        leaves = {row.name: StoredLeaf(row, places) for row in index.rows}
        yield StoredTrees(root, index, leaves)


def shards_of(value: Any, start: Sequence[int], axis: int | None, name: Words) -> Iterator[Shard]:
    """Yields what this process has of an array that is the block from `start` on of a leaf, along
    `axis` without its length of 1. Whole, if no other process takes part in it."""
    shape = _with(value.shape, axis, 1)
    if not isinstance(value, jax.Array) or value.is_fully_addressable:
        # Of arrays on devices Orbax would note which, and restore on no others.
        yield Shard(name, tuple(start), shape, axis, np.asarray(value))
        return
    for shard in value.addressable_shards:
        if shard.replica_id:
            continue
        first = [s.indices(n)[0] for s, n in zip(shard.index, value.shape, strict=True)]
        offset = _with(first, axis, 0)
        begin = tuple(a + b for a, b in zip(start, offset, strict=True))
        data = np.asarray(shard.data)
        yield Shard(name, begin, _with(data.shape, axis, 1), axis, data)


def _with(numbers: Sequence[int], axis: int | None, number: int) -> tuple[int, ...]:
    result = list(numbers)
    if axis is not None:
        result.insert(axis, number)
    return tuple(result)
