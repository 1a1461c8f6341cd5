"""`tune`: profile and machine in, the best plan found and a proven bound out."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache

import numpy as np

from octojax.errors import CapacityError
from octojax.ir.partition import Partition, uniform_partition
from octojax.ir.placement import Placement
from octojax.ir.plan import Plan
from octojax.ir.prediction import Prediction
from octojax.ir.profile import LayerCost, Machine, Profile
from octojax.schedules import generate
from octojax.simulate import simulate
from octojax.tune.baseline import Baseline
from octojax.tune.baselines import Outcome, outcomes, summary
from octojax.tune.beginnings import candidates_of, constraints_of
from octojax.tune.best import search_best, starts_for
from octojax.tune.bound import LowerBound, lower_bound
from octojax.tune.candidate import is_possible
from octojax.tune.exact import is_small, solve
from octojax.tune.fixed_table import search_partition
from octojax.tune.initial import Start
from octojax.tune.measure import fits
from octojax.tune.memory import explain_lack
from octojax.tune.named_baselines import baselines_of, by_name, names_of
from octojax.tune.problem import Problem
from octojax.tune.recompute_rule import RecomputeRule
from octojax.tune.result import COMPILATION, Progress, TuneResult
from octojax.tune.search import PHASES, Limits, Search
from octojax.tune.table_forms import split

METHODS = ("best", "octopipe", "random", "exact")
DEFAULT_SECONDS = 20.0
BASELINES_SHARE = 0.2
"""No published way is measured, 1F1B apart, when this share of the budget is spent."""


def tune(
    profile: Profile,
    ranks: int | None = None,
    microbatches: int | None = None,
    *,
    method: str = "best",
    seconds: float | None = None,
    iterations: int | None = None,
    seed: int = 0,
    capacity_bytes: float | None = None,
    phases: Iterable[str] = PHASES,
    overlap: bool = True,
    target_gap: float | None = None,
    replicated: bool = True,
    start: Start | Plan | Partition | Placement | str | None = None,
    recompute: RecomputeRule | str | Iterable[int] = "auto",
    baselines: str | Iterable[str] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> TuneResult:
    """Returns the plan with the least makespan found whose peaks fit every rank's memory.

    What is not given (`ranks`, `microbatches`, capacity) comes from the profile. `method`:
    `best` searches from many starting points; `octopipe` is the paper's Algorithm 1; `random`
    the same moves with the phase drawn by chance; `exact` enumerates, for small cases.
    Stops after `seconds` (default 20 if nothing else is given; what a new installation takes to
    compile comes on top), `iterations`, or at `target_gap` above the proven bound; with
    `iterations` alone the result depends on `seed` only. `phases` are those that may change. The
    others stay as in 1F1B: uniform partition, a stage per rank; without "schedule" I goes before F
    and W follows its I, but the number of microbatches in flight is not limited. Without `overlap`
    every transfer occupies both its ranks, in the search and in all figures of the result. With
    few seconds not every published way is measured; 1F1B always is. `replicated` allows published
    plans that keep stages on two ranks (Chimera, DualPipe) as the answer. A keyboard interrupt
    returns the best so far.

    `start` is a plan, a partition, a placement or text (`octojax.tune.initial`): the search begins
    there, the phases that may not change stay as they are in it, and the result is never worse. A
    fixed partition is the number of layers of each rank, which placement then disperses and
    exchanges; with the partition alone free, a given plan's table stays as it is. `recompute` is
    `auto`, `all`, `none` or stages (`0-3,7`), for plans and for what they are compared with.
    `baselines` names the published ways to measure (`all`, or names of
    `octojax.tune.ways.WAYS`; `TuneResult.ways`), whose time `seconds` does not count; by default
    every schedule is measured on several partitions, and the best of each kind named.

    Raises `ValueError` and `ProfileError` for bad input, `PlanError` for a start that does not fit
    the problem, `CapacityError` when no plan fits.
    """
    wanted = _check(method, phases, seconds, iterations, target_gap, seed)
    if start is not None and method == "exact":
        raise ValueError(
            "the exact method enumerates all plans and begins from none: leave the start out, or "
            "use method 'best'"
        )
    overlap = overlap and not profile.machine.blocking
    if not overlap:
        profile = without_overlap(profile)
    rule = RecomputeRule.of(recompute)
    names = None if baselines is None else names_of(baselines)
    problem = Problem.of(profile, ranks, microbatches, capacity_bytes, rule)
    begun = None if start is None else Start.of(start).fitted(problem)
    if seconds is None and iterations is None:
        seconds = DEFAULT_SECONDS if target_gap is None else 10 * DEFAULT_SECONDS
    bound = lower_bound(problem)
    compiles = not (warm_up.cache_info().currsize or is_compiled())
    if compiles and progress is not None:
        progress(first_moment(problem, bound))
    if compiles or seconds is not None:
        warm_up()
        if is_small(problem):
            warm_up_exact()
    search = Search(problem, Limits(seconds, iterations, target_gap), bound, progress)
    search.constraints = constraints_of(begun, problem, wanted)
    known: list[Outcome] = []
    base: list[Baseline] = []
    ways: list[Baseline] = []
    try:
        if begun is not None:
            search.start = candidates_of(begun, problem, wanted)
            if begun.plan is not None:
                search.offer(begun.plan, "schedule")
        if names is not None:
            ways.extend(baselines_of(problem, names))
            if not any(row.name == "1f1b" for row in ways):
                base.extend(baselines_of(problem, ("1f1b",)))
            search.begun = search.clock()
        else:
            for outcome in outcomes(problem, enough=lambda: search.time_share > BASELINES_SHARE):
                known.append(outcome)
        if method == "best" and wanted == frozenset(PHASES):
            for outcome in sorted(known, key=lambda k: k.evaluation.makespan_s):
                if fits(outcome.evaluation, problem) and (replicated or not outcome.replicated):
                    search.offer(outcome.plan(), "schedule", outcome.evaluation)
                    break
            for row in (*base, *ways):
                if row.plan is not None and row.fits:
                    search.offer(row.plan, "schedule")
        if begun is not None and begun.plan is not None and wanted == {"partition"}:
            search_partition(search, begun.plan, seed)
        else:
            _run(method, search, wanted, seed, overlap)
    except KeyboardInterrupt:
        search.stop = "interrupted"
    if search.plan is None or search.evaluation is None:
        if search.stop == "interrupted":
            raise KeyboardInterrupt
        raise CapacityError(explain_lack(problem))
    if names is None:
        makespans, replicated_baselines = summary(known, problem)
    else:
        makespans, replicated_baselines = by_name((*base, *ways)), ()
    prediction = Prediction(
        profile.name, profile.fingerprint, float(search.makespan_s), float(search.bound_s)
    )
    return TuneResult(
        plan=replace(search.plan, prediction=prediction),
        profile_name=profile.name,
        method=method,
        makespan_s=search.makespan_s,
        lower_bound_s=search.bound_s,
        bound_parts=dict(search.bound.parts),
        baselines=makespans,
        iterations=search.counts,
        history=tuple(search.history),
        evaluations=search.evaluations,
        seconds=search.seconds,
        peak_bytes=tuple(float(b) for b in search.evaluation.peak_bytes),
        capacity_bytes=problem.capacities_bytes,
        stop=search.stop or "done",
        replicated=replicated_baselines,
        replicated_bound_s=search.bound.replicated_s,
        seed=seed,
        recompute=str(rule),
        ways=tuple(ways),
    )


def is_compiled() -> bool:
    """Whether compiled code of the search is on disk, by the smallest function of it."""
    is_possible(np.zeros(2, np.int64), np.zeros(1))
    return not is_possible.stats.cache_misses


def first_moment(problem: Problem, bound: LowerBound) -> Progress:
    """Returns what is known before anything is compiled: split 1F1B on the uniform partition, in
    the plain simulator.
    """
    partition = uniform_partition(problem.profile.kinds, problem.ranks)
    table = split(generate("1f1b", problem.ranks, problem.microbatches))
    plan = Plan(partition, table.placement, table)
    makespan_s = simulate(plan, problem.profile, compiled=False).makespan_s
    return Progress(0.0, 0, COMPILATION, makespan_s, makespan_s / bound.seconds - 1)


@lru_cache(maxsize=1)
def warm_up() -> None:
    """Compiles the search, or loads it compiled, before a clock starts.

    The layers differ, and are too many to be enumerated: equal ones would be settled before the
    search itself is called.
    """
    layers = tuple(LayerCost("x", 1.0 + 0.37 * (n % 3), 1.0, 1.0) for n in range(9))
    problem = Problem.of(Profile("warm-up", layers, Machine()), 2, 4)
    search = Search(problem, Limits(iterations=1), lower_bound(problem))
    search_best(search, frozenset(PHASES), starts_for(search, frozenset(PHASES), 0), 0)


@lru_cache(maxsize=1)
def warm_up_exact() -> None:
    """The same for the enumeration of small cases."""
    solve(Problem.of(Profile("warm-up", (LayerCost("x", 1.0, 1.0, 1.0),) * 2, Machine()), 2, 1))


def without_overlap(profile: Profile) -> Profile:
    """Returns the profile on a machine that computes or transfers, never both at once: what a
    transfer takes on the slowest link becomes host cost on both its ranks.
    """
    machine = profile.machine
    latency = max(machine.latency_s, machine.inter_latency_s or 0.0)
    bandwidth = min(machine.bandwidth_bytes_per_s, machine.inter_bandwidth_bytes_per_s or math.inf)
    size = max((x.output_bytes for x in profile.layers[:-1]), default=0)
    return profile.on(
        replace(
            machine,
            host_cost_s=machine.host_cost_s + latency + size / bandwidth,
            latency_s=0.0,
            bandwidth_bytes_per_s=math.inf,
            inter_latency_s=None,
            inter_bandwidth_bytes_per_s=None,
            blocking=False,
        )
    )


def _run(method: str, search: Search, phases: frozenset[str], seed: int, overlap: bool) -> None:
    if method == "best":
        search_best(search, phases, starts_for(search, phases, seed), seed)
        return
    if method == "exact":
        from octojax.tune.exact import search_exact

        search_exact(search)
        return
    from octojax.tune.algorithm1 import search_octopipe

    search_octopipe(search, phases, seed, by_chance=method == "random", overlap=overlap)


def _check(
    method: str,
    phases: Iterable[str],
    seconds: float | None,
    iterations: int | None,
    target_gap: float | None,
    seed: int,
) -> frozenset[str]:
    if method not in METHODS:
        renamed = "; the enumeration is called exact" if method == "ilp" else ""
        raise ValueError(f"unknown method {method!r}{renamed}; choose of {', '.join(METHODS)}")
    if seed < 0:
        raise ValueError(f"seed = {seed}, expected a number >= 0")
    wanted = frozenset(phases)
    if not wanted or wanted - set(PHASES):
        raise ValueError(f"phases {sorted(wanted)}: choose at least one of {', '.join(PHASES)}")
    for name, value in (
        ("seconds", seconds),
        ("iterations", iterations),
        ("target_gap", target_gap),
    ):
        if value is not None and not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name} = {value}, expected a finite number >= 0")
    return wanted
