"""Median times of many small jobs, measured in turns so that drift meets all of them alike."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)

Job = Callable[[int], None]
"""`job(n)` runs n times back to back and returns when all of it is done."""


def median_times(
    jobs: Mapping[Key, Job],
    rounds: int = 5,
    target_s: float = 0.01,
    most: int = 64,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Key, float]:
    """Returns the median seconds of one run of each job.

    Every job runs once to warm up and once to see how often it must be repeated for `target_s`;
    then each of `rounds` rounds measures every job once, in the same order. What a single run
    waits for the host is spread over the repetitions. `clock` may be `time.process_time` in a
    process bound to one core: then other work on that core hardly counts.
    """
    repeats = {}
    for key, job in jobs.items():
        job(1)
        repeats[key] = max(1, min(most, round(target_s / max(_timed(job, 1, clock), 1e-9))))
    samples: dict[Key, list[float]] = {key: [] for key in jobs}
    for _ in range(rounds):
        for key, job in jobs.items():
            samples[key].append(_timed(job, repeats[key], clock))
    return {key: statistics.median(values) for key, values in samples.items()}


def _timed(job: Job, times: int, clock: Callable[[], float]) -> float:
    start = clock()
    job(times)
    return (clock() - start) / times
