"""What the step would take if something were otherwise: the same plan, simulated again.

Every change is a plan and a profile; what it saves is the difference of two simulations, and
whoever doubts it runs `simulate(change.plan, change.profile)`.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from octojax.ir import Kind, LayerCost, Machine, Plan, Profile, Schedule
from octojax.simulate.costs import StageCosts
from octojax.simulate.table import Table

QUICKER = 0.9
"""Layers and ranks that are quicker take this share of their time."""
_TIMES = ("forward_s", "input_grad_s", "weight_grad_s", "backward_s")


@dataclass(frozen=True)
class Change:
    """Something else than what is, and what a step takes then.

    `sort` is one of `layer`, `kind`, `rank`, `link`, `host`, `recompute`, `order`,
    `microbatch`, `memory`, `search`, `ranks`; `what` says it in words; `method` is "same plan",
    "same stages in another order" or "searched plan". `edit` is what was changed in the profile
    or asked of the search. `base_s` is what the present plan takes for the same work: its
    makespan, but for another number of microbatches. `bound_s`, of searched plans, is below every
    plan's step after the change.
    """

    sort: str
    what: str
    method: str
    plan: Plan
    profile: Profile
    makespan_s: float
    base_s: float
    edit: tuple[tuple[str, Any], ...] = ()
    bound_s: float | None = None

    @property
    def saved_s(self) -> float:
        """Seconds less than `base_s`; below zero if the change makes the step longer."""
        return self.base_s - self.makespan_s

    @property
    def saved_share(self) -> float:
        return self.saved_s / self.base_s if self.base_s else 0.0

    def to_json(self) -> dict[str, Any]:
        """Returns the shape in `octopipe explain --json`; a plan of its own is written out."""
        return {
            "sort": self.sort,
            "what": self.what,
            "method": self.method,
            "edit": dict(self.edit),
            "base_s": self.base_s,
            "makespan_s": self.makespan_s,
            "saved_s": self.saved_s,
            "lower_bound_s": self.bound_s,
            **({} if self.method == "same plan" else {"plan": self.plan.to_json()}),
        }


def makespan_s(plan: Plan, profile: Profile, table: Table | None = None) -> float:
    """Returns what `simulate(plan, profile)` says, without the rest of the timeline.

    The plan is complete and cannot deadlock, which the caller has checked. `table` is the plan's,
    for callers with many profiles of one plan.
    """
    from octojax.simulate.evaluation import evaluate
    from octojax.simulate.links import Links

    costs = StageCosts.of(profile, plan.partition, plan.recompute)
    links = Links.of(profile.machine, plan.num_ranks)
    return evaluate(table or Table.of(plan), costs, links, with_memory=False).makespan_s


def same_plan(plan: Plan, profile: Profile) -> Iterator[Change]:
    """Yields every change under which the plan can stay as it is, simulated."""
    table = Table.of(plan)
    base_s = makespan_s(plan, profile, table)
    for sort, what, edit, changed_plan, changed_profile in _variants(plan, profile):
        took_s = makespan_s(changed_plan, changed_profile, table if changed_plan is plan else None)
        yield Change(sort, what, "same plan", changed_plan, changed_profile, took_s, base_s, edit)


Variant = tuple[str, str, tuple[tuple[str, Any], ...], Plan, Profile]


def _variants(plan: Plan, profile: Profile) -> Iterator[Variant]:
    percent = f"{1 - QUICKER:.0%}"
    by_kind: dict[str, list[int]] = defaultdict(list)
    for number, layer in enumerate(profile.layers):
        by_kind[layer.kind].append(number)
        edit = (("layers", [number]), ("factor", QUICKER))
        what = f"layer {number} ({layer.kind}) {percent} quicker"
        yield "layer", what, edit, plan, quicker(profile, [number])
    for kind, numbers in by_kind.items():
        if len(numbers) > 1:
            edit = (("layers", numbers), ("factor", QUICKER))
            what = f"all {len(numbers)} layers of kind {kind} {percent} quicker"
            yield "kind", what, edit, plan, quicker(profile, numbers)
    for rank in range(plan.num_ranks):
        speeds = [profile.machine.speed(r) for r in range(plan.num_ranks)]
        speeds[rank] /= QUICKER
        machine = replace(profile.machine, speeds=tuple(speeds))
        edit = (("machine", {"speeds": speeds}),)
        yield "rank", f"rank {rank} {percent} quicker", edit, plan, profile.on(machine)
    for sort, what, fields in _machines(profile.machine):
        machine = replace(profile.machine, **fields)
        yield sort, what, (("machine", fields),), plan, profile.on(machine)
    if any(plan.recomputes):
        bare = without_recompute(plan)
        edit = (("recompute", []),)
        yield "recompute", "memory enough to recompute nothing", edit, bare, profile


def quicker(profile: Profile, layers: list[int], factor: float = QUICKER) -> Profile:
    """Returns the profile with all times of these layers multiplied by `factor`."""
    indices = set(layers)

    def changed(layer: LayerCost) -> LayerCost:
        times = {n: v * factor for n in _TIMES if (v := getattr(layer, n)) is not None}
        return replace(layer, **times)

    costs = (changed(x) if i in indices else x for i, x in enumerate(profile.layers))
    return replace(profile, layers=tuple(costs))


def _machines(machine: Machine) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields other links: sort, words, and the fields of the machine that differ."""
    bandwidth, latency = machine.bandwidth_bytes_per_s, machine.latency_s
    far = machine.ranks_per_node is not None
    inner = "links within a node" if far else "links"
    if math.isfinite(bandwidth):
        yield "link", f"{inner} of twice the bandwidth", {"bandwidth_bytes_per_s": 2 * bandwidth}
    if latency > 0:
        yield "link", f"{inner} of half the latency", {"latency_s": latency / 2}
    free: dict[str, Any] = {"latency_s": 0.0, "bandwidth_bytes_per_s": math.inf}
    if far:
        between = machine.inter_bandwidth_bytes_per_s or bandwidth
        wait = latency if machine.inter_latency_s is None else machine.inter_latency_s
        if math.isfinite(between):
            fields = {"inter_bandwidth_bytes_per_s": 2 * between}
            yield "link", "links between nodes of twice the bandwidth", fields
        if wait > 0:
            yield "link", "links between nodes of half the latency", {"inter_latency_s": wait / 2}
        free |= {"inter_latency_s": 0.0, "inter_bandwidth_bytes_per_s": math.inf}
    if any(getattr(machine, name) != value for name, value in free.items()):
        yield "link", "transfers that take no time", free
    if machine.host_cost_s > 0:
        yield "host", "transfers that cost their ranks nothing", {"host_cost_s": 0.0}


def without_recompute(plan: Plan) -> Plan:
    """Returns the plan with all residuals kept, and no action that rebuilds them."""
    rows = tuple(
        tuple(x for x in row if getattr(x, "kind", None) is not Kind.RECOMPUTE)
        for row in plan.schedule.ranks
    )
    return replace(plan, schedule=Schedule(rows), recompute=(), prediction=None)
