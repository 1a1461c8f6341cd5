"""Transfers as compiled `ppermute` programs over the devices of two ranks.

    lanes          0SEND_F0   0SEND_F1   0SEND_F2 ...    parts of one order, in every process
    rank threads   send: hand the values over            receive: wait for them

The two ranks' values form one array that claims to be replicated over the pair: on the source
it is the value, on the target a buffer of zeros of the same shape. The program permutes along
the pair, so that afterwards the target holds the value. All leaves travel in one program.
"""

import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from octojax.arrays import joined, pieces, put
from octojax.errors import ExecutionError, PeerError
from octojax.executor.record import TransferClock
from octojax.executor.stop import Stop, Stopped
from octojax.executor.transport import Arrays, DevicePut, Mailboxes
from octojax.ir import Transfer
from octojax.mesh import PipelineMesh, Rank
from octojax.processes import several, wait
from octojax.programs.build import Job, compile_all

PAIR = "pair"


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
        shardings = [
            [v.sharding for v in group] if k in self.direct else []
            for k, group in enumerate(values)
        ]
        self.copies = DevicePut(transfers, shardings, timeout_s)  # type: ignore[arg-type]
        # A CPU client runs programs of several of its devices in the order of their launch, so
        # that one which waits for a peer would hold up the other lanes, and computation.
        alone = jax.default_backend() == "cpu" and jax.process_count() > 1
        self.links = _links(transfers, values, mesh, self.direct, alone)
        used = {id(link): link for link in self.links if link is not None}
        self.num_programs = sum(len(link.pairs) for link in used.values())
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
        here = transfer.source in self.local
        values = self.outgoing.get(number) if here else None
        if self.waits and values is not None:
            jax.block_until_ready(values)
        clock, start = self.clock, time.monotonic()
        try:
            moved = link.move(values)
            if clock is not None:
                jax.block_until_ready(moved)
        except Exception as error:
            ends = (transfer.source, transfer.target)
            mine, peer = ends if here else ends[::-1]
            raise PeerError(
                f"rank {mine}: the transfer {transfer.name} from rank {ends[0]} to rank "
                f"{ends[1]} broke off. The process of rank {peer} has probably ended: see what it "
                f"printed last. ({str(error).splitlines()[0]})"
            ) from error
        if clock is not None:
            clock.note(number, start, time.monotonic())
        if transfer.target in self.local:
            self.arrived.put(number, moved)


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


class _Link:
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
        held = [{}] * len(self.shapes) if values is None else [pieces(v) for v in values]
        arrived = [pair.move(held) for pair in self.pairs]
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

    def move(self, held: Sequence[Mapping[Any, jax.Array]]) -> list[list[jax.Array]]:
        """Returns each value's pieces on the target; [] in a process without any of it.

        `held[i]` are the pieces of value i by device, in a process that has the source.
        """
        whole = [
            jax.make_array_from_single_device_arrays(
                shape, sharding, [*(own[d] for d in self.sources), *blank]
            )
            for shape, sharding, own, blank in zip(
                self.shapes, self.shardings, held, self.blanks, strict=True
            )
        ]
        moved = self.program(*whole)
        if not self.targets:
            return []
        return [[x for d, x in pieces(v).items() if d in self.targets] for v in moved]


def _links(
    transfers: Sequence[Transfer],
    values: Sequence[Sequence[jax.ShapeDtypeStruct]],
    mesh: PipelineMesh,
    direct: set[int],
    alone: bool,
) -> list[Any]:
    """One link per transfer; transfers of equal values between the same ranks share one.

    In every process links are made and compiled in the same order.
    """
    local = frozenset(mesh.local_ranks)
    known: dict[Any, _Link] = {}
    found: list[_Link | None] = []
    for number, (transfer, carried) in enumerate(zip(transfers, values, strict=True)):
        ends = (transfer.source, transfer.target)
        if local.isdisjoint(ends) or number in direct:
            found.append(None)
            continue
        kinds = tuple((v.shape, v.dtype, getattr(v.sharding, "spec", None)) for v in carried)
        key = (*ends, kinds)
        if key not in known:
            source, target = mesh.ranks[ends[0]], mesh.ranks[ends[1]]
            known[key] = _Link(source, target, carried, alone=alone)
        found.append(known[key])
    pairs = [pair for link in known.values() for pair in link.pairs]
    for pair, program in zip(pairs, compile_all([x.job for x in pairs], False), strict=True):
        pair.program = program
    return found
