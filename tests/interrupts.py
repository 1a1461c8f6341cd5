"""Ctrl-C for tests: a signal that raises `KeyboardInterrupt` in the main thread, wherever it is."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType


@contextlib.contextmanager
def interrupts(delays_s: Sequence[float], after: threading.Event | None = None) -> Iterator[None]:
    """Within it `KeyboardInterrupt` is raised after each of the delays, counted from the event or
    else from the start, and never later than its end."""
    armed = True
    over = threading.Event()

    def ring(_: int, frame: FrameType | None) -> None:
        if armed and not entering_or_leaving(frame):
            raise KeyboardInterrupt

    def run() -> None:
        while after is not None and not after.wait(0.01):
            if over.is_set():
                return
        start = time.monotonic()
        for delay in sorted(delays_s):
            if over.wait(max(0.0, start + delay - time.monotonic())):
                return
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, ring)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        armed = False
        over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def entering_or_leaving(frame: FrameType | None) -> bool:
    """Whether an interrupt at `frame` would hit `interrupts` and not what runs within it."""
    function = interrupts.__wrapped__
    while frame is not None:
        manager = frame.f_locals.get("self") if frame.f_globals is vars(contextlib) else None
        if frame.f_code is function.__code__ or getattr(manager, "func", None) is function:
            return True
        frame = frame.f_back
    return False


def interrupting(after: threading.Event, times: int = 1) -> contextlib.AbstractContextManager[None]:
    """`interrupts` soon after the event, so many times."""
    return interrupts([0.02 * (k + 1) for k in range(times)], after)
