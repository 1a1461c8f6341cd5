"""What published ways achieve on the same profile: the plans a tuned one must beat."""

import math
from collections.abc import Callable, Iterator

from octojax.errors import OctoPipeError
from octojax.ir.partition import Partition, uniform_partition
from octojax.ir.plan import Plan
from octojax.partitioners import partition as divide
from octojax.schedules import SCHEDULES
from octojax.simulate.costs import StageCosts
from octojax.simulate.evaluation import Evaluation, evaluate
from octojax.simulate.links import Links
from octojax.simulate.table import Table
from octojax.tune.measure import fits, measure
from octojax.tune.problem import Problem
from octojax.tune.table_forms import fill, split

SEARCHED = frozenset({"zb-auto", "hanayo", "tessel", "v-half", "v-min", "1f1b-v", "zb-greedy"})
"""Families whose table is the outcome of a search: measured last."""
LARGE_CUT = 2_000_000
"""Stages * layers^2 beyond which many-chunk tables are tried on the uniform partition alone."""
CHUNKS = (2, 3, 4, 6, 8)

Measured = tuple[str, Plan, Evaluation]


def partitions(problem: Problem, stages: int) -> Iterator[tuple[str, Partition]]:
    """Yields partitions into so many stages: uniform by count, least maximum, Mist's."""
    if stages > problem.num_layers:
        return
    uniform = uniform_partition(problem.profile.kinds, stages)
    yield "uniform", uniform
    if stages * problem.num_layers**2 > LARGE_CUT:
        return
    seen = {uniform}
    for name in ("balanced", "mist"):
        other = divide(name, problem.profile, stages, problem.microbatches)
        if other not in seen:
            seen.add(other)
            yield name, other


def published(problem: Problem, enough: Callable[[], bool] = lambda: False) -> Iterator[Measured]:
    """Yields every published schedule on every partition, measured; also those too large.

    1F1B on the uniform partition comes first; once `enough()`, nothing after it.
    """
    p = problem
    links = Links.of(p.profile.machine, p.ranks)
    order = sorted(SCHEDULES, key=lambda name: (name != "1f1b", name in SEARCHED))
    for name in order:
        family = SCHEDULES[name]
        for chunks in _chunk_counts(problem, family):
            if name != "1f1b" and enough():
                return
            try:
                table = family.generate(p.ranks, p.microbatches, chunks)
            except (ValueError, OctoPipeError):
                continue  # its rule does not allow these sizes
            tables = [(name, table)]
            if family.splits_backward is False:
                tables.append((f"{name}-split", split(table)))
            compiled = [(label, rows, Table.of(rows)) for label, rows in tables]
            for how, partition in partitions(p, table.num_stages):
                if how != "uniform" and enough():
                    return
                again = p.recompute.flags(partition.num_stages)
                costs = StageCosts.of(p.profile, partition, again)
                for label, rows, known in compiled:
                    evaluation = evaluate(known, costs, links)
                    if evaluation.done == len(known.items):
                        plan = Plan(partition, table.placement, rows, again, f"{label}/{how}")
                        yield plan.name, plan, evaluation
                if name == "1f1b":
                    plan = Plan(partition, table.placement, split(table), again, f"1f1b-fill/{how}")
                    plan = fill(plan, problem)
                    yield plan.name, plan, measure(plan, problem)


def _chunk_counts(problem: Problem, family) -> list[int | None]:
    least, most = family.chunk_range
    if family.bidirectional or most == least or family.name in SEARCHED:
        return [None]
    per_rank = max(1, (problem.num_layers - 2) // problem.ranks)
    wanted = {*CHUNKS, per_rank, least}
    return [c for c in sorted(wanted) if least <= c <= min(per_rank, most or math.inf)]


def summary(measured: list[Measured], problem: Problem) -> tuple[dict[str, float], tuple[str, ...]]:
    """Returns the makespans that results are compared with, by name; only plans that fit. And
    the names behind which a plan stands that holds stages on two ranks.

    `1f1b` fused, `1f1b-split` (W right after I) and `1f1b-fill` on the uniform partition;
    `interleaved` and `schedule-only` the best of their kind on it; `partition-only` the best
    1F1B of any partition; `published` the best of all.
    """

    def best(keep: Callable[[str], bool]) -> tuple[float, bool] | None:
        return min(
            (
                (evaluation.makespan_s, plan.placement.replicated)
                for name, plan, evaluation in measured
                if keep(name) and fits(evaluation, problem)
            ),
            default=None,
        )

    kinds: dict[str, Callable[[str], bool]] = {
        "1f1b": lambda n: n == "1f1b/uniform",
        "1f1b-split": lambda n: n == "1f1b-split/uniform",
        "1f1b-fill": lambda n: n == "1f1b-fill/uniform",
        "interleaved": lambda n: n.startswith("interleaved") and n.endswith("/uniform"),
        "partition-only-split": lambda n: n.startswith("1f1b-split/"),
        "partition-only": lambda n: n.startswith(("1f1b/", "1f1b-split/", "1f1b-fill/")),
        "schedule-only": lambda n: n.endswith("/uniform"),
        "published": lambda n: True,
    }
    least = {name: value for name, keep in kinds.items() if (value := best(keep)) is not None}
    makespans = {name: seconds for name, (seconds, _) in least.items()}
    return makespans, tuple(name for name, (_, replicated) in least.items() if replicated)
