"""The inner loop, and one thread per rank to run it in."""

import contextvars
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ClassVar, Protocol

from octojax.compat import thread_settings
from octojax.errors import ExecutionError
from octojax.executor.instructions import Do, Operation
from octojax.executor.shared import SharedWait, broken_off, waiting
from octojax.executor.stop import Stop, Stopped
from octojax.executor.transport import Transport
from octojax.mesh import Rank

Bound = tuple[Callable[..., Any], Callable[[list[Any]], Any], tuple[int, ...], tuple[int, ...]]
"""A function, how to read its arguments from the slots, where its results go, what to clear."""

LOOK_S = 1.0
"""How often who waits for a thread looks whether it is still there."""


class Program(Protocol):
    """A rank's operations, and what errors call the time before and after them."""

    before: ClassVar[str]
    after: ClassVar[str]

    @property
    def rank(self) -> int: ...

    @property
    def body(self) -> tuple[Operation, ...]: ...


def bind(program: Program, compiled: Sequence[Any], transport: Transport) -> list[Bound]:
    """Returns the rank's operations as functions over slots, ready for `run_rank`.

    `compiled[i]` runs recipe i; any callable of the same arguments and results will do.
    """
    return [_bound(i, compiled, transport) for i in program.body]


def _bound(operation: Operation, compiled: Sequence[Any], transport: Transport) -> Bound:
    reads, writes, frees = operation.reads, operation.writes, operation.frees
    number = operation.target
    match operation.do:
        case Do.RUN:
            return compiled[number], _reader(reads), writes, frees
        case Do.SEND:

            def send(*values: Any) -> tuple[()]:
                transport.send(number, values)
                return ()

            return send, _reader(reads), writes, frees
        case Do.RECEIVE:
            return (lambda: transport.receive(number)), _nothing, writes, frees
        case Do.POST:

            def post() -> tuple[()]:
                transport.post(number)
                return ()

            return post, _nothing, (), ()


def _nothing(_: list[Any]) -> tuple[()]:
    return ()


def _reader(reads: tuple[int, ...]) -> Callable[[list[Any]], Any]:
    if not reads:
        return _nothing
    if len(reads) == 1:
        only = reads[0]
        return lambda slots: (slots[only],)
    return itemgetter(*reads)


class Walk:
    """A rank's instructions in order, and where it is in them. Ends early with the step."""

    def __init__(self, program: Program, bound: Sequence[Bound], stop: Stop) -> None:
        self.program, self.bound, self.stop, self.at = program, bound, stop, -1

    def __iter__(self) -> Iterator[Bound]:
        stop = self.stop
        for at, step in enumerate(self.bound):
            self.at = at
            if stop.error is not None:
                raise Stopped from stop.error
            stop.instructions += 1  # by several threads: what counts is that it changes
            yield step
        self.at = len(self.bound)

    def __str__(self) -> str:
        if self.at < 0:
            return self.program.before
        body = self.program.body
        return body[self.at].name if self.at < len(body) else self.program.after


def run_rank(bound: Iterable[Bound], slots: list[Any]) -> None:
    """Runs one rank's instructions over `slots`, in place."""
    for function, read, writes, frees in bound:
        results = function(*read(slots))
        for slot, value in zip(writes, results, strict=False):
            slots[slot] = value
        for slot in frees:
            slots[slot] = None


def run_recorded(
    bound: Iterable[Bound],
    slots: list[Any],
    clock: Callable[[], float],
    wait: Callable[[Any], Any],
    weigh: Callable[[Sequence[int], Sequence[Any], Sequence[int]], None] | None = None,
) -> list[tuple[float, float]]:
    """Like `run_rank`, and returns start and end of each instruction on `clock`.

    `wait` blocks until results are there, so that the end is the end of the work. Then
    `weigh(writes, results, frees)` may look at them.
    """
    spans = []
    for function, read, writes, frees in bound:
        start = clock()
        results = function(*read(slots))
        wait(results)
        spans.append((start, clock()))
        if weigh is not None:
            weigh(writes, results, frees)
        for slot, value in zip(writes, results, strict=False):
            slots[slot] = value
        for slot in frees:
            slots[slot] = None
    return spans


Answers = queue.SimpleQueue[tuple[int, Any, BaseException | None]]


@dataclass(frozen=True)
class _Job:
    work: Callable[[], Any]
    settings: Callable[[], AbstractContextManager[None]]
    answers: Answers


class RankThreads:
    """One lasting thread per local rank but the first, which runs in the caller's.

    The caller's JAX settings and context variables hold in all of them. `timeout_s` bounds how
    long a step that has failed is waited for. A rank that this process runs together with others
    (`shared`; it is the only one here) has a thread as well: it may wait for them inside a program,
    and the caller must hear in time that they do not come.
    """

    def __init__(
        self, ranks: Sequence[int], timeout_s: float = 600.0, shared: Rank | None = None
    ) -> None:
        self.ranks, self.timeout_s, self.shared = tuple(ranks), timeout_s, shared
        apart = self.ranks[1:] if shared is None else self.ranks
        self._inboxes = {rank: queue.SimpleQueue[_Job | None]() for rank in apart}
        self._threads: dict[int, threading.Thread] = {}
        self._settled = True
        # Threads know only their inbox, so that a step nobody holds any more ends them.
        self._end = weakref.finalize(self, _end, tuple(self._inboxes.values()))

    def run(
        self, works: Sequence[Callable[[], Any]], stop: Stop, walks: Sequence[Walk] = ()
    ) -> list[Any]:
        """Returns what each rank's work returned. The first failure stops all, and is raised.

        No rank is at work any more afterwards, unless one does not end within `timeout_s` of a
        failure: that is an `ExecutionError`, and so is every later call until it has ended.
        `walks[i]` says where rank i is.
        """
        places = dict(zip(self.ranks, walks, strict=False))
        self._settle(places)
        failures: list[tuple[int, BaseException]] = []

        def guarded(rank: int, work: Callable[[], Any]) -> Callable[[], Any]:
            def call() -> Any:
                try:
                    return work()
                except BaseException as error:
                    if not isinstance(error, Stopped):
                        failures.append((rank, error))
                        stop.set(error)
                    raise

            return call

        calls = [guarded(r, w) for r, w in zip(self.ranks, works, strict=True)]
        answers: Answers = queue.SimpleQueue()
        settings = thread_settings() if self._inboxes else nullcontext
        results: dict[int, Any] = {}
        stopped = False
        self._settled = False
        own = list(zip(self.ranks, calls, strict=True))
        for rank, call in own[len(own) - len(self._inboxes) :]:
            context = contextvars.copy_context()
            self._put(rank, _Job(lambda c=context, f=call: c.run(f), settings, answers))
        if self.shared is None:
            try:
                results[self.ranks[0]] = calls[0]()
            except BaseException as error:  # kept in `failures`, or a consequence of one
                stopped = True
                if not failures and not isinstance(error, Stopped):  # between two of our lines
                    failures.append((self.ranks[0], error))
                    stop.set(error)
        with nullcontext() if self.shared is None else self._company(stop) as company:
            for rank, result, error in self._answers(
                answers, len(self._inboxes), stop, places, company
            ):
                results[rank] = result
                stopped = stopped or error is not None
        self._settled = True
        if failures:
            rank, error = failures[0]
            if not isinstance(error, Exception) or isinstance(error, ExecutionError):
                raise error
            if self.shared is not None:
                at = str(places[rank]) if rank in places else "its part"
                lost = broken_off(self.shared, at, error)
                if lost is not None:
                    raise lost from error
            where = f" in {places[rank]}" if rank in places else ""
            raise ExecutionError(f"rank {rank} failed{where}: {error}") from error
        if stopped:
            raise _of_transfer(stop)
        return [results[r] for r in self.ranks]

    def _put(self, rank: int, job: _Job) -> None:
        thread = self._threads.get(rank)
        if thread is None or not thread.is_alive():
            name, inbox = f"octopipe rank {rank}", self._inboxes[rank]
            thread = threading.Thread(target=_serve, args=(rank, inbox), name=name, daemon=True)
            self._threads[rank] = thread
            thread.start()
        self._inboxes[rank].put(job)

    def _company(self, stop: Stop) -> AbstractContextManager[SharedWait]:
        assert self.shared is not None, "a rank of this process alone waits for nobody"
        return waiting(self.shared, self.timeout_s, stop).watched()

    def _answers(
        self,
        answers: Answers,
        count: int,
        stop: Stop,
        places: dict[int, Walk],
        company: SharedWait | None = None,
    ) -> Iterator[tuple[int, Any, BaseException | None]]:
        """Yields `count` answers as they come; bounded once the step has failed, and where the
        rank's `company` does not come."""
        waiting = set(self._inboxes)
        deadline = None
        while len(self._inboxes) - len(waiting) < count:
            try:
                answer = answers.get(timeout=LOOK_S)
            except queue.Empty:
                if company is not None:
                    company.look()
                dead = sorted(r for r in waiting if not self._threads[r].is_alive())
                if dead:
                    stop.set(ExecutionError(f"the thread of rank {_list(dead)} has ended"))
                    waiting -= set(dead)
                now = time.monotonic()
                if stop.error is not None and deadline is None:
                    deadline = now + self.timeout_s
                if deadline is not None and now > deadline:
                    raise self._still(waiting, places) from stop.error
                continue
            waiting.discard(answer[0])
            yield answer

    def _settle(self, places: dict[int, Walk]) -> None:
        """Returns when no rank is at work any more for an earlier call that was broken off."""
        if self._settled:
            return
        answers: Answers = queue.SimpleQueue()
        stop = Stop()
        stop.error = Stopped()
        settings = thread_settings()
        for rank in self._inboxes:
            self._put(rank, _Job(_nothing_to_do, settings, answers))
        for _ in self._answers(answers, len(self._inboxes), stop, places):
            pass
        self._settled = True

    def _still(self, ranks: Iterable[int], places: dict[int, Walk]) -> ExecutionError:
        late = ", ".join(
            f"rank {r}" + (f" in {places[r]}" if r in places else "") for r in sorted(ranks)
        )
        return ExecutionError(
            f"the step has been broken off, but {late} has not ended within {self.timeout_s:g} s. "
            f"Nothing can run until it has: call again later, raise timeout_s if one action "
            f"takes so long, or start the program anew"
        )

    def close(self) -> None:
        """Ends the threads, once."""
        self._end()


def _of_transfer(stop: Stop) -> Exception:
    """What to raise where no rank has failed by itself: a transfer has, or the caller stopped."""
    cause = stop.error
    error: Exception = Stopped("the step was stopped")
    if isinstance(cause, Exception) and not isinstance(cause, Stopped):
        error = ExecutionError(f"a transfer failed: {cause}")
    error.__cause__ = cause
    return error


def _nothing_to_do() -> None:
    pass


def _list(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def _end(inboxes: Sequence["queue.SimpleQueue[_Job | None]"]) -> None:
    for inbox in inboxes:
        inbox.put(None)


def _serve(rank: int, inbox: "queue.SimpleQueue[_Job | None]") -> None:
    while (job := inbox.get()) is not None:
        try:
            with job.settings():
                result, error = job.work(), None
        except BaseException as caught:
            result, error = None, caught
        job.answers.put((rank, result, error))
        del job, result, error
