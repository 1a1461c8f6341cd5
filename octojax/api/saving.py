"""Save and restore a training state in the user's own layout, whatever the plan.

Every process writes the parts of leaves that its ranks keep, and reads those that they will keep:
no leaf is gathered, and none is whole in a process that does not keep it whole.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.tree_util as tree

from octojax import checkpoint, processes
from octojax.api.leaf_sources import GivenLeaves, JoinedLeaves, StoredLeaves
from octojax.checkpoint.leaves import Row, Words, check_storable, form_of, unlike, words
from octojax.checkpoint.sharded import Shard, StoredTrees, shards_of
from octojax.compat import is_key
from octojax.errors import ExecutionError, MeshError
from octojax.programs.recipe import raw, unstored
from octojax.stages.program import Role
from octojax.update.layout import Rows
from octojax.update.state import read_state

if TYPE_CHECKING:
    from octojax.api.step import TrainState, TrainStep

PARAMS, OPT_STATE, MODULE_STATE = "params", "opt_state", "module_state"


def save(step: "TrainStep", path: str | Path, state: "TrainState", overwrite: bool) -> None:
    """Writes `state` to the folder `path`: every process what it holds, however long it takes.
    All return when it is written, or raise the error of the first that has one."""
    rows = _rows(step)
    with processes.busy("writing the checkpoint"):
        checkpoint.save_shards(
            path,
            rows,
            list(_shards(step, state, rows)),
            step=state.step,
            plan=step.loss.plan,
            overwrite=overwrite,
            process=jax.process_index(),
            alone=not processes.several(),
            meet=lambda text: processes.everyone(text, f"step.save, step {state.step}"),
        )


def _templates(step: "TrainStep") -> dict[str, Any]:
    """The trees of a checkpoint of this step, of shapes."""
    traced = step.loss.staged.traced
    return {
        PARAMS: traced.params.unflatten(_shapes(traced.params)),
        OPT_STATE: step.update_plan.state_shapes,
        MODULE_STATE: None
        if step.loss.pure.state is None
        else traced.state.unflatten(_shapes(traced.state)),
    }


def _rows(step: "TrainStep") -> list[Row]:
    """What the index says of every leaf, pieces apart."""
    rows: list[Row] = []
    places: set[str] = set()
    for root, template in _templates(step).items():
        for path, aval in tree.tree_leaves_with_path(template):
            name: Words = (root, *words(path))
            at = unlike(name, places)
            places.add(".".join(at))
            rows.append(form_of(name, aval, at))
    check_storable(rows)
    return rows


def _shards(step: "TrainStep", state: "TrainState", rows: Sequence[Row]) -> Iterator[Shard]:
    """What this process holds of every leaf, and nobody else brings."""
    loss, model = step.loss, state.model
    staged, here = loss.staged, loss.mesh.local_ranks
    names = {root: [r.name for r in rows if r.name[0] == root] for root in (PARAMS, MODULE_STATE)}
    leaves = [*names[PARAMS], *names[MODULE_STATE]]
    offset = len(staged.traced.params)
    ndim = {row.name: len(row.shape) for row in rows}

    def shards(leaf: int, row: int | None, value: Any, aval: Any) -> Iterator[Shard]:
        name = leaves[leaf]
        start = (0,) * ndim[name] if row is None else (row, *(0,) * (ndim[name] - 1))
        array = value if is_key(aval) else unstored(value, aval)
        yield from shards_of(array, start, None if row is None else 0, name)

    for unit, value, aval in zip(staged.units, model.units, staged.unit_avals, strict=True):
        if value is not None and unit.leaf < len(leaves):
            yield from shards(unit.leaf, unit.index, value, aval)
    changing = dict(model.carried)
    if here[0] == 0:  # every rank has the counters: the first one brings them
        for ref, value in zip(loss.count_reads, model.counters[0], strict=True):
            if ref.role is Role.STATE:
                changing[ref.index] = value
    for k, value in sorted(changing.items()):
        leaf = staged.state[k]
        yield from shards(offset + leaf.leaf, leaf.row, value, leaf.aval)
    yield from _opt_shards(step, state, [r.name for r in rows if r.name[0] == OPT_STATE], ndim)


def _opt_shards(
    step: "TrainStep", state: "TrainState", names: Sequence[Words], ndim: dict[Words, int]
) -> Iterator[Shard]:
    plan = step.update_plan
    for rank in step.loss.mesh.local_ranks:
        for k, value in zip(plan.states_on(rank), state.opt_state[rank], strict=True):
            piece = plan.state_pieces[k]
            if piece.rank is None and rank:  # which every rank has
                continue
            name, layout = names[piece.leaf], plan.state_layouts[piece.leaf]
            start, axis = [0] * ndim[name], None
            if piece.row is not None:
                assert isinstance(layout, Rows), "a piece with a row"
                start[layout.axis] = piece.row * layout.block
                axis = layout.axis if layout.block == 1 else None
            yield from shards_of(raw(value), start, axis, name)


def restore(step: "TrainStep", path: str | Path) -> tuple[Any, Any, int]:
    """Returns what a training state holds: parameters and module state, the optimizer state of
    this process's ranks, and the step number in `path`. Of a leaf a rank reads what it will keep.

    Raises `FormatError` naming the leaves that are not those of the step's model and optimizer;
    in several processes `MeshError` where they have read different checkpoints, and
    `ExecutionError` where the path holds none for one of them.
    """
    count = jax.process_count() if processes.several() else 1
    error: Exception | None = None
    mine, number = "", 0
    model: Any = None
    opt_state: Any = None
    try:
        with (
            processes.busy("reading the checkpoint"),
            checkpoint.opened(path, jax.process_index() if count > 1 else 0, count) as stored,
        ):
            number = stored.index.step
            mine = f"step {number} ({stored.digest})"
            model, opt_state = _placed(step, stored)
    except Exception as raised:
        error = raised
    texts = processes.everyone(
        f"{type(error).__name__}: {error}" if error else mine, "step.restore"
    )
    if error is not None:
        raise error
    others = [f"process {p}: {text}" for p, text in enumerate(texts) if text != mine]
    if others and all(text.startswith("step ") for text in texts):
        each = ", ".join(f"process {p} has {text}" for p, text in enumerate(texts))
        raise MeshError(
            f"the processes have read different checkpoints ({each}), this one from {path}. Every "
            f"process must read the same checkpoint: give a path that all see"
        )
    if others:
        raise ExecutionError(
            f"this process has read {mine} from {path}, but {'; '.join(others)}. Every process "
            f"must read the same checkpoint: give a path that all see"
        )
    return step.loss.with_copies(model), opt_state, number


def _placed(step: "TrainStep", stored: StoredTrees) -> tuple[Any, Any]:
    loss, templates = step.loss, _templates(step)
    leaves = {name: stored.fit(template, name) for name, template in templates.items()}
    staged = loss.staged
    avals = [*staged.traced.params.avals, *staged.traced.state.avals]
    source = JoinedLeaves(
        (
            (StoredLeaves([*leaves[PARAMS], *leaves[MODULE_STATE]], avals), len(avals)),
            (GivenLeaves(staged.constants), len(staged.constants)),
        )
    )
    opt_state = read_state(step.update_plan, step.places, leaves[OPT_STATE])
    return loss.placed(source), opt_state


def _shapes(leaves: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in leaves.avals]
