"""Whether a plan fits into the memory of every rank."""

from octojax.errors import CapacityError
from octojax.ir import Plan, Profile
from octojax.ir.verify import verify
from octojax.simulate.costs import StageCosts
from octojax.simulate.evaluation import evaluate
from octojax.simulate.links import Links
from octojax.simulate.table import Table

_GIB = 1 << 30


def check_capacity(plan: Plan, profile: Profile) -> None:
    """Returns nothing if every rank's peak is within its capacity, else raises `CapacityError`.

    The message names all ranks that lack memory, and how much each lacks.
    """
    verify(plan)
    costs = StageCosts.of(profile, plan.partition, plan.recompute)
    peaks = evaluate(Table.of(plan), costs, Links.of(profile.machine, plan.num_ranks)).peak_bytes
    lines = []
    for rank, peak in enumerate(peaks.tolist()):
        capacity = profile.machine.capacity(rank)
        if peak > capacity:
            static = sum(costs.state_bytes[s] for s in plan.placement.ranks[rank])
            lines.append(
                f"rank {rank} needs {peak / _GIB:.3f} GiB at its peak, {static / _GIB:.3f} of it "
                f"for weights, gradients and optimizer, and has {capacity / _GIB:.3f} GiB: "
                f"it lacks {peak - capacity:.0f} bytes"
            )
    if lines:
        raise CapacityError(
            "\n".join(
                [
                    *lines,
                    "Recompute stages on these ranks, run W earlier, use more ranks, "
                    "or smaller microbatches",
                ]
            )
        )
