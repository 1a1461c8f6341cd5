"""Compiles many programs ahead, in parallel, with a progress bar, or lines where none can be."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import jax

from octojax.compat import under_thread_settings


@dataclass(frozen=True)
class Job:
    """One program to compile. `arguments` are trees of shapes, dtypes and shardings."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    out_shardings: Any = None


def compile_all(
    jobs: Sequence[Job], progress: bool = True, options: Mapping[str, Any] | None = None
) -> list[Any]:
    """Returns the compiled program of each job, in order. `options` go to XLA's compiler.

    Tracing holds Python's lock, so it happens here one after the other; XLA compiles in as
    many threads as there are cores meanwhile.
    """
    threads = max(1, min(len(jobs), os.cpu_count() or 1))
    results: list[Any] = [None] * len(jobs)
    with _bar(len(jobs), progress) as advance, ThreadPoolExecutor(threads) as pool:
        futures = {}
        for index, job in enumerate(jobs):
            compile_it = under_thread_settings(_lower(job).compile)
            futures[pool.submit(compile_it, dict(options or {}) or None)] = index
        for future in as_completed(futures):
            results[futures[future]] = future.result()
            advance(jobs[futures[future]].name)
    return results


def _lower(job: Job) -> Any:
    options: dict[str, Any] = {"donate_argnums": job.donated, "keep_unused": True}
    if job.out_shardings is not None:
        options["out_shardings"] = job.out_shardings
    return jax.jit(job.function, **options).lower(*job.arguments)


EVERY_S = 10.0
"""Between two lines where there is no terminal to draw a bar in."""


class _bar:
    """A progress bar in a terminal, elsewhere a line every ten seconds; entering it gives the
    advance function.
    """

    def __init__(self, total: int, visible: bool) -> None:
        self.total, self.visible = total, visible
        self.count, self.begun_s = 0, time.monotonic()
        self.next_s = self.begun_s + EVERY_S

    def line(self, name: str) -> None:
        """Says how far the compilation is, unless it said so just now."""
        self.count += 1
        now = time.monotonic()
        if now >= self.next_s and self.count < self.total:
            self.next_s = now + EVERY_S
            text = f"compiling: {self.count} of {self.total} programs in {now - self.begun_s:.0f} s"
            print(f"{text} ({name})", file=sys.stderr, flush=True)

    def __enter__(self) -> Callable[[str], None]:
        if not self.visible or not self.total:
            self.progress = None
            return lambda _: None
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

        console = Console(stderr=True)
        if not console.is_terminal:
            self.progress = None
            return self.line
        self.progress = Progress(
            "compiling",
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            "{task.description}",
            console=console,
            transient=True,
        )
        task = self.progress.add_task("", total=self.total)
        self.progress.start()
        return lambda name: self.progress.update(task, advance=1, description=name)  # type: ignore[union-attr]

    def __exit__(self, *_: object) -> None:
        if self.progress is not None:
            self.progress.stop()
