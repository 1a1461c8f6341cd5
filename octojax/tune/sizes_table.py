"""The table of what was weighed when devices were divided among axes."""

import math
from dataclasses import dataclass
from typing import Any

from octojax.ir.profile import Profile
from octojax.tune.mesh_costs import MeshSizes
from octojax.tune.result import TuneResult

MOST_ROWS = 16


@dataclass(frozen=True)
class Weighed:
    """One way to divide the devices. `bound_s` is proven for the pipeline part of its step,
    `makespan_s` that part as simulated, `step_s` with the data axis's collectives; `peak_bytes`
    are those of the fullest device. Without a plan, `note` says why."""

    sizes: MeshSizes
    microbatches: int
    bound_s: float
    step_s: float | None = None
    makespan_s: float | None = None
    peak_bytes: float | None = None
    recomputed_stages: int = 0
    num_stages: int = 0
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        sizes = self.sizes
        return {
            "pipeline": sizes.pipeline,
            "tensor": sizes.tensor,
            "data": sizes.data,
            "microbatch_size": sizes.samples,
            "microbatches": self.microbatches,
            "zero": sizes.zero,
            "bound_s": self.bound_s if math.isfinite(self.bound_s) else None,
            "step_s": self.step_s,
            "makespan_s": self.makespan_s,
            "peak_bytes": self.peak_bytes,
            "recomputed_stages": self.recomputed_stages,
            "stages": self.num_stages,
            "note": self.note,
        }


@dataclass(frozen=True)
class DevicesResult:
    """The best sizes with their plan, the profile of such ranks, and all that was weighed, the
    quickest first. Times are simulated."""

    profile_name: str
    devices: int
    global_batch: int
    rows: tuple[Weighed, ...]
    best: Weighed
    result: TuneResult
    profile: Profile

    def to_json(self) -> dict[str, Any]:
        """The shape that `octopipe tune --devices --json` prints."""
        return {
            "profile": self.profile_name,
            "devices": self.devices,
            "global_batch": self.global_batch,
            "best": self.best.to_json(),
            "weighed": [row.to_json() for row in self.rows],
            "plan": self.result.plan.to_json(),
            "lower_bound_s": self.result.lower_bound_s,
            "peak_bytes": list(self.result.peak_bytes),
        }

    def __str__(self) -> str:
        best = self.best.sizes
        lines = [
            f"{self.profile_name}: {self.devices} devices, {self.global_batch} samples a step "
            f"(simulated)",
            f"{'pipe':>5s}{'tensor':>7s}{'data':>5s}{'zero':>5s}{'samples':>8s}{'microb.':>8s}"
            f"{'ms/sample':>11s}{'bound':>9s}{'GiB':>8s}{'stages':>7s}{'again':>6s}  note",
        ]
        lines += [self._line(row) for row in self.rows[:MOST_ROWS]]
        if len(self.rows) > MOST_ROWS:
            lines.append(f"... and {len(self.rows) - MOST_ROWS} more (--json has all)")
        shape = f"({best.pipeline}, {best.data}, {best.tensor})"
        lines.append(
            f'best: jax.make_mesh({shape}, ("pipe", "data", "tensor")), '
            f"microbatches={self.best.microbatches}"
        )
        return "\n".join(lines)

    def _line(self, row: Weighed) -> str:
        s = row.sizes
        per_sample = [
            "-" if t is None or not math.isfinite(t) else f"{t * 1e3 / self.global_batch:.4g}"
            for t in (row.step_s, row.bound_s)
        ]
        gib = "-" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.2f}"
        return (
            f"{s.pipeline:5d}{s.tensor:7d}{s.data:5d}{s.zero:5d}{s.samples:8d}"
            f"{row.microbatches:8d}{per_sample[0]:>11s}{per_sample[1]:>9s}{gib:>8s}"
            f"{row.num_stages or '-':>7}{row.recomputed_stages or '-':>6}  {row.note}"
        ).rstrip()
