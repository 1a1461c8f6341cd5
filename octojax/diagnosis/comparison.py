"""`compare`: several plans, tables or named schedules under one profile."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from octojax.diagnosis.accounts import busiest, rank_accounts
from octojax.diagnosis.explanation import as_plan, bound_of, unit_profile
from octojax.ir import Plan, Profile, Schedule, Timeline
from octojax.report import Panel, render_svg
from octojax.report.panel import nbytes, seconds, stage_layers
from octojax.simulate import simulate

UNITS = "F = I = W = 1, B = 2 for all stages of a rank"


@dataclass(frozen=True)
class Entry:
    """One of the compared: its plan and what its step comes to.

    `speedup` is how many times more microbatches a second than the first entry. Fill and drain,
    and both waits, are those of the busiest rank. `gap` is to the lower bound for as many ranks
    and microbatches, None where there is none. `fits` tells whether every rank's peak is within
    its memory. `layers` names what is in each stage.
    """

    name: str
    plan: Plan
    timeline: Timeline
    speedup: float
    imbalance_s: float
    fill_drain_s: float
    computation_wait_s: float
    transfer_wait_s: float
    peak_microbatches: int
    peak_bytes: float
    fits: bool
    bound_s: float | None
    layers: tuple[str, ...] = ()
    capacities_bytes: tuple[float, ...] = ()

    @property
    def gap(self) -> float | None:
        return self.timeline.makespan_s / self.bound_s - 1 if self.bound_s else None

    def to_json(self) -> dict[str, Any]:
        fields = ("imbalance_s", "fill_drain_s", "computation_wait_s", "transfer_wait_s")
        return {
            "name": self.name,
            "ranks": self.plan.num_ranks,
            "stages": self.plan.num_stages,
            "microbatches": self.plan.num_microbatches,
            "makespan_s": self.timeline.makespan_s,
            "speedup": self.speedup,
            "bubble_ratio": self.timeline.bubble_ratio,
            **{name: getattr(self, name) for name in fields},
            "peak_microbatches": self.peak_microbatches,
            "peak_bytes": self.peak_bytes,
            "fits": self.fits,
            "lower_bound_s": self.bound_s,
            "gap": self.gap,
        }


@dataclass(frozen=True)
class Comparison:
    """What was compared, in the order given, and where the times come from."""

    entries: tuple[Entry, ...]
    source: str

    def panels(self) -> list[Panel]:
        """Returns one titled timeline per entry, for `octojax.report`."""
        return [
            Panel(
                f"{e.name}, {self.source}",
                e.timeline,
                e.bound_s if self._timed else None,
                layers=e.layers,
                capacities_bytes=e.capacities_bytes,
            )
            for e in self.entries
        ]

    @property
    def _timed(self) -> bool:
        return all(e.timeline.unit == "s" for e in self.entries)

    def to_json(self) -> dict[str, Any]:
        """Returns the shape that `octopipe compare --json` prints."""
        unit = "s" if self._timed else "units"
        return {
            "source": self.source,
            "unit": unit,
            "entries": [e.to_json() for e in self.entries],
        }

    def __repr__(self) -> str:
        best = max(self.entries, key=lambda e: e.speedup)
        return (
            f"<Comparison of {len(self.entries)}: {best.name!r} is quickest, {best.speedup:.3f}x "
            f"{self.entries[0].name!r}, {self.source}>"
        )

    def __str__(self) -> str:
        return table(self)

    def _repr_html_(self) -> str:
        return render_svg(self.panels())


def compare(plans: Mapping[str, Plan | Schedule], profile: Profile | None = None) -> Comparison:
    """Returns what every plan's step comes to under one profile, the first being the measure.

    Without a profile a rank's stages together take F = I = W = 1 and B = 2, so that all plans do
    the same work. Bare schedules are cut uniformly for the profile's layers.

    Raises `ValueError` for no plans, `PlanError` for a plan of another number of layers.
    """
    if not plans:
        raise ValueError("nothing to compare: give plans by name")
    ranks = next(iter(plans.values())).num_ranks
    entries = [
        _entry(name, plan, profile or unit_profile(plan, ranks / plan.num_stages), bool(profile))
        for name, plan in plans.items()
    ]
    first = entries[0]
    rate = first.plan.num_microbatches / (first.timeline.makespan_s or 1.0)
    entries = [
        replace(e, speedup=e.plan.num_microbatches / (e.timeline.makespan_s or 1.0) / rate)
        for e in entries
    ]
    source = UNITS if profile is None else f"simulated with profile {profile.name}"
    return Comparison(tuple(entries), source)


def _entry(name: str, source: Plan | Schedule, costs: Profile, timed: bool) -> Entry:
    plan = as_plan(source, costs)
    timeline = simulate(plan, costs)
    if not timed:
        timeline = replace(timeline, unit="units")
    most = busiest(accounts := rank_accounts(timeline))
    mean = sum(a.busy_s for a in accounts) / len(accounts)
    bound = bound_of(plan, costs, timeline.makespan_s)
    return Entry(
        name=name,
        plan=plan,
        timeline=timeline,
        speedup=1.0,
        imbalance_s=most.busy_s - mean,
        fill_drain_s=most.fill_s + most.drain_s,
        computation_wait_s=most.computation_wait_s,
        transfer_wait_s=most.transfer_wait_s,
        peak_microbatches=max(r.peak_microbatches for r in timeline.ranks),
        peak_bytes=max(a.peak_bytes for a in accounts),
        fits=all(a.peak_bytes <= costs.machine.capacity(a.rank) for a in accounts),
        bound_s=bound.seconds if bound else None,
        layers=stage_layers(plan, costs) if timed else (),
        capacities_bytes=tuple(map(costs.machine.capacity, range(plan.num_ranks))),
    )


def table(comparison: Comparison) -> str:
    """Returns the comparison as lines of text, one per entry."""
    timed = comparison._timed

    def time(value: float) -> str:
        return seconds(value) if timed else f"{value:.4g}"

    names = (
        "", "step", "speed", "bubbles", "imbalance", "fill, drain", "computation", "transfers",
        "peak", "above bound",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = [names]
    for e in comparison.entries:
        peak = nbytes(e.peak_bytes) if e.peak_bytes else f"{e.peak_microbatches} live"
        rows.append(
            (
                e.name,
                time(e.timeline.makespan_s),
                f"{e.speedup:.3f}x",
                f"{e.timeline.bubble_ratio:.1%}",
                time(e.imbalance_s),
                time(e.fill_drain_s),
                time(e.computation_wait_s),
                time(e.transfer_wait_s),
                peak if e.fits else f"{peak}, too much",
                "-" if e.gap is None else f"{max(0.0, e.gap):.1%}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(names))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(x.rjust(w) for x, w in _rest(row, widths))]).rstrip()
        for row in rows
    ]
    sizes = {(e.plan.num_ranks, e.plan.num_microbatches) for e in comparison.entries}
    each = "; ".join(f"{ranks} ranks, {count} microbatches" for ranks, count in sorted(sizes))
    unit = "" if timed else ", in units"
    return "\n".join([f"{comparison.source}{unit}: {each}", *lines])


def _rest(row: tuple[str, ...], widths: list[int]) -> list[tuple[str, int]]:
    return list(zip(row[1:], widths[1:], strict=True))
