"""The devices of a pipeline: which of them form which rank."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from octojax import compat
from octojax.errors import MeshError

DATA_AXIS = "data"
"""The one mesh axis that octojax handles itself: batch rows are spread over it, and gradients
are summed over it once per step. Any further axis is left to XLA's automatic partitioning."""


ONE_DEVICE = (
    "JAX has one device here, so this pipeline has one rank: it computes the same, and overlaps "
    "nothing. On CPU, ask for more before using JAX: jax.config.update('jax_num_cpu_devices', 4), "
    "or start the script with `octopipe launch -n 4`. Pass mesh= with one device if that is meant"
)


@dataclass(frozen=True)
class PipelineMesh:
    """A mesh seen along its pipeline axis: a rank is one position on `axis`.

    A rank is one device, or several when the mesh has more axes than the pipeline's. These are of
    one process, which may have further ranks; or all ranks are spread evenly over equally many
    processes, of which each has a part of one rank alone. Raises `MeshError` listing what is
    otherwise, and processes without a rank.
    """

    mesh: Mesh
    axis: str

    def __post_init__(self) -> None:
        if self.axis not in self.mesh.axis_names:
            raise MeshError(
                f"the mesh has axes {self.mesh.axis_names} of sizes "
                f"{tuple(self.mesh.shape.values())}, none is named {self.axis!r}. Name the "
                f"pipeline axis so, or pass axis=<one of the mesh's names>"
            )
        self._check_processes()

    def _check_processes(self) -> None:
        faults = list(_uneven(self.ranks))
        if faults:
            raise MeshError(
                f"the ranks of the mesh (positions on axis {self.axis!r}) do not fit the "
                f"processes: {'; '.join(faults)}. A rank is of one process, or all ranks are "
                f"spread evenly over equally many, each of which has no other rank: order the "
                f"mesh's devices so, as in np.array(sorted(jax.devices(), key=lambda d: "
                f"(d.process_index, d.id))).reshape({tuple(self.mesh.shape.values())}) with the "
                f"pipeline's axis first"
            )
        idle = set(range(jax.process_count())) - {p for r in self.ranks for p in r.processes}
        if idle:
            raise MeshError(
                f"there are {jax.process_count()} processes, but none of the mesh's "
                f"{self.num_ranks} rank(s) is on process {', '.join(map(str, sorted(idle)))}. "
                f"Start fewer processes, or use a plan and a mesh with a rank for each"
            )

    @property
    def num_ranks(self) -> int:
        return self.mesh.shape[self.axis]

    @property
    def data_size(self) -> int:
        """Devices that share a rank's batch rows; 1 without a data axis."""
        return self.mesh.shape.get(DATA_AXIS, 1)

    @property
    def has_further_axes(self) -> bool:
        """Whether there are axes for XLA beside those that the pipeline handles."""
        return bool(set(self.mesh.axis_names) - {self.axis, DATA_AXIS})

    @cached_property
    def model_mesh(self) -> AbstractMesh:
        """What is in force while the model is traced, for all ranks alike: every axis is XLA's,
        and the data axis has size 1, as the model sees the rows of one data shard."""
        devices, names = self.mesh.devices, self.mesh.axis_names
        if DATA_AXIS in names:
            devices = np.take(devices, [0], axis=names.index(DATA_AXIS))
        return Mesh(devices, names).abstract_mesh

    @contextmanager
    def in_force(self, *, named: bool) -> Iterator[None]:
        """Within it a model is traced, whatever mesh the caller has set. It may name axes if the
        mesh has any beside those of the pipeline, or if the caller had one (`named`)."""
        with compat.without_mesh():
            if not named and not self.has_further_axes:
                yield
                return
            with jax.sharding.use_abstract_mesh(self.model_mesh):
                yield

    @contextmanager
    def around_plain_model(self, *, named: bool, whole: bool) -> Iterator[Callable[[Any], Any]]:
        """Within it the model runs without a pipeline, and may name axes as in `in_force`, or
        does (unless `whole`) what was traced there, on one device. Yields what places arguments."""
        with compat.without_mesh():
            if not named and not self.has_further_axes:
                yield lambda values: values
                return
            if not whole:
                one = self.ranks[self.local_ranks[0]].local_devices[0]
                yield lambda values: jax.device_put(values, SingleDeviceSharding(one))
                return
            everywhere = NamedSharding(self.mesh, PartitionSpec())
            with jax.set_mesh(self.mesh):
                yield lambda values: jax.device_put(values, everywhere)

    @cached_property
    def ranks(self) -> "tuple[Rank, ...]":
        position = self.mesh.axis_names.index(self.axis)
        names = tuple(n for n in self.mesh.axis_names if n != self.axis)
        return tuple(
            Rank(index, Mesh(np.take(self.mesh.devices, index, axis=position), names))
            if names
            else Rank(index, Mesh(self.mesh.devices[index : index + 1], ("device",)))
            for index in range(self.num_ranks)
        )

    @cached_property
    def local_ranks(self) -> tuple[int, ...]:
        """Ranks that have a device of this process."""
        return tuple(r.index for r in self.ranks if jax.process_index() in r.processes)

    @cached_property
    def led_ranks(self) -> tuple[int, ...]:
        """Ranks for which this process speaks: it has their first device."""
        return tuple(r.index for r in self.ranks if r.leader == jax.process_index())

    @cached_property
    def spans_processes(self) -> bool:
        """Whether ranks have devices of several processes."""
        return any(len(rank.processes) > 1 for rank in self.ranks)

    @cached_property
    def shared_rank(self) -> "Rank | None":
        """The one rank that this process has a part of, if others have the rest."""
        return self.ranks[self.local_ranks[0]] if self.spans_processes else None

    @cached_property
    def home(self) -> jax.sharding.Sharding:
        """Where this process has what all have: on its first rank, or its own device of it."""
        if self.shared_rank is not None:
            return SingleDeviceSharding(self.shared_rank.local_devices[0])
        return self.ranks[self.local_ranks[0]].replicated

    def take(self, num_ranks: int) -> "PipelineMesh":
        """Returns the mesh of the first `num_ranks` ranks."""
        if num_ranks > self.num_ranks:
            raise MeshError(
                f"the plan has {num_ranks} ranks, but axis {self.axis!r} of the mesh has only "
                f"{self.num_ranks} position(s). Use a plan for {self.num_ranks} rank(s) or "
                f"fewer, or a mesh with more devices"
            )
        position = self.mesh.axis_names.index(self.axis)
        kept = np.take(self.mesh.devices, range(num_ranks), axis=position)
        return PipelineMesh(Mesh(kept, self.mesh.axis_names), self.axis)


@dataclass(frozen=True)
class Rank:
    """One rank's devices, as a mesh without the pipeline axis."""

    index: int
    mesh: Mesh

    @cached_property
    def devices(self) -> tuple[Any, ...]:
        return tuple(self.mesh.devices.flat)

    @cached_property
    def processes(self) -> tuple[int, ...]:
        """The processes that have devices of this rank, ascending."""
        return tuple(sorted({d.process_index for d in self.devices}))

    @property
    def leader(self) -> int:
        """The process that speaks for the rank where one must."""
        return self.devices[0].process_index

    @cached_property
    def local_devices(self) -> tuple[Any, ...]:
        here = jax.process_index()
        return tuple(d for d in self.devices if d.process_index == here)

    @property
    def data_size(self) -> int:
        return self.mesh.shape.get(DATA_AXIS, 1)

    @property
    def automatic_axes(self) -> frozenset[str]:
        """The axes over which XLA spreads what the model says: not the data axis, which is
        manual, where it has more than one device."""
        handled = {DATA_AXIS} if self.data_size > 1 else set()
        return frozenset(self.mesh.axis_names) - handled

    def sharding(self, spec: PartitionSpec | None = None) -> jax.sharding.Sharding:
        """Returns where values of this rank live: replicated over it unless `spec` says else."""
        if len(self.devices) == 1:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, spec or PartitionSpec())

    @cached_property
    def replicated(self) -> jax.sharding.Sharding:
        return self.sharding()

    @cached_property
    def along_data(self) -> jax.sharding.Sharding:
        """Axis 0 spread over the data axis."""
        return self.stacked(PartitionSpec())

    @cached_property
    def spreads(self) -> bool:
        """Whether XLA spreads values over some axis of the rank."""
        return any(self.mesh.shape[name] > 1 for name in self.automatic_axes)

    def stacked(self, spec: PartitionSpec) -> jax.sharding.Sharding:
        """Returns where values of each data shard lie that have `spec` there: with a data axis
        they are stacked along a new axis 0."""
        return self.sharding(PartitionSpec(DATA_AXIS, *spec) if self.data_size > 1 else spec)


def _uneven(ranks: Sequence[Rank]) -> Iterator[str]:
    """Yields what is wrong with how ranks are spread over processes."""
    for rank in ranks:
        counts = Counter(d.process_index for d in rank.devices)
        if len(set(counts.values())) > 1:
            parts = (f"{n} of process {p}" for p, n in sorted(counts.items()))
            yield f"of the devices of rank {rank.index} are {', '.join(parts)}"
    wide = {rank.index for rank in ranks if len(rank.processes) > 1}
    for process in sorted({p for rank in ranks for p in rank.processes}):
        mine = [rank.index for rank in ranks if process in rank.processes]
        if len(mine) > 1 and wide & set(mine):
            parts = ", ".join(map(str, mine))
            yield f"process {process} has parts of ranks {parts}, and not all of each"
    numbers: dict[int, list[int]] = {}
    for rank in ranks:
        numbers.setdefault(len(rank.processes), []).append(rank.index)
    if len(numbers) > 1:
        parts = (f"{n} for rank {', '.join(map(str, x))}" for n, x in sorted(numbers.items()))
        yield f"ranks have unequal numbers of processes, {' and '.join(parts)}"


def pipeline_mesh(
    mesh: Mesh | PipelineMesh | None = None,
    axis: str = "pipe",
    num_ranks: int | None = None,
    devices: Sequence[Any] | None = None,
) -> PipelineMesh:
    """Returns `mesh` as a pipeline of `num_ranks` ranks.

    Without a mesh, the devices at hand form one: the first `num_ranks` of them, or all.
    Raises `MeshError` if the axis is missing or the ranks outnumber the mesh.
    """
    if isinstance(mesh, PipelineMesh):
        return mesh if num_ranks is None else mesh.take(num_ranks)
    if mesh is not None:
        if not isinstance(mesh, Mesh):
            raise TypeError(
                f"mesh is of type {type(mesh).__name__}, expected a jax.sharding.Mesh with an axis "
                f"{axis!r}, such as jax.make_mesh((2,), ({axis!r},))"
            )
        pipeline = PipelineMesh(Mesh(mesh.devices, mesh.axis_names), axis)
        return pipeline if num_ranks is None else pipeline.take(num_ranks)
    at_hand = list(jax.devices() if devices is None else devices)
    wanted = len(at_hand) if num_ranks is None else num_ranks
    if wanted > len(at_hand):
        raise MeshError(
            f"the plan has {wanted} ranks, but there are only {len(at_hand)} device(s). Use a "
            f"plan for {len(at_hand)} rank(s), or more devices; on CPU, start Python with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={wanted}"
        )
    return PipelineMesh(Mesh(np.array(at_hand[:wanted]), (axis,)), axis)


def axes_of(entry: Any) -> tuple[str, ...]:
    """Returns the axes that an entry of a partition spec names."""
    if isinstance(entry, tuple):
        return entry
    return (entry,) if isinstance(entry, str) else ()
