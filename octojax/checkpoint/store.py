"""Writing and reading whole checkpoints."""

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from octojax.checkpoint import folder
from octojax.checkpoint.index import NAME, Index, read_index, write_index
from octojax.checkpoint.leaves import Words, fit, nested, rows_of, verified
from octojax.checkpoint.pieces import join_pieces, places_of
from octojax.errors import FormatError
from octojax.ir.plan import Plan

_ROOTS = ("params", "opt_state", "module_state")


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds: trees of NumPy arrays (PRNG keys as keys), and its step."""

    params: Any
    opt_state: Any
    module_state: Any
    step: int
    plan: Plan | None


def save(
    path: str | Path,
    params: Any,
    opt_state: Any = None,
    *,
    step: int = 0,
    module_state: Any = None,
    plan: Plan | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint to the folder `path`.

    The trees have the user's structure: `optimizer.init(params)`'s for the optimizer state. Of
    several processes one calls this, with all values.

    The data go to a new folder in it; replacing the index, in one go, makes them the checkpoint.
    Whenever the process ends, there is the old checkpoint or the new one, and what it leaves
    unfinished is removed by the next save to the path. Nothing else in the folder is touched.

    Raises `FileExistsError` if there is a checkpoint already, unless `overwrite`, or if another
    process is writing one there; `OSError` naming the file where it cannot be written (the old
    checkpoint is as it was); `TypeError` naming leaves that are no arrays; `ValueError` for
    a path that is no local folder.
    """
    root = folder.local_folder(path)
    rows = rows_of(dict(zip(_ROOTS, (params, opt_state, module_state), strict=True)))
    check_writable(root, overwrite)
    is_new = not root.exists()
    try:
        with unwritten(root):
            root.mkdir(parents=True, exist_ok=True)
            with folder.sole_writer(root) as lock:
                check_writable(root, overwrite)  # another process may have written it meanwhile
                old = tidied(lock, root)
                exists = os.path.lexists(root / "tree")
                new = f"tree-{uuid.uuid4().hex[:8]}" if exists else "tree"
                lock.note(new, old)
                try:
                    values = {row.at: value for row, value in rows.items() if row.size}
                    write_tree(root / new, values)
                    digests = folder.sync(root / new)
                    write_index(root, Index(int(step), plan, tuple(rows), new, digests))
                finally:
                    with contextlib.suppress(OSError):  # the next save tries again
                        tidied(lock, root)
    except Exception:
        if is_new:
            with contextlib.suppress(OSError):
                root.rmdir()
        raise


@contextlib.contextmanager
def unwritten(root: Path) -> Iterator[None]:
    """Within it every error is an `OSError` that names the checkpoint, and what is left of it."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and str(root) in str(error):
            raise
        remainder = ". The one that was there is as it was" if (root / NAME).exists() else ""
        raise OSError(  # Orbax has kinds of its own for a full disk
            f"the checkpoint {root} could not be written: {_line(error)}{remainder}"
        ) from error


def check_writable(path: str | Path, overwrite: bool) -> None:
    """Raises `FileExistsError` if there is a checkpoint, unless `overwrite`;
    `NotADirectoryError` if the path, or a folder above it, is a file; `IsADirectoryError` if a
    folder is where the index belongs; `OSError` for a name that the file system does not take."""
    root = folder.local_folder(path)
    for place in (root, *root.parents):
        if place.exists() and not place.is_dir():
            raise NotADirectoryError(
                f"{place} is a file; a checkpoint is a folder: give another path"
            )
    if (root / NAME).is_dir():
        raise IsADirectoryError(
            f"{root / NAME} is a folder, where a checkpoint has its index: give another path"
        )
    if (root / NAME).exists() and not overwrite:
        raise FileExistsError(
            f"{root} holds a checkpoint already; pass overwrite=True, or a new path"
        )


def load(
    path: str | Path, params: Any = None, opt_state: Any = None, module_state: Any = None
) -> Checkpoint:
    """Returns the checkpoint in `path`, on the host.

    Trees of arrays or shapes given here say what is expected: the result has their structure.
    What is not given comes as nested dicts, as it is stored.

    Raises `FormatError` naming the file and what is wrong in it: an index or leaves that were
    changed after they were written, a newer version, or every leaf that is missing, left over, or
    of another shape or type than expected. `FileNotFoundError` without a checkpoint.
    """
    root = folder.local_folder(path)
    index, stored = read_newest(root, lambda index: _read(root, index))
    trees = {}
    for name, template in zip(_ROOTS, (params, opt_state, module_state), strict=True):
        mine = {key[1:]: x for key, x in stored.items() if key[0] == name}
        trees[name] = nested(mine) if template is None else fit(template, mine, root, name)
    return Checkpoint(**trees, step=index.step, plan=index.plan)


def read_newest(root: Path, read: Callable[[Index], Any]) -> tuple[Index, Any]:
    """Returns the index in `root` and what `read` makes of it; once more where the checkpoint is
    overwritten meanwhile."""
    index = _index(root)
    try:
        return index, read(index)
    except FormatError:
        newer = _index(root)
        if newer.tree == index.tree:
            raise
        return newer, read(newer)


def _index(root: Path) -> Index:
    if (root / NAME).is_dir():
        raise FormatError(f"{root / NAME} is a folder: {root} is no checkpoint")
    if (root / NAME).exists():
        return read_index(root)
    if not root.exists():
        why = f"{root} does not exist"
    elif not root.is_dir():
        raise NotADirectoryError(f"{root} is a file; a checkpoint is the folder with {NAME}")
    elif writer := folder.writer_of(root):
        why = f"{root} is being written by {writer}, and its {NAME} comes last"
    else:
        why = f"{root} has no {NAME}: saving was interrupted, or it is another folder"
    raise FileNotFoundError(f"no checkpoint: {why}")


def tidied(lock: folder.Lock, root: Path) -> str | None:
    """Removes what a writer left behind; returns the folder of data of the checkpoint in `root`.

    With an index that cannot be read nobody knows which data are the checkpoint's: all stay.
    """
    tree = None
    if (root / NAME).exists():
        try:
            tree = read_index(root).tree
        except (OSError, FormatError):
            return None
    lock.tidy(tree)
    return tree


def write_tree(path: Path, values: Mapping[Words, Any]) -> None:
    """Writes arrays by their paths with Orbax, which refuses those without elements."""
    import orbax.checkpoint as ocp

    tree = nested(values) or {}
    with _orbax() as writer, folder.plain_path(path) as place:
        writer.save(place, args=ocp.args.PyTreeSave(tree))


def _orbax() -> Any:
    """Orbax's reader and writer, for this process alone even where there are others.

    They do not take part, and are not waited for: left to itself, Orbax meets them without end.
    """
    import orbax.checkpoint as ocp

    options = ocp.options.MultiprocessingOptions()
    if jax.process_count() > 1:
        options = ocp.options.MultiprocessingOptions(
            primary_host=jax.process_index(),
            active_processes={jax.process_index()},
            barrier_sync_key_prefix=f"octojax-{jax.process_index()}",
        )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def _read(root: Path, index: Index) -> dict[Words, Any]:
    path, rows = root / index.tree, index.rows
    if not any(row.size for row in rows):
        return verified({}, rows, path)
    folder.verify(path, index.digests)
    if not path.is_dir():
        raise FormatError(f"{path} is missing, which {path.parent / NAME} names as its data")
    if any(row.pieces for row in rows):
        with places_of(path, rows) as places:
            return join_pieces(rows, places, path)
    try:
        with _orbax() as reader, folder.plain_path(path) as place:
            tree = reader.restore(place)
    except PermissionError:
        raise
    except Exception as error:
        raise FormatError(
            f"{path} is damaged and cannot be read: {_line(error)}. Load another checkpoint"
        ) from error
    return verified(tree, rows, path)


def _line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
