"""What published ways achieve on the same profile: the plans a tuned one must beat."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from octojax.errors import OctoPipeError
from octojax.ir.partition import Partition, uniform_partition
from octojax.ir.placement import Placement
from octojax.ir.plan import Plan
from octojax.ir.schedule import Schedule
from octojax.partitioners import partition as divide
from octojax.schedules import SCHEDULES
from octojax.schedules.family import Family
from octojax.simulate.costs import StageCosts
from octojax.simulate.evaluation import Evaluation, evaluate
from octojax.simulate.links import Links
from octojax.simulate.table import Table
from octojax.tune.measure import fits, measure
from octojax.tune.problem import Problem
from octojax.tune.table_forms import fill, split, split_table

SEARCHED = frozenset({"zb-auto", "hanayo", "tessel", "v-half", "v-min", "1f1b-v", "zb-greedy"})
"""Families whose table is the outcome of a search: measured last."""
LARGE_CUT = 2_000_000
"""Stages * layers^2 beyond which many-chunk tables are tried on the uniform partition alone."""
CHUNKS = (2, 3, 4, 6, 8)

Measured = tuple[str, Plan, Evaluation]


class Outcome(NamedTuple):
    """What a published way comes to. `plan()` makes the plan, which takes as long as measuring."""

    name: str
    plan: Callable[[], Plan]
    replicated: bool
    evaluation: Evaluation


class Partitions:
    """Partitions of a problem by their number of stages, made once each."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._known: dict[int, tuple[tuple[str, Partition], ...]] = {}

    def of(self, stages: int) -> tuple[tuple[str, Partition], ...]:
        """Returns uniform by count, least maximum and Mist's, those that differ; the last two not
        where they would take long.
        """
        if stages not in self._known:
            self._known[stages] = tuple(self._cut(stages))
        return self._known[stages]

    def _cut(self, stages: int) -> Iterator[tuple[str, Partition]]:
        p = self.problem
        if stages > p.num_layers:
            return
        uniform = uniform_partition(p.profile.kinds, stages)
        yield "uniform", uniform
        if stages * p.num_layers**2 > LARGE_CUT:
            return
        seen = {uniform}
        for name in ("balanced", "mist"):
            other = divide(name, p.profile, stages, p.microbatches)
            if other not in seen:
                seen.add(other)
                yield name, other


def least_s(problem: Problem, placement: Placement, partition: Partition) -> float:
    """Returns a time that no order of these stages on these ranks is below; 0 where two ranks
    hold one.
    """
    p, bounds = problem, partition.bounds
    if placement.replicated:
        return 0.0
    before = np.concatenate([[0.0], np.cumsum(p.forward_s)]) / p.speeds.max()
    work = np.concatenate([[0.0], np.cumsum(p.compute_s)])
    least = 0.0
    for rank, stages in enumerate(placement.ranks):
        load = sum(work[bounds[s + 1]] - work[bounds[s]] for s in stages)
        least = max(least, p.microbatches * load / p.speeds[rank] + before[bounds[stages[0]]])
    return float(least) * (1 - 1e-9)


class Field:
    """The best of what was measured, and what cannot beat it any more."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.uniform_s = self.any_s = math.inf

    def note(self, outcome: Outcome) -> None:
        """Counts an outcome that fits and holds every stage once: any answer may be such a plan."""
        if outcome.replicated or not fits(outcome.evaluation, self.problem):
            return
        self.any_s = min(self.any_s, outcome.evaluation.makespan_s)
        if outcome.name.endswith("/uniform"):
            self.uniform_s = min(self.uniform_s, outcome.evaluation.makespan_s)

    def hopeless(self, name: str, least: float) -> bool:
        """Whether what takes at least so long is the best of nothing that `summary` names."""
        family, how = name.split("/")
        if family == "1f1b":
            return False
        if how != "uniform":
            return least > self.any_s
        return family != "interleaved" and least > self.uniform_s


def published(problem: Problem) -> Iterator[Measured]:
    """Yields every published schedule on every partition, measured; also those too large.

    1F1B on the uniform partition comes first.
    """
    for name, plan, _, evaluation in outcomes(problem, hopeless=lambda name, least: False):
        yield name, plan(), evaluation


def outcomes(
    problem: Problem,
    hopeless: Callable[[str, float], bool] | None = None,
    enough: Callable[[], bool] = lambda: False,
) -> Iterator[Outcome]:
    """Yields what published schedules on published partitions come to, 1F1B first.

    Left out are those that `hopeless(name, least_s)` (by default: that cannot be the best of their
    kind any more, whatever their order); once `enough()`, all after 1F1B on the uniform partition.
    """
    p, field = problem, Field(problem)
    hopeless = hopeless or field.hopeless
    links, partitions = Links.of(p.profile.machine, p.ranks), Partitions(p)
    order = sorted(SCHEDULES, key=lambda name: (name != "1f1b", name in SEARCHED))
    for name in order:
        family = SCHEDULES[name]
        for chunks in _chunk_counts(problem, family):
            if name != "1f1b" and enough():
                return
            place = family.place(p.ranks, chunks)
            table: tuple[Form, ...] | None = None
            for how, partition in partitions.of(family.stages(p.ranks, chunks)):
                if how != "uniform" and enough():
                    return
                if hopeless(f"{name}/{how}", least_s(p, place, partition)):
                    continue
                try:
                    table = table or tuple(_forms(p, family, chunks, place))
                except (ValueError, OctoPipeError):
                    break  # its rule does not allow these sizes
                for outcome in _measured(p, table, how, place, partition, links):
                    field.note(outcome)
                    yield outcome


class Form(NamedTuple):
    """A published table, whole or split, as rows (made when asked for) and as arrays."""

    name: str
    rows: Callable[[], Schedule]
    table: Table


def _forms(
    problem: Problem, family: Family, chunks: int | None, place: Placement
) -> Iterator[Form]:
    rows = family.generate(problem.ranks, problem.microbatches, chunks)
    table = Table.of(rows, place)
    yield Form(family.name, lambda: rows, table)
    if not family.splits_backward:
        yield Form(f"{family.name}-split", lambda: split(rows), split_table(table))


def _measured(
    problem: Problem,
    forms: tuple[Form, ...],
    how: str,
    place: Placement,
    partition: Partition,
    links: Links,
) -> Iterator[Outcome]:
    """Yields a table's forms on one partition; of 1F1B also the filled one."""
    again = problem.recompute.flags(partition.num_stages)
    costs = StageCosts.of(problem.profile, partition, again)
    for name, rows, table in forms:
        evaluation = evaluate(table, costs, links)
        if evaluation.done == len(table.items):
            full = f"{name}/{how}"
            plan = partial(_plan, partition, place, rows, again, full)
            yield Outcome(full, plan, place.replicated, evaluation)
    if forms[0].name == "1f1b":
        halves = _plan(partition, place, forms[1].rows, again, f"1f1b-fill/{how}")
        filled = fill(halves, problem)
        yield Outcome(filled.name, lambda: filled, False, measure(filled, problem))


def _plan(
    partition: Partition,
    place: Placement,
    rows: Callable[[], Schedule],
    again: tuple[bool, ...],
    name: str,
) -> Plan:
    return Plan(partition, place, rows(), again, name)


def _chunk_counts(problem: Problem, family) -> list[int | None]:
    least, most = family.chunk_range
    if family.bidirectional or most == least or family.name in SEARCHED:
        return [None]
    per_rank = max(1, (problem.num_layers - 2) // problem.ranks)
    wanted = {*CHUNKS, per_rank, least}
    return [c for c in sorted(wanted) if least <= c <= min(per_rank, most or math.inf)]


def summary(measured: list[Outcome], problem: Problem) -> tuple[dict[str, float], tuple[str, ...]]:
    """Returns the makespans that results are compared with, by name; only plans that fit. And
    the names behind which a plan stands that holds stages on two ranks.

    `1f1b` fused, `1f1b-split` (W right after I) and `1f1b-fill` on the uniform partition;
    `interleaved` and `schedule-only` the best of their kind on it; `partition-only` the best
    1F1B of any partition; `published` the best of all.
    """

    def best(keep: Callable[[str], bool]) -> tuple[float, bool] | None:
        return min(
            (
                (outcome.evaluation.makespan_s, outcome.replicated)
                for outcome in measured
                if keep(outcome.name) and fits(outcome.evaluation, problem)
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
