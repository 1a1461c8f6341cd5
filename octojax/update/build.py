"""Trace an optax optimizer over the user's whole tree and spread it over ranks."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Literal

from octojax.errors import PlanError
from octojax.update.graph import Graph, flatten
from octojax.update.partition import Want, distribute
from octojax.update.place import EVERYWHERE, EXCHANGE_LIMIT_BYTES, Rank, place
from octojax.update.plan import End, Role, UpdatePlan

GRAD_NORM = "grad_norm"


def build_update(
    optimizer: optax.GradientTransformation,
    params: Any,
    owners: Sequence[int],
    num_ranks: int,
    *,
    grad_dtypes: Sequence[Any] | None = None,
    extra: Any = None,
    grad_norm: bool = True,
    limit_bytes: int = EXCHANGE_LIMIT_BYTES,
) -> UpdatePlan:
    """Returns the update of `optimizer` as programs per rank, equal to the unpipelined one.

    `params` is the user's tree (arrays or shapes) and `owners[i]` the rank of its i-th flat
    leaf. The optimizer is traced once over the whole tree, so that masks, labels and
    everything that looks at paths see what they would see without a pipeline. A leaf that is
    stacked over layers and split over ranks is given as a tuple of its slices in the place of
    the leaf: masks and labels given as prefixes still fit, and only what reduces over a whole
    leaf (trust ratios, block clipping) then works per layer.

    Gradients arrive as `grad_dtypes[i]` (by default the leaf's own type) and are cast to the
    leaf's type first. Integer and boolean leaves are passed on unchanged. `extra` is a dict of
    shapes of further arguments of `optimizer.update`, the same on every rank (`value`: the
    loss). With `grad_norm` the global norm of the gradients is among the scalars.

    Raises `PlanError` where one operation needs large arrays of several ranks.
    """
    flat, params_tree = jax.tree.flatten(params)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    _check_owners(owners, len(flat), num_ranks)
    traced = _Traced(optimizer, flat, params_tree, grad_dtypes, extra or {}, grad_norm)
    init, update = flatten(traced.init), flatten(traced.update)
    names = _input_names(paths, traced.state_names, traced.extra_names)
    state_owners = _state_owners(init, update, owners, traced, paths, names, limit_bytes)
    ends, ranks = _update_inputs(traced, owners, state_owners)
    num_params, num_states = len(flat), len(state_owners)
    wants = [
        Want(End(Role.NEW_PARAM, i), atom, owners[i], traced.params[i])
        for i, atom in enumerate(update.outputs[:num_params])
    ]
    wants += [
        Want(End(Role.NEW_STATE, k), atom, state_owners[k], traced.states[k])
        for k, atom in enumerate(update.outputs[num_params : num_params + num_states])
    ]
    wants += [
        Want(End(Role.SCALAR, k), atom, EVERYWHERE, jax.ShapeDtypeStruct((), np.float32))
        for k, atom in enumerate(update.outputs[num_params + num_states :])
    ]
    pairs = [(want.atom, want.rank) for want in wants]
    placed = place(update, ranks, pairs, names, limit_bytes)
    firsts = [
        Want(End(Role.NEW_STATE, k), atom, state_owners[k], traced.states[k])
        for k, atom in enumerate(init.outputs)
    ]
    pairs = [(want.atom, want.rank) for want in firsts]
    placed_init = place(init, owners, pairs, names, limit_bytes)
    return UpdatePlan(
        num_ranks=num_ranks,
        owners=tuple(owners),
        param_names=tuple(paths),
        param_avals=tuple(traced.params),
        grad_avals=tuple(traced.grads),
        params_tree=params_tree,
        state_names=tuple(traced.state_names),
        state_avals=tuple(traced.states),
        state_owners=tuple(state_owners),
        state_tree=traced.state_tree,
        scalars=(GRAD_NORM,) if grad_norm else (),
        extra_tree=traced.extra_tree,
        init=distribute(init, placed_init, ends[:num_params], firsts, num_ranks),
        update=distribute(update, placed, ends, wants, num_ranks),
    )


def locate_state(
    optimizer: optax.GradientTransformation, params: Any, owners: Sequence[int], num_ranks: int
) -> tuple[tuple[Any, ...], tuple[Rank, ...]]:
    """Returns shape and rank of every leaf of the optimizer state (None: on every rank).

    Arguments and errors are those of `build_update`, of which this is the first part.
    """
    flat, tree = jax.tree.flatten(params)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    _check_owners(owners, len(flat), num_ranks)
    traced = _Traced(optimizer, flat, tree, None, {}, grad_norm=False)
    names = _input_names(paths, traced.state_names, ())
    graphs = flatten(traced.init), flatten(traced.update)
    found = _state_owners(*graphs, owners, traced, paths, names, EXCHANGE_LIMIT_BYTES)
    return tuple(traced.states), tuple(found)


def _check_owners(owners: Sequence[int], num_leaves: int, num_ranks: int) -> None:
    if len(owners) != num_leaves:
        raise PlanError(f"{len(owners)} owners for {num_leaves} parameter leaves; give one each")
    outside = [(i, r) for i, r in enumerate(owners) if not 0 <= r < num_ranks]
    if outside:
        leaf, rank = outside[0]
        raise PlanError(
            f"{len(outside)} owners are no rank: leaf {leaf} on rank {rank}, but ranks are "
            f"0 to {num_ranks - 1}"
        )


class _Traced:
    """The jaxprs of init and update over the whole tree, with the types at their ends."""

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        flat: Sequence[Any],
        params_tree: Any,
        grad_dtypes: Sequence[Any] | None,
        extra: Any,
        grad_norm: bool,
    ) -> None:
        self.params = [_struct(x) for x in flat]
        dtypes = [x.dtype for x in self.params] if grad_dtypes is None else grad_dtypes
        self.grads = [
            jax.ShapeDtypeStruct(x.shape, dtype)
            for x, dtype in zip(self.params, dtypes, strict=True)
        ]
        extras, self.extra_tree = jax.tree.flatten(extra)
        self.extras = [_struct(x) for x in extras]
        self.extra_names = [
            jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(extra)
        ]
        trainable = [jnp.issubdtype(x.dtype, jnp.inexact) for x in self.params]
        full = optax.with_extra_args_support(optimizer)

        def init(*leaves: Any) -> Any:
            return full.init(params_tree.unflatten(leaves))

        self.init, shapes = jax.make_jaxpr(init, return_shape=True)(*self.params)
        with_paths, self.state_tree = jax.tree_util.tree_flatten_with_path(shapes)
        self.state_names = [jax.tree_util.keystr(path) for path, _ in with_paths]
        self.states = [_struct(x) for _, x in with_paths]

        def update(*arguments: Any) -> list[Any]:
            params, grads, states, extras = _split(
                arguments, len(flat), len(flat), len(self.states), len(self.extras)
            )
            gradients = [
                g.astype(p.dtype) if free else jnp.zeros(p.shape, p.dtype)
                for g, p, free in zip(grads, params, trainable, strict=True)
            ]
            tree = params_tree.unflatten(params)
            updates, state = full.update(
                params_tree.unflatten(gradients),
                self.state_tree.unflatten(states),
                tree,
                **self.extra_tree.unflatten(extras),
            )
            new = jax.tree.leaves(optax.apply_updates(tree, updates))
            kept = [n if free else p for n, p, free in zip(new, params, trainable, strict=True)]
            floats = [
                g.astype(jnp.float32) if g.dtype.itemsize == 1 else g  # 8 bits: no promotion
                for g, free in zip(gradients, trainable, strict=True)
                if free
            ]
            norms = [optax.tree.norm(floats).astype(jnp.float32)] if grad_norm else []
            return [*kept, *self._same_state(state), *norms]

        self.update: ClosedJaxpr = jax.make_jaxpr(update)(
            *self.params, *self.grads, *self.states, *self.extras
        )

    def _same_state(self, state: Any) -> list[Any]:
        """The leaves of the new state, checked to be of the old state's form."""
        leaves, tree = jax.tree.flatten(state)
        if tree != self.state_tree:
            raise PlanError(
                f"optimizer.update returns a state of another structure than optimizer.init: "
                f"{tree} instead of {self.state_tree}"
            )
        wrong = [
            f"{name} is {new.dtype}{list(new.shape)}, was {old.dtype}{list(old.shape)}"
            for name, old, new in zip(self.state_names, self.states, leaves, strict=True)
            if jnp.shape(new) != old.shape
        ]
        if wrong:
            raise PlanError(f"optimizer.update changes the shape of its state: {'; '.join(wrong)}")
        return [
            jnp.asarray(new).astype(old.dtype) for old, new in zip(self.states, leaves, strict=True)
        ]


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        jnp.shape(x), x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
    )


def _split(items: Sequence[Any], *sizes: int) -> list[list[Any]]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(list(items[at : at + size]))
        at += size
    return pieces


def _input_names(
    paths: Sequence[str], state_names: Sequence[str], extra_names: Sequence[str]
) -> list[str]:
    return [
        *(f"params{path}" for path in paths),
        *(f"grads{path}" for path in paths),
        *(f"state{path}" for path in state_names),
        *(f"extra{path}" for path in extra_names),
    ]


def _update_inputs(
    traced: _Traced, owners: Sequence[int], state_owners: Sequence[Rank]
) -> tuple[list[End], list[Rank]]:
    """The ends and ranks of the inputs of the update graph, in order."""
    ends = [End(Role.PARAM, i) for i in range(len(owners))]
    ends += [End(Role.GRAD, i) for i in range(len(owners))]
    ends += [End(Role.STATE, k) for k in range(len(state_owners))]
    ends += [End(Role.EXTRA, k) for k in range(len(traced.extras))]
    ranks: list[Rank] = [*owners, *owners, *state_owners, *([EVERYWHERE] * len(traced.extras))]
    return ends, ranks


def _state_owners(
    init: Graph,
    update: Graph,
    owners: Sequence[int],
    traced: _Traced,
    paths: Sequence[str],
    names: Sequence[str],
    limit_bytes: int,
) -> list[Rank]:
    """The rank of every state leaf: where its new value is made; None for what all ranks know.

    Starts from "everywhere" and follows the graph until nothing changes: a moment is mixed
    with its gradient, so its new value, hence the moment itself, lives with the parameter.
    Arrays that are never renewed go where they come from (init) or whose path they carry.
    """
    num_params = len(owners)
    found: list[Rank] = [EVERYWHERE] * len(traced.states)
    while True:
        _, ranks = _update_inputs(traced, owners, found)
        placed = place(update, ranks, (), names, limit_bytes)
        outputs = update.outputs[num_params : num_params + len(found)]
        new = [
            old if isinstance(atom, Literal) or old is not EVERYWHERE else placed.ranks[atom]
            for old, atom in zip(found, outputs, strict=True)
        ]
        if new == found:
            break
        found = new
    made = place(init, owners, (), names, limit_bytes)
    for k, atom in enumerate(init.outputs):
        if found[k] is EVERYWHERE and traced.states[k].shape:
            first = EVERYWHERE if isinstance(atom, Literal) else made.ranks[atom]
            found[k] = _by_path(traced, k, paths, owners) if first is EVERYWHERE else first
    return found


def _by_path(traced: _Traced, k: int, paths: Sequence[str], owners: Sequence[int]) -> Rank:
    """The owner of the parameter of the same shape whose path ends the state leaf's path."""
    for path, param, owner in zip(paths, traced.params, owners, strict=True):
        if traced.state_names[k].endswith(path) and param.shape == traced.states[k].shape:
            return owner
    return EVERYWHERE
