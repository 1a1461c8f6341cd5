"""Interleaved 1F1B, with the backward whole or split, and its breadth-first relative."""

from collections.abc import Sequence
from typing import Any

from octojax.ir.schedule import Schedule
from octojax.schedules.family import Family, Option
from octojax.schedules.options import flag, whole
from octojax.schedules.row_shapes import (
    backward,
    forward,
    schedule,
    warm_steady_cool,
    with_deferred_weights,
)

RULE = (
    "m splits evenly into max(1, m // p) rounds (PyTorch), or group_size g is given with "
    "p <= g <= m and m % g == 0 or m % g >= p (Megatron)"
)


def default_group(ranks: int, microbatches: int) -> int | None:
    """Returns PyTorch's group size, m over max(1, m // p) rounds, or None if that is uneven."""
    rounds = max(1, microbatches // ranks)
    return None if microbatches % rounds else microbatches // rounds


def group_allowed(
    ranks: int, microbatches: int, chunks: int, *, group_size: int | None = None, **_: Any
) -> bool:
    if group_size is None:
        return default_group(ranks, microbatches) is not None
    if group_size == default_group(ranks, microbatches):
        return True
    rest = microbatches % group_size
    return ranks <= group_size <= microbatches and (rest == 0 or rest >= ranks)


def visiting_order(microbatches: int, chunks: int, group: int) -> list[tuple[int, int]]:
    """Returns `(chunk, microbatch)` in the order of forwards: group by group, chunk by chunk.

    m=4, 2 chunks, groups of 2: F of chunk 0 for 0 1, chunk 1 for 0 1, chunk 0 for 2 3, ...
    """
    return [
        (chunk, microbatch)
        for start in range(0, microbatches, group)
        for chunk in range(chunks)
        for microbatch in range(start, min(start + group, microbatches))
    ]


def looped_row(
    ranks: int, rank: int, microbatches: int, chunks: int, group: int, warmup: int
) -> list[Any]:
    order: Sequence[tuple[int, int]] = visiting_order(microbatches, chunks, group)
    return warm_steady_cool(
        [forward(chunk * ranks + rank, i) for chunk, i in order],
        [backward((chunks - 1 - chunk) * ranks + rank, i) for chunk, i in order],
        warmup,
    )


def interleaved(
    ranks: int, microbatches: int, chunks: int, *, group_size: int | None, moe_overlap: bool
) -> Schedule:
    """Returns Megatron's order: stage s on rank s mod p, warm-up of 2(p-1-r) + (v-1)g forwards.

    `moe_overlap` warms up one forward more, so that each pair can hide an all-to-all.
    """
    group = group_size or default_group(ranks, microbatches) or ranks
    extra = (chunks - 1) * group + moe_overlap
    return schedule(
        looped_row(ranks, r, microbatches, chunks, group, 2 * (ranks - 1 - r) + extra)
        for r in range(ranks)
    )


def zero_bubble_h1(
    ranks: int, microbatches: int, chunks: int, *, group_size: int | None
) -> Schedule:
    """Returns (interleaved) 1F1B with a warm-up of p-1-r + (v-1)g, and W(j) after I(j+r).

    rank 0   F0 F1 .. I0 W0 F2 I1 W1 .. I2 W2
    rank 1   .. F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    group = group_size or default_group(ranks, microbatches) or ranks
    extra = (chunks - 1) * group
    return schedule(
        with_deferred_weights(
            looped_row(ranks, r, microbatches, chunks, group, ranks - 1 - r + extra), delay=r
        )
        for r in range(ranks)
    )


def zero_bubble_allowed(
    ranks: int, microbatches: int, chunks: int, *, group_size: int | None = None
) -> bool:
    if chunks == 1:
        return group_size is None
    return group_allowed(ranks, microbatches, chunks, group_size=group_size)


def looped_bfs(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Returns all F chunk by chunk, then all B chunk by chunk, microbatches newest first."""
    order = [(chunk, i) for chunk in range(chunks) for i in range(microbatches)]
    return schedule(
        [
            *(forward(chunk * ranks + r, i) for chunk, i in order),
            *(backward(chunk * ranks + r, i) for chunk, i in reversed(order)),
        ]
        for r in range(ranks)
    )


GROUP = Option(
    "group_size",
    None,
    "microbatches that a chunk runs before the next chunk takes over; default m // max(1, m // p)",
    whole(),
)

FAMILIES = (
    Family(
        name="interleaved",
        summary="1F1B over several chunks per rank: a v-th of the bubble, v times the transfers",
        source="Narayanan et al., Megatron-LM, SC 2021, arXiv:2104.04473",
        layout=interleaved,
        constraints=f"v >= 2; {RULE}",
        bubble="(p-1)(F+B)/v",
        peak="((v-1)g + 2(p-1-r) + 1)/v",
        chunks=2,
        chunk_range=(2, None),
        placement="loop",
        options=(
            GROUP,
            Option("moe_overlap", False, "warm up one forward more (Megatron's MoE)", flag),
        ),
        allows=group_allowed,
    ),
    Family(
        name="looped-bfs",
        summary="breadth-first: every microbatch through a chunk before the next chunk",
        source="Lamy-Poirier, Breadth-First Pipeline Parallelism, MLSys 2023, arXiv:2211.05953",
        layout=looped_bfs,
        constraints="v >= 2",
        bubble="(p-1)(F+B)/v if m >= p",
        peak="m",
        chunks=2,
        chunk_range=(2, None),
        placement="loop",
    ),
    Family(
        name="zb-h1",
        summary="1F1B with the weight gradient split off to fill the drain, in 1F1B's memory",
        source="Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv:2401.10241; "
        "with v >= 2 PyTorch's InterleavedZeroBubble",
        layout=zero_bubble_h1,
        constraints=f"v = 1: any number of microbatches; v >= 2: {RULE}",
        bubble="(p-1)(F+I-W)",
        peak="p-r freed at I, min(p, m) freed at W (v = 1)",
        chunks=1,
        chunk_range=(1, None),
        placement="loop",
        splits_backward=True,
        options=(GROUP,),
        allows=zero_bubble_allowed,
        aliases=("zb1p",),
    ),
)
