"""Each phase alone, in pairs, all together, with and without overlap: the paper's Fig. 10.

    python experiments/tuner_ablation.py --seconds 10

P partition, A placement, S schedule, O transfers beside computation. Without O a transfer
occupies both its ranks, in the search and in the figure; the base, split 1F1B, as well.
"""

import argparse
from itertools import combinations

from tuner_common import DATA, load, write_rows

from octojax.tune import PHASES, tune

LETTER = {"partition": "P", "placement": "A", "schedule": "S"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--configuration", default="nemotron-h-m")
    options = parser.parse_args()
    profile = load(options.configuration)
    tune(load("jamba-s"), iterations=1)
    rows, base = [], None
    for size in (1, 2, 3):
        for phases in combinations(PHASES, size):
            for overlap in (False, True):
                result = tune(profile, seconds=options.seconds, phases=phases, overlap=overlap)
                if base is None:  # split 1F1B without overlap
                    base = result.baselines["1f1b-split"]
                    rows.append(row("1F1B", base, base, None))
                name = "+" + "".join(LETTER[p] for p in phases) + ("O" if overlap else "")
                rows.append(row(name, result.makespan_s, base, result.gap))
                print(rows[-1], flush=True)
    write_rows("fig10", rows)
    draw(rows)


def row(name: str, makespan_s: float, base: float, gap: float | None) -> dict:
    return {
        "variant": name,
        "makespan_ms": round(makespan_s * 1e3, 2),
        "speedup": round(base / makespan_s, 3),
        "gap": "" if gap is None else round(gap, 4),
    }


def draw(rows: list[dict]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    names = [r["variant"] for r in rows]
    bars = axes.bar(names, [r["speedup"] for r in rows])
    axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.set(ylabel="speedup over split 1F1B", ylim=(0.8, None))
    axes.tick_params(axis="x", rotation=60)
    axes.set_title("NemotronH-M, calibrated costs, simulated (as Fig. 10)", fontsize=10)
    figure.savefig(DATA / "fig10.svg")


if __name__ == "__main__":
    main()
