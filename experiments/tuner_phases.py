"""What the order of phases in Algorithm 1 is worth beside phases drawn by chance (as TABLE V).

    python experiments/tuner_phases.py --iterations 160 --seeds 3

Writes the shares of the phases and the gaps to the proven bound on several models.
"""

import argparse
from statistics import mean

from tuner_common import load, write_rows

from octojax.tune import tune

COMPARED = ("nemotron-h-m", "jamba-m", "llama-m")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=160)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    rows = []
    for name in COMPARED:
        for method in ("octopipe", "random"):
            rows.append(row(name, method, options.iterations, options.seeds))
            print(rows[-1], flush=True)
            write_rows("table5_phases", rows)


def row(name: str, method: str, iterations: int, seeds: int) -> dict[str, object]:
    """Returns the means over seeds of one method on one model."""
    results = [
        tune(load(name), method=method, iterations=iterations, seed=seed) for seed in range(seeds)
    ]
    counts = {p: sum(r.iterations[p] for r in results) for p in results[0].iterations}
    return {
        "configuration": name,
        "method": method,
        "iterations": iterations,
        **{phase: round(count / (iterations * seeds), 3) for phase, count in counts.items()},
        "gap": round(mean(r.gap for r in results), 4),
        "gaps": " ".join(f"{r.gap:.4f}" for r in results),
        "over_1f1b_split": round(mean(r.speedups["1f1b-split"] for r in results), 3),
        "evaluations": round(mean(r.evaluations for r in results)),
    }


if __name__ == "__main__":
    main()
