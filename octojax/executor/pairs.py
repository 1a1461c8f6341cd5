"""Compiled `ppermute` programs over the devices of two ranks.

The two ranks' values form one array that claims to be replicated over the pair: on the source
it is the value, on the target a buffer of zeros of the same shape. The program permutes along
the pair, so that afterwards the target holds the value. All leaves travel in one program.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from octojax.arrays import joined, pieces, put
from octojax.errors import PeerError
from octojax.executor.transport import Arrays
from octojax.ir import Transfer
from octojax.mesh import PipelineMesh, Rank
from octojax.programs.build import Job, compile_all

PAIR = "pair"


class Link:
    """Values of given shapes from one rank to another, in one or more compiled programs.

    With `alone` each device of the source has a program with its counterpart at the target.
    """

    def __init__(self, source: Rank, target: Rank, values: Sequence[Any], *, alone: bool) -> None:
        self.shapes = [v.shape for v in values]
        self.shardings = [v.sharding for v in values]
        here = jax.process_index()
        if alone and len(source.devices) > 1:
            whole = [jax.ShapeDtypeStruct(v.sharding.shard_shape(v.shape), v.dtype) for v in values]
            ends = [
                (Mesh([s], ("device",)), Mesh([t], ("device",)))
                for s, t in zip(source.devices, target.devices, strict=True)
            ]
        else:
            whole, ends = values, [(source.mesh, target.mesh)]
        name = f"transfer from rank {source.index} to rank {target.index}"
        self.pairs = [
            _Pair(name, *meshes, whole)
            for meshes in ends
            if any(d.process_index == here for mesh in meshes for d in mesh.devices.flat)
        ]

    def move(self, values: Arrays | None) -> list[jax.Array]:
        """Returns the values on the target; [] in a process that is only the source."""
        piece_maps = [{}] * len(self.shapes) if values is None else [pieces(v) for v in values]
        arrived = [pair.move(piece_maps) for pair in self.pairs]
        return [
            joined(shape, sharding, [piece for of_pair in arrived for piece in of_pair[at]])
            for at, (shape, sharding) in enumerate(zip(self.shapes, self.shardings, strict=True))
            if arrived[0]
        ]


class _Pair:
    """One compiled program: values from the devices of one mesh to those of another like it."""

    def __init__(self, name: str, source: Mesh, target: Mesh, values: Sequence[Any]) -> None:
        mesh = Mesh(np.stack([source.devices, target.devices]), (PAIR, *source.axis_names))
        here = jax.process_index()
        self.sources = [d for d in source.devices.flat if d.process_index == here]
        self.targets = {d for d in target.devices.flat if d.process_index == here}
        self.specs = tuple(getattr(v.sharding, "spec", PartitionSpec()) for v in values)
        self.shapes = [v.shape for v in values]
        self.shardings = [NamedSharding(mesh, spec) for spec in self.specs]
        self.blanks = [
            list(pieces(put(np.zeros(v.shape, v.dtype), where)).values()) if self.targets else []
            for v, where in zip(values, (NamedSharding(target, x) for x in self.specs), strict=True)
        ]

        def permute(*values: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(jax.lax.ppermute(v, PAIR, [(0, 1)]) for v in values)

        function = jax.shard_map(
            permute, mesh=mesh, in_specs=self.specs, out_specs=self.specs, check_vma=False
        )
        avals = [
            jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=s)
            for v, s in zip(values, self.shardings, strict=True)
        ]
        self.job = Job(name, function, tuple(avals), (), tuple(self.shardings))
        self.program: Any = None

    def move(self, piece_maps: Sequence[Mapping[Any, jax.Array]]) -> list[list[jax.Array]]:
        """Returns each value's pieces on the target; [] in a process without any of it.

        `piece_maps[i]` are the pieces of value i by device, in a process that has the source.
        """
        whole = [
            jax.make_array_from_single_device_arrays(
                shape, sharding, [*(own[d] for d in self.sources), *blank]
            )
            for shape, sharding, own, blank in zip(
                self.shapes, self.shardings, piece_maps, self.blanks, strict=True
            )
        ]
        results = self.program(*whole)
        if not self.targets:
            return []
        return [[x for d, x in pieces(v).items() if d in self.targets] for v in results]


def links_of(
    transfers: Sequence[Transfer],
    values: Sequence[Sequence[jax.ShapeDtypeStruct]],
    mesh: PipelineMesh,
    direct: Collection[int] = (),
) -> "list[Link | None]":
    """Returns the link of every transfer that a rank of this process takes part in and that is
    not in `direct`; transfers of equal values between the same ranks share one.

    In every process links are made and compiled in the same order.
    """
    local = frozenset(mesh.local_ranks)
    # A CPU client runs programs of several of its devices in the order of their launch, so
    # that one which waits for a peer would hold up the other lanes, and computation.
    alone = jax.default_backend() == "cpu" and jax.process_count() > 1
    by_ends: dict[Any, Link] = {}
    links: list[Link | None] = []
    for number, (transfer, carried) in enumerate(zip(transfers, values, strict=True)):
        ends = (transfer.source, transfer.target)
        if local.isdisjoint(ends) or number in direct:
            links.append(None)
            continue
        kinds = tuple((v.shape, v.dtype, getattr(v.sharding, "spec", None)) for v in carried)
        key = (*ends, kinds)
        if key not in by_ends:
            source, target = mesh.ranks[ends[0]], mesh.ranks[ends[1]]
            by_ends[key] = Link(source, target, carried, alone=alone)
        links.append(by_ends[key])
    pairs = [pair for link in by_ends.values() for pair in link.pairs]
    for pair, program in zip(pairs, compile_all([x.job for x in pairs], False), strict=True):
        pair.program = program
    return links


def num_programs(links: Sequence[Link | None]) -> int:
    """Returns how many programs were compiled for them."""
    used = {id(link): link for link in links if link is not None}
    return sum(len(link.pairs) for link in used.values())


def broken_transfer(transfer: Transfer, *, sends: bool, error: Exception) -> PeerError:
    """Returns what to raise where a link of this process's rank (which `sends`) has failed."""
    ends = (transfer.source, transfer.target)
    mine, peer = ends if sends else ends[::-1]
    return PeerError(
        f"rank {mine}: the transfer {transfer.name} from rank {ends[0]} to rank "
        f"{ends[1]} broke off. The process of rank {peer} has probably ended: see what it "
        f"printed last. ({str(error).splitlines()[0]})"
    )
