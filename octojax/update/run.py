"""Run an `UpdatePlan`: one compiled program per rank and phase, small exchanges between."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from octojax.update.exchange import ExchangeFunction, local_exchange
from octojax.update.layout import Rows
from octojax.update.places import Places
from octojax.update.plan import End, Role, UpdatePlan
from octojax.update.programs import Bound

Fetch = Callable[[Any, int, jax.ShapeDtypeStruct], jax.Array]

OptState = tuple[tuple[jax.Array, ...] | None, ...]
"""Per rank its pieces in the order of `plan.states_on(rank)`; None: another process's."""


class Update:
    """A compiled update. Holds programs only; parameters and state belong to the caller.

        init(params)                   -> opt_state
        apply(params, grads, opt_state) -> params, opt_state, scalars

    `params` and `grads` are flat, one entry per piece of the plan (a leaf of the user's tree, or
    a row of a stacked one); those of other processes are None. `apply` gives away (donates)
    parameters and state, not gradients.
    `exchange` carries the bytes of `plan.update`, `init_exchange` those of `plan.init`; by
    default every rank is in this process.
    """

    def __init__(
        self,
        plan: UpdatePlan,
        places: Places,
        exchange: ExchangeFunction | None = None,
        init_exchange: ExchangeFunction | None = None,
        donate: bool = True,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.plan, self.places = plan, places
        self.ranks = places.local_ranks
        self._leaves = {rank: plan.params_on(rank) for rank in self.ranks}
        self._states = {rank: plan.states_on(rank) for rank in self.ranks}
        params = {rank: [End(Role.PARAM, i) for i in self._leaves[rank]] for rank in self.ranks}
        states = {rank: [End(Role.NEW_STATE, k) for k in self._states[rank]] for rank in self.ranks}
        self._init = Bound(
            plan,
            plan.init,
            places,
            params,
            states,
            init_exchange or local_exchange(plan.init, places),
            donate=False,
            compiler_options=compiler_options,
        )
        self._update = Bound(
            plan,
            plan.update,
            places,
            {rank: [*params[rank], *self._further_inputs(rank)] for rank in self.ranks},
            {rank: self._outputs_of(rank) for rank in self.ranks},
            exchange or local_exchange(plan.update, places),
            donate,
            compiler_options,
        )

    @property
    def num_programs(self) -> int:
        """How many programs were compiled, for `init` and for `apply`."""
        return self._init.num_programs + self._update.num_programs

    def init(self, params: Sequence[jax.Array | None]) -> OptState:
        """Returns the first optimizer state, every leaf on its rank."""
        found = self._init.run({r: [params[i] for i in self._leaves[r]] for r in self.ranks})
        return self._per_rank({rank: tuple(leaves) for rank, leaves in found.items()})

    def apply(
        self,
        params: Sequence[jax.Array | None],
        grads: Sequence[jax.Array | None],
        opt_state: OptState,
        extra: Mapping[int, Any] | None = None,
    ) -> tuple[tuple[jax.Array | None, ...], OptState, dict[str, jax.Array]]:
        """Returns new parameters, new state, and scalars of this step (`grad_norm`).

        `extra[r]` is the tree of extra arguments on the devices of rank r, for the ranks in
        `extra_ranks`. Nothing waits for the devices.
        """
        inputs = {}
        absent = [None] * self.plan.extra_tree.num_leaves
        for rank in self.ranks:
            mine, held = self._leaves[rank], opt_state[rank]
            assert held is not None, f"rank {rank} is in this process, its state is not"
            more = jax.tree.leaves(extra[rank]) if extra and rank in extra else absent
            inputs[rank] = [*(params[i] for i in mine), *(grads[i] for i in mine), *held, *more]
        found = self._update.run(inputs)
        new: list[jax.Array | None] = [None] * len(self.plan.owners)
        state = {}
        for rank, outputs in found.items():
            mine = self._leaves[rank]
            for i, leaf in zip(mine, outputs[: len(mine)], strict=True):
                new[i] = leaf
            state[rank] = tuple(outputs[len(mine) : len(mine) + len(self._states[rank])])
        last = found[self.ranks[0]][len(found[self.ranks[0]]) - len(self.plan.scalars) :]
        return tuple(new), self._per_rank(state), dict(zip(self.plan.scalars, last, strict=True))

    @cached_property
    def extra_ranks(self) -> tuple[int, ...]:
        """Ranks of this process whose programs read the extra arguments (the loss, if any)."""
        phases = self.plan.update.phases
        return tuple(
            rank
            for rank in self.ranks
            if any(
                end.role is Role.EXTRA
                for phase in phases
                for program in phase.every_program
                if program.rank == rank
                for end in program.reads
            )
        )

    def gather(self, opt_state: OptState) -> Any:
        """Returns `gather_state` of the plan; every rank must be in this process."""
        return gather_state(self.plan, opt_state)

    def scatter(self, tree: Any) -> OptState:
        """Returns the per-rank state that the whole tree holds, placed on the ranks.

        Raises `ValueError` naming every leaf whose shape or type does not fit.
        """
        plan, leaves = self.plan, state_leaves(self.plan, tree)
        return self._per_rank(
            {
                rank: tuple(
                    _copy(_piece(leaves, plan, k), self.places.of_state(plan, k, rank))
                    for k in self._states[rank]
                )
                for rank in self.ranks
            }
        )

    def _further_inputs(self, rank: int) -> list[End]:
        extras = self.plan.extra_tree.num_leaves
        return [
            *(End(Role.GRAD, i) for i in self._leaves[rank]),
            *(End(Role.STATE, k) for k in self._states[rank]),
            *(End(Role.EXTRA, k) for k in range(extras)),
        ]

    def _outputs_of(self, rank: int) -> list[End]:
        """New leaves, new state, and on the first rank the scalars."""
        scalars = range(len(self.plan.scalars) if rank == self.ranks[0] else 0)
        return [
            *(End(Role.NEW_PARAM, i) for i in self._leaves[rank]),
            *(End(Role.NEW_STATE, k) for k in self._states[rank]),
            *(End(Role.SCALAR, k) for k in scalars),
        ]

    def _per_rank(self, found: Mapping[int, tuple[jax.Array, ...]]) -> OptState:
        return tuple(found.get(rank) for rank in range(self.plan.num_ranks))


def gather_state(plan: UpdatePlan, opt_state: OptState, fetch: Fetch | None = None) -> Any:
    """Returns the state as the tree that `optimizer.init` makes of the whole parameters.

    Leaves stay on their devices, rows of a stacked one are joined on those of its first. Where
    ranks are in other processes, `fetch(piece, rank, shape)` returns here what rank `rank` has;
    all processes call it alike.
    """
    pieces: list[Any] = [None] * len(plan.state_pieces)
    for rank, mine in reversed(list(enumerate(opt_state))):
        for k, piece in zip(plan.states_on(rank), mine or (), strict=mine is not None):
            pieces[k] = piece
    leaves: list[list[Any]] = [[] for _ in plan.state_layouts]
    for k, (piece, value) in enumerate(zip(plan.state_pieces, pieces, strict=True)):
        if fetch is not None and piece.rank is not None:
            value = fetch(value, piece.rank, piece_aval(plan, k))
        leaves[piece.leaf].append(value)
    return plan.state_tree.unflatten(
        [
            join_pieces(values, layout) if isinstance(layout, Rows) else values[0]
            for values, layout in zip(leaves, plan.state_layouts, strict=True)
        ]
    )


def state_leaves(plan: UpdatePlan, tree: Any) -> list[Any]:
    """Returns the flat leaves of a whole optimizer state.

    Raises `ValueError` where structure, shapes or types are not those of the plan's optimizer.
    """
    leaves, structure = jax.tree.flatten(tree)
    if structure != plan.state_tree:
        raise ValueError(
            f"this optimizer state has the structure {structure}, the optimizer's own is "
            f"{plan.state_tree}; restore it with the optimizer that it was saved with"
        )
    wrong = [
        f"{name}: {leaf.dtype}{list(leaf.shape)} instead of {aval.dtype}{list(aval.shape)}"
        for name, leaf, aval in zip(plan.state_names, leaves, plan.state_avals, strict=True)
        if (leaf.shape, leaf.dtype) != (aval.shape, aval.dtype)
    ]
    if wrong:
        raise ValueError(f"{len(wrong)} leaves of the state do not fit: {'; '.join(wrong)}")
    return leaves


def piece_aval(plan: UpdatePlan, k: int) -> jax.ShapeDtypeStruct:
    """Returns shape and type of a piece of the state."""
    leaf = plan.state_pieces[k].leaf
    aval, layout = plan.state_avals[leaf], plan.state_layouts[leaf]
    shape = layout.piece_shape(aval.shape) if isinstance(layout, Rows) else aval.shape
    return jax.ShapeDtypeStruct(shape, aval.dtype)


def _piece(leaves: Sequence[Any], plan: UpdatePlan, k: int) -> Any:
    piece = plan.state_pieces[k]
    leaf, layout = leaves[piece.leaf], plan.state_layouts[piece.leaf]
    if piece.row is None:
        return leaf
    assert isinstance(layout, Rows), "a piece with a row"
    start = piece.row * layout.block
    index = (slice(None),) * layout.axis
    return leaf[(*index, piece.row if layout.block == 1 else slice(start, start + layout.block))]


def join_pieces(pieces: Sequence[Any], layout: Rows) -> jax.Array:
    """Returns the leaf of which `pieces` are the rows, on the devices of the first."""
    here = [jax.device_put(x, pieces[0].sharding) for x in pieces]
    join = jnp.stack if layout.block == 1 else jnp.concatenate
    return join(here, axis=layout.axis)


def _copy(leaf: Any, sharding: Sharding | None) -> jax.Array:
    """A fresh array on `sharding`: the caller's must outlive the donation of ours."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.device_put(leaf, sharding)
    return jax.device_put(np.asarray(leaf), sharding)
