"""Checkpoints in the user's own layout, so that they reload under any plan.

    PATH/octojax.json    step, plan, names, shapes and types of all leaves; written last
    PATH/tree/           an Orbax checkpoint of nested dicts: {"params": ..., "opt_state": ...}

Nothing in them depends on ranks, partition or schedule. Without octojax, the trees are read by
`orbax.checkpoint.PyTreeCheckpointer().restore(PATH / "tree")`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from octojax.compat import is_key
from octojax.errors import FormatError
from octojax.ir.plan import Plan

VERSION = 1
_INDEX = "octojax.json"
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
    several processes one calls this, with all values. The index is written last: a checkpoint
    that was interrupted is refused by `load`.

    Raises `FileExistsError` if there is one already, unless `overwrite`.
    """
    root = Path(path).absolute()
    index = root / _INDEX
    if index.exists() and not overwrite:
        raise FileExistsError(
            f"{root} holds a checkpoint already; pass overwrite=True, or a new path"
        )
    root.mkdir(parents=True, exist_ok=True)
    index.unlink(missing_ok=True)
    trees = dict(zip(_ROOTS, (params, opt_state, module_state), strict=True))
    entries = {
        (name, *_words(path)): leaf
        for name, tree in trees.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    _write(root / "tree", entries)
    text = {
        "version": VERSION,
        "step": int(step),
        "plan": None if plan is None else plan.to_json(),
        "leaves": _describe(entries),
    }
    index.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


def load(
    path: str | Path, params: Any = None, opt_state: Any = None, module_state: Any = None
) -> Checkpoint:
    """Returns the checkpoint in `path`, on the host.

    Trees of arrays or shapes given here say what is expected: the result has their structure.
    What is not given comes as nested dicts, as it is stored.

    Raises `FormatError` naming every leaf that is missing, left over, or of another shape or
    type, and `FileNotFoundError` without a checkpoint.
    """
    root = Path(path).absolute()
    index = _index(root)
    stored = _read(root, index["leaves"])
    found = {}
    for name, template in zip(_ROOTS, (params, opt_state, module_state), strict=True):
        mine = {key[1:]: x for key, x in stored.items() if key[0] == name}
        found[name] = _nested(mine) if template is None else _fit(template, mine, root, name)
    plan = None if index["plan"] is None else Plan.from_json(index["plan"])
    return Checkpoint(**found, step=index["step"], plan=plan)


# ---------------------------------------------------------------------- names of leaves


def _word(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))


def _words(path: Sequence[Any]) -> tuple[str, ...]:
    """A key path as words; a tree that is a single leaf is called `value`."""
    return tuple(map(_word, path)) or ("value",)


def _nested(entries: Mapping[tuple[str, ...], Any]) -> Any:
    """The entries as nested dicts; None without any."""
    tree: dict[str, Any] = {}
    for key, value in entries.items():
        at = tree
        for word in key[:-1]:
            at = at.setdefault(word, {})
        at[key[-1]] = value
    return tree or None


# ---------------------------------------------------------------------- files


def _write(path: Path, entries: Mapping[tuple[str, ...], Any]) -> None:
    import orbax.checkpoint as ocp

    # Alone even where there are other processes: they do not take part, and are not waited for.
    alone = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(),
        active_processes={jax.process_index()},
        barrier_sync_key_prefix="octojax",
    )
    options = alone if jax.process_count() > 1 else ocp.options.MultiprocessingOptions()
    # Orbax refuses arrays without elements; the index knows their shape.
    full = {key: x for key, x in entries.items() if np.size(_raw(x))}
    tree = _nested({key: np.asarray(_raw(x)) for key, x in full.items()}) or {}
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    with ocp.Checkpointer(handler, multiprocessing_options=options) as writer:
        writer.save(path, args=ocp.args.PyTreeSave(tree), force=True)


def _raw(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if hasattr(leaf, "dtype") and is_key(leaf) else leaf


def _describe(entries: Mapping[tuple[str, ...], Any]) -> list[dict[str, Any]]:
    rows = []
    for key, leaf in entries.items():
        value = np.asarray(_raw(leaf))
        row = {"name": list(key), "shape": list(value.shape), "dtype": str(value.dtype)}
        if hasattr(leaf, "dtype") and is_key(leaf):
            row["key"] = str(jax.random.key_impl(leaf))
        rows.append(row)
    return rows


def _index(root: Path) -> dict[str, Any]:
    path = root / _INDEX
    if not path.exists():
        why = "was interrupted while it was written" if root.exists() else "does not exist"
        raise FileNotFoundError(f"no checkpoint in {root}: {_INDEX} is missing, so it {why}")
    index = json.loads(path.read_text(encoding="utf-8"))
    if index.get("version") != VERSION:
        raise FormatError(
            f"{path}: checkpoint version {index.get('version')!r}, this octojax reads {VERSION}"
        )
    return index


def _read(root: Path, rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, ...], Any]:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        tree = reader.restore(root / "tree") if any(_size(row) for row in rows) else {}
    found = {}
    for row in rows:
        key = tuple(row["name"])
        value: Any = tree
        if _size(row):
            for word in key:
                value = value[word]
        else:
            value = np.zeros(row["shape"], np.dtype(row["dtype"]))
        value = np.asarray(value)
        found[key] = jax.random.wrap_key_data(value, impl=row["key"]) if "key" in row else value
    return found


def _size(row: Mapping[str, Any]) -> int:
    return int(np.prod(row["shape"], dtype=np.int64))


# ---------------------------------------------------------------------- fitting


def _fit(template: Any, stored: Mapping[tuple[str, ...], Any], root: Path, name: str) -> Any:
    """The stored leaves in the structure of `template`."""
    paths, structure = jax.tree_util.tree_flatten_with_path(template)
    wanted = {_words(path): leaf for path, leaf in paths}
    wrong = [f"{'.'.join(key)} is not in the file" for key in wanted if key not in stored]
    wrong += [f"{'.'.join(key)} is in the file only" for key in stored if key not in wanted]
    for key, leaf in wanted.items():
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
            f"{root}: {len(wrong)} leaves of {name} do not fit: {'; '.join(wrong[:8])}"
            f"{'; ...' if len(wrong) > 8 else ''}. The checkpoint is of another model or "
            f"optimizer; build the one that it was saved with, or load it without a template"
        )
    return structure.unflatten([stored[_words(path)] for path, _ in paths])
