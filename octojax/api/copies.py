"""What the ranks hold more than once, and whether that is worth a warning."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octojax.stages.program import Role, Stage

MUCH = 1.2
"""So many times the model's bytes, over all ranks, are clearly more than the model."""
SMALL_BYTES = 64 * 1024
"""Copies of fewer bytes together (norms, a bias, a tied table of a small model) are no matter."""
MOST_NAMES = 8


@dataclass(frozen=True)
class Copy:
    """A parameter that several ranks hold. `further` counts the copies that the schedule did not
    ask for by holding a stage twice."""

    name: str
    ranks: tuple[int, ...]
    bytes_each: int
    further: int


def find_copies(
    names: Sequence[str],
    unit_bytes: Sequence[int],
    holders: Sequence[Sequence[int]],
    stages: Sequence[Stage],
    ranks_of_stage: Sequence[Sequence[int]],
) -> tuple[Copy, ...]:
    """Returns the units that more ranks hold than hold any one stage that reads them, largest
    first. The first three arguments go by unit, the last by stage."""
    replicas = _replicas(stages, ranks_of_stage)
    copies = [
        Copy(names[u], tuple(ranks), unit_bytes[u], len(ranks) - replicas.get(u, 1))
        for u, ranks in enumerate(holders)
        if len(ranks) > replicas.get(u, 1)
    ]
    return tuple(sorted(copies, key=lambda c: -c.further * c.bytes_each))


def _replicas(
    stages: Sequence[Stage], ranks_of_stage: Sequence[Sequence[int]]
) -> Mapping[int, int]:
    """Returns how many ranks hold each unit on purpose: those that hold one stage of it."""
    counts: dict[int, int] = {}
    for stage in stages:
        for program in (stage.forward, stage.backward, stage.input_grad, stage.weight_grad):
            for ref in program.reads if program is not None else ():
                if ref.role is Role.PARAM:
                    count = len(ranks_of_stage[stage.index])
                    counts[ref.index] = max(counts.get(ref.index, 1), count)
    return counts


def warn_of_copies(copies: Sequence[Copy], model_bytes: int, stacklevel: int = 2) -> None:
    """Warns if the copies make the ranks together hold clearly more than the model."""
    further = sum(c.further * c.bytes_each for c in copies)
    if further <= max(SMALL_BYTES, (MUCH - 1) * model_bytes):
        return
    listed = ", ".join(
        f"{c.name} ({_size(c.bytes_each)} on ranks {', '.join(map(str, c.ranks))})"
        for c in copies[:MOST_NAMES]
    )
    more = f" and {len(copies) - MOST_NAMES} more" if len(copies) > MOST_NAMES else ""
    warnings.warn(
        f"the ranks together hold {_size(further)} of copies beside a model of "
        f"{_size(model_bytes)}: {listed}{more}. Every rank holds what its stages read, with a "
        f"gradient for it, and the copies are refreshed after each step. Weights that the model "
        f"reads at its start and at its end are held by two ranks; a placement that puts those "
        f"stages on one rank (schedule='zb-v', or placement=) saves the copy. A model "
        f"called on its own output reads all its weights again: call it on inputs of the batch "
        f"side by side, or use fewer ranks. A penalty over many weights belongs into the "
        f"optimizer (optax.add_decayed_weights). step.report shows the bytes of each rank",
        stacklevel=stacklevel + 1,
    )


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"
