"""Programs that take turns: processes that stay, each run for a few steps while the others wait.

Whatever slows the machine for a while slows all of them alike, so that ratios of their medians
hold. A child imports `answer` and calls it with what one step is.
"""

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Answer = dict[str, Any]


def answer(step: Callable[[], object], **ready: Any) -> None:
    """Runs steps whenever a line on standard input says how many, and prints what they took.

    First a record with `ready` is printed. Each record after that has `seconds` (of every step),
    `processor` (seconds of processor time a step, user and system), `faults` (of pages, a step)
    and `peak_mib`.
    """
    print(json.dumps({"ready": True, **ready}), flush=True)
    for line in sys.stdin:
        before, seconds = resource.getrusage(resource.RUSAGE_SELF), []
        for _ in range(int(line)):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_SELF)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        record = {
            "seconds": seconds,
            "processor": used / len(seconds),
            "faults": (after.ru_minflt - before.ru_minflt) / len(seconds),
            "peak_mib": after.ru_maxrss / 1024,
        }
        print(json.dumps(record), flush=True)


class Program:
    """A child process that runs steps when told. `ready` is its first record."""

    def __init__(self, name: str, command: Sequence[str], env: dict[str, str]) -> None:
        self.name, self.answers = name, []
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ready = self._record()

    def run(self, steps: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        self.answers.append(self._record())

    @property
    def step_s(self) -> float:
        """Median seconds of a step over all turns."""
        return statistics.median(s for record in self.answers for s in record["seconds"])

    @property
    def processor_s(self) -> float:
        return statistics.median(record["processor"] for record in self.answers)

    def end(self) -> None:
        """Ends the child, by force if it does not end in ten seconds."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _record(self) -> Answer:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"{self.name} ended with {self.process.wait()}")
