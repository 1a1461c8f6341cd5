"""What ranks do at the end of a step, over named ends: the phases of an update, and copies.

    UPDATE0 SEND_U(0->1;0) RECV_U(1->0;0) UPDATE1 SEND_P(0->1;4)      a rank's row
    run UPDATE0, send SEND_U(0->1;0), post RECV_U(1->0;0),            its operations
    receive RECV_U(1->0;0), run UPDATE1, send SEND_P(0->1;4)

Like a step's own instructions they become operations over slots, which the same loop runs in the
same threads, over the same transport.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from octojax import compat
from octojax.errors import NonFiniteError
from octojax.executor.instructions import Do, Operation, with_frees
from octojax.executor.nonfinite import non_finite_phase
from octojax.executor.recorded import Recorder
from octojax.executor.run import Bound, RankThreads, Walk, run_rank
from octojax.executor.stop import Stop
from octojax.executor.transport import Transport
from octojax.ir import Cargo, Instruction, Receive, Run, Send, Transfer, Update
from octojax.update import Distributed, End, Role, UpdateProgram


@dataclass(frozen=True)
class Crew:
    """Who carries out routines: a thread per local rank, and a transport that numbers transfers.

    `order` are the numbers of theirs in an order that all processes keep.
    """

    threads: RankThreads
    transport: Transport
    numbers: Mapping[Transfer, int]
    order: tuple[int, ...]


@dataclass(frozen=True)
class Routine:
    """One rank's end of a step. The first slots hold `inputs`, then `row_numbers`."""

    rank: int
    inputs: tuple[End, ...]
    row_numbers: tuple[int, ...]
    body: tuple[Operation, ...]
    num_slots: int
    outputs: tuple[int, ...]  # slots
    copies: Mapping[int, int]  # per parameter unit that comes to this rank, its slot
    programs: tuple[UpdateProgram, ...] = ()  # by their numbers in the body

    before: ClassVar[str] = "the start of its update"
    after: ClassVar[str] = "the end of its update"


class RoutineBuilder:
    """Lays out one rank's slots and operations; lives for one call of `build`.

    `numbers` are those of the transport; `renewed[u]` is the end of parameter u where the update
    writes it. What else is copied is an input.
    """

    def __init__(
        self,
        distributed: Distributed | None,
        rank: int,
        numbers: Mapping[Transfer, int],
        renewed: Mapping[int, End],
    ) -> None:
        self.distributed, self.rank, self.numbers = distributed, rank, numbers
        self.renewed = renewed
        self.slots: dict[End, int] = {}
        self.copies: dict[int, int] = {}
        self.posted: dict[End, Receive] = {}
        self.body: list[Operation] = []

    def build(
        self,
        row: Sequence[Instruction],
        inputs: Sequence[End],
        outputs: Sequence[End] = (),
        programs: Sequence[UpdateProgram] = (),
    ) -> Routine:
        """Returns the routine of a row. `programs` are all that were compiled, in their order."""
        mine = [(n, p) for n, p in enumerate(programs) if p.rank == self.rank]
        bindings = (binding for _, program in mine for binding in program.bindings)
        numbers = sorted({e.index for b in bindings for e in b.reads if e.role is Role.ROW})
        for end in (*inputs, *(End(Role.ROW, n) for n in numbers)):
            self._slot(end)
        for x in row:
            match x:
                case Update():
                    self._phase(x, [(n, p) for n, p in mine if p.phase == x.phase])
                case Send():
                    self._send(x)
                case Receive():
                    self.posted.update(dict.fromkeys(self._copies(x.transfer), x))
                    self.body.append(Operation(Do.POST, self.numbers[x.transfer], (), (), (), x))
                case Run():
                    raise AssertionError("computation comes before the end of a step")
        self._receive(list(self.posted))
        results = tuple(self.slots[end] for end in outputs)
        return Routine(
            self.rank,
            tuple(inputs),
            tuple(numbers),
            with_frees(self.body, {*results, *self.copies.values()}, 0),
            len(self.slots),
            results,
            self.copies,
            tuple(programs),
        )

    def _slot(self, end: End) -> int:
        return self.slots.setdefault(end, len(self.slots))

    def _phase(self, x: Update, programs: Sequence[tuple[int, UpdateProgram]]) -> None:
        tail = False
        for number, program in programs:
            for binding in program.bindings:
                self._receive(binding.reads)
                reads, writes = (tuple(map(self._slot, e)) for e in (binding.reads, binding.writes))
                self.body.append(Operation(Do.RUN, number, reads, writes, (), x, tail))
                tail = True
        own = End(Role.PACKED, x.phase)
        if own in self.slots:  # what a rank offers it may read itself
            assert self.distributed is not None
            self.slots[self.distributed.gathered(x.phase, self.rank)] = self.slots[own]

    def _send(self, x: Send) -> None:
        ends = self._sent(x.transfer)
        self._receive(ends)
        reads = tuple(self.slots[end] for end in ends)
        self.body.append(Operation(Do.SEND, self.numbers[x.transfer], reads, (), (), x))

    def _receive(self, ends: Iterable[End]) -> None:
        """Waits for what of `ends` was posted."""
        for x in dict.fromkeys(self.posted[end] for end in ends if end in self.posted):
            writes = []
            for end in self._copies(x.transfer):
                writes.append(self._slot(end))
                self.posted.pop(end)
                if x.transfer.kind is Cargo.PARAMETERS:
                    self.copies[end.index] = writes[-1]
            number = self.numbers[x.transfer]
            self.body.append(Operation(Do.RECEIVE, number, (), tuple(writes), (), x, tail=True))

    def _sent(self, transfer: Transfer) -> Sequence[End]:
        if transfer.kind is Cargo.PARAMETERS:
            return [self.renewed.get(u, End(Role.COPY, u)) for u in transfer.parts]
        return self._message(transfer).sent

    def _copies(self, transfer: Transfer) -> Sequence[End]:
        if transfer.kind is Cargo.PARAMETERS:
            return [End(Role.COPY, u) for u in transfer.parts]
        return self._message(transfer).copies

    def _message(self, transfer: Transfer) -> Any:
        assert self.distributed is not None, "only copies come without an update"
        ends = (transfer.source, transfer.target)
        messages = self.distributed.messages[transfer.parts[0]]
        return next(m for m in messages if (m.source, m.target) == ends)


def copied_units(row: Sequence[Instruction], renewed: Mapping[int, End]) -> tuple[int, ...]:
    """Returns the parameters that a rank sends copies of and that its update does not write."""
    sent = [x.transfer for x in row if isinstance(x, Send)]
    units = (u for t in sent if t.kind is Cargo.PARAMETERS for u in t.parts)
    return tuple(sorted(set(units) - renewed.keys()))


def run_routines(
    parts: Sequence[tuple[Routine, Sequence[Bound]]],
    inputs: Sequence[list[Any]],
    crew: Crew,
    stop: Stop,
    record: Recorder | None = None,
) -> list[list[Any]]:
    """Returns the slots of every local rank after its routine.

    `inputs[i]` are the first values of part i. Nothing waits for the devices; a failing rank
    stops the others.
    """
    crew.transport.begin(crew.order, stop)
    walks, shared = [Walk(x, bound, stop) for x, bound in parts], crew.threads.shared is not None
    works = [
        partial(_run, routine, walk, values, record, shared)
        for (routine, _), walk, values in zip(parts, walks, inputs, strict=True)
    ]
    return crew.threads.run(works, stop, walks)


def _run(
    routine: Routine, walk: Walk, values: Sequence[Any], record: Recorder | None, shared: bool
) -> list[Any]:
    slots = [*_spare(values), *[None] * (routine.num_slots - len(values))]
    loop = run_rank if record is None else record.end(routine.rank, routine.body)
    try:
        loop(walk, slots)
        if shared:  # a later program, of another thread, must not overtake these in one process
            jax.block_until_ready(
                [x for x in slots if isinstance(x, jax.Array) and not x.is_deleted()]
            )
    except Exception as error:
        if compat.is_nan_report(error) and not isinstance(error, NonFiniteError):
            inputs = [*values, *slots[len(values) :]]
            raise non_finite_phase(routine, walk, inputs) from error
        raise
    return slots


def _spare(values: Sequence[Any]) -> Sequence[Any]:
    """Returns copies where a program may be refused after it has run (`jax.debug_nans`), so that
    what it was given survives; else the values, whose buffers it takes over."""
    config: Any = jax.config
    if not (config.jax_debug_nans or config.jax_debug_infs):
        return values
    with jax.debug_nans(False), jax.debug_infs(False):
        return jax.tree.map(jnp.copy, values)


def copies_of(
    crew: Crew, routines: Sequence[Routine], slots: Sequence[Sequence[Any]]
) -> tuple[tuple[jax.Array, ...], ...]:
    """Returns what each `P` transfer brought to local ranks, in their order; () for others."""
    here = {x.rank: (x.copies, own) for x, own in zip(routines, slots, strict=True)}
    none: tuple[Mapping[int, int], Sequence[Any]] = ({}, ())
    arrivals = []
    for transfer in crew.numbers:
        if transfer.kind is Cargo.PARAMETERS:
            copies, own = here.get(transfer.target, none)
            arrivals.append(tuple(own[copies[u]] for u in transfer.parts if u in copies))
    return tuple(arrivals)
