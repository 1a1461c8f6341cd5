"""The tuner against the exact optimum on 200 small random cases.

python experiments/tuner_optimality.py --cases 200 --iterations 10
"""

import argparse

import numpy as np
from tuner_common import write_rows

from octojax.ir import LayerCost, Machine, Profile
from octojax.tune import tune


def case(seed: int) -> Profile:
    """Returns 3 to 5 layers with random costs, 2 or 3 ranks, 1 to 3 microbatches."""
    rng = np.random.default_rng(seed)
    layers = tuple(
        LayerCost("x", *map(float, rng.integers(1, 10, 3))) for _ in range(rng.integers(3, 6))
    )
    machine = Machine(latency_s=float(rng.choice([0.0, 0.25])))
    ranks = int(rng.integers(2, min(3, len(layers)) + 1))
    return Profile(f"case {seed}", layers, machine, ranks, int(rng.integers(1, 4)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--iterations", type=int, default=10)
    options = parser.parse_args()
    rows, seed = [], 0
    while len(rows) < options.cases:
        profile = case(seed)
        seed += 1
        exact = tune(profile, method="exact")
        if exact.stop != "optimal":
            continue  # the enumeration did not end
        made = tune(profile, iterations=options.iterations, replicated=False)
        rows.append(
            {
                "seed": seed - 1,
                "layers": profile.num_layers,
                "ranks": profile.ranks,
                "microbatches": profile.microbatches,
                "optimum": round(exact.makespan_s, 6),
                "tuned": round(made.makespan_s, 6),
                "bound": round(made.lower_bound_s, 6),
                "excess": round(made.makespan_s / exact.makespan_s - 1, 5),
                "bound_holds": made.lower_bound_s <= exact.makespan_s * (1 + 1e-9),
            }
        )
        if len(rows) % 20 == 0:
            near = sum(r["excess"] <= 0.01 for r in rows)
            print(f"{len(rows)} cases: {near} within 1 % of the optimum", flush=True)
    write_rows("optimality", rows)


if __name__ == "__main__":
    main()
