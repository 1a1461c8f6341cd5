"""Transfers issued by the ranks' own threads, in the order of the lowered plan's rows.

    row        0RECV_B0      0F1       0SEND_F1      0B0
    launches   ppermute      0F1       ppermute      0B0

On accelerators every program takes its turn on its devices. Where processes share a rank, all must
launch its programs and its transfers in one order, or two of them wait for each other for ever:

    process 0   all-reduce with 1   ppermute with 2        process 1   ppermute with 3   all-reduce
    process 2   ppermute with 0     all-reduce with 3      process 3   all-reduce        ppermute

A lane that runs beside the rank's thread does not keep one; the row does, and the plan is proven to
go through when every transfer waits for both of its sides.
"""

import time
from collections.abc import Sequence

import jax

from octojax.executor.pairs import broken_transfer, links_of, num_programs
from octojax.executor.record import TransferClock
from octojax.executor.stop import Stop
from octojax.executor.transport import Arrays, DevicePut
from octojax.ir import Transfer
from octojax.mesh import PipelineMesh


class InOrder:
    """A transport whose `send` and `post` launch the transfer there and then.

    On CPU they return when both sides have come; elsewhere the devices wait. Ranks of one process
    hand values over by copies.
    """

    def __init__(
        self,
        transfers: Sequence[Transfer],
        values: Sequence[Sequence[jax.ShapeDtypeStruct]],
        mesh: PipelineMesh,
        timeout_s: float = 600.0,
    ) -> None:
        self.transfers = tuple(transfers)
        local = frozenset(mesh.local_ranks)
        self.direct = {k for k, t in enumerate(transfers) if {t.source, t.target} <= local}
        self.copies = DevicePut.of(self.direct, transfers, values, timeout_s)
        self.links = links_of(transfers, values, mesh, self.direct)
        self.num_programs = num_programs(self.links)
        self.coming: dict[int, tuple[float, list[jax.Array]]] = {}
        self.waits = jax.default_backend() == "cpu"
        self.clock: TransferClock | None = None
        self.stop = Stop()

    def begin(self, order: Sequence[int], stop: Stop) -> None:
        self.stop = stop
        self.coming.clear()
        self.copies.begin(order, stop)
        self.copies.clock = self.clock

    def send(self, number: int, values: Arrays) -> None:
        if number in self.direct:
            self.copies.send(number, values)
            return
        if self.waits:  # a program with pending inputs would wait for its peer in the client's pool
            jax.block_until_ready(values)
        start = time.monotonic()
        arrays = self._move(number, values)
        if self.clock is not None:
            jax.block_until_ready(arrays)
            self.clock.note(number, start, time.monotonic())

    def post(self, number: int) -> None:
        if number not in self.direct:
            self.coming[number] = time.monotonic(), self._move(number, None)

    def receive(self, number: int) -> Arrays:
        if number in self.direct:
            return self.copies.receive(number)
        start, values = self.coming.pop(number)
        if self.clock is not None:
            jax.block_until_ready(values)
            self.clock.note(number, start, time.monotonic())
        return values

    def drain(self) -> None:
        pass  # what a rank has launched comes before what it launches next

    def close(self) -> None:
        pass

    def _move(self, number: int, values: Arrays | None) -> list[jax.Array]:
        self.stop.check()
        link = self.links[number]
        assert link is not None, "a transfer of this process's rank"
        try:
            return link.move(values)
        except Exception as error:
            transfer = self.transfers[number]
            raise broken_transfer(transfer, sends=values is not None, error=error) from error
