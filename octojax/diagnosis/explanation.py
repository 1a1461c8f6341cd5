"""`explain`: the account of a plan's step, as a record, as JSON and as text."""

import math
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any

from octojax.diagnosis.accounts import (
    RankAccount,
    StepPart,
    Wait,
    parts_of,
    rank_accounts,
    waits_of,
)
from octojax.diagnosis.changes import Change, same_plan
from octojax.diagnosis.critical_path import critical_path, seconds_by
from octojax.errors import OctoPipeError
from octojax.ir import LayerCost, Machine, Partition, Plan, Profile, Schedule, uniform_partition
from octojax.ir.lowering import without_transfers
from octojax.ir.shown import duration, line
from octojax.simulate import simulate


@dataclass(frozen=True)
class BoundAccount:
    """What the lower bound says: `parts` by name, `binding` the largest of them.

    `gap` is the makespan over the bound, less one. See docs/lower_bound.md.
    """

    seconds: float
    gap: float
    binding: str
    parts: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Binding:
    """Something on the chain that the step's length comes from, and its seconds there."""

    what: str
    seconds: float


@dataclass(frozen=True)
class Explanation:
    """Where a plan's step goes, what binds it, and what would change that.

    `parts` add up to `makespan_s`, and so do the fields of each of `ranks`; `chain` holds the
    ranks, stages and links of the critical path with their seconds on it, which add up to the
    makespan too (ranks and links; stages are the same time again). `changes` are sorted by what
    they save. `unit` is "s", or "units" where no profile was given.
    """

    name: str
    source: str
    plan: Plan
    profile: Profile
    unit: str
    makespan_s: float
    parts: tuple[StepPart, ...]
    ranks: tuple[RankAccount, ...]
    waits: tuple[Wait, ...]
    chain_ranks: tuple[Binding, ...]
    chain_stages: tuple[Binding, ...]
    chain_links: tuple[Binding, ...]
    bound: BoundAccount | None
    changes: tuple[Change, ...]
    searched_s: float = 0.0

    def __repr__(self) -> str:
        whole = duration(self.makespan_s) if self.unit == "s" else f"{self.makespan_s:.4g} units"
        lost = max(self.parts[1:], key=lambda x: x.seconds)
        best = self.changes[0] if self.changes and self.changes[0].saved_s > 0 else None
        return line("Explanation", self.name, (
            whole,
            f"most lost to {lost.name} ({lost.seconds / (self.makespan_s or 1.0):.1%})",
            f"{best.what} saves {best.saved_share:.1%}" if best else "",
        ))  # fmt: skip

    def __str__(self) -> str:
        from octojax.diagnosis.text import words

        return words(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def to_json(self) -> dict[str, Any]:
        """Returns the shape that `octopipe explain --json` prints."""
        return {
            "name": self.name,
            "source": self.source,
            "unit": self.unit,
            "makespan_s": self.makespan_s,
            "parts": [asdict(x) for x in self.parts],
            "ranks": [asdict(x) for x in self.ranks],
            "waits": [asdict(x) for x in self.waits],
            "critical_path": {
                "ranks": [asdict(x) for x in self.chain_ranks],
                "stages": [asdict(x) for x in self.chain_stages],
                "links": [asdict(x) for x in self.chain_links],
            },
            "bound": asdict(self.bound) if self.bound else None,
            "searched_s": self.searched_s,
            "changes": [x.to_json() for x in self.changes],
        }


def explain(
    plan: Plan | Schedule,
    profile: Profile | None = None,
    *,
    seconds: float = 0.0,
    name: str = "",
) -> Explanation:
    """Returns where the step of a plan goes, what binds it, and what would make it shorter.

    `profile` None explains it in units: every stage takes F = I = W = 1 and B = 2, and transfers
    nothing. A bare schedule is cut uniformly for the profile's layers. With `seconds`, plans are
    also searched for the same ranks, for memory without limit and for one more rank, so long each.
    Every saving is the difference of two simulations: `simulate(change.plan, change.profile)`.

    Raises `ScheduleError` for a table that is wrong, `PlanError` for a profile of another number
    of layers, `ValueError` for negative `seconds`.
    """
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise ValueError(f"seconds = {seconds}, expected a finite number >= 0")
    unit = "s" if profile is not None else "units"
    profile = unit_profile(plan) if profile is None else profile
    plan = as_plan(plan, profile)
    timeline = simulate(plan, profile)
    changes = list(same_plan(plan, profile))
    try:
        from octojax.diagnosis.other_plans import reordered, searched

        changes += reordered(plan, profile, timeline)
        changes += searched(plan, profile, timeline.makespan_s, seconds)
    except OctoPipeError:  # layers that cost nothing, say, for which the tuner has no plan
        pass
    chain_ranks, chain_stages, chain_links = seconds_by(critical_path(timeline))
    return Explanation(
        name=name or plan.name or "plan",
        source="F = I = W = 1, B = 2" if unit == "units" else f"profile {profile.name}",
        plan=plan,
        profile=profile,
        unit=unit,
        makespan_s=timeline.makespan_s,
        parts=parts_of(timeline),
        ranks=rank_accounts(timeline),
        waits=waits_of(timeline),
        chain_ranks=tuple(Binding(f"rank {r}", s) for r, s in chain_ranks.items()),
        chain_stages=tuple(Binding(_stage(plan, profile, s), t) for s, t in chain_stages.items()),
        chain_links=tuple(Binding(f"rank {a} to {b}", s) for (a, b), s in chain_links.items()),
        bound=bound_of(plan, profile, timeline.makespan_s),
        changes=tuple(sorted(changes, key=lambda c: -c.saved_share)),
        searched_s=seconds,
    )


def unit_profile(plan: Plan | Schedule, unit: float = 1.0) -> Profile:
    """Returns a profile of a layer per stage: F = I = W = `unit`, B twice that, ideal links."""
    layer = LayerCost("stage", unit, unit, unit, backward_s=2 * unit)
    sizes = plan.partition.sizes if isinstance(plan, Plan) else (1,) * plan.num_stages
    extra = (("stages_of", tuple(sizes)),) if max(sizes, default=1) > 1 else ()
    return Profile("units", (layer,) * len(sizes), Machine(), extra=extra)


def as_plan(plan: Plan | Schedule, profile: Profile) -> Plan:
    """Returns the plan without SEND and RECV; a bare schedule is cut for the profile's layers."""
    if isinstance(plan, Schedule):
        bare = without_transfers(plan)
        cut = (
            Partition(profile.of_partition)
            if profile.of_partition
            else uniform_partition(profile.kinds, bare.num_stages)
        )
        return Plan(cut, bare.placement, bare)
    if plan.schedule.has_transfers:
        return replace(plan, schedule=without_transfers(plan.schedule))
    return plan


def bound_of(plan: Plan, profile: Profile, makespan_s: float) -> BoundAccount | None:
    """Returns the bound that holds for every plan with as many ranks and microbatches.

    None where there is none: a profile of whole stages, or with layers that cost nothing.
    """
    from octojax.tune.bound import lower_bound
    from octojax.tune.problem import Problem

    if profile.of_partition is not None:
        return None
    try:
        problem = Problem.of(profile, plan.num_ranks, plan.num_microbatches, math.inf)
    except (OctoPipeError, ValueError):
        return None
    bound = lower_bound(problem)
    replicated = plan.placement.replicated
    value = bound.replicated_s if replicated else bound.seconds
    binding = "work shared by two holders" if replicated else bound.binding
    return BoundAccount(value, makespan_s / value - 1, binding, bound.parts)


def _stage(plan: Plan, profile: Profile, stage: int) -> str:
    """What is in a stage: `stage 3, layers 5-7 (mamba, mlp, mamba)`."""
    layers = plan.partition.layers(stage)
    where = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"
    if profile.of_partition is not None:
        return f"stage {stage}, {where}"
    kinds = [profile.layers[i].kind for i in layers]
    few = ", ".join(kinds) if len(kinds) <= 4 else f"{', '.join(kinds[:3])}, ... {kinds[-1]}"
    return f"stage {stage}, {where} ({few})"
