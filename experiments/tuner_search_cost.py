"""How searches proceed on NemotronH-L: OctoPipe's order of phases, random phases, exact (ILP).

    python experiments/tuner_search_cost.py --seconds 60

Writes the data of TABLE V (iterations per phase) and Fig. 12 (makespan over time) and draws it.
"""

import argparse

from tuner_common import DATA, load, write_rows

from octojax.tune import tune


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--configuration", default="nemotron-h-l")
    options = parser.parse_args()
    profile = load(options.configuration)
    tune(load("jamba-s"), iterations=1)
    table, curves = [], []
    for method in ("octopipe", "random", "best"):
        # Iterations are not limited, so Algorithm 1 goes on after it stalls.
        result = tune(profile, method=method, seconds=options.seconds, iterations=10**9)
        total = max(1, sum(result.iterations.values()))
        table.append(
            {
                "method": method,
                "total": total,
                **result.iterations,
                **{f"{k}_share": round(v / total, 3) for k, v in result.iterations.items()},
                "makespan_ms": round(result.makespan_s * 1e3, 2),
                "gap": round(result.gap, 4),
                "over_1f1b_split": round(result.speedups["1f1b-split"], 3),
                "evaluations": result.evaluations,
            }
        )
        for seconds, iteration, phase, makespan in result.history:
            curves.append(
                {
                    "method": method,
                    "seconds": round(seconds, 3),
                    "iteration": iteration,
                    "phase": phase,
                    "makespan_ms": round(makespan * 1e3, 3),
                }
            )
        print(table[-1], flush=True)
    try:
        tune(profile, method="exact", seconds=options.seconds)
    except ValueError as error:
        table.append(dict.fromkeys(table[0], "") | {"method": "exact", "makespan_ms": "none found"})
        print(f"exact: {error}")
    write_rows("table5", table)
    write_rows("fig12", curves)
    draw(curves, options.seconds)


def draw(curves: list[dict], seconds: float) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for method in dict.fromkeys(c["method"] for c in curves):
        mine = [c for c in curves if c["method"] == method]
        x = [c["seconds"] for c in mine] + [seconds]
        y = [c["makespan_ms"] for c in mine] + [mine[-1]["makespan_ms"]]
        axes.step(x, y, where="post", label=method)
    axes.set(xlabel="seconds of search", ylabel="makespan, ms (simulated)", xscale="log")
    axes.legend()
    axes.set_title("Search on NemotronH-L, calibrated costs (as Fig. 12)", fontsize=10)
    figure.savefig(DATA / "fig12.svg")


if __name__ == "__main__":
    main()
