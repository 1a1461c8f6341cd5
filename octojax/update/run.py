"""Run an `UpdatePlan`: one compiled program per rank and phase, small exchanges between."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Sharding

from octojax.update.plan import Distributed, End, Role, UpdatePlan, UpdateProgram

Packed = Mapping[int, jax.Array]
"""Per rank of this process that offers something, its byte vector."""

ExchangeFunction = Callable[[int, Packed], Mapping[int, Sequence[jax.Array]]]
"""`exchange(phase, packed)` returns, for every rank r of this process, the vectors of the ranks
in `plan.update.phases[phase].exchange.needs[r]`, in that order, on the devices of r."""

OptState = tuple[tuple[jax.Array, ...] | None, ...]
"""Per rank its leaves in the order of `plan.state_leaves(rank)`; None: another process's."""


@dataclass(frozen=True)
class Places:
    """Where the leaves lie. `ranks[r]` is for everything replicated over the devices of rank r
    (None: the rank is in another process), `params[i]` for parameter leaf i, its gradient and
    the state of its shape (empty: replicated over the rank)."""

    ranks: tuple[Sharding | None, ...]
    params: tuple[Sharding | None, ...] = ()

    def of_param(self, plan: UpdatePlan, leaf: int) -> Sharding | None:
        own = self.params[leaf] if self.params else None
        return self.ranks[plan.owners[leaf]] if own is None else own

    def of_state(self, plan: UpdatePlan, leaf: int, rank: int) -> Sharding | None:
        """A moment lies as its parameter does; other state is replicated over the rank."""
        owner = _parameter_of(plan, leaf)
        return self.ranks[rank] if owner is None else self.of_param(plan, owner)


def _parameter_of(plan: UpdatePlan, leaf: int) -> int | None:
    """The parameter that a state leaf belongs to: same rank and shape, and path at the end."""
    for i, path in enumerate(plan.param_names):
        same = (
            plan.owners[i] == plan.state_owners[leaf]
            and plan.param_avals[i].shape == plan.state_avals[leaf].shape
        )
        if same and plan.state_names[leaf].endswith(path):
            return i
    return None


def local_exchange(distributed: Distributed, places: Places) -> ExchangeFunction:
    """Returns the exchange for ranks that are all in this process: plain copies, no waiting."""

    def exchange(phase: int, packed: Packed) -> dict[int, list[jax.Array]]:
        needs = distributed.phases[phase].exchange.needs  # type: ignore[union-attr]
        pairs = [(source, rank) for rank, sources in enumerate(needs) for source in sources]
        moved = jax.device_put(
            [packed[source] for source, _ in pairs], [places.ranks[rank] for _, rank in pairs]
        )
        received: dict[int, list[jax.Array]] = {rank: [] for rank in range(len(needs))}
        for (_, rank), vector in zip(pairs, moved, strict=True):
            received[rank].append(vector)
        return received

    return exchange


class Update:
    """A compiled update. Holds programs only; parameters and state belong to the caller.

        init(params)                          -> opt_state
        apply(params, grads, opt_state, ...)  -> params, opt_state, scalars

    `params` and `grads` are flat, one entry per leaf of the user's tree; leaves of other
    processes are None. `apply` gives away (donates) parameters and state, not gradients.
    """

    def __init__(
        self,
        plan: UpdatePlan,
        places: Places,
        exchange: ExchangeFunction | None = None,
        init_exchange: ExchangeFunction | None = None,
        donate: bool = True,
        workers: int | None = None,
    ) -> None:
        self.plan = plan
        self.places = places
        self.ranks = tuple(r for r, place in enumerate(places.ranks) if place is not None)
        self._exchange = exchange or local_exchange(plan.update, places)
        self._init_exchange = init_exchange or local_exchange(plan.init, places)
        with ThreadPoolExecutor(workers) as pool:
            self._init = _compile(plan, plan.init, places, False, pool)
            self._update = _compile(plan, plan.update, places, donate, pool)

    def init(self, params: Sequence[jax.Array | None]) -> OptState:
        """Returns the first optimizer state, every leaf on its rank."""
        ends = {rank: self._param_ends(params, rank) for rank in self.ranks}
        _run(self.plan.init, self._init, ends, self._init_exchange, self.plan.num_ranks)
        return self._new_state(ends)

    def apply(
        self,
        params: Sequence[jax.Array | None],
        grads: Sequence[jax.Array | None],
        opt_state: OptState,
        extra: Mapping[int, Any] | None = None,
    ) -> tuple[tuple[jax.Array | None, ...], OptState, dict[str, jax.Array]]:
        """Returns new parameters, new state, and scalars of this step (`grad_norm`).

        `extra[r]` is the tree of extra arguments on the devices of rank r, where the plan was
        built with some. Nothing waits for the devices.
        """
        plan = self.plan
        ends = {}
        for rank in self.ranks:
            mine = self._param_ends(params, rank)
            for i in plan.param_leaves(rank):
                mine[End(Role.GRAD, i)] = grads[i]
            leaves = opt_state[rank]
            assert leaves is not None, f"rank {rank} is in this process, its state is not"
            for k, leaf in zip(plan.state_leaves(rank), leaves, strict=True):
                mine[End(Role.STATE, k)] = leaf
            for k, leaf in enumerate(jax.tree.leaves(extra[rank] if extra else None)):
                mine[End(Role.EXTRA, k)] = leaf
            ends[rank] = mine
        _run(plan.update, self._update, ends, self._exchange, plan.num_ranks)
        new: list[jax.Array | None] = [None] * len(plan.owners)
        for rank in self.ranks:
            for i in plan.param_leaves(rank):
                new[i] = ends[rank][End(Role.NEW_PARAM, i)]
        first = ends[self.ranks[0]]
        scalars = {name: first[End(Role.SCALAR, k)] for k, name in enumerate(plan.scalars)}
        return tuple(new), self._new_state(ends), scalars

    def gather(self, opt_state: OptState) -> Any:
        """Returns the state as the tree that `optimizer.init` makes of the whole parameters.

        Leaves stay on their devices; every rank must be in this process.
        """
        plan = self.plan
        leaves: list[Any] = [None] * len(plan.state_owners)
        for rank, mine in reversed(list(enumerate(opt_state))):
            for k, leaf in zip(plan.state_leaves(rank), mine or (), strict=mine is not None):
                leaves[k] = leaf
        return plan.state_tree.unflatten(leaves)

    def scatter(self, tree: Any) -> OptState:
        """Returns the per-rank state that the whole tree holds, placed on the ranks.

        Raises `ValueError` naming every leaf whose shape or type does not fit.
        """
        plan = self.plan
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
        return tuple(
            tuple(
                _place(leaves[k], self.places.of_state(plan, k, rank))
                for k in plan.state_leaves(rank)
            )
            if rank in self.ranks
            else None
            for rank in range(plan.num_ranks)
        )

    def _param_ends(self, params: Sequence[Any], rank: int) -> dict[End, Any]:
        return {End(Role.PARAM, i): params[i] for i in self.plan.param_leaves(rank)}

    def _new_state(self, ends: Mapping[int, Mapping[End, Any]]) -> OptState:
        plan = self.plan
        return tuple(
            tuple(ends[rank][End(Role.NEW_STATE, k)] for k in plan.state_leaves(rank))
            if rank in ends
            else None
            for rank in range(plan.num_ranks)
        )


def _place(leaf: Any, sharding: Sharding | None) -> jax.Array:
    """A fresh array on `sharding`: the caller's must outlive the donation of ours."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.device_put(leaf, sharding)
    return jax.device_put(np.asarray(leaf), sharding)


_Compiled = dict[tuple[int, int], Callable[..., Any]]


def _run(
    distributed: Distributed,
    compiled: _Compiled,
    ends: Mapping[int, dict[End, Any]],
    exchange: ExchangeFunction,
    num_ranks: int,
) -> None:
    """Runs all phases; what programs write is added to `ends` of their rank."""
    for k, phase in enumerate(distributed.phases):
        for rank, mine in ends.items():
            program = phase.programs[rank]
            if program is None or (k, rank) not in compiled:
                continue
            results = compiled[k, rank](*[mine[end] for end in program.reads])
            mine.update(zip(program.writes, results, strict=True))
        if phase.exchange is None:
            continue
        packed = {
            rank: mine[End(Role.PACKED, k)]
            for rank, mine in ends.items()
            if End(Role.PACKED, k) in mine
        }
        received = exchange(k, packed)
        for rank, mine in ends.items():
            sources = phase.exchange.needs[rank]
            for source, vector in zip(sources, received[rank], strict=True):
                mine[End(Role.GATHERED, k * num_ranks + source)] = vector


def _compile(
    plan: UpdatePlan,
    distributed: Distributed,
    places: Places,
    donate: bool,
    pool: ThreadPoolExecutor,
) -> _Compiled:
    """Compiles the programs of this process's ranks in parallel. A program that only joins
    metrics is kept on the first of them."""
    local = [r for r, place in enumerate(places.ranks) if place is not None]
    futures = {}
    for k, phase in enumerate(distributed.phases):
        gives = donate and k == distributed.final_phase
        for rank in local:
            program = phase.programs[rank]
            if program is None or (
                k > distributed.final_phase
                and rank != local[0]
                and all(end.role is Role.SCALAR for end in program.writes)
            ):
                continue
            futures[k, rank] = pool.submit(_compile_one, plan, program, places, gives)
    return {key: future.result() for key, future in futures.items()}


def _compile_one(
    plan: UpdatePlan, program: UpdateProgram, places: Places, donate: bool
) -> Callable[..., Any]:
    function = jaxpr_as_fun(program.jaxpr)

    def update(*leaves: Any) -> tuple[Any, ...]:
        return tuple(function(*leaves))

    update.__name__ = f"update{program.phase}_rank{program.rank}"
    given = [
        at
        for at, end in enumerate(program.reads)
        if donate and end.role in (Role.PARAM, Role.STATE)
    ]
    shardings = [_sharding(plan, places, end, program.rank) for end in program.reads]
    jitted = jax.jit(
        update,
        in_shardings=shardings,
        out_shardings=tuple(_sharding(plan, places, end, program.rank) for end in program.writes),
        donate_argnums=given,
        keep_unused=True,
    )
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in program.jaxpr.jaxpr.invars]
    return jitted.lower(*shapes).compile()


def _sharding(plan: UpdatePlan, places: Places, end: End, rank: int) -> Sharding | None:
    if end.role in (Role.PARAM, Role.GRAD, Role.NEW_PARAM):
        return places.of_param(plan, end.index)
    if end.role in (Role.STATE, Role.NEW_STATE):
        return places.of_state(plan, end.index, rank)
    return places.ranks[rank]
