"""How a process ends, so that the others know, and nobody waits for the farewell of one that has
gone.

`jax.distributed` has a farewell of its own at the end of Python, for which all must come: after its
timeout it aborts everyone, and the exit code is lost. Here a process that has come to its regular
end waits for the others first; one that ends otherwise leaves it out.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from octojax import compat
from octojax.launch_environment import HEARTBEAT
from octojax.processes.board import Board, board

_FAREWELL_S = 6.0  # how long a process 0 that holds the coordinator stays for the others

_failed = False
_code: int | None = None  # of the last `sys.exit`


def fail_fast(reason: str = "") -> None:
    """Marks this program as failed: it will end at once, without an orderly farewell.

    Threads may sit in transfers that no one will ever complete, and the farewell of
    `jax.distributed` waits for every process. The others are told the reason.
    """
    global _failed
    _failed = True
    if compat.distributed_place()[1] > 1:
        board().end(f"failed: {reason}" if reason else "failed", well=False)


def watch_the_end() -> None:
    """Sees to it that the others hear how this process ends. Called once, after joining."""
    place = board()
    before, before_thread = sys.excepthook, threading.excepthook

    def ended(kind: Any, error: Any, trace: Any) -> None:
        global _code
        before(kind, error, trace)
        _code = 128 + signal.SIGINT if issubclass(kind, KeyboardInterrupt) else 1
        fail_fast("".join(traceback.format_exception_only(kind, error)).strip())

    def thread_ended(args: Any) -> None:
        before_thread(args)
        if args.exc_type is not SystemExit:
            name = args.thread.name if args.thread else "?"
            error = "".join(traceback.format_exception_only(args.exc_type, args.exc_value))
            place.remark(f"its thread {name!r} failed: {error.strip()}")

    sys.excepthook, threading.excepthook = ended, thread_ended
    sys.exit = _noted(sys.exit)
    atexit.register(_leave, place)


def _noted(leave: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    """`sys.exit` that notes its code: nothing else tells it to what runs at the end of Python."""

    def exit(status: Any = None, /) -> NoReturn:
        global _code
        if threading.current_thread() is threading.main_thread():
            _code = 0 if status is None else status if isinstance(status, int) else 1
        leave(status)

    return exit


def _leave(place: Board) -> None:
    if _failed or place.trouble is not None:  # threads may hang: Python might not get to its end
        place.ending.set()
        place.end("ended", well=False)
        depart(place.client, _code or 1)
    if _code:
        place.ending.set()
        place.end(f"ended by sys.exit({_code})", well=False)
        return abandon(place.client)
    place.end("ended", well=True)
    cause = _wait_for_all(place)
    place.ending.set()
    place.watcher.join()
    if cause is None:
        return None
    if cause:
        print(f"octojax: process {place.me} ends: {cause}", file=sys.stderr)
        depart(place.client, 1)
    return abandon(place.client)


def _wait_for_all(place: Board) -> str | None:
    """Returns None once all others have come to their regular end as well; else why they will not,
    "" where the reason is that this process has ended."""
    while True:
        place.look()
        ends = [x.place for x in place.peers.values()]
        if cause := place.failure():
            blame = any(x.end and not (x.well or x.follows) for x in ends)
            return cause if blame or all(x.well for x in ends) else ""
        if all(x.end for x in ends):
            return None
        time.sleep(0.02)


def abandon(client: Any) -> None:
    """Leaves without the farewell of `jax.distributed`; Python ends with the code it has."""
    _say_goodbye(client)
    compat.forget_distributed()


def depart(client: Any, code: int = 1) -> NoReturn:
    """Ends this process at once; the one that holds the coordinator as the last."""
    sys.stdout.flush()
    sys.stderr.flush()
    _say_goodbye(client)
    os._exit(code)


def _say_goodbye(client: Any) -> None:
    with contextlib.suppress(Exception):
        me, number = compat.distributed_place()
        client.key_value_set(f"octopipe/left/{me}", "", True)
        if me == 0 and HEARTBEAT not in os.environ:
            limit = time.monotonic() + _FAREWELL_S
            for process in range(1, number):
                left = max(1, round(1000 * (limit - time.monotonic())))
                client.blocking_key_value_get(f"octopipe/left/{process}", left)
            time.sleep(0.2)  # from their last word to their end
