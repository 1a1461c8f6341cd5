"""Clocks of ranks that disagree in a measured timeline: a value used before it was made."""

from dataclasses import dataclass

from octojax.ir import ActionSpan, Timeline
from octojax.ir.lowering import actions_of, makes
from octojax.simulate.waits import input_of


@dataclass(frozen=True)
class Skew:
    """The clock of `target` is behind that of `source` by at least `seconds`.

    For `user` starts so long before `maker` has ended, whose value it needs.
    """

    seconds: float
    source: int
    target: int
    maker: str
    user: str

    def __str__(self) -> str:
        return (
            f"the clocks of ranks {self.source} and {self.target} differ by {self.seconds:.3g} s "
            f"at least: {self.user} starts before {self.maker} has ended, whose value it needs"
        )


def clock_skew(timeline: Timeline) -> Skew | None:
    """Returns the largest difference of two ranks' clocks that the timeline proves, if any.

    Times that differ by less than a millionth of the step are taken for rounding.
    """
    makers: dict[tuple[str, int, int], ActionSpan] = {}
    for span in timeline.actions:
        for action in actions_of(span.item):
            if (value := makes(action)) is not None:
                makers[value] = span
    worst: Skew | None = None
    for span in timeline.actions:
        for action in actions_of(span.item):
            maker = makers.get(input_of(span.rank, action)[1:])
            if maker is None or maker.rank == span.rank:
                continue
            early = maker.end_s - span.start_s
            if early > max(1e-6 * timeline.makespan_s, worst.seconds if worst else 0.0):
                worst = Skew(early, maker.rank, span.rank, str(maker.item), str(span.item))
    return worst
