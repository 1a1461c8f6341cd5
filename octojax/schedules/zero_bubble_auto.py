"""Zero bubble found by search: given costs, transfer latency and a memory limit per rank."""

from collections.abc import Iterable, Iterator

from octojax.ir.action import Action
from octojax.ir.placement import Placement
from octojax.ir.schedule import Schedule
from octojax.schedules.family import Family, Option
from octojax.schedules.list_scheduler import ChainCosts, Layout, Policy, list_schedule, outcome_of
from octojax.schedules.options import amount, limits, per_rank, per_stage, seconds
from octojax.schedules.row_shapes import schedule
from octojax.schedules.zero_bubble_v import handcrafted

COSTS = (
    Option("forward", (1.0,), "cost of F, one number or one per stage", seconds),
    Option("input_grad", (1.0,), "cost of I, one number or one per stage", seconds),
    Option("weight_grad", (1.0,), "cost of W, one number or one per stage", seconds),
    Option("comm", 0.0, "latency of a transfer between ranks", amount),
)

Rows = list[list[Action]]


def zb_auto(
    ranks: int,
    microbatches: int,
    chunks: int,
    *,
    forward: tuple[float, ...],
    input_grad: tuple[float, ...],
    weight_grad: tuple[float, ...],
    comm: float,
    memory: tuple[int, ...] | None,
) -> Schedule:
    """Returns the fastest order found under these costs within `memory` microbatches per rank.

    Rows are laid out by list scheduling under several limits of what is in flight, each with
    forwards or gradients first and with W filling every gap or only gaps it fits into. The
    least makespan wins, then the shortest span of a rank (which is what chained steps pay).
    """
    placement = Placement.sequential(ranks)
    costs = ChainCosts(
        placement,
        microbatches,
        per_stage(forward, ranks, "forward"),
        per_stage(input_grad, ranks, "input_grad"),
        per_stage(weight_grad, ranks, "weight_grad"),
        comm,
        per_rank(memory or (ranks,), ranks, "memory"),
    )
    return schedule(_fastest(costs, _laid_out(costs, _sequential_limits(costs)), "zb-auto"))


def zb_v(
    ranks: int,
    microbatches: int,
    chunks: int,
    *,
    forward: tuple[float, ...],
    input_grad: tuple[float, ...],
    weight_grad: tuple[float, ...],
    comm: float,
    memory: tuple[int, ...] | None,
) -> Schedule:
    """Returns ZB-V's handcrafted order, or under unequal costs the fastest one found.

    `memory` counts (stage, microbatch) activations per rank; the default 2p is what the
    handcrafted order needs, and what 1F1B holds.
    """
    stages = 2 * ranks
    costs = ChainCosts(
        Placement.wave(ranks),
        microbatches,
        per_stage(forward, stages, "forward"),
        per_stage(input_grad, stages, "input_grad"),
        per_stage(weight_grad, stages, "weight_grad"),
        comm,
        per_rank(memory or (stages,), ranks, "memory"),
    )
    plain = handcrafted(ranks, microbatches)
    uniform = len({*forward, *input_grad, *weight_grad}) == 1 and comm == 0
    if uniform and memory is None:
        return plain
    rows = [[a for a in row if isinstance(a, Action)] for row in plain.ranks]
    fixed = [Layout(rows, outcome_of(costs, plain))]
    return schedule(_fastest(costs, [*fixed, *_laid_out(costs, _wave_limits(costs))], "zb-v"))


def _sequential_limits(costs: ChainCosts) -> Iterator[tuple[int, ...]]:
    """Yields limits of forwards in flight per stage, from ZB-H1's p-r to all that fits."""
    ranks = costs.num_ranks
    seen = set()
    for slope in (1.0, 2.0, float(costs.microbatches), *(() if _large(costs) else (1.5, 3.0))):
        limits = tuple(
            max(1, min(costs.memory[r], int(slope * (ranks - 1 - r)) + 1)) for r in range(ranks)
        )
        if limits not in seen:
            seen.add(limits)
            yield limits
    if costs.memory not in seen:
        yield costs.memory


def _wave_limits(costs: ChainCosts) -> Iterator[tuple[int, ...]]:
    """Yields limits per stage of a V: how far the first chunk runs ahead; the second is free."""
    ranks = costs.num_ranks
    for ahead in sorted({1, 2, max(1, ranks // 2), ranks, 2 * ranks - 1, 2 * ranks}):
        down = [max(1, min(ahead, 2 * ranks - 1 - r)) for r in range(ranks)]
        yield (*down, *(costs.microbatches,) * ranks)


def _laid_out(costs: ChainCosts, limits: Iterator[tuple[int, ...]]) -> Iterator[Layout]:
    for in_flight in limits:
        for order in ("IFW",) if _large(costs) else ("IFW", "FIW"):
            for patient in (True, False):
                layout = list_schedule(costs, Policy(in_flight, order, patient))
                if layout is not None:
                    yield layout


def _large(costs: ChainCosts) -> bool:
    """Whether a single layout takes so long (a tenth of a second) that fewer are tried."""
    return 3 * costs.num_stages * costs.microbatches > 1500


def _fastest(costs: ChainCosts, layouts: Iterable[Layout], name: str) -> Rows:
    best: Layout | None = None
    least: tuple[int, ...] | None = None
    for layout in layouts:
        outcome = layout.outcome
        if any(p > limit for p, limit in zip(outcome.peaks, costs.memory, strict=True)):
            if least is None or sum(outcome.peaks) < sum(least):
                least = outcome.peaks
            continue
        if best is None or outcome.key < best.outcome.key:
            best = layout
    if best is None:
        raise ValueError(
            f"{name}: found no order of {costs.microbatches} microbatches on {costs.num_ranks} "
            f"ranks that holds at most {list(costs.memory)} activations per rank; the leanest "
            f"complete one holds {list(least) if least else 'more'}. Raise memory"
        )
    return best.rows


FAMILIES = (
    Family(
        name="zb-auto",
        summary="zero bubble by search, under given costs, latency and memory limit",
        source="Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv:2401.10241, "
        "section 3 (own search: list scheduling)",
        layout=zb_auto,
        constraints="any number of microbatches; memory >= 1",
        bubble="(p-1)(F+I-W) at memory p, 0 inside every rank at 2p-1 (F=I=W)",
        peak="memory",
        splits_backward=True,
        options=(
            *COSTS,
            Option("memory", None, "microbatches held until W, one or one per rank; p", limits),
        ),
    ),
    Family(
        name="zb-v",
        least_order=lambda ranks: 2 * ranks - 1,
        summary="zero bubble in 1F1B's memory, on two chunks placed as a V",
        source="Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv:2401.10241, "
        "section 6; order as PyTorch's ScheduleZBVZeroBubble",
        layout=zb_v,
        constraints="any number of microbatches (zero bubble needs m >= 2p-1)",
        bubble="0 inside every rank, T = 6m+p-1 (chunks, m >= 2p-1, F=I=W)",
        peak="p (2p chunks)",
        chunks=2,
        chunk_range=(2, 2),
        placement="wave",
        splits_backward=True,
        options=(
            *COSTS,
            Option("memory", None, "chunks held until W, one or one per rank; 2p", limits),
        ),
    ),
)
