"""What the searches share: limits, the best plan so far, memory feedback, progress."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from octojax.errors import CapacityError
from octojax.ir.plan import Plan
from octojax.simulate.evaluation import Evaluation
from octojax.tune.bound import LowerBound
from octojax.tune.candidate import Candidate, problem_arrays
from octojax.tune.constraints import Constraints
from octojax.tune.measure import fits, measure, to_plan
from octojax.tune.problem import Problem
from octojax.tune.result import Progress

PHASES = ("partition", "placement", "schedule")
OFFER_GAIN, OFFER_ITERATIONS = 2e-3, 32
"""A plan is made of a proposed candidate once it is so much better than the best plan, and every
so many iterations: making a plan takes as long as some hundred moves."""


@dataclass(frozen=True)
class Limits:
    """When a search stops: whichever comes first."""

    seconds: float | None = None
    iterations: int | None = None
    target_gap: float | None = None

    def share(self, seconds: float, iteration: int) -> float:
        """How much of the budget is spent, from 0 to 1."""
        shares = [0.0]
        if self.seconds is not None:
            shares.append(seconds / self.seconds if self.seconds > 0 else 1.0)
        if self.iterations is not None:
            shares.append(iteration / self.iterations if self.iterations > 0 else 1.0)
        return min(1.0, max(shares))


@dataclass
class Search:
    """The running account of one search. The only mutable record of the tuner."""

    problem: Problem
    limits: Limits
    bound: LowerBound
    progress: Callable[[Progress], None] | None = None
    clock: Callable[[], float] = time.perf_counter
    plan: Plan | None = None
    evaluation: Evaluation | None = None
    iteration: int = 0
    evaluations: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    history: list[tuple[float, int, str, float]] = field(default_factory=list)
    stop: str = ""
    proposed: tuple[float, Candidate, str] | None = None
    constraints: Constraints = field(default_factory=Constraints)
    start: tuple[Candidate, ...] = ()
    """Where the caller wants the search to begin; empty for the usual starting points."""

    def __post_init__(self) -> None:
        self.begun = self.clock()
        self.slack = np.zeros(self.problem.ranks)  # room that transfer buffers need
        self.arrays = problem_arrays(self.problem)

    @property
    def seconds(self) -> float:
        return self.clock() - self.begun

    @property
    def makespan_s(self) -> float:
        return float("inf") if self.evaluation is None else float(self.evaluation.makespan_s)

    @property
    def bound_s(self) -> float:
        """The proven bound that holds for the kind of plan found so far."""
        if self.plan is not None and self.plan.placement.replicated:
            return self.bound.replicated_s
        return self.bound.seconds

    @property
    def gap(self) -> float:
        return self.makespan_s / self.bound_s - 1

    @property
    def share(self) -> float:
        return self.limits.share(self.seconds, self.iteration)

    @property
    def time_share(self) -> float:
        """How much of the seconds is spent, from 0 to 1; 0 where they are not limited."""
        if self.limits.seconds is None:
            return 0.0
        return Limits(self.limits.seconds).share(self.seconds, 0)

    def finished(self) -> bool:
        """Whether a limit is reached; notes which."""
        limits = self.limits
        if limits.target_gap is not None and self.gap <= limits.target_gap:
            self.stop = "gap"
        elif self.gap <= 1e-9:
            self.stop = "optimal"
        elif limits.iterations is not None and self.iteration >= limits.iterations:
            self.stop = "iterations"
        elif limits.seconds is not None and self.seconds >= limits.seconds:
            self.stop = "seconds"
        return bool(self.stop)

    def offer(self, plan: Plan, phase: str, evaluation: Evaluation | None = None) -> bool:
        """Takes the plan if it fits and beats the best so far; returns whether it did."""
        evaluation = measure(plan, self.problem) if evaluation is None else evaluation
        if not fits(evaluation, self.problem) or not evaluation.makespan_s < self.makespan_s * (
            1 - 1e-12
        ):
            return False
        self.plan, self.evaluation = plan, evaluation
        self.history.append((self.seconds, self.iteration, phase, self.makespan_s))
        return True

    def offer_candidate(self, candidate: Candidate, makespan_s: float, phase: str) -> bool:
        """Takes a candidate's plan likewise. If transfer buffers push it over a rank's
        capacity, the search leaves that much room from now on.
        """
        if not makespan_s < self.makespan_s * (1 - 1e-12):
            return False
        try:
            plan = to_plan(candidate, self.problem, self.arrays)
        except CapacityError:
            return False  # the room left has shrunk since it was found
        evaluation = measure(plan, self.problem)
        over = np.maximum(0.0, evaluation.peak_bytes - self.problem.capacity_bytes)
        if over.any():
            self.slack = np.minimum(self.slack + over * 1.1, 0.5 * self.problem.capacity_bytes)
            self.arrays = problem_arrays(self.problem, self.problem.capacity_bytes - self.slack)
            return False
        return self.offer(plan, phase, evaluation)

    def propose(self, candidate: Candidate, makespan_s: float, phase: str) -> None:
        """Notes a candidate for `offer_proposed`, unless a better one is noted."""
        if makespan_s < min(self.makespan_s, self.proposed[0] if self.proposed else float("inf")):
            self.proposed = makespan_s, candidate, phase

    def offer_proposed(self, at_once: bool) -> None:
        """Offers the noted candidate: `at_once`, or where that is worth its time."""
        if self.proposed is None:
            return
        makespan_s, candidate, phase = self.proposed
        good = self.bound_s * (1 + max(1e-9, self.limits.target_gap or 0.0))
        if (
            at_once
            or makespan_s <= max(good, self.makespan_s * (1 - OFFER_GAIN))
            or self.iteration % OFFER_ITERATIONS == 0
        ):
            self.proposed = None
            self.offer_candidate(candidate, makespan_s, phase)

    def report(self, phase: str) -> None:
        """Shows progress to whoever asked for it."""
        if self.progress is not None:
            self.progress(Progress(self.seconds, self.iteration, phase, self.makespan_s, self.gap))
