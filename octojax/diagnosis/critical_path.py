"""The chain of actions and transfers that a step's length comes from.

    rank 1        1F0[ 1F1 ]......[ 1B1 ]
    rank 0   [0F0][0F1]               |->[0B1]     in brackets: each began when the one before it
                                                   in the chain had ended

Shortening anything outside the chain does not shorten the step (it may when the chain moves).
"""

from collections import defaultdict
from dataclasses import dataclass

from octojax.ir import Action, Timeline, TransferSpan
from octojax.ir.lowering import actions_of
from octojax.simulate.critical import chains_of


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

    It is `octojax.simulate.critical.chains_of(timeline).critical`, cut where each event began. A
    transfer that waited for its link follows the one that was on it, as long as that kept it.
    """
    chains = chains_of(timeline)
    events = [chains.events[i] for i in chains.critical]
    pieces: list[Segment] = []
    until = 0.0
    for number, event in enumerate(events):
        is_transfer = isinstance(event, TransferSpan)
        rank, target = (event.source, event.target) if is_transfer else (event.rank, event.rank)
        start = max(until, event.start_s)
        if start > until + 1e-9 * timeline.makespan_s:  # nothing else explains: a measured step
            pieces.append(Segment("host", "", rank, rank, until, start))
            until = start
        following = events[number + 1].start_s if number + 1 < len(events) else timeline.makespan_s
        end = max(until, min(event.end_s, following))
        end = following if abs(end - following) <= 1e-9 * timeline.makespan_s else end
        cause, name = ("transfer", event.name) if is_transfer else ("computation", str(event.item))
        actions = () if is_transfer else actions_of(event.item)
        pieces.append(Segment(cause, name, rank, target, until, end, actions))
        until = end
    return tuple(pieces)


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
