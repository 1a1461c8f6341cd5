"""How a step ends early: one `Stop` per step, which everything that runs or waits in it knows."""

import threading
from collections.abc import Callable


class Stopped(Exception):
    """Another rank failed first, or the caller was interrupted; that error is the one to report."""


class Stop:
    """The first error of a step, or None while it goes well.

    Whoever waits looks at `error` now and then; `set` also runs what `listen` was given, so
    that they look at once. A step that is past `commit` can no longer be stopped by its caller.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.committed = False
        self.instructions = 0  # how many have begun: who waits sees whether the step goes on
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []

    def set(self, error: BaseException) -> None:
        """Ends the step because of `error`, unless it ended before."""
        with self._lock:
            if self.error is None:
                self.error = error
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener()

    def cancel(self, error: BaseException) -> None:
        """Like `set`, for the caller of a step: nothing happens after `commit`."""
        with self._lock:
            if self.committed:
                return
            if self.error is None:
                self.error = error
        self.set(error)

    def commit(self) -> None:
        """Called before the step takes over the buffers of its caller. Raises `Stopped` if the
        step has been stopped, and else takes care that it will not be by its caller."""
        with self._lock:
            if self.error is not None:
                raise Stopped from self.error
            self.committed = True

    def check(self) -> None:
        """Raises `Stopped` once the step has been stopped."""
        if self.error is not None:
            raise Stopped from self.error

    def listen(self, listener: Callable[[], None]) -> None:
        """Has `listener` called when the step is stopped, which may be now."""
        with self._lock:
            self._listeners.append(listener)
        if self.error is not None:
            listener()

    def end(self) -> None:
        """Called when the step has ended: nobody listens any more."""
        with self._lock:
            self._listeners.clear()
