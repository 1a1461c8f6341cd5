"""What a tuner hands back: the plan, what it takes, what it is compared with, how it was found."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from octojax.ir.plan import Plan
from octojax.ir.shown import duration, line
from octojax.tune.baseline import Baseline, table_of

COMPILATION = "compilation"
"""The phase of the first moment on a machine where the search has to be compiled, once."""


class Progress(NamedTuple):
    """One moment of a search: `phase` is what was worked on last, or `COMPILATION`."""

    seconds: float
    iteration: int
    phase: str
    makespan_s: float
    gap: float


@dataclass(frozen=True)
class TuneResult:
    """A plan and everything that was learned about it. All times in seconds, simulated.

    `lower_bound_s` is proven (`docs/lower_bound.md`), `gap` is `makespan_s / lower_bound_s - 1`.
    `baselines[name]` is the makespan of a published way on the same profile; those that do not
    fit into memory are left out. Those in `replicated` hold stages on two ranks, twice the
    parameters; no such plan beats `replicated_bound_s`. `history` holds `(seconds, iteration,
    phase, makespan_s)` of every improvement, `iterations` how often each phase was worked on.
    `ways` are the published ways that were asked for by name, each on its bases.
    """

    plan: Plan
    profile_name: str
    method: str
    makespan_s: float
    lower_bound_s: float
    bound_parts: dict[str, float]
    baselines: dict[str, float]
    iterations: dict[str, int]
    history: tuple[tuple[float, int, str, float], ...]
    evaluations: int
    seconds: float
    peak_bytes: tuple[float, ...]
    capacity_bytes: tuple[float, ...]
    stop: str
    seed: int = 0
    replicated: tuple[str, ...] = ()
    replicated_bound_s: float = 0.0
    recompute: str = "auto"
    ways: tuple[Baseline, ...] = ()

    def __repr__(self) -> str:
        return line("TuneResult", self.profile_name, (
            duration(self.makespan_s),
            f"within {self.gap:.2%} of the lower bound",
            f"method {self.method}",
            repr(self.plan),
        ))  # fmt: skip

    @property
    def gap(self) -> float:
        return self.makespan_s / self.lower_bound_s - 1

    @property
    def speedups(self) -> dict[str, float]:
        """How many times faster than each baseline."""
        return {name: s / self.makespan_s for name, s in self.baselines.items()}

    @property
    def speedup_over_1f1b(self) -> float | None:
        """Over split 1F1B, W right after I, uniform partition; None if that does not fit."""
        return self.speedups.get("1f1b-split")

    def to_json(self) -> dict[str, Any]:
        """The shape `octopipe tune --json` prints."""
        return {
            "profile": self.profile_name,
            "method": self.method,
            "seed": self.seed,
            "recompute": self.recompute,
            "makespan_s": self.makespan_s,
            "lower_bound_s": self.lower_bound_s,
            "gap": self.gap,
            "bound_parts": self.bound_parts,
            "baselines": self.baselines,
            "ways": [row.to_json() for row in self.ways],
            "speedups": self.speedups,
            "replicated_baselines": [*self.replicated],
            "replicated_lower_bound_s": self.replicated_bound_s,
            "speedup_over_1f1b": self.speedup_over_1f1b,
            "iterations": self.iterations,
            "evaluations": self.evaluations,
            "seconds": self.seconds,
            "peak_bytes": list(self.peak_bytes),
            "capacity_bytes": [c if c < float("inf") else None for c in self.capacity_bytes],
            "stop": self.stop,
            "history": [list(entry) for entry in self.history],
            "plan": self.plan.to_json(),
        }

    def __str__(self) -> str:
        plan = self.plan
        lines = [
            f"{self.profile_name}: {plan.num_ranks} ranks, {plan.num_microbatches} microbatches, "
            f"{plan.num_stages} stages, method {self.method} (simulated)",
            f"makespan     {self.makespan_s * 1e3:.3f} ms",
            f"lower bound  {self.lower_bound_s * 1e3:.3f} ms, gap {self.gap:.2%}",
        ]
        lines += table_of(self.ways, self.makespan_s) if self.ways else []
        for name, seconds in self.baselines.items() if not self.ways else ():
            mark = " *" if name in self.replicated else ""
            lines.append(
                f"  {name:<28s} {seconds * 1e3:12.3f} ms  {seconds / self.makespan_s:.3f}x{mark}"
            )
        if self.replicated:
            lines.append(
                f"  * holds stages on two ranks, with twice the parameters; the lower bound of "
                f"such plans is {self.replicated_bound_s * 1e3:.3f} ms"
            )
        peaks = " ".join(f"{b / 2**30:.2f}" for b in self.peak_bytes)
        lines.append(f"peak GiB     {peaks}")
        worked = ", ".join(f"{k} {v}" for k, v in self.iterations.items())
        lines.append(
            f"iterations   {worked}; {self.evaluations} evaluations in {self.seconds:.1f} s "
            f"(stopped: {self.stop})"
        )
        return "\n".join(lines)
