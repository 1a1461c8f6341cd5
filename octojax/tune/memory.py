"""Starting points that need little memory, and why no plan fits, in numbers."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from octojax.tune.candidate import LATE_S, Candidate
from octojax.tune.problem import Problem

RECOMPUTED = {False: "all recomputed", True: "nothing recomputed"}
TRIED = {
    "auto": "recompute was tried",
    "all": "all is recomputed already",
    "none": "recompute is off",
}


def memory_may_bind(problem: Problem) -> bool:
    """Whether keeping everything of all microbatches could exceed some rank's capacity."""
    p = problem
    most = np.maximum(p.residual_bytes, p.weight_residual_bytes).sum() * p.microbatches
    share = (most + p.state_bytes.sum()) / p.ranks
    return bool(1.5 * share > p.capacity_bytes.min())


def frugal(candidate: Candidate) -> Iterator[Candidate]:
    """Yields forms of a candidate that hold less: W right after I; stages recomputed; and both
    in stages of one layer, whose residuals are rebuilt one layer at a time.
    """
    early = candidate.key_LKM.copy()
    early[:, 2] = -LATE_S
    none = np.zeros(len(candidate.rank_L), np.bool_)
    yield replace(candidate, key_LKM=early)
    yield replace(candidate, key_LKM=early, recompute_L=~none)
    yield replace(candidate, key_LKM=early, recompute_L=~none, cut_L=~none)
    yield replace(candidate, key_LKM=early, recompute_L=~none, fused_L=~none, cut_L=~none)


def spread(problem: Problem) -> np.ndarray:
    """Returns the bytes per rank when layers are dealt largest first to the emptiest rank, one
    microbatch at a time and everything recomputed: state, and the residuals of one layer (of all
    its layers, where nothing may be recomputed).
    """
    p = problem
    state, running = np.zeros(p.ranks), np.zeros(p.ranks)
    kept = np.maximum(p.residual_bytes, p.weight_residual_bytes)
    for layer in np.argsort(-(p.state_bytes + kept), kind="stable"):
        rank = int(np.argmax(p.capacity_bytes - state - running))
        state[rank] += p.state_bytes[layer]
        if p.recompute.mode == "none":
            running[rank] += kept[layer]
        else:
            running[rank] = max(running[rank], kept[layer])
    return state + running


def explain_lack(problem: Problem) -> str:
    """Returns a message that says which rank lacks how much, and what would help."""
    p = problem
    need = spread(p)
    lines = [
        f"no plan of {p.profile.name!r} on {p.ranks} ranks was found that fits into memory. "
        f"Spread as evenly as whole layers allow, one microbatch at a time, "
        f"{RECOMPUTED[p.recompute.mode == 'none']}:"
    ]
    for rank, (wanted, capacity) in enumerate(zip(need, p.capacity_bytes, strict=True)):
        short = wanted - capacity
        says = f"lacks {size(short)}" if short > 0 else f"{size(-short)} are left"
        lines.append(f"  rank {rank} needs {size(wanted)}, has {size(capacity)}: {says}")
    if (need <= p.capacity_bytes).all():
        lines.append("  so the state fits, but what microbatches in flight keep does not")
    enough = max(int(np.ceil(need.sum() / p.capacity_bytes.mean())), p.ranks + 1)
    lines.append(
        f"What would help: {enough} ranks or more, smaller microbatches, tensor parallelism, or "
        f"sharding the {size(float(p.state_bytes.sum()))} of weights, gradients and optimizer "
        f"state ({TRIED.get(p.recompute.mode, f'recompute was asked for of stages {p.recompute}')})"
    )
    if p.recompute.mode == "none":
        lines.append(
            "Nothing may be recomputed: with --recompute auto (recompute='auto') stages rebuild "
            "their residuals where memory needs it"
        )
    return "\n".join(lines)


def size(nbytes: float) -> str:
    """Returns a number of bytes for people."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3f} {name}"
    return f"{nbytes:.0f} bytes"
