"""The signals by which a launcher is asked to end."""

import signal
import threading
from typing import Any


class Signals:
    """Meanwhile SIGINT, SIGTERM and SIGHUP are only noted; afterwards the first takes its course.

    Those that are ignored stay so (`nohup`), and outside the main thread, where Python allows no
    handlers, all do what they did.
    """

    def __init__(self) -> None:
        self.noted: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, _: Any) -> None:
        self.noted.append(number)

    def __exit__(self, kind: Any, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.noted and kind is None:
            signal.raise_signal(self.noted[0])
