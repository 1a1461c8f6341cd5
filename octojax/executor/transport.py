"""How values get from rank to rank. Each side names the transfer, so equal shapes never mix up.

    source rank's thread    transport.send(k, values)
    target rank's thread    transport.receive(k) -> values on the target's devices

`send` never waits for the other side. A failure anywhere wakes every waiting `receive`.
"""

import queue
import time
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from octojax.compat import copy_to, is_float
from octojax.errors import ExecutionError
from octojax.executor.instructions import Transfer
from octojax.executor.record import TransferClock

Arrays = Sequence[jax.Array]


class Transport(Protocol):
    """Moves the values of numbered transfers. One instance serves one step program."""

    def send(self, number: int, values: Arrays) -> None: ...

    def receive(self, number: int) -> Arrays: ...

    clock: TransferClock | None
    """Where the times of transfers are noted; None: nowhere, and nothing waits to see them."""

    def begin(self, order: Sequence[int]) -> None:
        """Called before any rank starts: these transfers will happen, in an order like this.

        `order` is a linear extension of the dependences, the same in every process.
        """

    def abort(self, error: BaseException) -> None:
        """Makes every waiting and later `receive` of this step raise."""

    def drain(self) -> None:
        """Returns when every transfer has been issued, so that other collectives may follow."""

    def close(self) -> None: ...


class Mailboxes:
    """One box per transfer, for threads of one process.

    Waits are cut into slices, so that an abort is seen though its message was taken.
    """

    def __init__(self, transfers: Sequence[Transfer], timeout_s: float) -> None:
        self.transfers = tuple(transfers)
        self.timeout_s = timeout_s
        self.boxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in transfers]
        self.error: BaseException | None = None

    def put(self, number: int, values: Any) -> None:
        self.boxes[number].put(values)

    def get(self, number: int) -> Any:
        deadline = time.monotonic() + self.timeout_s
        while self.error is None:
            try:
                values = self.boxes[number].get(timeout=min(1.0, self.timeout_s))
            except queue.Empty:
                if time.monotonic() < deadline:
                    continue
                t = self.transfers[number]
                raise ExecutionError(
                    f"rank {t.target} waited {self.timeout_s:g} s for {t.name} from rank "
                    f"{t.source}, which has not sent it. Rank {t.source} is stalled, or slower "
                    f"than that: raise timeout_s if one action may take so long"
                ) from None
            if values is not None:
                return values
        raise Stopped from self.error

    def abort(self, error: BaseException) -> None:
        self.error = self.error or error
        for box in self.boxes:
            box.put(None)

    def clear(self) -> None:
        """Forgets a failed step, so that the next one may run."""
        if self.error is None:
            return
        for box in self.boxes:
            while not box.empty():
                box.get_nowait()
        self.error = None


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
        self.given_away = {k for k, t in enumerate(transfers) if t.kind == "G"}
        made: dict[Any, jax.Array] = {}
        self.values: dict[int, list[jax.Array]] = {}
        for number, (transfer, group) in enumerate(zip(transfers, values, strict=True)):
            if transfer.target in local:
                keys = [(v.shape, v.dtype, v.sharding) for v in group]
                for key, value in zip(keys, group, strict=True):
                    if key not in made:
                        made[key] = jax.device_put(_made_up(value), value.sharding)
                self.values[number] = [made[key] for key in keys]

    def send(self, number: int, values: Arrays) -> None:
        pass

    def receive(self, number: int) -> Arrays:
        values = self.values[number]
        return [jnp.copy(v) for v in values] if number in self.given_away else values

    def begin(self, order: Sequence[int]) -> None:
        pass

    def abort(self, error: BaseException) -> None:
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


class Stopped(Exception):
    """Another rank failed first; its error is the one to report."""


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

    def begin(self, order: Sequence[int]) -> None:
        self.mail.clear()

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

    def abort(self, error: BaseException) -> None:
        self.mail.abort(error)

    def drain(self) -> None:
        pass

    def close(self) -> None:
        pass
