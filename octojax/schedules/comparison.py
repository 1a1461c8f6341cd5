"""Bubbles and peaks of named schedules side by side, by simulation at F=I=W=1, B=2."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from octojax.ir.action import Kind
from octojax.ir.schedule import Schedule
from octojax.schedules.registry import family
from octojax.simulate import StageCosts, simulate


@dataclass(frozen=True)
class Comparison:
    """One schedule at one size. Time is in F of a whole rank's layers, whatever the chunks.

    `bubble_ratio` is idle over all time; `inner_bubble` the most that a rank idles between its
    first and last action. Peaks are of the busiest rank, in activations of one microbatch on a
    whole rank: freed when the input gradient is done, or only after the weight gradient.
    `refused` says why there are no numbers.
    """

    name: str
    ranks: int
    microbatches: int
    makespan: float = 0.0
    bubble_ratio: float = 0.0
    inner_bubble: float = 0.0
    peak_until_input_grad: float = 0.0
    peak_until_weight_grad: float = 0.0
    refused: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    names: Iterable[str], ranks: int, microbatches: Iterable[int]
) -> tuple[Comparison, ...]:
    """Returns a row per name and number of microbatches; a size that a rule forbids says so."""
    sizes = tuple(microbatches)
    return tuple(_one(name, ranks, m) for name in names for m in sizes)


def _one(name: str, ranks: int, microbatches: int) -> Comparison:
    record = family(name)
    try:
        schedule = record.generate(ranks, microbatches)
    except ValueError as error:
        return Comparison(name, ranks, microbatches, refused=str(error))
    stages = schedule.num_stages
    # A bidirectional schedule has p stages, each run by two ranks for half the microbatches.
    share = ranks / stages
    costs = StageCosts.unit(stages, share, share, share, 2 * share)
    timeline = simulate(schedule, costs)
    return Comparison(
        name,
        ranks,
        microbatches,
        timeline.makespan_s,
        timeline.bubble_ratio,
        max(rank.residual_bubble_s for rank in timeline.ranks),
        share * max(peaks(schedule, Kind.INPUT_GRAD)),
        share * max(peaks(schedule, Kind.WEIGHT_GRAD)),
    )


def peaks(schedule: Schedule, freed_at: Kind) -> tuple[int, ...]:
    """Returns the most live (stage, microbatch) activations per rank, freed at B or `freed_at`."""
    live, most = [0] * schedule.num_ranks, [0] * schedule.num_ranks
    for rank, _, action in schedule.actions():
        if action.kind is Kind.FORWARD:
            live[rank] += 1
            most[rank] = max(most[rank], live[rank])
        elif action.kind in (Kind.BACKWARD, freed_at):
            live[rank] -= 1
    return tuple(most)


def table(rows: Iterable[Comparison]) -> str:
    """Returns the comparison as text: one line per schedule, three columns per size."""
    rows = tuple(rows)
    sizes = tuple(dict.fromkeys(row.microbatches for row in rows))
    by_name: dict[str, dict[int, Comparison]] = {}
    for row in rows:
        by_name.setdefault(row.name, {})[row.microbatches] = row
    head = f"{'':13}" + "".join(f"  | {f'm = {m}':<20}" for m in sizes)
    columns = f"{'schedule':13}" + "  |  bubble  at I  at W " * len(sizes)
    lines = [head, columns, "-" * len(head)]
    lines += [
        f"{name:13}" + "".join(f"  | {_cells(entry[m]):<20}" for m in sizes)
        for name, entry in by_name.items()
    ]
    notes = dict.fromkeys(row.refused for row in rows if row.refused)
    legend = (
        "bubble: idle share of all time, F=I=W=1, B=2; at I, at W: peak activations of a "
        "microbatch on the busiest rank, freed after the input or the weight gradient"
    )
    return "\n".join([*lines, legend, *(f"refused: {note}" for note in notes)])


def _cells(row: Comparison) -> str:
    if row.refused:
        return "refused"
    return f"{row.bubble_ratio:6.3f} {row.peak_until_input_grad:5g} {row.peak_until_weight_grad:5g}"
