"""Why no plan fits, in numbers."""

import numpy as np

from octojax.tune.problem import Problem

GIB = 2**30


def least_bytes(problem: Problem, recompute: bool) -> np.ndarray:
    """Returns what each layer needs at least on its rank: its state, and one microbatch."""
    p = problem
    kept = np.maximum(p.residual_bytes, p.weight_residual_bytes)
    if recompute:
        return p.state_bytes + kept
    return p.state_bytes + kept


def explain_lack(problem: Problem) -> str:
    """Returns a message that says which rank lacks how much, and what would help."""
    p = problem
    need = spread(p)
    lines = [
        f"no plan of {p.profile.name!r} on {p.ranks} ranks was found that fits into memory. "
        f"Spread as evenly as whole layers allow, one microbatch at a time:"
    ]
    lacking = False
    for rank, (wanted, capacity) in enumerate(zip(need, p.capacity_bytes, strict=True)):
        short = wanted - capacity
        lacking |= short > 0
        says = f"lacks {short / GIB:.3f} GiB" if short > 0 else "has room"
        lines.append(
            f"  rank {rank} needs {wanted / GIB:.3f} GiB, has {capacity / GIB:.3f} GiB: {says}"
        )
    if not lacking:
        lines.append("  (each rank alone could hold its share, but not with microbatches in turn)")
    state = float(p.state_bytes.sum())
    enough = int(np.ceil(need.sum() / p.capacity_bytes.mean()))
    lines.append(
        f"What would help: recompute (already tried), at least {max(enough, p.ranks + 1)} ranks, "
        f"smaller microbatches, or sharding the {state / GIB:.3f} GiB of optimizer state"
    )
    return "\n".join(lines)


def spread(problem: Problem) -> np.ndarray:
    """Returns the bytes per rank when layers are dealt largest first to the emptiest rank."""
    p = problem
    size = least_bytes(problem, recompute=True)
    need = np.zeros(p.ranks)
    for layer in np.argsort(-size, kind="stable"):
        need[int(np.argmax(p.capacity_bytes - need))] += size[layer]
    return need
