"""DynaPipe's cyclic schedule: adaptive, for any placement, within a limit of what is in flight."""

import math
from collections.abc import Sequence
from itertools import zip_longest

from octojax.ir.action import Action
from octojax.ir.placement import Placement
from octojax.ir.schedule import Schedule
from octojax.schedules.family import Family, Option
from octojax.schedules.options import limits as at_most
from octojax.schedules.options import per_rank, ranks_of_stages, seconds
from octojax.schedules.row_shapes import backward, forward, schedule
from octojax.schedules.user_placement import on_ranks


def dynapipe(
    ranks: int,
    microbatches: int,
    chunks: int,
    *,
    placement: Placement | None,
    memory: tuple[int, ...] | None,
    activations: tuple[float, ...] | None,
) -> Schedule:
    """Returns the order of the cyclic scheduler: a cycle moves every stage by one B and one F.

    In each cycle a rank takes, of each of its stages, the next backward and the next forward
    that were ready when the cycle began, backwards first in turn with forwards, oldest
    microbatch first. A forward that would hold more than `memory` on its rank is left for a
    later cycle. `activations[i]` is what microbatch i holds per stage (1 each), for
    microbatches of different lengths. Raises `ValueError` if the limit stops all ranks.
    """
    held_by = on_ranks(placement or Placement.loop(ranks, chunks), ranks, "dynapipe")
    weights = _weights(activations, microbatches)
    limits = per_rank(memory, ranks, "memory") if memory else (math.inf,) * ranks
    stages = held_by.num_stages
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    used = [0.0] * ranks
    forwards, backwards = [0] * stages, [0] * stages  # done per stage
    while min(backwards) < microbatches:
        had_forwards, had_backwards = tuple(forwards), tuple(backwards)
        moved = False
        for rank, stages_here in enumerate(held_by.ranks):
            back = [
                s
                for s in stages_here
                if had_backwards[s] < (had_backwards[s + 1] if s + 1 < stages else had_forwards[s])
            ]
            ready = [
                s
                for s in stages_here
                if had_forwards[s] < (had_forwards[s - 1] if s else microbatches)
            ]
            back.sort(key=lambda s: (had_backwards[s], -s))
            ready.sort(key=lambda s: (had_forwards[s], -s))
            ahead = []
            room = used[rank] - sum(weights[had_backwards[s]] for s in back)
            for s in ready:
                if room + weights[had_forwards[s]] <= limits[rank]:
                    ahead.append(s)
                    room += weights[had_forwards[s]]
            used[rank] = room
            for b, f in zip_longest(back, ahead):
                if b is not None:
                    rows[rank].append(backward(b, backwards[b]))
                    backwards[b] += 1
                if f is not None:
                    rows[rank].append(forward(f, forwards[f]))
                    forwards[f] += 1
            moved = moved or bool(back or ahead)
        if not moved:
            raise ValueError(_stuck(held_by, limits, used, forwards))
    return schedule(rows)


def _weights(activations: tuple[float, ...] | None, microbatches: int) -> tuple[float, ...]:
    weights = activations or (1.0,)
    if len(weights) == 1:
        return weights * microbatches
    if len(weights) != microbatches:
        raise ValueError(
            f"dynapipe: activations has {len(weights)} numbers for {microbatches} microbatches; "
            f"give one, or one per microbatch"
        )
    return weights


def _stuck(
    placement: Placement, limits: Sequence[float], used: list[float], forwards: list[int]
) -> str:
    rank = min(range(len(used)), key=lambda r: limits[r] - used[r])
    return (
        f"dynapipe: no rank can go on with at most {limits[rank]:g} activations in flight on rank "
        f"{rank}: it holds {used[rank]:g} after the forwards {forwards} per stage. "
        f"A rank needs room for at least one microbatch on each of its "
        f"{len(placement.ranks[rank])} stages; raise memory"
    )


FAMILIES = (
    Family(
        name="dynapipe",
        summary="cyclic and adaptive: any placement, any memory limit, microbatches of any length",
        source="Jiang et al., DynaPipe, EuroSys 2024, arXiv:2311.10418, section 5",
        layout=dynapipe,
        constraints="any number of microbatches; memory must hold one microbatch on every stage",
        bubble="as 1F1B, more under a memory limit",
        peak="memory, or 2(p-r)-1",
        chunk_range=(1, None),
        placement="given",
        options=(
            Option("placement", None, "rank of each stage, such as 0,1,0", ranks_of_stages),
            Option("memory", None, "most activations in flight, one or one per rank", at_most),
            Option("activations", None, "what each microbatch holds, one number each", seconds),
        ),
    ),
)
