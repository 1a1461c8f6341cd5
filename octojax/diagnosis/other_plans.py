"""Changes that need another plan: the same stages in another order, or a search.

The order is the list scheduler's (`octojax.tune`), its priorities being when each action runs
now, justified from both ends; the search is `octojax.tune.tune`. What comes out is simulated, so
a figure is what that plan takes, and a better one may exist.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from octojax.diagnosis.changes import Change, makespan_s, without_recompute
from octojax.errors import OctoPipeError
from octojax.ir import Kind, Plan, Profile, Timeline
from octojax.ir.lowering import actions_of
from octojax.tune import tune
from octojax.tune.candidate import LATE_S, Candidate
from octojax.tune.justify import justified
from octojax.tune.keys import FORMULAS, by_formula
from octojax.tune.measure import quick_makespan, to_plan
from octojax.tune.problem import Problem

ORDER, SEARCH = "same stages in another order", "searched plan"


def reordered(plan: Plan, profile: Profile, timeline: Timeline) -> Iterator[Change]:
    """Yields the plan's stages in another order: of the present work, of one microbatch more, and
    with memory without limit. Nothing for plans that hold a stage on two ranks.

    `timeline` is the plan's under the profile.
    """
    if plan.placement.replicated or profile.of_partition is not None:
        return
    base_s, count = timeline.makespan_s, plan.num_microbatches
    capacity = tuple(profile.machine.capacity(r) for r in range(plan.num_ranks))
    fits = all(r.peak_bytes <= c for r, c in zip(timeline.ranks, capacity, strict=True))
    other = best_order(plan, profile, timeline, count, math.inf if not fits else None)
    if other is not None:
        what = "the same stages in another order"
        yield Change("order", what, ORDER, other, profile, makespan_s(other, profile), base_s)
    more = best_order(plan, profile, timeline, count + 1, math.inf if not fits else None)
    if more is not None:
        edit = (("microbatches", count + 1),)
        what = f"one more microbatch a step ({count + 1}), for the same number of microbatches"
        took_s = makespan_s(more, profile)
        share = (count + 1) / count
        yield Change("microbatch", what, ORDER, more, profile, took_s, base_s * share, edit)
    if all(map(math.isinf, capacity)):
        return
    free = best_order(without_recompute(plan), profile, timeline, count, math.inf)
    if free is not None:
        took_s, what = makespan_s(free, profile), "memory without limit, in the best order for it"
        yield Change("memory", what, ORDER, free, profile, took_s, base_s)


def best_order(
    plan: Plan, profile: Profile, timeline: Timeline, microbatches: int, capacity: float | None
) -> Plan | None:
    """Returns the plan's stages in the quickest of several orders; None where none fits memory.

    `capacity` None is the machine's.
    """
    problem = Problem.of(profile, plan.num_ranks, microbatches, capacity)
    rank_L = np.repeat([ranks[0] for ranks in plan.placement.stages], plan.partition.sizes)
    first = np.array(plan.partition.bounds[:-1])
    begins = np.zeros(problem.num_layers, np.bool_)
    begins[first[1:]] = True
    recompute, fused = np.zeros_like(begins), np.zeros_like(begins)
    recompute[first] = plan.recomputes
    whole = {a.stage for _, _, a in plan.schedule.actions() if a.kind is Kind.BACKWARD}
    fused[first] = [s in whole for s in range(plan.num_stages)]
    tried: list[tuple[float, int, Candidate]] = []
    for number, keys in enumerate(_keys(plan, problem, timeline)):
        candidate = Candidate(rank_L, begins, recompute, fused, keys, np.zeros(1))
        tried.append((quick_makespan(candidate, problem), number, candidate))
    took_s, _, candidate = min(tried, key=lambda t: t[:2])
    if took_s == math.inf:
        return None
    best = justified(candidate, took_s, problem)
    return replace(to_plan(best[1], problem), name=f"{plan.name} reordered".strip())


def _keys(plan: Plan, problem: Problem, timeline: Timeline) -> Iterator[np.ndarray]:
    """Yields priorities: the plan's own times, with its W then or late, and some formulas."""
    count = plan.num_microbatches
    when = np.full((plan.num_stages, 3, count), LATE_S)
    columns = {Kind.FORWARD: 0, Kind.INPUT_GRAD: 1, Kind.BACKWARD: 1, Kind.WEIGHT_GRAD: 2}
    for span in timeline.actions:
        for action in actions_of(span.item):
            if action.kind in columns:
                when[action.stage, columns[action.kind], action.microbatch] = span.start_s
    stage_L = np.repeat(np.arange(plan.num_stages), plan.partition.sizes)
    period = timeline.makespan_s / count
    for at in dict.fromkeys((count // 2, count - 1)):  # whose times a further microbatch gets
        times = when
        for extra in range(problem.microbatches - count):
            copy = times[:, :, at + extra : at + extra + 1] + period
            later = times[:, :, at + extra + 1 :] + period
            times = np.concatenate([times[:, :, : at + extra + 1], copy, later], axis=2)
        keys = times[stage_L]
        yield keys
        late = keys.copy()
        late[:, 2] = LATE_S
        yield late
    for row in FORMULAS:
        yield by_formula(problem, row)


def searched(plan: Plan, profile: Profile, base_s: float, seconds: float) -> Iterator[Change]:
    """Yields what searches of so many seconds each find: for the present ranks, for memory without
    limit, and for one more rank like the last one.
    """
    if profile.of_partition is not None or seconds <= 0:
        return
    count, ranks = plan.num_microbatches, plan.num_ranks
    machine = profile.machine
    cases: list[tuple[str, str, Profile, int]] = [
        ("search", "another plan for the same ranks", profile, ranks)
    ]
    if any(math.isfinite(machine.capacity(r)) for r in range(ranks)):
        roomy = profile.on(replace(machine, capacity_bytes=math.inf, capacities_bytes=()))
        cases.append(("memory", "memory without limit, and a plan for it", roomy, ranks))
    wider = replace(
        machine,
        speeds=_one_more(machine.speeds, ranks),
        capacities_bytes=_one_more(machine.capacities_bytes, ranks),
    )
    what = f"one more rank ({ranks + 1}), and a plan for it"
    cases.append(("ranks", what, profile.on(wider), ranks + 1))
    for sort, what, changed, width in cases:
        try:
            result = tune(changed, width, count, seconds=seconds, replicated=False)
        except (OctoPipeError, ValueError):
            continue  # too few layers for a further rank, or no room
        edit = (("ranks", width), ("seconds", seconds))
        best, took_s = result.plan, makespan_s(result.plan, changed)
        bound_s = result.lower_bound_s
        yield Change(sort, what, SEARCH, best, changed, took_s, base_s, edit, bound_s)


def _one_more(values: tuple[float, ...], ranks: int) -> tuple[float, ...]:
    return (*values[:ranks], values[ranks - 1]) if values else ()
