"""One thread that runs the calls of a compiled step, one after the other.

    thread A    step(state, batch)   --.                        wait      result
    thread B    step.evaluate(...)   ---'--> step thread: A's call, then B's call

So a step may be called from many threads, and none of their accidents reaches the middle of it:
Ctrl-C, an alarm or any other exception that comes out of the blue hits a caller who waits. The
call that it waits for is stopped; or, where that has taken over its caller's buffers already, runs
to its end, and what it made is kept.
"""

import contextvars
import queue
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from octojax.compat import copies_allowed, in_callback, jit_enabled, thread_settings
from octojax.errors import ExecutionError
from octojax.executor.stop import Stop

T = TypeVar("T")

LOOK_S = 1.0
"""How often a waiting caller looks whether the call before its own goes on."""

GRACE_S = 10.0
"""An interrupted call ends after the actions that its ranks are in, mostly in less than this."""


@dataclass(eq=False)
class Call:
    """One call on its way through the thread; `over` is locked until it has ended."""

    name: str
    work: Callable[[], Any]
    settings: Callable[[], AbstractContextManager[None]]
    stop: Stop = field(default_factory=Stop)
    over: threading.Lock = field(default_factory=threading.Lock)
    result: Any = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.over.acquire()

    def run(self) -> None:
        try:
            with self.settings(), jit_enabled(), copies_allowed():
                self.stop.check()
                self.result = self.work()
        except BaseException as error:
            self.error = error
        finally:
            self.work = _ended
            self.stop.end()
            self.over.release()

    def outcome(self) -> Any:
        """Returns what the call returned, or raises what it raised, once."""
        error, result = self.error, self.result
        self.error = self.result = None
        if error is None:
            return result
        try:
            raise error
        finally:
            del error  # which has this frame in its traceback


class StepThread:
    """Runs what it is given in a lasting thread of its own, under the caller's JAX settings.

    `timeout_s` bounds how long a call waits for one before it that does not go on, `grace_s` how
    long an interrupted caller waits for its call to end; a second interrupt ends that wait. What
    still runs then ends in the background, and the next call comes after it.
    """

    def __init__(self, timeout_s: float = 600.0, grace_s: float = GRACE_S) -> None:
        self.timeout_s, self.grace_s = timeout_s, grace_s
        self.closed: str | None = None
        self._inbox: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._running: list[Call] = []  # shared with the thread: none or one
        self._thread: threading.Thread | None = None
        self._start = threading.Lock()
        # The thread knows only its inbox, so that a step nobody holds any more ends it.
        self._end = weakref.finalize(self, self._inbox.put, None)

    @property
    def stop(self) -> Stop:
        """The `Stop` of the call that this thread runs: the one to hand to whatever it starts."""
        return self._running[0].stop

    def run(self, work: Callable[[], T], name: str) -> T:
        """Returns what `work` returns, after all calls before it have ended.

        Within a call of this thread it simply runs. `name` says what it is, for errors. Raises
        `ExecutionError` when called from a callback that a running call waits for, after
        `close`, and when the call before does not go on.
        """
        running = self._running[:1]
        if running and in_callback():
            raise ExecutionError(
                f"{name} was called from inside a callback (jax.debug.callback, pure_callback or "
                f"io_callback) while {running[0].name} runs: it would wait for "
                f"itself. Call it after the step has returned"
            )
        if threading.current_thread() is self._thread:
            return work()
        context = contextvars.copy_context()

        def in_turn() -> T:
            self.refuse_if_closed(name)  # by a call before this one
            return context.run(work)

        call = Call(name, in_turn, thread_settings())
        try:
            self._send(call)
            self._wait(call)
        except BaseException as error:  # of this thread: the call itself keeps its own
            call.stop.cancel(error)
            self._wait_for_end(call)
            raise
        return call.outcome()

    def _send(self, call: Call) -> None:
        with self._start:
            self.refuse_if_closed(call.name)
            if self._thread is None or not self._thread.is_alive():
                self._running.clear()
                target = (self._inbox, self._running)
                self._thread = threading.Thread(
                    target=_serve, args=target, name="octopipe step", daemon=True
                )
                self._thread.start()
        self._inbox.put(call)

    def _wait(self, call: Call) -> None:
        """Returns when the call has ended. It may take as long as it wants, and so may those
        before it while they go on."""
        before, count, since = None, -1, time.monotonic()
        while not call.over.acquire(timeout=LOOK_S):
            if self._thread is None or not self._thread.is_alive():
                raise ExecutionError(f"the thread that was to run {call.name} has ended")
            running = next(iter(self._running[:1]), call)
            if running is call or (running, running.stop.instructions) != (before, count):
                before, count = running, running.stop.instructions
                since = time.monotonic()
            elif count and time.monotonic() - since > self.timeout_s:
                raise ExecutionError(
                    f"{call.name} waited {self.timeout_s:g} s for {running.name}, which was called "
                    f"before and does not go on"
                    + (" though it has been interrupted" if running.stop.error else "")
                    + ". Nothing can run until it ends: raise timeout_s if one action takes so "
                    "long, or start the program anew"
                )

    def _wait_for_end(self, call: Call) -> None:
        """Returns when a stopped call has ended, but not later than `grace_s`. One that has not
        begun will not."""
        deadline = time.monotonic() + self.grace_s
        while call in self._running and time.monotonic() < deadline:
            if call.over.acquire(timeout=0.05):
                return

    def refuse_if_closed(self, name: str) -> None:
        """Raises `ExecutionError` after `close`."""
        if self.closed is not None:
            raise ExecutionError(f"{name} was called, but {self.closed}")

    def close(self, why: str, release: Callable[[], None]) -> None:
        """Runs `release` after the calls that were made before, and ends the thread; later calls
        are told `why`. Twice is once."""
        if self.closed is not None:
            return

        def last() -> None:
            self.closed = self.closed or why
            release()

        self.run(last, "close")
        self._end()


def _ended() -> None:
    raise AssertionError("a call runs once")


def _serve(inbox: "queue.SimpleQueue[Call | None]", running: list[Call]) -> None:
    while (call := inbox.get()) is not None:
        running.append(call)
        try:
            call.run()
        finally:
            running.clear()
            del call
