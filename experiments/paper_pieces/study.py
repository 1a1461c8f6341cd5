"""What the pieces share while they run: how long to search, what is tuned already, progress."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from octojax.ir import Profile
from octojax.tune import TuneResult, tune

SHARES = {"s": 1 / 6, "m": 1 / 3, "l": 1.0}


@dataclass(frozen=True)
class Settings:
    """How a run was asked for. `seconds` is the search on a large configuration; a medium one
    gets a third, a small one a sixth. `quick`: small configurations and short searches, a try.
    """

    seconds: float = 50.0
    quick: bool = False
    out: Path = Path("runs/paper")

    def search_s(self, size: str) -> float:
        """Returns the seconds of search for a configuration of size s, m or l."""
        return 0.5 if self.quick else self.seconds * SHARES[size]

    @property
    def sizes(self) -> str:
        return "s" if self.quick else "sml"


@dataclass
class Study:
    """One run of several pieces. The only mutable record: progress and what is tuned already."""

    settings: Settings
    console: Console
    total_s: float
    begun: float = field(default_factory=time.perf_counter)
    done_s: float = 0.0
    memo: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self.task = self.bar.add_task("", total=max(self.total_s, 1e-9), left="")

    @contextmanager
    def job(self, text: str, estimate_s: float) -> Iterator[None]:
        """Shows what is worked on, which was expected to take so long."""
        self.show(text)
        if not self.console.is_terminal:
            self.console.print(f"{text} ({self.left()})", highlight=False, soft_wrap=True)
        yield
        self.done_s += estimate_s
        self.show(text)

    def show(self, text: str = "", within_s: float = 0.0) -> None:
        """Draws the bar; `within_s` of the present job have passed."""
        done = min(self.total_s, self.done_s + within_s)
        text = text or self.bar.tasks[0].description
        self.bar.update(self.task, completed=done, description=text, left=self.left())

    def finish(self, expected_s: float) -> None:
        """Notes that pieces are done that were expected to take so long, jobs shared or not."""
        self.done_s = expected_s
        self.show()

    def left(self) -> str:
        """Returns the remaining time in words, by how long the finished part took."""
        spent = time.perf_counter() - self.begun
        pace = max(1.0, spent / self.done_s) if self.done_s > 30 else 1.0
        minutes, seconds = divmod(round(max(0.0, self.total_s - self.done_s) * pace), 60)
        return f"about {minutes}:{seconds:02d} left"

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Returns `make()`, or what it returned when the same key was asked for before."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    def tuned(self, profile: Profile, size: str, **options: Any) -> TuneResult:
        """Returns `tune(profile, ...)` with the search time of the size; the same question is
        answered once in a run.
        """
        wanted = {
            "seconds": self.settings.search_s(size),
            "ranks": profile.ranks,
            "microbatches": profile.microbatches,
            **({"baselines": ("1f1b",)} if self.settings.quick else {}),
            **options,
        }
        key = (profile.name, profile.fingerprint, *sorted((k, repr(v)) for k, v in wanted.items()))

        def search() -> TuneResult:
            name = f"tune {profile.name}, {wanted['microbatches']} microbatches"
            with self.job(name, wanted["seconds"] or 0.0):
                return tune(profile, progress=lambda p: self.show(within_s=p.seconds), **wanted)

        return self.once(key, search)


def load_average() -> float:
    """Returns the machine's load average over one minute, to stand beside results."""
    return round(os.getloadavg()[0], 1)
