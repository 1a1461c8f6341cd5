"""Trace an optax optimizer over the user's whole tree and spread it over ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Literal

from octojax.compat import num_bytes
from octojax.errors import PlanError
from octojax.jaxprs.graph import Graph, graph_of
from octojax.update.layout import EVERYWHERE, Layout, Partial, Rows, Stack
from octojax.update.partition import distribute
from octojax.update.place import Placed, place
from octojax.update.plan import End, Role, UpdatePlan, pieces_of
from octojax.update.refusal import EXCHANGE_LIMIT_BYTES
from octojax.update.routes import Want

GRAD_NORM = "grad_norm"


Owner = int | Sequence[int]
"""The rank of a leaf; for a leaf that is stacked over layers and split, that of every row."""


def build_update(
    optimizer: optax.GradientTransformation,
    params: Any,
    owners: Sequence[Owner],
    num_ranks: int,
    *,
    grad_dtypes: Sequence[Any] | None = None,
    extra: Any = None,
    grad_norm: bool = True,
    limit_bytes: int = EXCHANGE_LIMIT_BYTES,
) -> UpdatePlan:
    """Returns the update of `optimizer` as programs per rank, equal to the unpipelined one.

    `params` is the user's tree (arrays or shapes) and `owners[i]` the rank of its i-th flat
    leaf, or of each row along its axis 0. The optimizer is traced once over the whole tree, so
    that whatever looks at paths, shapes or whole leaves sees what it would see without a
    pipeline. Rows of a stacked leaf are updated on their ranks; where an operation needs the
    leaf whole, its rows are brought to one rank and the results back.

    Gradients arrive as `grad_dtypes[i]` (by default the leaf's own type) and are cast to the
    leaf's type first. Integer and boolean leaves are passed on unchanged. `extra` is a dict of
    shapes of further arguments of `optimizer.update`, the same on every rank (`value`: the
    loss). With `grad_norm` the global norm of the gradients is among the scalars.

    Raises `PlanError` where one operation needs large arrays of several ranks, and where the
    optimizer cannot be traced over these parameters.
    """
    flat, params_tree = jax.tree.flatten(params)
    layouts = _layouts(owners, flat, num_ranks)
    traced = _Traced(optimizer, flat, params_tree, grad_dtypes, extra or {}, grad_norm)
    names = traced.input_names
    init, update = graph_of(traced.init), graph_of(traced.update)
    states = _state_layouts(init, update, layouts, traced, limit_bytes)
    ends = _Ends(layouts, states, len(traced.extras))
    count, num_states = len(flat), len(states)
    leaves, moments = update.outputs[:count], update.outputs[count : count + num_states]
    wants = [
        *_wants(ends.of(Role.NEW_PARAM, layouts), leaves, layouts, traced.params),
        *_wants(ends.of(Role.NEW_STATE, states), moments, states, traced.states),
    ]
    wants += [
        Want((End(Role.SCALAR, k),), atom, EVERYWHERE, jax.ShapeDtypeStruct((), np.float32))
        for k, atom in enumerate(update.outputs[count + num_states :])
    ]
    firsts = _wants(ends.of(Role.NEW_STATE, states), init.outputs, states, traced.states)
    pairs = [(want.atom, want.layout) for want in wants]
    first_pairs = [(want.atom, want.layout) for want in firsts]
    placed = place(update, ends.layouts, pairs, names, limit_bytes, traced.roots)
    placed_init = place(init, layouts, first_pairs, names, limit_bytes, traced.roots)
    return UpdatePlan(
        num_ranks=num_ranks,
        param_names=tuple(traced.param_names),
        param_avals=tuple(traced.params),
        param_layouts=tuple(layouts),
        params_tree=params_tree,
        state_names=tuple(traced.state_names),
        state_avals=tuple(traced.states),
        state_layouts=tuple(states),
        state_tree=traced.state_tree,
        scalars=(GRAD_NORM,) if grad_norm else (),
        extra_tree=traced.extra_tree,
        operations=tuple(sorted({op.primitive.name for op in update.ops})),
        init=distribute(init, placed_init, ends.inputs[:count], firsts, num_ranks),
        update=distribute(update, placed, ends.inputs, wants, num_ranks),
    )


def locate_state(
    optimizer: optax.GradientTransformation, params: Any, owners: Sequence[Owner], num_ranks: int
) -> list[tuple[int, int | None]]:
    """Returns the bytes and the rank (None: every rank) of every piece of the optimizer state.

    Arguments and errors are those of `build_update`, of which this is the first part.
    """
    flat, tree = jax.tree.flatten(params)
    layouts = _layouts(owners, flat, num_ranks)
    traced = _Traced(optimizer, flat, tree, None, {}, grad_norm=False)
    graphs = graph_of(traced.init), graph_of(traced.update)
    states = _state_layouts(*graphs, layouts, traced, EXCHANGE_LIMIT_BYTES)
    return [
        (num_bytes(traced.states[p.leaf]) // _num_pieces(states[p.leaf]), p.rank)
        for p in pieces_of(states)
    ]


def _num_pieces(layout: Layout) -> int:
    return len(layout.stack.owners) if isinstance(layout, Rows) else 1


def _layouts(owners: Sequence[Owner], flat: Sequence[Any], num_ranks: int) -> list[Layout]:
    """Returns the layouts of the parameters, from the ranks of leaves or of their rows."""
    if len(owners) != len(flat):
        raise PlanError(f"{len(owners)} owners for {len(flat)} parameter leaves; give one each")
    each = [(i, rank) for i, x in enumerate(owners) for rank in ([x] if isinstance(x, int) else x)]
    outside = [(i, rank) for i, rank in each if not 0 <= rank < num_ranks]
    if outside:
        leaf, rank = outside[0]
        raise PlanError(
            f"{len(outside)} owners are no rank: leaf {leaf} on rank {rank}, but ranks are "
            f"0 to {num_ranks - 1}"
        )
    short = [
        f"leaf {i} of shape {list(jnp.shape(leaf))} has {len(x)} owners"
        for i, (x, leaf) in enumerate(zip(owners, flat, strict=True))
        if not isinstance(x, int) and (not jnp.shape(leaf) or len(x) != jnp.shape(leaf)[0])
    ]
    if short:
        raise PlanError(f"a leaf in rows needs an owner per index of axis 0: {'; '.join(short)}")
    return [x if isinstance(x, int) else Rows(Stack(tuple(x))) for x in owners]


class _Ends:
    """The ends and layouts of the inputs of the update graph, in order."""

    def __init__(self, params: Sequence[Layout], states: Sequence[Layout], extras: int) -> None:
        self.layouts: list[Layout] = [*params, *params, *states, *([EVERYWHERE] * extras)]
        self.inputs = [
            *self.of(Role.PARAM, params),
            *self.of(Role.GRAD, params),
            *self.of(Role.STATE, states),
            *((End(Role.EXTRA, k),) for k in range(extras)),
        ]

    @staticmethod
    def of(role: Role, layouts: Sequence[Layout]) -> list[tuple[End, ...]]:
        """Returns the ends of every leaf: one, or one per row."""
        ends: list[list[End]] = [[] for _ in layouts]
        for at, piece in enumerate(pieces_of(layouts)):
            ends[piece.leaf].append(End(role, at))
        return [tuple(x) for x in ends]


def _wants(
    ends: Sequence[tuple[End, ...]], atoms: Sequence[Any], layouts: Sequence[Layout], avals: Any
) -> list[Want]:
    return [Want(*each) for each in zip(ends, atoms, layouts, avals, strict=True)]


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
        self.param_names = _paths(params_tree.unflatten(self.params))
        dtypes = [x.dtype for x in self.params] if grad_dtypes is None else grad_dtypes
        self.grads = [
            jax.ShapeDtypeStruct(x.shape, dtype)
            for x, dtype in zip(self.params, dtypes, strict=True)
        ]
        extras, self.extra_tree = jax.tree.flatten(extra)
        self.extras = [_struct(x) for x in extras]
        self.extra_names = _paths(extra)
        trainable = [jnp.issubdtype(x.dtype, jnp.inexact) for x in self.params]
        full = optax.with_extra_args_support(optimizer)

        def init(*leaves: Any) -> Any:
            return full.init(params_tree.unflatten(leaves))

        with _tracing("init", self.params):
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
            values = [n if free else p for n, p, free in zip(new, params, trainable, strict=True)]
            floats = [
                g.astype(jnp.float32) if g.dtype.itemsize == 1 else g  # 8 bits: no promotion
                for g, free in zip(gradients, trainable, strict=True)
                if free
            ]
            norms = [optax.tree.norm(floats).astype(jnp.float32)] if grad_norm else []
            return [*values, *self._same_state(state), *norms]

        with _tracing("update", self.params, self.extra_names):
            self.update: ClosedJaxpr = jax.make_jaxpr(update)(
                *self.params, *self.grads, *self.states, *self.extras
            )

    @property
    def input_names(self) -> list[str]:
        """The inputs of the update, for messages."""
        return [
            *(f"params{path}" for path in self.param_names),
            *(f"grads{path}" for path in self.param_names),
            *(f"state{path}" for path in self.state_names),
            *(f"extra{path}" for path in self.extra_names),
        ]

    @cached_property
    def roots(self) -> list[int | None]:
        """The leaf of the parameters that each input of the update belongs to, if any."""
        leaves = range(len(self.params))
        return [*leaves, *leaves, *(self.parameter_of(k) for k in range(len(self.states)))]

    def parameter_of(self, k: int) -> int | None:
        """Returns the parameter of the same shape whose path ends the path of state leaf k."""
        for i, (path, param) in enumerate(zip(self.param_names, self.params, strict=True)):
            if self.state_names[k].endswith(path) and param.shape == self.states[k].shape:
                return i
        return None

    def _same_state(self, state: Any) -> list[Any]:
        """Returns the leaves of the new state, checked to be of the old state's form."""
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


@contextmanager
def _tracing(what: str, params: Sequence[Any], extra: Sequence[str] = ()) -> Iterator[None]:
    """Names what octojax asked for where an optimizer cannot be traced over the parameters."""
    try:
        yield
    except PlanError:
        raise
    except Exception as error:
        extras = "".join(f", {name.strip(chr(39) + '[]')}" for name in extra)
        call = "params" if what == "init" else f"gradients, state, params{extras}"
        raise PlanError(
            f"optimizer.{what}({call}) failed on the {len(params)} parameter leaves: "
            f"{type(error).__name__}: {error}. A step passes an optimizer these arguments and no "
            f"others (docs/optimizers.md lists the optimizers that need more)"
        ) from error


def _paths(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


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


def _state_layouts(
    init: Graph,
    update: Graph,
    params: Sequence[Layout],
    traced: _Traced,
    limit_bytes: int,
) -> list[Layout]:
    """Where every state leaf lies: where its new value is made; everywhere what all ranks know.

    Starts from "everywhere" and follows the graph until nothing changes: a moment is mixed
    with its gradient, so its new value, hence the moment itself, lives with the parameter.
    Arrays that are never renewed go where they come from (init) or whose path they carry.
    """
    names = traced.input_names
    states: list[Layout] = [EVERYWHERE] * len(traced.states)
    while True:
        inputs = _Ends(params, states, len(traced.extras)).layouts
        placed = place(update, inputs, (), names, limit_bytes, traced.roots)
        outputs = update.outputs[len(params) : len(params) + len(states)]
        new = [
            old if old is not EVERYWHERE else _layout_of(atom, placed)
            for old, atom in zip(states, outputs, strict=True)
        ]
        if new == states:
            break
        states = new
    placed = place(init, params, (), names, limit_bytes, traced.roots)
    for k, atom in enumerate(init.outputs):
        if states[k] is EVERYWHERE and traced.states[k].shape:
            first = _layout_of(atom, placed)
            own = traced.parameter_of(k)
            states[k] = params[own] if first is EVERYWHERE and own is not None else first
    return states


def _layout_of(atom: Any, placed: Placed) -> Layout:
    """Returns the layout of a leaf with value `atom`: what is shared out is joined everywhere."""
    layout = EVERYWHERE if isinstance(atom, Literal) else placed.layouts[atom]
    return EVERYWHERE if isinstance(layout, Partial) else layout
