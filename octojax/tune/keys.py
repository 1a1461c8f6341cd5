"""Priorities to start from: formulas, and the start times of published tables."""

from dataclasses import dataclass

import numpy as np

from octojax.ir.partition import Partition
from octojax.ir.placement import Placement
from octojax.ir.schedule import Schedule
from octojax.simulate.costs import BACKWARD, FORWARD, INPUT_GRAD, StageCosts
from octojax.simulate.evaluation import trace
from octojax.simulate.links import Links
from octojax.simulate.table import Table
from octojax.tune.candidate import LATE_S
from octojax.tune.problem import Problem

FORMULAS = np.array(
    [
        [-2.0, 1.0, 1.5, 0.0, 0.1],
        [-3.2, 2.2, -2.8, 0.0, 0.6],
        [0.2, 6.9, -1.7, 0.5, 0.0],
        [-0.9, 1.1, 2.2, 1.2, 2.8],
        [1.0, -3.6, 0.0, 0.0, 0.0],
        [6.1, 3.3, 0.1, 2.3, 0.0],
        [1.7, -0.1, -2.7, 0.06, 0.0],
        [2.7, 1.4, -5.1, 0.2, -0.1],
    ]
)
"""Ways to order F and I that did well on one profile or another; see `by_formula`."""
ONE_F_ONE_B = np.array([-1.0, 1.0, -9.0, 0.0, 0.0])
"""Every I before every F, the deepest F first."""


def by_formula(problem: Problem, row: np.ndarray, late_weights: bool = True) -> np.ndarray:
    """Returns the (layers, 3, microbatches) keys that five numbers describe.

    F: `row[0]` * forward time before the layer + `row[3]` * period * microbatch;
    I: `row[2]` * forward time of the model + `row[1]` * input-gradient time behind the layer
    + `row[4]` * period * microbatch. W: after everything, or before (`late_weights` false).
    """
    p = problem
    period = p.compute_s.sum() / p.speeds.sum()
    microbatch = np.arange(p.microbatches)
    grad_s = p.input_grad_s + p.again_s
    before = np.cumsum(p.forward_s) - p.forward_s
    behind = grad_s.sum() - np.cumsum(grad_s)
    keys = np.zeros((p.num_layers, 3, p.microbatches))
    keys[:, 0] = row[0] * before[:, None] + row[3] * period * microbatch
    keys[:, 1] = (row[2] * p.forward_s.sum() + row[1] * behind)[:, None]
    keys[:, 1] += row[4] * period * microbatch
    keys[:, 2] = LATE_S if late_weights else -LATE_S
    return keys


@dataclass(frozen=True, eq=False)
class Published:
    """A published table of F and B (or I), ready to be simulated under any costs."""

    name: str
    stages: Placement
    table: Table

    @classmethod
    def of(cls, name: str, schedule: Schedule) -> "Published":
        return cls(name, schedule.placement, Table.of(schedule))


def by_table(problem: Problem, known: Published, sizes: tuple[int, ...]) -> np.ndarray:
    """Returns keys that say when each F and each B or I runs in a table, simulated."""
    p, items = problem, known.table.items
    costs = StageCosts.of(p.profile, Partition(sizes))
    starts = trace(known.table, costs, Links.of(p.profile.machine, p.ranks)).start_s
    forward = np.zeros((len(sizes), p.microbatches))
    backward = np.zeros_like(forward)
    rows = items[:, 0] == FORWARD
    forward[items[rows, 1], items[rows, 2]] = starts[rows]
    rows = (items[:, 0] == BACKWARD) | (items[:, 0] == INPUT_GRAD)
    backward[items[rows, 1], items[rows, 2]] = starts[rows]
    rows = items[:, 3] >= 0  # overlapped pairs
    backward[items[rows, 3], items[rows, 4]] = starts[rows]
    stage_L = np.repeat(np.arange(len(sizes)), sizes)
    late = np.full((p.num_layers, p.microbatches), LATE_S)
    return np.stack([forward[stage_L], backward[stage_L], late], axis=1)
