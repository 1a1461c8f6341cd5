"""Transports by name."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from octojax.executor.engine import MakeTransport
from octojax.executor.in_order import InOrder
from octojax.executor.sliced import sliced
from octojax.executor.transport import DevicePut, Transport
from octojax.ir import Transfer
from octojax.mesh import PipelineMesh

NAMES = ("auto", "device_put", "ppermute", "in_order")


def transport(name: str, timeout_s: float) -> MakeTransport:
    """Returns the maker of the named transport.

    "auto" is `device_put` where one process holds all ranks (measured the fastest there);
    else `in_order` on accelerators whose ranks have several devices, where collectives inside a
    rank and between ranks take turns; else `ppermute`. Raises `ValueError` for an unknown name.
    """
    if name not in NAMES:
        raise ValueError(f"unknown transport {name!r}; known are {', '.join(NAMES)}")

    def make(
        transfers: Sequence[Transfer],
        values: Sequence[Sequence[jax.ShapeDtypeStruct]],
        mesh: PipelineMesh,
    ) -> Transport:
        alone = len(mesh.local_ranks) == mesh.num_ranks
        if name == "device_put" or (name == "auto" and alone):
            return _copies(transfers, values, mesh, timeout_s)
        take_turns = jax.default_backend() != "cpu" and len(mesh.ranks[0].devices) > 1
        if name == "in_order" or (name == "auto" and take_turns):
            return sliced(partial(InOrder, timeout_s=timeout_s), transfers, values, mesh)
        from octojax.executor.permute import PairPermute

        permute = partial(PairPermute, timeout_s=timeout_s)
        return sliced(permute, transfers, values, mesh)

    return make


def _copies(
    transfers: Sequence[Transfer],
    values: Sequence[Sequence[jax.ShapeDtypeStruct]],
    mesh: PipelineMesh,
    timeout_s: float,
) -> Transport:
    def make(transfers: Any, values: Any, mesh: PipelineMesh) -> Transport:
        shardings = [[v.sharding for v in group] for group in values]
        return DevicePut(transfers, shardings, timeout_s)

    if jax.default_backend() == "cpu":  # all in one memory: to cut and to join is only more work
        return make(transfers, values, mesh)
    return sliced(make, transfers, values, mesh)
