"""Transfers as compiled `ppermute` programs over the devices of two ranks.

lanes          0SEND_F0   0SEND_F1   0SEND_F2 ...    parts of one order, in every process
rank threads   send: hand the values over            receive: wait for them
"""

import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from octojax.errors import ExecutionError
from octojax.executor.pairs import broken_transfer, links_of, num_programs
from octojax.executor.record import TransferClock
from octojax.executor.stop import Stop, Stopped
from octojax.executor.transport import Arrays, DevicePut, Mailboxes
from octojax.ir import Transfer
from octojax.mesh import PipelineMesh
from octojax.processes import several, wait


class PairPermute:
    """Issues every transfer that a local rank takes part in, each lane in the order of `begin`.

    A lane is a thread. On CPU a program blocks its caller until both sides have come, so that in
    one lane a late peer would hold up the transfers of all others. There each rank has a lane to
    each other: its values leave in the order in which it makes them, and none waits for another.
    (gloo connects devices in the order of their mesh, so the two directions do not meet.) On
    accelerators all programs of a device share one queue, and the one global order must be kept:
    there is one lane. Where there are several processes, the ranks of one hand values over by
    copies: they could not join two lanes' programs at once.
    """

    def __init__(
        self,
        transfers: Sequence[Transfer],
        values: Sequence[Sequence[jax.ShapeDtypeStruct]],
        mesh: PipelineMesh,
        timeout_s: float = 600.0,
    ) -> None:
        self.transfers = tuple(transfers)
        self.outgoing = Mailboxes(transfers, math.inf)  # a rank of this process: its waits end
        self.timeout_s = timeout_s
        # Waits for other processes end by the board of `octojax.processes`, which knows why.
        self.arrived = Mailboxes(transfers, math.inf if several() else timeout_s)
        self.local = frozenset(mesh.local_ranks)
        self.direct = {
            k
            for k, t in enumerate(transfers)
            if jax.process_count() > 1 and {t.source, t.target} <= self.local
        }
        self.copies = DevicePut.of(self.direct, transfers, values, timeout_s)
        self.links = links_of(transfers, values, mesh, self.direct)
        self.num_programs = num_programs(self.links)
        self.lanes = [self._lane(k, t) for k, t in enumerate(transfers)]
        self.orders: dict[Any, queue.SimpleQueue[Callable[[], None] | None]] = {}
        self.stop = Stop()
        self.busy = _Count()
        # On CPU a program with pending inputs runs in the client's pool: one that waits for a peer
        # there would hold up computation. With its inputs ready it runs in the lane's thread.
        self.waits = jax.default_backend() == "cpu"
        self.clock: TransferClock | None = None
        for lane in dict.fromkeys(x for x in self.lanes if x is not None):
            self.orders[lane] = queue.SimpleQueue()
            name = f"octopipe transfers {lane}"
            threading.Thread(
                target=_serve, args=(self.orders[lane],), name=name, daemon=True
            ).start()
        # Threads know only their queue, so that a step nobody holds any more ends them.
        self._end = weakref.finalize(self, _end, tuple(self.orders.values()))

    def _lane(self, number: int, transfer: Transfer) -> tuple[int, ...] | None:
        ends = {transfer.source, transfer.target}
        if self.local.isdisjoint(ends) or number in self.direct:
            return None
        if ends <= self.local or jax.default_backend() != "cpu":
            return ()
        return transfer.source, transfer.target

    def drain(self) -> None:
        """Returns when every transfer of `begin` has been issued; raises if one has failed.

        What follows on the whole mesh must not overtake them: a CPU client runs programs of
        several of its devices in the order of their launch.
        """
        self._wait_for_lanes()
        if self.stop.error is not None:
            raise self.stop.error

    def _wait_for_lanes(self) -> None:
        if not self.busy.number:
            return
        mine = ", ".join(map(str, sorted(self.local)))
        text = (
            f"rank {mine} waited {self.timeout_s:g} s for its last transfers: a process has "
            f"stopped, or is slower than that. Raise timeout_s if a step may take so long"
        )
        if not several():
            if not self.busy.wait_for_none(self.timeout_s):
                raise ExecutionError(text)
            return
        errors: list[Exception] = []

        def wake(error: Exception) -> None:
            errors.append(error)
            self.busy.give_up()

        with wait(text, self.timeout_s, wake):
            if not self.busy.wait_for_none():
                raise errors[0]

    def begin(self, order: Sequence[int], stop: Stop) -> None:
        self._wait_for_lanes()
        if jax.process_count() > 1 and self.stop.error is not None:
            cause = self.stop.error
            raise ExecutionError(
                f"a step was broken off in this process ({type(cause).__name__}: {cause}) while "
                f"other processes may still be in it: what they send would be taken for values "
                f"of another step. Start all processes again, from the last checkpoint"
            ) from cause
        self.stop = stop
        self.outgoing.begin(stop)
        self.arrived.begin(stop)
        self.copies.begin(order, stop)
        self.copies.clock = self.clock
        for lane, orders in self.orders.items():
            mine = tuple(k for k in order if self.lanes[k] == lane)
            if mine:
                self.busy.add(1)
                orders.put(lambda mine=mine: self._issue_all(mine, stop))

    def post(self, number: int) -> None:
        pass  # the lanes receive as early as they can

    def send(self, number: int, values: Arrays) -> None:
        if number in self.direct:
            self.copies.send(number, values)
        else:
            self.outgoing.put(number, values)

    def receive(self, number: int) -> Arrays:
        if number in self.direct:
            return self.copies.receive(number)
        if not several():
            return self.arrived.get(number)
        t, errors = self.transfers[number], list[Exception]()

        def wake(error: Exception) -> None:
            errors.append(error)
            self.stop.set(error)

        text = (
            f"rank {t.target} waited {self.timeout_s:g} s for {t.name} from rank {t.source}, which "
            f"has not sent it. Raise timeout_s if one action may take so long"
        )
        with wait(text, self.timeout_s, wake):
            try:
                return self.arrived.get(number)
            except Stopped:
                if errors:
                    raise errors[0] from None
                raise

    def close(self) -> None:
        self.stop.set(Stopped("the step was closed"))  # a lane may still wait for a value
        self._end()

    def _issue_all(self, numbers: Iterable[int], stop: Stop) -> None:
        try:
            for number in numbers:
                self._issue(number)
        except Stopped:
            pass
        except BaseException as error:
            stop.set(error)
        finally:
            self.busy.add(-1)

    def _issue(self, number: int) -> None:
        transfer, link = self.transfers[number], self.links[number]
        assert link is not None, "a lane has transfers of this process's ranks"
        here = transfer.source in self.local
        values = self.outgoing.get(number) if here else None
        if self.waits and values is not None:
            jax.block_until_ready(values)
        clock, start = self.clock, time.monotonic()
        try:
            arrays = link.move(values)
            if clock is not None:
                jax.block_until_ready(arrays)
        except Exception as error:
            raise broken_transfer(transfer, sends=here, error=error) from error
        if clock is not None:
            clock.note(number, start, time.monotonic())
        if transfer.target in self.local:
            self.arrived.put(number, arrays)


def _serve(orders: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (work := orders.get()) is not None:
        work()
        del work


def _end(queues: Iterable["queue.SimpleQueue[Callable[[], None] | None]"]) -> None:
    for orders in queues:
        orders.put(None)


class _Count:
    """A number of busy lanes that one can wait on to become zero."""

    def __init__(self) -> None:
        self.number = 0
        self.hopeless = False
        self.changed = threading.Condition()

    def add(self, change: int) -> None:
        with self.changed:
            self.number += change
            self.changed.notify_all()

    def give_up(self) -> None:
        """Makes every wait return False."""
        with self.changed:
            self.hopeless = True
            self.changed.notify_all()

    def wait_for_none(self, timeout_s: float | None = None) -> bool:
        """Returns whether it did within the time."""
        with self.changed:
            self.changed.wait_for(lambda: self.number == 0 or self.hopeless, timeout_s)
            return self.number == 0
