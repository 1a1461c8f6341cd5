"""What every idle time of a rank waited for.

rank 1   1F0 ........ 1F1        asynchronous: 0F1 is made at the bar, and then travels
rank 0   0F0    0F1 |---->
         computation|transfer

rank 1   1B0 [SEND] .. [RECV] 1F1     blocking: in brackets a transfer; the dots until the
                                      other side has come wait for what that is busy with
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence

from octojax.ir import Action, ActionSpan, Cause, Gap, Item, Kind, TransferSpan
from octojax.ir.lowering import actions_of, makes

_GRADIENTS = (Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
Piece = tuple[float, float, Cause, str, int]
"""From, until, what is waited for, its name, and the rank that does it."""


def gaps_of(
    spans: Sequence[ActionSpan],
    transfers: Sequence[TransferSpan],
    num_ranks: int,
    makespan_s: float,
    blocking: bool = False,
    ends_s: Sequence[tuple[float, float]] = (),
) -> tuple[Gap, ...]:
    """Returns every idle time of every rank, in order, by what it waited for.

    `spans` are in each rank's order. A time in which the input was there already is the host's
    (it happens in measured steps alone). `ends_s` are what ranks are busy with before their first
    action and after their last.
    """
    waits = _Blocking(spans, transfers) if blocking else _Asynchronous(spans, transfers)
    rows: list[list[ActionSpan]] = [[] for _ in range(num_ranks)]
    for span in spans:
        rows[span.rank].append(span)
    last = max(spans, key=lambda s: s.end_s, default=None)
    gaps: list[Gap] = []
    for rank, row in enumerate(rows):
        end, after = ends_s[rank] if ends_s else (0.0, 0.0)
        for position, span in enumerate(row):
            if span.start_s > end:
                gaps += [
                    Gap(rank, *piece, str(span.item), boundary=not position)
                    for piece in waits.pieces(rank, end, span)
                    if piece[1] > piece[0]
                ]
            end = max(end, span.end_s)
        end += after
        if makespan_s > end and last is not None:
            piece = (end, makespan_s, Cause.COMPUTATION, str(last.item), last.rank)
            gaps.append(Gap(rank, *piece, "", boundary=True))
    return tuple(gaps)


class _Asynchronous:
    """Transfers run while ranks compute: a rank waits for the input that comes last."""

    def __init__(self, spans: Sequence[ActionSpan], transfers: Sequence[TransferSpan]) -> None:
        self.makers = {
            value: span
            for span in spans
            for action in actions_of(span.item)
            if (value := makes(action)) is not None
        }
        self.arrivals = {(t.target, t.kind, t.stage, t.microbatch): t for t in transfers}

    def pieces(self, rank: int, begin: float, span: ActionSpan) -> Iterator[Piece]:
        stop = span.start_s
        brought = [t for t in self._inputs(rank, span.item) if t.end_s > begin]
        if brought:
            late = max(brought, key=lambda t: t.end_s)
            maker = self.makers[late.kind, late.stage, late.microbatch]
            ready_s = min(max(begin, maker.end_s), stop)
            yield begin, ready_s, Cause.COMPUTATION, str(maker.item), maker.rank
            begin = min(max(ready_s, late.end_s), stop)
            yield ready_s, begin, Cause.TRANSFER, late.name, late.source
        yield begin, stop, Cause.HOST, "", rank

    def _inputs(self, rank: int, item: Item) -> Iterator[TransferSpan]:
        for action in actions_of(item):
            key = input_of(rank, action)
            if key in self.arrivals:
                yield self.arrivals[key]


def input_of(rank: int, action: Action) -> tuple[int, str, int, int]:
    """Returns the target, kind, stage and microbatch of the transfer that may bring its input."""
    if action.kind is Kind.FORWARD:
        return rank, "F", action.stage - 1, action.microbatch
    if action.kind in _GRADIENTS:
        return rank, "B", action.stage + 1, action.microbatch
    return rank, "", -1, -1


class _Blocking:
    """Transfers occupy both ranks: a rank waits for the other side to come, and for the wire."""

    def __init__(self, spans: Sequence[ActionSpan], transfers: Sequence[TransferSpan]) -> None:
        events: dict[int, list[tuple[float, float, Cause, str]]] = defaultdict(list)
        for span in spans:
            events[span.rank].append((span.start_s, span.end_s, Cause.COMPUTATION, str(span.item)))
        for t in transfers:
            for rank in (t.source, t.target):
                events[rank].append((t.start_s, t.end_s, Cause.TRANSFER, t.name))
        self.events = {rank: sorted(mine) for rank, mine in events.items()}
        self.moves: dict[int, list[tuple[TransferSpan, int]]] = defaultdict(list)
        for t in sorted(transfers, key=lambda t: (t.start_s, t.end_s)):
            self.moves[t.source].append((t, t.target))
            self.moves[t.target].append((t, t.source))

    def pieces(self, rank: int, begin: float, span: ActionSpan) -> Iterator[Piece]:
        stop, moves = span.start_s, self.moves[rank]
        at = bisect_right(moves, begin, key=lambda move: move[0].end_s)
        for t, peer in moves[at:]:
            if t.start_s > stop or begin >= stop:
                break
            if t.start_s > begin:
                cause, name = self._last(peer, t)
                yield begin, t.start_s, cause, name, peer
            yield max(begin, t.start_s), min(t.end_s, stop), Cause.TRANSFER, t.name, t.source
            begin = max(begin, t.end_s)
        yield begin, stop, Cause.HOST, "", rank

    def _last(self, rank: int, before: TransferSpan) -> tuple[Cause, str]:
        """What a rank was busy with before it came to a transfer."""
        for _, end, cause, name in reversed(self.events[rank]):
            if end <= before.start_s and name != before.name:
                return cause, name
        return Cause.TRANSFER, before.name
