"""Transports by name."""

from collections.abc import Sequence

import jax

from octojax.executor.engine import MakeTransport
from octojax.executor.transport import DevicePut, Transport
from octojax.ir import Transfer
from octojax.mesh import PipelineMesh

NAMES = ("auto", "device_put", "ppermute")


def transport(name: str, timeout_s: float) -> MakeTransport:
    """Returns the maker of the named transport.

    "auto" is `device_put` where one process holds all ranks (measured the fastest there),
    else `ppermute`. Raises `ValueError` for an unknown name.
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
            shardings = [[v.sharding for v in group] for group in values]
            return DevicePut(transfers, shardings, timeout_s)  # type: ignore[arg-type]
        from octojax.executor.permute import PairPermute

        return PairPermute(transfers, values, mesh, timeout_s)

    return make
