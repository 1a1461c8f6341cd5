"""The progress of a search on standard error: a bar in a terminal, else a line now and then."""

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from octojax.tune.result import COMPILATION
from octojax.tune.result import Progress as Moment

EVERY_S = 5.0
"""Between two lines where there is no terminal to draw a bar in."""


class Ticker:
    """A context in which `show` draws iteration, phase, makespan and gap."""

    def __init__(self, seconds: float | None, iterations: int | None) -> None:
        self._seconds, self._iterations = seconds, iterations
        self._lines = not sys.stderr.isatty()
        self._next_s = EVERY_S
        self._bar = Progress(
            TextColumn("tune"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )

    def __enter__(self) -> "Ticker":
        if not self._lines:
            self._bar.start()
        total = self._iterations or self._seconds
        self._task = self._bar.add_task("first plans", total=total)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._lines:
            self._bar.stop()

    def show(self, moment: Moment) -> None:
        """Draws one moment of the search; a line of its own says that it is being compiled."""
        if moment.phase == COMPILATION:
            self._bar.console.print(
                f"first plan: 1f1b-split, {moment.makespan_s * 1e3:.3f} ms, gap {moment.gap:.2%}; "
                f"the search is being compiled, once on this machine (about half a minute)",
                soft_wrap=True,
                highlight=False,
            )
            return
        text = (
            f"iteration {moment.iteration} {moment.phase:9s} "
            f"{moment.makespan_s * 1e3:.3f} ms, gap {moment.gap:.2%}"
        )
        if self._lines:
            if moment.seconds >= self._next_s:
                self._next_s = moment.seconds + EVERY_S
                print(f"tune {moment.seconds:.0f} s: {text}", file=sys.stderr, flush=True)
            return
        done = moment.iteration if self._iterations else moment.seconds
        self._bar.update(
            self._task,
            completed=done,
            description=text,
        )
