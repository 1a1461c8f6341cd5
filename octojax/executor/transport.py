"""How values get from rank to rank. Each side names the transfer, so equal shapes never mix up.

    source rank's thread    transport.send(k, values)
    target rank's thread    transport.receive(k) -> values on the target's devices

`send` never waits for the other side. A failure anywhere wakes every waiting `receive`. Every
message belongs to a step (its `Stop`): what a step that was broken off has left is never taken.
"""

import queue
import time
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from octojax.arrays import put
from octojax.compat import copy_to, is_float
from octojax.errors import ExecutionError
from octojax.executor.record import TransferClock
from octojax.executor.stop import Stop
from octojax.ir import Cargo, Transfer

Arrays = Sequence[jax.Array]


class Transport(Protocol):
    """Moves the values of numbered transfers. One instance serves one step program."""

    def post(self, number: int) -> None:
        """The values of a transfer may come from here on; the row has its RECV here."""

    def send(self, number: int, values: Arrays) -> None: ...

    def receive(self, number: int) -> Arrays: ...

    clock: TransferClock | None
    """Where the times of transfers are noted; None: nowhere, and nothing waits to see them."""

    def begin(self, order: Sequence[int], stop: Stop) -> None:
        """Called before any rank starts: these transfers will happen, in an order like this.

        `order` is a linear extension of the dependences, the same in every process. Once `stop`
        is set, every waiting and later `receive` raises `Stopped`. No thread may still be at
        work for the step before.
        """

    def drain(self) -> None:
        """Returns when every transfer has been issued, so that other collectives may follow."""

    def close(self) -> None: ...


class Mailboxes:
    """One box per transfer, for threads of one process.

    Waits are cut into slices, so that a stop is seen though nothing woke the waiting thread.
    """

    def __init__(self, transfers: Sequence[Transfer], timeout_s: float) -> None:
        self.transfers = tuple(transfers)
        self.timeout_s = timeout_s
        self.boxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in transfers]
        self.stop = Stop()

    def begin(self, stop: Stop) -> None:
        self.stop = stop
        stop.listen(self._wake)

    def put(self, number: int, values: Any) -> None:
        self.boxes[number].put((self.stop, values))

    def get(self, number: int) -> Any:
        stop, box = self.stop, self.boxes[number]
        deadline = time.monotonic() + self.timeout_s
        while True:
            stop.check()
            try:
                message = box.get(timeout=min(1.0, self.timeout_s))
            except queue.Empty:
                if time.monotonic() < deadline:
                    continue
                t = self.transfers[number]
                raise ExecutionError(
                    f"rank {t.target} waited {self.timeout_s:g} s for {t.name} from rank "
                    f"{t.source}, which has not sent it. Rank {t.source} is stalled, or slower "
                    f"than that: raise timeout_s if one action may take so long"
                ) from None
            if message is not None and message[0] is stop:
                return message[1]

    def _wake(self) -> None:
        for box in self.boxes:
            box.put(None)


class StandIns:
    """Moves nothing: whatever a local rank receives is there from the start, made up.

    So no rank waits for another, and each shows how long its own work takes.
    """

    def __init__(
        self,
        transfers: Sequence[Transfer],
        values: Sequence[Sequence[jax.ShapeDtypeStruct]],
        local: Collection[int],
    ) -> None:
        self.clock: TransferClock | None = None
        self.given_away = {k for k, t in enumerate(transfers) if t.kind is Cargo.SUMS}
        buffers: dict[Any, jax.Array] = {}
        self.values: dict[int, list[jax.Array]] = {}
        for number, (transfer, group) in enumerate(zip(transfers, values, strict=True)):
            if transfer.target in local:
                keys = [(v.shape, v.dtype, v.sharding) for v in group]
                for key, value in zip(keys, group, strict=True):
                    if key not in buffers:
                        buffers[key] = put(_made_up(value), value.sharding)
                self.values[number] = [buffers[key] for key in keys]

    def post(self, number: int) -> None:
        pass

    def send(self, number: int, values: Arrays) -> None:
        pass

    def receive(self, number: int) -> Arrays:
        values = self.values[number]
        return [jnp.copy(v) for v in values] if number in self.given_away else values

    def begin(self, order: Sequence[int], stop: Stop) -> None:
        pass

    def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


def _made_up(value: jax.ShapeDtypeStruct) -> np.ndarray:
    """Small random numbers; zeros for whole numbers."""
    if not is_float(value):
        return np.zeros(value.shape, value.dtype)
    return (1e-2 * np.random.default_rng(0).standard_normal(value.shape)).astype(value.dtype)


class DevicePut:
    """Transfers by copies between devices of one process.

    The receiving thread waits for the source value before it copies: on CPU, calling a
    program on a pending copy would block inside the call, for just as long.
    """

    def __init__(
        self,
        transfers: Sequence[Transfer],
        shardings: Sequence[Sequence[jax.sharding.Sharding]],
        timeout_s: float = 600.0,
    ) -> None:
        self.mail = Mailboxes(transfers, timeout_s)
        self.copies = [copy_to(tuple(where)) for where in shardings]
        self.waits = jax.default_backend() == "cpu"
        self.clock: TransferClock | None = None

    @classmethod
    def of(
        cls,
        numbers: Collection[int],
        transfers: Sequence[Transfer],
        values: Sequence[Sequence[Any]],
        timeout_s: float,
    ) -> "DevicePut":
        """Returns copies for the transfers of these numbers, among others that go another way.

        `values[k]` are the shapes of transfer k at its target, with shardings.
        """
        shardings = [
            [v.sharding for v in group] if k in numbers else [] for k, group in enumerate(values)
        ]
        return cls(transfers, shardings, timeout_s)

    def begin(self, order: Sequence[int], stop: Stop) -> None:
        self.mail.begin(stop)

    def post(self, number: int) -> None:
        pass

    def send(self, number: int, values: Arrays) -> None:
        self.mail.put(number, values)

    def receive(self, number: int) -> Arrays:
        values = self.mail.get(number)
        if self.waits:
            for value in values:
                value.block_until_ready()
        if self.clock is None:
            return self.copies[number](values)
        start = time.monotonic()
        copied = jax.block_until_ready(self.copies[number](values))
        self.clock.note(number, start, time.monotonic())
        return copied

    def drain(self) -> None:
        pass

    def close(self) -> None:
        pass
