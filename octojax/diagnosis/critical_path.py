"""The chain of actions and transfers that a step's length comes from.

    rank 1        1F0[ 1F1 ]......[ 1B1 ]
    rank 0   [0F0][0F1]               |->[0B1]     in brackets: each began when the one before it
                                                   in the chain had ended

Shortening anything outside the chain does not shorten the step (it may when the chain moves).
"""

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass

from octojax.ir import Action, ActionSpan, Kind, Overlap, Timeline, TransferSpan
from octojax.ir.lowering import actions_of, makes


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the chain. `rank` is `target` for computation, and the sender for a transfer.

    `name` is the action or transfer, `cause` "computation", "transfer" or, where nothing that
    the timeline holds explains the start, "host".
    """

    cause: str
    name: str
    rank: int
    target: int
    start_s: float
    end_s: float
    actions: tuple[Action, ...] = ()

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def critical_path(timeline: Timeline) -> tuple[Segment, ...]:
    """Returns the chain from zero to the makespan, in order of time; its lengths add up to it.

    Of a step with asynchronous transfers, simulated or measured. Where an action could start for
    two reasons, the earlier action of its own rank is taken.
    """
    if not timeline.actions:
        return ()
    return tuple(reversed(_Walk(timeline).back()))


class _Walk:
    def __init__(self, timeline: Timeline) -> None:
        self.close = 1e-9 * timeline.makespan_s
        self.rows: dict[int, list[ActionSpan]] = defaultdict(list)
        for span in timeline.actions:
            self.rows[span.rank].append(span)
        self.at = {id(span): i for row in self.rows.values() for i, span in enumerate(row)}
        self.makers: dict[tuple[str, int, int], ActionSpan] = {}
        for span in timeline.actions:
            for action in actions_of(span.item):
                if (value := makes(action)) is not None:
                    self.makers[value] = span
        self.arrivals = {(t.target, t.kind, t.stage, t.microbatch): t for t in timeline.transfers}
        self.links: dict[tuple[int, int], list[TransferSpan]] = defaultdict(list)
        for t in sorted(timeline.transfers, key=lambda t: (t.start_s, t.end_s)):
            self.links[t.source, t.target].append(t)
        self.last = max(timeline.actions, key=lambda s: (s.end_s, -s.rank))
        self.end_s = timeline.makespan_s

    def back(self) -> list[Segment]:
        """The chain from its end to its beginning."""
        chain: list[Segment] = []
        span, until = self.last, self.end_s
        while True:
            actions = span.item.actions if isinstance(span.item, Overlap) else (span.item,)
            start = min(span.start_s, until)
            chain.append(
                Segment("computation", str(span.item), span.rank, span.rank, start, until, actions)
            )
            until = start
            before = self._before(span)
            late = self._late(span)
            ready = max(before.end_s if before else 0.0, late.end_s if late else 0.0)
            if until > ready + self.close:
                chain.append(Segment("host", "", span.rank, span.rank, ready, until))
                until = ready
            if before is not None and before.end_s >= ready - self.close:
                span = before
            elif late is not None:
                span, until = self._through(late, until, chain)
            else:
                break
        if until > 0:  # a measured step that begins late
            chain.append(Segment("host", "", span.rank, span.rank, 0.0, until))
        return chain

    def _before(self, span: ActionSpan) -> ActionSpan | None:
        """What its rank ran before."""
        at = self.at[id(span)]
        return self.rows[span.rank][at - 1] if at > 0 else None

    def _late(self, span: ActionSpan) -> TransferSpan | None:
        """The input from another rank that came last."""
        inputs = []
        for action in actions_of(span.item):
            if action.kind is Kind.FORWARD:
                key = span.rank, "F", action.stage - 1, action.microbatch
            elif action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
                key = span.rank, "B", action.stage + 1, action.microbatch
            else:
                continue
            if key in self.arrivals:
                inputs.append(self.arrivals[key])
        return max(inputs, key=lambda t: t.end_s, default=None)

    def _through(
        self, moved: TransferSpan, until: float, chain: list[Segment]
    ) -> tuple[ActionSpan, float]:
        """Goes back over a transfer, and over those before it that kept its link busy."""
        while True:
            start = min(moved.start_s, until)
            chain.append(Segment("transfer", moved.name, moved.source, moved.target, start, until))
            until = start
            maker = self.makers[moved.kind, moved.stage, moved.microbatch]
            if maker.end_s >= start - self.close:
                return maker, until
            link = self.links[moved.source, moved.target]
            at = bisect_left(link, moved.start_s - self.close, key=lambda t: t.start_s)
            if at == 0:
                chain.append(Segment("host", "", moved.source, moved.source, maker.end_s, until))
                return maker, maker.end_s
            moved = link[at - 1]


def seconds_by(
    chain: tuple[Segment, ...],
) -> tuple[dict[int, float], dict[int, float], dict[tuple[int, int], float]]:
    """Returns the chain's seconds of computation by rank and by stage, and of transfer by link.

    Each with the longest first.
    """
    ranks: dict[int, float] = defaultdict(float)
    stages: dict[int, float] = defaultdict(float)
    links: dict[tuple[int, int], float] = defaultdict(float)
    for piece in chain:
        if piece.cause == "transfer":
            links[piece.rank, piece.target] += piece.seconds
        elif piece.cause == "computation":
            ranks[piece.rank] += piece.seconds
            for action in piece.actions:
                stages[action.stage] += piece.seconds / len(piece.actions)
    return _ordered(ranks), _ordered(stages), _ordered(links)


def _ordered(by: dict) -> dict:
    return dict(sorted(by.items(), key=lambda entry: (-entry[1], entry[0])))
