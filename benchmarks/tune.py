"""Plan evaluations a second: what one move of the search costs, on one core after warm-up.

python benchmarks/tune.py
"""

import json
import time
from pathlib import Path

import numpy as np

from octojax.ir import Profile
from octojax.tune.candidate import problem_arrays
from octojax.tune.justify import judged
from octojax.tune.problem import Problem
from octojax.tune.starts import starting_points

PROFILES = Path(__file__).parent.parent / "experiments" / "profiles"


def rate(name: str, fine: bool, seconds: float = 2.0) -> dict:
    """Returns evaluations a second of one configuration's starting plan.

    `fine` cuts every layer into its own stage, the largest case there is.
    """
    problem = Problem.of(Profile.load(PROFILES / f"{name}.calibrated.json"))
    found = starting_points(problem, steps=2000)[0]
    if fine:
        found.cut_L[:] = True
    arrays = problem_arrays(problem)
    size = 3 * problem.num_layers * problem.microbatches
    rows, starts, peaks = np.zeros((size, 4), np.int64), np.zeros(size), np.zeros(problem.ranks)
    judged(*found.arrays, *arrays, rows, starts, peaks, 0, np.inf, 0.0)
    count, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        for _ in range(10):
            judged(*found.arrays, *arrays, rows, starts, peaks, 0, np.inf, 0.0)
        count += 10
    took = time.perf_counter() - begun
    return {
        "configuration": name,
        "stages": problem.num_layers if fine else int((np.diff(found.rank_L) != 0).sum()) + 1,
        "evaluations_per_s": round(count / took),
        "ms": round(1e3 * took / count, 3),
    }


def main() -> None:
    for name in ("nemotron-h-s", "jamba-s", "llama-s", "nemotron-h-m", "nemotron-h-l", "llama-l"):
        for fine in (False, True):
            print(json.dumps(rate(name, fine)), flush=True)


if __name__ == "__main__":
    main()
