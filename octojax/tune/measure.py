"""Candidates become plans, and plans are measured by the simulator, whose word is final."""

import numpy as np

from octojax.errors import CapacityError
from octojax.ir.action import Action, Kind
from octojax.ir.partition import Partition
from octojax.ir.placement import Placement
from octojax.ir.plan import Plan
from octojax.ir.schedule import Schedule
from octojax.simulate.costs import StageCosts
from octojax.simulate.evaluation import Evaluation, evaluate
from octojax.simulate.links import Links
from octojax.simulate.table import Table
from octojax.tune import candidate as compiled
from octojax.tune.candidate import Candidate, problem_arrays
from octojax.tune.problem import Problem

SPLIT = (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)


def measure(plan: Plan, problem: Problem) -> Evaluation:
    """Returns makespan, busy times and peak bytes of a plan under the simulator's meaning."""
    costs = StageCosts.of(problem.profile, plan.partition, plan.recompute)
    return evaluate(Table.of(plan), costs, Links.of(problem.profile.machine, problem.ranks))


def fits(evaluation: Evaluation, problem: Problem) -> bool:
    """Whether every rank's peak is within its capacity."""
    return bool((evaluation.peak_bytes <= problem.capacity_bytes).all())


def quick_makespan(candidate: Candidate, problem: Problem, arrays: tuple | None = None) -> float:
    """Returns the makespan the compiled list scheduler gives; infinity if memory forbids."""
    return run(candidate, problem, arrays)[0]


def run(
    candidate: Candidate, problem: Problem, arrays: tuple | None = None
) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
    """Returns makespan, rows (rank, stage, kind, microbatch) in order of start, starts, peaks."""
    layers, microbatches = problem.num_layers, problem.microbatches
    rows = np.full((3 * layers * microbatches, 4), -1, np.int64)
    starts, peaks = np.zeros(len(rows)), np.zeros(problem.ranks)
    arrays = problem_arrays(problem) if arrays is None else arrays
    makespan = compiled.evaluate(candidate, arrays, microbatches, rows, starts, peaks)
    used = int((rows[:, 0] >= 0).sum())
    return float(makespan), rows[:used], starts[:used], peaks


def to_plan(
    candidate: Candidate, problem: Problem, arrays: tuple | None = None, name: str = "tuned"
) -> Plan:
    """Returns the plan that the list scheduler makes of a candidate.

    Raises `CapacityError` for a candidate that does not fit: its schedule would be cut short.
    """
    makespan, rows, _, _ = run(candidate, problem, arrays)
    if makespan == np.inf:
        raise CapacityError("a candidate that does not fit into memory has no plan")
    first, ranks = stages_of(candidate)
    fused = candidate.fused_L[first[:-1]]
    table: list[list[Action]] = [[] for _ in range(problem.ranks)]
    for rank, stage, kind, microbatch in rows.tolist():
        what = Kind.BACKWARD if kind == 1 and fused[stage] else SPLIT[kind]
        table[rank].append(Action(stage, what, microbatch))
    recompute = tuple(bool(x) for x in candidate.recompute_L[first[:-1]])
    return Plan(
        Partition(tuple(int(n) for n in np.diff(first))),
        Placement.of([int(r) for r in ranks], problem.ranks),
        Schedule(tuple(map(tuple, table))),
        recompute if any(recompute) else (),
        name,
    )


def stages_of(candidate: Candidate) -> tuple[np.ndarray, np.ndarray]:
    """Returns where stages begin (and the number of layers), and the rank of each stage."""
    begins = np.concatenate([[True], (np.diff(candidate.rank_L) != 0) | candidate.cut_L[1:]])
    first = np.flatnonzero(begins)
    return np.append(first, len(candidate.rank_L)), candidate.rank_L[first]
