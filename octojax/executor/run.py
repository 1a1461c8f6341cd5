"""The inner loop, and one thread per rank to run it in."""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from octojax.errors import ExecutionError
from octojax.executor.instructions import Do, Instruction, RankProgram
from octojax.executor.transport import Stopped, Transport

Bound = tuple[Callable[..., Any], Callable[[list[Any]], Any], tuple[int, ...], tuple[int, ...]]
"""A function, how to read its arguments from the slots, where its results go, what to clear."""


def bind(program: RankProgram, compiled: Sequence[Any], transport: Transport) -> list[Bound]:
    """Returns the rank's instructions as functions over slots, ready for `run_rank`.

    `compiled[i]` runs recipe i; any callable of the same arguments and results will do.
    """
    return [_bound(i, compiled, transport) for i in program.body]


def _bound(instruction: Instruction, compiled: Sequence[Any], transport: Transport) -> Bound:
    reads, writes, frees = instruction.reads, instruction.writes, instruction.frees
    number = instruction.target
    match instruction.do:
        case Do.RUN:
            return compiled[number], _reader(reads), writes, frees
        case Do.SEND:

            def send(*values: Any) -> tuple[()]:
                transport.send(number, values)
                return ()

            return send, _reader(reads), writes, frees
        case Do.RECEIVE:
            return (lambda: transport.receive(number)), _nothing, writes, frees


def _nothing(_: list[Any]) -> tuple[()]:
    return ()


def _reader(reads: tuple[int, ...]) -> Callable[[list[Any]], Any]:
    if not reads:
        return _nothing
    if len(reads) == 1:
        only = reads[0]
        return lambda slots: (slots[only],)
    return itemgetter(*reads)


def run_rank(bound: Sequence[Bound], slots: list[Any]) -> None:
    """Runs one rank's instructions over `slots`, in place."""
    for function, read, writes, frees in bound:
        results = function(*read(slots))
        for slot, value in zip(writes, results, strict=False):
            slots[slot] = value
        for slot in frees:
            slots[slot] = None


def run_recorded(
    bound: Sequence[Bound],
    slots: list[Any],
    clock: Callable[[], float],
    wait: Callable[[Any], Any],
) -> list[tuple[float, float]]:
    """Like `run_rank`, and returns start and end of each instruction on `clock`.

    `wait` blocks until results are there, so that the end is the end of the work.
    """
    spans = []
    for function, read, writes, frees in bound:
        start = clock()
        results = function(*read(slots))
        wait(results)
        spans.append((start, clock()))
        for slot, value in zip(writes, results, strict=False):
            slots[slot] = value
        for slot in frees:
            slots[slot] = None
    return spans


@dataclass(frozen=True)
class _Job:
    work: Callable[[], Any]
    done: "queue.SimpleQueue[tuple[int, Any, BaseException | None]]"


class RankThreads:
    """One lasting thread per local rank but the first, which runs in the caller's."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.inboxes: list[queue.SimpleQueue[_Job | None]] = []
        for rank in self.ranks[1:]:
            inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
            thread = threading.Thread(
                target=_serve, args=(rank, inbox), name=f"octopipe rank {rank}", daemon=True
            )
            thread.start()
            self.inboxes.append(inbox)
        # Threads know only their inbox, so that a step nobody holds any more ends them.
        self._end = weakref.finalize(self, _end, self.inboxes)

    def run(
        self, works: Sequence[Callable[[], Any]], abort: Callable[[BaseException], None]
    ) -> list[Any]:
        """Returns what each rank's work returned. The first failure stops all, and is raised."""
        done: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
        failures: list[tuple[int, BaseException]] = []
        results: dict[int, Any] = {}

        def guarded(rank: int, work: Callable[[], Any]) -> Callable[[], Any]:
            def call() -> Any:
                try:
                    return work()
                except BaseException as error:
                    if not isinstance(error, Stopped):
                        failures.append((rank, error))
                        abort(error)
                    raise

            return call

        calls = [guarded(r, w) for r, w in zip(self.ranks, works, strict=True)]
        for inbox, call in zip(self.inboxes, calls[1:], strict=True):
            inbox.put(_Job(call, done))
        stopped: list[BaseException] = []
        try:
            results[self.ranks[0]] = calls[0]()
        except BaseException as error:  # kept in `failures`, or a consequence of one
            stopped.append(error)
        for _ in self.inboxes:
            rank, result, error = done.get()
            results[rank] = result
            if error is not None:
                stopped.append(error)
        if failures:
            rank, error = failures[0]
            if not isinstance(error, Exception) or isinstance(error, ExecutionError):
                raise error
            raise ExecutionError(f"rank {rank} failed: {error}") from error
        if stopped:
            cause = stopped[0].__cause__
            raise ExecutionError(f"a transfer failed: {cause}") from cause
        return [results[r] for r in self.ranks]

    def close(self) -> None:
        """Ends the threads, once."""
        self._end()


def _end(inboxes: Sequence["queue.SimpleQueue[_Job | None]"]) -> None:
    for inbox in inboxes:
        inbox.put(None)


def _serve(rank: int, inbox: "queue.SimpleQueue[_Job | None]") -> None:
    while (job := inbox.get()) is not None:
        try:
            result, error = job.work(), None
        except BaseException as caught:
            result, error = None, caught
        job.done.put((rank, result, error))
        del job, result, error
