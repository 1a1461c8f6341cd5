"""Tune the nine configurations and compare with published ways: the main table.

python experiments/tuner_targets.py --seconds 120
python experiments/tuner_targets.py --seconds 5 --only s --name five_seconds
python experiments/tuner_targets.py --seconds 60 --host-cost 7e-5 --name host_cost
"""

import argparse
import os
import time
from dataclasses import replace

from tuner_common import ATOMIC, CONFIGURATIONS, PAPER, WANTED, load, write_rows

from octojax.tune import tune


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--costs", nargs="*", default=["calibrated", "roofline"])
    parser.add_argument("--only", default="sml", help="sizes, such as s or ml")
    parser.add_argument("--host-cost", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="targets")
    options = parser.parse_args()
    tune(load("jamba-s"), iterations=1)  # compile before the clock matters
    rows = []
    for costs in options.costs:
        for name in CONFIGURATIONS:
            size = name[-1]
            if size not in options.only:
                continue
            profile = load(name, costs)
            if options.host_cost:
                profile = profile.on(replace(profile.machine, host_cost_s=options.host_cost))
            begun = time.perf_counter()
            result = tune(profile, seconds=options.seconds, seed=options.seed)
            atomic = ATOMIC[costs][name]
            speedups = result.speedups
            row = {
                "configuration": name,
                "costs": costs,
                "host_cost_ms": options.host_cost * 1e3,
                "makespan_ms": round(result.makespan_s * 1e3, 3),
                "lower_bound_ms": round(result.lower_bound_s * 1e3, 3),
                "gap": round(result.gap, 4),
                **{
                    f"over_{k.replace('-', '_')}": round(speedups[k], 3)
                    for k in (
                        "1f1b", "1f1b-split", "1f1b-fill", "interleaved", "partition-only-split",
                        "schedule-only", "published",
                    )
                },
                "atomic": atomic,
                "share_of_atomic": round(speedups["1f1b-split"] / atomic, 4),
                "wanted": WANTED[size],
                "paper": PAPER[name],
                "stages": result.plan.num_stages,
                "evaluations": result.evaluations,
                "seconds": round(time.perf_counter() - begun, 1),
                "load_average": round(os.getloadavg()[0], 1),
            }  # fmt: skip
            rows.append(row)
            print(
                f"{name:13s} {costs:10s} {row['makespan_ms']:9.2f} ms, gap {row['gap']:.2%}, "
                f"{row['over_1f1b_split']:.3f}x split 1F1B, {row['share_of_atomic']:.2%} of atomic "
                f"(wanted {WANTED[size]:.1%}), {row['evaluations']} evaluations",
                flush=True,
            )
            write_rows(options.name, rows)


if __name__ == "__main__":
    main()
