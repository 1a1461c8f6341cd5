"""The partition as an integer linear program, solved by SciPy's HiGHS: a check on the others."""

from typing import Any

import numpy as np

from octojax.errors import PlanError
from octojax.ir.partition import Partition
from octojax.partitioners.chain import Chain
from octojax.partitioners.cut import TOLERANCE, Division, objective
from octojax.partitioners.family import Partitioner
from octojax.partitioners.ties import quickest


def ilp(chain: Chain, stages: int, microbatches: int, seconds: float = 60.0) -> Division:
    """Returns the least `sum(t) + (m-1) max(t)`, t the compute of a stage, by branch and bound.

    Variables: `x[i, s]`, layer i is in stage s, and the maximum T. Minimise T under `time of
    stage s <= T`, consecutive layers, no stage empty: the sum is the same for all. Raises
    `PlanError` if HiGHS proves no optimum within `seconds`.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    n, total = chain.num_layers, chain.total_s
    width = n * stages + 1  # last: T
    scale = float(total.sum()) or 1.0
    rows, lows, highs = _rules(total / scale, n, stages, width)
    cost = np.zeros(width)
    cost[-1] = 1.0
    solve: Any = milp  # SciPy's stubs know scalar limits only
    bounds: Any = Bounds
    constraint: Any = LinearConstraint
    result = solve(
        cost,
        constraints=constraint(np.array(rows), np.array(lows), np.array(highs)),
        integrality=np.array([1] * (n * stages) + [0]),
        bounds=bounds(np.zeros(width), np.array([1.0] * (n * stages) + [np.inf])),
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    if result.x is None or result.status != 0:
        raise PlanError(
            f"ilp: HiGHS found no proven optimum of {n} layers in {stages} stages within "
            f"{seconds:g} s ({result.message}). Raise seconds, or use alpa: it is exact and fast"
        )
    inside = np.round(result.x[:-1]).reshape(n, stages)
    sizes = tuple(int(inside[:, s].sum()) for s in range(stages))
    times, weight = chain.compute_s(), microbatches - 1
    value_s = objective(times, None, weight, Partition(sizes))
    limit = value_s * (1 + TOLERANCE)
    best = quickest(
        Partition(sizes), chain, microbatches, lambda x: objective(times, None, weight, x) <= limit
    )
    return Division(best, value_s)


def _rules(
    total: np.ndarray[Any, Any], n: int, stages: int, width: int
) -> tuple[list[Any], list[float], list[float]]:
    """Returns rows with their lower and upper limits; `x[i * stages + s]` puts i into s."""
    rows: list[Any] = []
    lows: list[float] = []
    highs: list[float] = []

    def rule(low: float, high: float, terms: dict[int, float]) -> None:
        row = np.zeros(width)
        for column, factor in terms.items():
            row[column] += factor
        rows.append(row)
        lows.append(low)
        highs.append(high)

    for i in range(n):  # every layer in one stage
        rule(1.0, 1.0, {i * stages + s: 1.0 for s in range(stages)})
    for s in range(stages):  # none empty, none longer than T
        rule(1.0, np.inf, {i * stages + s: 1.0 for i in range(n)})
        rule(-np.inf, 0.0, {i * stages + s: total[i] for i in range(n)} | {width - 1: -1.0})
    for i in range(n - 1):  # consecutive: a layer in s or before only if the one before it is
        for s in range(stages):
            earlier = {i * stages + k: -1.0 for k in range(s + 1)}
            rule(-np.inf, 0.0, earlier | {(i + 1) * stages + k: 1.0 for k in range(s + 1)})
    return rows, lows, highs


FAMILIES = (
    Partitioner(
        "ilp",
        "sum(t) + (m-1) max(t) by integer programming, for small cases",
        "the ILP baseline of the OctoPipe paper, partition only (HiGHS)",
        ilp,
        (("seconds", 60.0),),
    ),
)
