"""Tuning under memory caps of 100, 75 and 60 % of what the unconstrained plan needs.

python experiments/tuner_memory.py --seconds 10
"""

import argparse

from tuner_common import CONFIGURATIONS, load, write_rows

from octojax.errors import CapacityError
from octojax.simulate import simulate
from octojax.tune import tune


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--only", default="sm")
    options = parser.parse_args()
    tune(load("jamba-s"), iterations=1)
    rows = []
    for name in CONFIGURATIONS:
        if name[-1] not in options.only:
            continue
        profile = load(name)
        free = tune(profile, seconds=options.seconds, capacity_bytes=1e15, replicated=False)
        for share in (1.0, 0.75, 0.6):
            cap = share * max(free.peak_bytes)
            row = {"configuration": name, "cap": share, "cap_gib": round(cap / 2**30, 3)}
            try:
                made = tune(profile, seconds=options.seconds, capacity_bytes=cap)
                peak = max(r.peak_bytes for r in simulate(made.plan, profile).ranks)
                row |= {
                    "peak_gib": round(peak / 2**30, 3),
                    "fits": peak <= cap,
                    "makespan_ms": round(made.makespan_s * 1e3, 2),
                    "slower_than_free": round(made.makespan_s / free.makespan_s, 4),
                    "recomputed_stages": sum(made.plan.recomputes),
                }
            except CapacityError as error:
                row |= {
                    "peak_gib": "", "fits": "no plan", "makespan_ms": "", "slower_than_free": "",
                    "recomputed_stages": "",
                }  # fmt: skip
                print(error)
            rows.append(row)
            print(row, flush=True)
            write_rows("memory", rows)


if __name__ == "__main__":
    main()
