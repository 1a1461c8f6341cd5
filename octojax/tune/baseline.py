"""A published way as it was measured, and the table that people read."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from octojax.ir.plan import Plan
from octojax.ir.shown import short

BASES = ("fused", "split", "fill")
"""fused: B computes both gradients. split: W right after I (or as the published table has it).
fill: W where its rank would wait, memory not looked at."""


@dataclass(frozen=True)
class Baseline:
    """A published way on one base. `own`: the published table as it is. `plan` is None where its
    rule or memory allows none, and `refusal` says why. Seconds and bytes are simulated;
    `peak_bytes` has an entry per rank.
    """

    name: str
    base: str
    own: bool
    plan: Plan | None = None
    makespan_s: float | None = None
    peak_bytes: tuple[float, ...] = ()
    fits: bool = False
    refusal: str = ""

    @property
    def key(self) -> str:
        """Its name in `TuneResult.baselines`: `1f1b` (fused), `1f1b-split`, `1f1b-fill`; a way
        whose own table splits the backward has its name alone.
        """
        return self.name if self.own else f"{self.name}-{self.base}"

    def to_json(self) -> dict[str, Any]:
        """Returns name, base, figures, partition, placement and recompute; not the table."""
        plan = self.plan
        return {
            "name": self.name,
            "base": self.base,
            "makespan_s": self.makespan_s,
            "fits": self.fits,
            "peak_bytes": [*self.peak_bytes],
            "partition": None if plan is None else [*plan.partition.sizes],
            "placement": None if plan is None else [[*ranks] for ranks in plan.placement.stages],
            "recompute": None if plan is None else [*plan.recomputes],
            "refusal": self.refusal,
        }


def table_of(rows: Iterable[Baseline], makespan_s: float | None = None) -> list[str]:
    """Returns lines of text, a row per base; how many times quicker a plan of `makespan_s` is."""
    head = f"  {'published way':<14} {'base':<6} {'ms':>10} {'':>8} {'peak GiB':>9}  partition"
    lines = [head]
    for row in rows:
        if row.plan is None or row.makespan_s is None:
            lines.append(f"  {row.name:<14} {row.base:<6} {'-':>10} {'':>8} {'':>9}  {row.refusal}")
            continue
        speedup = "" if makespan_s is None else f"{row.makespan_s / makespan_s:.3f}x"
        peak = f"{max(row.peak_bytes) / 2**30:.2f}"
        note = "" if row.fits else "  does not fit"
        again = "".join("x" if again else "." for again in row.plan.recompute)
        note += f"  recompute {again}" if again else ""
        sizes = short(str(row.plan.partition))
        lines.append(
            f"  {row.name:<14} {row.base:<6} {row.makespan_s * 1e3:10.3f} {speedup:>8} "
            f"{peak:>9}  {sizes}{note}"
        )
    return lines
