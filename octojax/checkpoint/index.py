"""`octojax.json`: what a checkpoint holds, and the one file whose replacement makes it valid."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octojax.checkpoint.folder import PART, TREE, sync_folder
from octojax.checkpoint.leaves import Piece, Row
from octojax.errors import FormatError
from octojax.ir.files import read_json
from octojax.ir.plan import Plan

NAME = "octojax.json"
VERSION = 3
"""Version 1 has no digests, and its data always in `tree`; only version 3 has pieces of leaves."""


@dataclass(frozen=True)
class Index:
    """What `octojax.json` says. `digests` are those of the files in the folder `tree`."""

    step: int
    plan: Plan | None
    rows: tuple[Row, ...]
    tree: str
    digests: Mapping[str, str]


def write_index(root: Path, index: Index) -> None:
    """Replaces the index of a checkpoint in one go: before, the old one is valid, then the new."""
    text: dict[str, Any] = {
        "version": VERSION if any(row.pieces for row in index.rows) else 2,
        "step": index.step,
        "plan": None if index.plan is None else index.plan.to_json(),
        "tree": index.tree,
        "leaves": [_row_text(row) for row in index.rows],
        "files": dict(index.digests),
    }
    text["digest"] = _digest(text)
    new = root / f"{NAME}.new"
    try:
        with open(new, "w", encoding="utf-8") as file:
            file.write(json.dumps(text, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, root / NAME)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync_folder(root)


def read_index(root: Path) -> Index:
    """Returns the index of the checkpoint in `root`.

    Raises `FormatError` naming the file and what is wrong in it; `OSError` where it cannot be
    opened.
    """
    path = root / NAME
    text = read_json(path)
    if not isinstance(text, dict) or "version" not in text:
        raise FormatError(f"{path} is not the index of a checkpoint: it has no version")
    version = text["version"]
    if not _is_count(version) or not 1 <= version <= VERSION:
        newer = _is_count(version) and version > VERSION
        raise FormatError(
            f"{path}: version {version!r}, but this octojax reads versions 1 to {VERSION}"
            + (". It was written by a newer one: upgrade octojax" if newer else "")
        )
    if version > 1 and text.pop("digest", None) != _digest(text):
        raise FormatError(
            f"{path} was changed after it was written, or is damaged: its digest is another one. "
            f"Load another checkpoint"
        )
    missing = sorted({"step", "plan", "leaves"} - text.keys())
    if missing:
        raise FormatError(f"{path} is damaged: it has no {', '.join(missing)}")
    tree, step = text.get("tree", "tree"), text["step"]
    if not _is_count(step):
        raise FormatError(f"{path}: the step is {step!r}, expected a number")
    if not (isinstance(tree, str) and TREE.fullmatch(tree)):
        raise FormatError(f"{path}: the data are in {tree!r}, expected a folder called tree")
    digests = text.get("files", {})
    return Index(step, _plan(path, text["plan"]), _rows(path, text["leaves"]), tree, digests)


def _plan(path: Path, text: Any) -> Plan | None:
    if text is None:
        return None
    try:
        return Plan.from_json(text)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FormatError(f"{path}: its plan cannot be read: {error!r}") from None


def _rows(path: Path, texts: Any) -> tuple[Row, ...]:
    if not isinstance(texts, list):
        raise FormatError(f"{path}: the leaves are {type(texts).__name__}, expected a list")
    rows = []
    for number, text in enumerate(texts):
        try:
            rows.append(_row(text))
        except (ValueError, TypeError, KeyError) as error:
            raise FormatError(f"{path}: leaf {number} cannot be read: {error!r}") from None
    names = Counter(row.name for row in rows)
    twice = sorted(".".join(name) for name, count in names.items() if count > 1)
    if twice:
        raise FormatError(f"{path}: leaves that come twice: {', '.join(twice)}")
    return tuple(rows)


def _row(text: Mapping[str, Any]) -> Row:
    name, shape = _strings(text["name"]), tuple(text["shape"])
    if not all(map(_is_count, shape)):
        raise ValueError(f"shape {list(shape)}")
    np.dtype(text["dtype"])
    key = text.get("key")
    if not (key is None or isinstance(key, str)):
        raise ValueError(f"key {key!r}")
    pieces = tuple(piece_of(x, len(shape)) for x in text.get("pieces", ()))
    return Row(name, shape, text["dtype"], _strings(text.get("at", name)), key, pieces)


def piece_of(text: Mapping[str, Any], ndim: int) -> Piece:
    """Returns a piece of a leaf of so many axes from its text. Raises `ValueError`."""
    folder, start, shape = text["folder"], tuple(text["start"]), tuple(text["shape"])
    axis = text.get("axis")
    if not (isinstance(folder, str) and PART.fullmatch(folder)):
        raise ValueError(f"piece in {folder!r}")
    if len(start) != ndim or len(shape) != ndim or not all(map(_is_count, (*start, *shape))):
        raise ValueError(f"piece at {list(start)} of shape {list(shape)}")
    if not (axis is None or (_is_count(axis) and axis < ndim and shape[axis] == 1)):
        raise ValueError(f"piece without axis {axis!r}")
    return Piece(folder, _strings(text["at"]), start, shape, axis)


def piece_text(piece: Piece) -> dict[str, Any]:
    """Returns a piece as what the index has of it."""
    text: dict[str, Any] = {
        "folder": piece.folder,
        "at": list(piece.at),
        "start": list(piece.start),
        "shape": list(piece.shape),
    }
    return text if piece.axis is None else {**text, "axis": piece.axis}


def _row_text(row: Row) -> dict[str, Any]:
    text: dict[str, Any] = {
        "name": list(row.name),
        "shape": list(row.shape),
        "dtype": row.dtype,
    }
    if row.at != row.name:
        text["at"] = list(row.at)
    if row.key is not None:
        text["key"] = row.key
    if row.pieces:
        text["pieces"] = [piece_text(piece) for piece in row.pieces]
    return text


def _strings(items: Iterable[Any]) -> tuple[str, ...]:
    items = tuple(items)
    if not items or not all(isinstance(x, str) for x in items):
        raise ValueError(f"name {items!r}")
    return items


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _digest(text: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(text, sort_keys=True).encode()).hexdigest()
