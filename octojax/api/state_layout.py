"""Where every value of a training state lies, and how it becomes the user's trees again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from octojax import compat
from octojax.arrays import local, put
from octojax.executor.share import Share
from octojax.layers.state import StateLeaf
from octojax.mesh import PipelineMesh
from octojax.programs.recipe import stored, unstored
from octojax.stages.program import ParamUnit, Ref, Role
from octojax.trace import Leaves


@dataclass(frozen=True)
class ModelValues:
    """Everything that a pipelined loss keeps on devices between steps.

    `units[u]` is parameter unit u on its owner's devices (PRNG keys as integers), `copies[i]`
    what other holders keep, by refresh; `carried` are leaves of module state by number, on
    their stage's rank; `counters[i]` are local rank i's.
    """

    units: tuple[jax.Array | None, ...]
    copies: tuple[tuple[jax.Array, ...], ...]
    carried: Mapping[int, jax.Array]
    counters: tuple[tuple[jax.Array, ...], ...]


jax.tree_util.register_dataclass(
    ModelValues, data_fields=["units", "copies", "carried", "counters"], meta_fields=[]
)


@dataclass(frozen=True)
class StateLayout:
    """How the parameters and module state of one step are held: enough to read them back.

    `owners[u]` keeps parameter unit u, `homes[k]` the carried one of `state_units`; the values of
    `count_reads`, among them the counted ones, are with every rank. It holds no programs, so
    that a training state may outlive its step.
    """

    mesh: PipelineMesh
    share: Share | None
    params: Leaves
    state: Leaves
    state_units: tuple[StateLeaf, ...]
    units: tuple[ParamUnit, ...]
    unit_avals: tuple[Any, ...]
    owners: tuple[int, ...]
    homes: Mapping[int, int]
    count_reads: tuple[Ref, ...]

    def gathered(self, model: ModelValues, state: bool = False) -> Any:
        """Returns the parameters, or module state, of `model` in the user's tree on one device.

        Several processes: all of them call this, and each gets everything.
        """
        check_alive(model)
        where = self._first
        units = [
            unstored(fresh(x, where), aval)
            for x, aval in zip(self.gathered_units(model.units), self.unit_avals, strict=True)
        ]
        leaves = self._leaves(units, state)
        if not state:
            return self.params.unflatten(leaves)
        changing: dict[int, Any] = {
            k: self.from_owner(model.carried.get(k), home, stored(self.state_units[k].aval))
            for k, home in self.homes.items()
        }
        for ref, value in zip(self.count_reads, model.counters[0], strict=True):
            if ref.role is Role.STATE:
                changing[ref.index] = value
        rows: dict[int, list[Any]] = {}
        for k, value in sorted(changing.items()):
            unit = self.state_units[k]
            leaves[unit.leaf] = unstored(fresh(value, where), unit.aval)
            if unit.row is not None:
                rows.setdefault(unit.leaf, []).append(leaves[unit.leaf])
        for leaf, some in rows.items():
            leaves[leaf] = jnp.stack(some)
        return self.state.unflatten(leaves)

    def gathered_units(self, units: Sequence[Any]) -> list[jax.Array]:
        """Returns a value for every unit in every process, from the processes of its owner."""
        avals = map(stored, self.unit_avals)
        return [self.from_owner(x, o, a) for x, o, a in zip(units, self.owners, avals, strict=True)]

    def from_owner(self, value: Any, owner: int, aval: Any) -> jax.Array:
        """Returns rank `owner`'s value in every process."""
        return value if self.share is None else self.share.from_owner(value, owner, aval)

    def tree(self, units: Sequence[Any]) -> Any:
        """Returns values by unit as the user's tree of parameters."""
        return self.params.unflatten(self._leaves(units, False))

    def _leaves(self, units: Sequence[Any], state: bool) -> list[Any]:
        leaves = self.state if state else self.params
        first = len(self.params) if state else 0
        values: list[Any] = [None] * len(leaves)  # None: a leaf that is no unit (mutable state)
        slices: dict[int, list[Any]] = {}
        for value, unit in zip(units, self.units, strict=True):
            at = unit.leaf - first
            if not 0 <= at < len(leaves):
                continue
            if unit.index is None:
                values[at] = value
            else:
                slices.setdefault(at, []).append((unit.index, value))
        for at, pieces in slices.items():
            ordered = [value for _, value in sorted(pieces, key=lambda p: p[0])]
            where = ordered[0].sharding
            values[at] = jnp.stack([jax.device_put(x, where) for x in ordered])
        return values

    @property
    def here(self) -> tuple[int, ...]:
        """The ranks of this process."""
        return self.mesh.local_ranks

    @cached_property
    def _first(self) -> jax.sharding.Sharding:
        """The devices of the first rank of this process, or its own one of them."""
        return self.mesh.home


def check_alive(model: ModelValues) -> None:
    """Raises `ValueError` for a state whose buffers a step has taken over."""
    if any(isinstance(unit, compat.Tracer) for unit in model.units):
        raise TypeError(
            "a pipelined step was called inside jax.jit or another transformation. It is "
            "compiled already and runs programs on several devices: call it as it is"
        )
    kinds = {type(u).__name__ for u in model.units if not (u is None or isinstance(u, jax.Array))}
    if kinds:
        raise ValueError(
            f"the values of this training state are of type {', '.join(sorted(kinds))}: they left "
            f"the devices of their ranks (jax.device_get, jax.tree.map). Bring back parameters "
            f"with step.init(params), a whole state with step.save and step.restore"
        )
    if any(unit is not None and unit.is_deleted() for unit in model.units):
        raise ValueError(
            "this training state was given to an earlier step, which took over its buffers. Go "
            "on with the state that the step returned: state, metrics = step(state, batch). If "
            "that call was interrupted before it returned, step.recover() has what it made"
        )


def fresh(value: Any, where: jax.sharding.Sharding) -> jax.Array:
    """An array on `where` that shares no buffer with `value`, which the user may go on using."""
    if len(where.device_set) == 1:
        return jax.device_put(local(value), where, may_alias=False)
    placed = put(value, where)
    return jnp.copy(placed) if _aliases(placed, value) else placed


def _aliases(a: jax.Array, b: Any) -> bool:
    """Whether arrays share memory; of replicas, `may_alias=False` copies all but one."""
    if not isinstance(b, jax.Array):
        return True  # a NumPy array may be wrapped without a copy
    pointers = [{s.data.unsafe_buffer_pointer() for s in x.addressable_shards} for x in (a, b)]
    return not pointers[0].isdisjoint(pointers[1])
