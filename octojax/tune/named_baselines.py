"""Published ways measured on a profile: each with its bases, partition, memory, and refusals."""

import difflib
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from octojax.errors import OctoPipeError
from octojax.ir.action import Kind
from octojax.ir.plan import Plan
from octojax.ir.profile import Profile
from octojax.tune.baseline import BASES, Baseline
from octojax.tune.measure import fits, measure
from octojax.tune.problem import Problem
from octojax.tune.recompute_rule import RecomputeRule
from octojax.tune.table_forms import fill, split
from octojax.tune.ways import WAYS


def names_of(asked: str | Iterable[str]) -> tuple[str, ...]:
    """Returns the names of ways in `asked`: `all`, or names (as text separated by commas).

    Raises `ValueError` on unknown names, suggesting the nearest.
    """
    words = asked.split(",") if isinstance(asked, str) else list(asked)
    names = [str(word).strip().lower() for word in words]
    if names == ["all"]:
        return tuple(WAYS)
    unknown = [name for name in names if name not in WAYS]
    if unknown or not names:
        hints = []
        for name in unknown:
            near = difflib.get_close_matches(name, WAYS, n=1, cutoff=0.4)
            hints.append(repr(name) + (f" (did you mean {near[0]!r}?)" if near else ""))
        what = f"unknown baselines {', '.join(hints)}" if unknown else "no baselines named"
        raise ValueError(f"{what}; choose of {', '.join(WAYS)}, or all")
    return tuple(dict.fromkeys(names))


def measure_baselines(
    profile: Profile,
    ranks: int | None = None,
    microbatches: int | None = None,
    names: str | Iterable[str] = "all",
    *,
    capacity_bytes: float | None = None,
    recompute: RecomputeRule | str | Iterable[int] = "auto",
) -> tuple[Baseline, ...]:
    """Returns the named published ways on a profile, a row per base, without any search.

    Arguments as in `octojax.tune.tune`. Of a way's plans (numbers of chunks, warm-ups, memory
    limits) the quickest that fits stands for it on each base; where none fits, the leanest, with
    `fits` false. Raises `ValueError` for unknown names.
    """
    rule = RecomputeRule.of(recompute)
    problem = Problem.of(profile, ranks, microbatches, capacity_bytes, rule)
    return tuple(baselines_of(problem, names_of(names)))


def baselines_of(problem: Problem, names: Iterable[str]) -> Iterator[Baseline]:
    """Yields the rows of the named ways."""
    for name in names:
        yield from _rows(problem, name)


def _rows(problem: Problem, name: str) -> Iterator[Baseline]:
    way = WAYS[name]
    bases = ("split",) if way.splits else BASES
    try:
        plans = list(way.plans(problem))
        if not plans:
            raise ValueError(f"{name} has no plan for these sizes")
    except (ValueError, OctoPipeError) as error:
        for base in bases:
            yield _refused(name, base, str(error))
        return
    if way.splits:
        yield _best([_measured(problem, name, "split", plan) for plan in plans])
        return
    yield _best([_measured(problem, name, "fused", plan) for plan in plans])
    halves = [plan.with_schedule(split(plan.schedule)) for plan in plans]
    best = _best([_measured(problem, name, "split", plan) for plan in halves])
    yield best
    if best.plan is None or _runs_ahead(best.plan):
        yield _refused(name, "fill", "its R have places of their own, which a fill would move")
    else:
        yield _measured(problem, name, "fill", fill(best.plan, problem))


def _measured(problem: Problem, name: str, base: str, plan: Plan) -> Baseline:
    evaluation = measure(plan, problem)
    if evaluation.done < sum(map(len, plan.schedule.ranks)):
        return _refused(name, base, "its order waits in a circle on this placement")
    peaks = tuple(float(b) for b in evaluation.peak_bytes)
    whole = replace(plan, name=f"{name} {base}")
    return Baseline(
        name, base, _own(name, base), whole, evaluation.makespan_s, peaks, fits(evaluation, problem)
    )


def _own(name: str, base: str) -> bool:
    return base == "fused" or WAYS[name].splits


def _refused(name: str, base: str, why: str) -> Baseline:
    return Baseline(name, base, _own(name, base), refusal=" ".join(why.split()))


def _best(rows: list[Baseline]) -> Baseline:
    """Returns the quickest row that fits, or the one whose largest peak is least."""
    return min(rows, key=lambda r: (r.plan is None, not r.fits, _cost(r)))


def _cost(row: Baseline) -> float:
    if row.makespan_s is None:
        return math.inf
    return row.makespan_s if row.fits else max(row.peak_bytes)


def _runs_ahead(plan: Plan) -> bool:
    return any(action.kind is Kind.RECOMPUTE for _, _, action in plan.schedule.actions())


def by_name(rows: Iterable[Baseline]) -> dict[str, float]:
    """Returns makespans by `Baseline.key` of what fits, and the best as `published`."""
    makespans = {r.key: r.makespan_s for r in rows if r.fits and r.makespan_s is not None}
    return makespans | ({"published": min(makespans.values())} if makespans else {})
