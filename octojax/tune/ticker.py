"""The progress line of a search, on standard error."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from octojax.tune.result import Progress as Moment


class Ticker:
    """A context in which `show` draws iteration, phase, makespan and gap."""

    def __init__(self, seconds: float | None, iterations: int | None) -> None:
        self._seconds, self._iterations = seconds, iterations
        self._bar = Progress(
            TextColumn("tune"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )

    def __enter__(self) -> "Ticker":
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
        self._bar.stop()

    def show(self, moment: Moment) -> None:
        """Draws one moment of the search."""
        done = moment.iteration if self._iterations else moment.seconds
        self._bar.update(
            self._task,
            completed=done,
            description=(
                f"iteration {moment.iteration} {moment.phase:9s} "
                f"{moment.makespan_s * 1e3:.3f} ms, gap {moment.gap:.2%}"
            ),
        )
