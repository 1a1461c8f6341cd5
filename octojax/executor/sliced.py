"""Values that are the same along an axis of a rank cross once, in slices.

    sender, tensor=2     [x x]   cut     [x0 x1]
    link                 x0 -> its counterpart, x1 -> its counterpart
    receiver             [x0 x1]  gather  [x x]

Links between ranks are slower than those within one. Small values cross whole: two more programs
take longer than that.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from octojax.compat import num_bytes
from octojax.executor.record import TransferClock
from octojax.executor.stop import Stop
from octojax.executor.transport import Arrays, Transport
from octojax.ir import Transfer
from octojax.mesh import PipelineMesh, Rank, axes_of
from octojax.programs.build import Job, compile_all

LEAST_BYTES = 1 << 20
"""Of a value, for it to cross in slices."""

Group = Sequence[jax.ShapeDtypeStruct]


def on_the_link(value: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns how a value crosses that lies so at its target: cut along the axes along which it
    is the same there, at the first dimension that they divide."""
    where = value.sharding
    if not isinstance(where, NamedSharding) or num_bytes(value) < LEAST_BYTES:
        return value
    entries = [*map(axes_of, where.spec), *[()] * (len(value.shape) - len(where.spec))]
    used = {name for entry in entries for name in entry}
    free = tuple(n for n, size in where.mesh.shape.items() if size > 1 and n not in used)
    parts = math.prod(where.mesh.shape[name] for name in free)
    for at, (entry, length) in enumerate(zip(entries, value.shape, strict=True)):
        mine = math.prod(where.mesh.shape[name] for name in entry)
        if parts > 1 and length % (mine * parts) == 0:
            spec = PartitionSpec(*entries[:at], (*entry, *free), *entries[at + 1 :])
            return _placed(value, NamedSharding(where.mesh, spec))
    return value


def bytes_on_links(values: Sequence[Group]) -> int:
    """Returns what the values of transfers are together on the links, every device's part of
    them counted."""
    return sum(
        math.prod(v.sharding.shard_shape(v.shape)) * v.dtype.itemsize * v.sharding.num_devices
        for group in values
        for v in group
        if v.sharding is not None
    )


class Sliced:
    """A transport whose values are cut by `cuts[k]` before transfer k and joined by `joins[k]`
    behind it; each takes and returns those at the places `changed[k]`."""

    def __init__(
        self,
        inner: Transport,
        changed: Mapping[int, Sequence[int]],
        cuts: Mapping[int, Any],
        joins: Mapping[int, Any],
    ) -> None:
        self.inner, self.changed, self.cuts, self.joins = inner, changed, cuts, joins
        programs = {id(p) for p in (*cuts.values(), *joins.values())}
        self.num_programs = getattr(inner, "num_programs", 0) + len(programs)

    @property
    def clock(self) -> TransferClock | None:
        return self.inner.clock

    @clock.setter
    def clock(self, clock: TransferClock | None) -> None:
        self.inner.clock = clock

    def post(self, number: int) -> None:
        self.inner.post(number)

    def send(self, number: int, values: Arrays) -> None:
        self.inner.send(number, self._with(self.cuts, number, values))

    def receive(self, number: int) -> Arrays:
        return self._with(self.joins, number, self.inner.receive(number))

    def _with(self, programs: Mapping[int, Any], number: int, values: Arrays) -> Arrays:
        program = programs.get(number)
        if program is None:
            return values
        changed, new = self.changed[number], list(values)
        for at, value in zip(changed, program(*(new[at] for at in changed)), strict=True):
            new[at] = value
        return new

    def begin(self, order: Sequence[int], stop: Stop) -> None:
        self.inner.begin(order, stop)

    def drain(self) -> None:
        self.inner.drain()

    def close(self) -> None:
        self.inner.close()


def sliced(
    make: Any, transfers: Sequence[Transfer], values: Sequence[Group], mesh: PipelineMesh
) -> Transport:
    """Returns the transport that `make` makes, with values cut where that is worth it."""
    links = [tuple(map(on_the_link, group)) for group in values]
    changed = {
        k: [at for at, (a, b) in enumerate(zip(group, link, strict=True)) if a is not b]
        for k, (group, link) in enumerate(zip(values, links, strict=True))
    }
    changed = {k: places for k, places in changed.items() if places}
    if not changed:
        return make(transfers, values, mesh)
    local, jobs = set(mesh.local_ranks), {}
    numbers: dict[bool, dict[int, Any]] = {False: {}, True: {}}
    for k, places in changed.items():
        whole, cut = ([group[k][at] for at in places] for group in (values, links))
        for joins, rank in ((False, transfers[k].source), (True, transfers[k].target)):
            if rank in local:
                job = _job(mesh.ranks[rank], *((cut, whole) if joins else (whole, cut)))
                key = (job.name, job.arguments)
                jobs.setdefault(key, job)
                numbers[joins][k] = key
    programs = dict(zip(jobs, compile_all(list(jobs.values()), False), strict=True))
    cuts, joins = ({k: programs[x] for k, x in numbers[side].items()} for side in (False, True))
    inner = make(transfers, links, mesh)
    return Sliced(inner, changed, cuts, joins)  # pyright: ignore[reportReturnType] (clock is a property)


def _job(rank: Rank, before: Group, after: Group) -> Job:
    here = partial(_on, rank)
    where = tuple(here(v).sharding for v in after)
    name = f"slices on rank {rank.index}: {[str(w) for w in where]}"
    return Job(name, lambda *values: values, tuple(map(here, before)), (), where)


def _on(rank: Rank, value: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The same layout on the devices of another rank."""
    assert isinstance(value.sharding, NamedSharding)
    return _placed(value, NamedSharding(rank.mesh, value.sharding.spec))


def _placed(value: jax.ShapeDtypeStruct, where: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=where)
