"""Median times of many small jobs, measured in turns so that drift meets all of them alike."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)

Job = Callable[[int], None]
"""`job(n)` runs n times back to back and returns when all of it is done."""


def median_times(
    jobs: Mapping[Key, Job], rounds: int = 5, target_s: float = 0.01, most: int = 64
) -> dict[Key, float]:
    """Returns the median seconds of one run of each job.

    Every job runs once to warm up and once to see how often it must be repeated for `target_s`;
    then each of `rounds` rounds measures every job once, in the same order. What a single run
    waits for the host is spread over the repetitions.
    """
    repeats = {}
    for key, job in jobs.items():
        job(1)
        repeats[key] = max(1, min(most, round(target_s / max(_timed(job, 1), 1e-9))))
    samples: dict[Key, list[float]] = {key: [] for key in jobs}
    for _ in range(rounds):
        for key, job in jobs.items():
            samples[key].append(_timed(job, repeats[key]))
    return {key: statistics.median(values) for key, values in samples.items()}


def _timed(job: Job, times: int) -> float:
    start = time.perf_counter()
    job(times)
    return (time.perf_counter() - start) / times
