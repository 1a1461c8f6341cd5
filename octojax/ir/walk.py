"""The one runner of tables: what happens when, and which rank waits for what.

    free         transfers are not looked at; values leave as they are made, in the order in which
                 their sender makes them, and arrive by themselves
    posted       a SEND and a RECV take their ranks no time; the values leave once both sides are
                 there and the link is free of what the sender posted for it before
    rendezvous   a SEND and its RECV happen when both ranks have reached them, and occupy both

Without times it is a proof: in whatever order ready ranks are taken, the same instructions run in
the end, because one that can run stays able to. So what passes under rendezvous, the strictest
way to carry out a table, cannot deadlock on any transport that keeps each rank's order.
"""

import enum
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octojax.ir.action import Action, Item, Kind
from octojax.ir.instruction import Instruction, Receive, Run, Send, Update
from octojax.ir.lowered import LoweredPlan
from octojax.ir.lowering import Value
from octojax.ir.transfer import Transfer


class Mode(enum.StrEnum):
    FREE = "free"
    POSTED = "posted"
    RENDEZVOUS = "rendezvous"


@dataclass(frozen=True, slots=True)
class Stuck:
    """A rank that cannot go on at `position`: what it `needs` has not happened.

    `needs` is the text of a computation, or of the other side of a transfer.
    """

    rank: int
    position: int
    item: Item | str
    needs: str


Duration = Callable[[int, tuple[Action, ...]], float]
"""How long a rank is busy with an action, or with the two of an overlapped pair."""


class TableWalk:
    """One run of a lowered plan. `stuck()` is empty if every rank finished its row.

    `spans[r]` are `(item, start_s, end_s)` of what rank r computed, `units[r]` start and end of
    each of its units (a program of joined actions is one). `moves` says when each transfer
    started and ended, and `order` lists the instructions `(rank, position)`, both in an order of
    which every row's is a part.
    `duration_s(rank, actions)` and `wire_s(transfer)` (latency, time on the link) are seconds; by
    default nothing takes time. Rank r is busy for `ends_s[r][0]` before its first instruction, and
    for `ends_s[r][1]` in its first update.
    """

    def __init__(
        self,
        plan: LoweredPlan,
        mode: Mode,
        duration_s: Duration | None = None,
        wire_s: Callable[[Transfer], tuple[float, float]] | None = None,
        ends_s: Sequence[tuple[float, float]] = (),
    ) -> None:
        self.plan, self.mode = plan, mode
        self.duration_s, self.wire_s = duration_s, wire_s
        self.crossings = plan.crossings
        self.head = [0] * plan.num_ranks
        self.free = [before for before, _ in ends_s] or [0.0] * plan.num_ranks
        self.update_s = [after for _, after in ends_s] or [0.0] * plan.num_ranks
        self.at: list[dict[Value, float]] = [{} for _ in plan.ranks]  # when a value is on a rank
        self.link_free: dict[tuple[int, int], float] = defaultdict(float)
        self.posted: list[dict[Transfer, float]] = [{} for _ in plan.ranks]
        self.queues: dict[tuple[int, int], deque[Transfer]] = defaultdict(deque)
        self.spans: list[list[tuple[Item, float, float]]] = [[] for _ in plan.ranks]
        self.units: list[list[tuple[float, float]]] = [[] for _ in plan.ranks]
        self.moves: dict[Transfer, tuple[float, float]] = {}
        self.order: list[tuple[int, int]] = []
        self._run()

    def _run(self) -> None:
        step = {Mode.FREE: self._pass, Mode.POSTED: self._post, Mode.RENDEZVOUS: self._meet}
        transfer_step = step[self.mode]
        waiting = deque(range(self.plan.num_ranks))
        self.woken = waiting
        while waiting:
            rank = waiting.popleft()
            row = self.plan.ranks[rank]
            while self.head[rank] < len(row):
                instruction = row[self.head[rank]]
                if isinstance(instruction, Update):
                    self.free[rank] += self.update_s[rank]
                    self.update_s[rank] = 0.0  # once, whatever the number of its phases
                    self._done(rank)
                    continue
                step_taken = (
                    self._compute(rank, instruction)
                    if isinstance(instruction, Run)
                    else transfer_step(rank, instruction)
                )
                if not step_taken:
                    break

    def _done(self, rank: int) -> None:
        self.order.append((rank, self.head[rank]))
        self.head[rank] += 1

    # ------------------------------------------------------------------ computing

    def _compute(self, rank: int, run: Run) -> bool:
        """Runs the unit at a rank's head; False while one of its inputs is not there."""
        here, start = self.at[rank], self.free[rank]
        reads, makes, leaving = self.plan.needs[rank][len(self.units[rank])]
        for value in reads:
            at = here.get(value)
            if at is None:
                return False
            if at > start:
                start = at
        self._done(rank)
        end = start
        for actions, item in _units(run):
            begin = end
            if self.duration_s is not None:
                end = begin + self.duration_s(rank, actions)
            self.spans[rank].append((item, begin, end))
        self.units[rank].append((start, end))
        self.free[rank] = end
        for value in makes:
            here[value] = end
        if self.mode is Mode.FREE:
            for transfer in leaving:
                self._leave(transfer, end)
        return True

    def _leave(self, transfer: Transfer, ready: float) -> None:
        """A value goes on its link as soon as that is free."""
        link = (transfer.source, transfer.target)
        latency, occupied = (0.0, 0.0) if self.wire_s is None else self.wire_s(transfer)
        start = max(ready, self.link_free[link])
        self.link_free[link] = start + occupied
        self._arrive(transfer, start, start + (latency + occupied))

    def _arrive(self, transfer: Transfer, start: float, end: float) -> None:
        self.moves[transfer] = (start, end)
        self.at[transfer.target][transfer.value] = end
        self.woken.append(transfer.target)

    # ------------------------------------------------------------------ transfers

    def _pass(self, rank: int, instruction: Send | Receive) -> bool:
        self._done(rank)
        return True

    def _post(self, rank: int, instruction: Send | Receive) -> bool:
        transfer = instruction.transfer
        link = (transfer.source, transfer.target)
        if isinstance(instruction, Send):
            if not self._sendable(transfer):
                return False
            self.queues[link].append(transfer)
            self.posted[rank][transfer] = self.free[rank]
        else:
            self.posted[rank][transfer] = self.free[rank]
        self._done(rank)
        queue, arriving = self.queues[link], self.posted[transfer.target]
        while queue and queue[0] in arriving:
            first = queue.popleft()
            self._leave(first, max(self.posted[first.source][first], arriving[first]))
        return True

    def _sendable(self, transfer: Transfer) -> bool:
        return transfer.stage < 0 or transfer.value in self.at[transfer.source]

    def _meet(self, rank: int, instruction: Send | Receive) -> bool:
        transfer = instruction.transfer
        if not self._sendable(transfer):
            return False
        sender = isinstance(instruction, Send)
        other = transfer.target if sender else transfer.source
        peer = self._next(other)
        if not isinstance(peer, Receive if sender else Send) or (
            peer.transfer is not transfer and peer.transfer != transfer
        ):
            return False
        latency, occupied = (0.0, 0.0) if self.wire_s is None else self.wire_s(transfer)
        start = max(self.free[rank], self.free[other])
        end = start + (latency + occupied)
        for side in (transfer.source, transfer.target):
            self._done(side)
            self.free[side] = end
        self._arrive(transfer, start, end)
        self.woken.append(other)
        return True

    def _next(self, rank: int) -> Instruction | None:
        row, at = self.plan.ranks[rank], self.head[rank]
        return row[at] if at < len(row) else None

    # ------------------------------------------------------------------ who waits

    def stuck(self) -> tuple[Stuck, ...]:
        """Returns the ranks that did not finish, in rank order."""
        stopped = []
        for rank, row in enumerate(self.plan.ranks):
            if self.head[rank] < len(row):
                instruction = row[self.head[rank]]
                stopped.append(Stuck(rank, self.head[rank], instruction.cell, self._lacks(rank)))
        return tuple(stopped)

    def _lacks(self, rank: int) -> str:
        instruction = self._next(rank)
        if isinstance(instruction, Run):
            values = [v for a in instruction.actions for v in self.crossings.reads(a)]
            return self._waited_for(rank, next(v for v in values if v not in self.at[rank]))
        assert isinstance(instruction, Send | Receive)
        transfer = instruction.transfer
        if isinstance(instruction, Send):
            if not self._sendable(transfer):
                return self._waited_for(rank, transfer.value)
            return str(Receive(transfer))
        if self._next(transfer.source) == Send(transfer) and not self._sendable(transfer):
            return self._waited_for(transfer.source, transfer.value)
        return str(Send(transfer))

    def _waited_for(self, rank: int, value: Value) -> str:
        kind, stage, microbatch = value
        source, action = self.crossings.maker.get(
            value, (rank, Action(stage, Kind(kind), microbatch))
        )
        transfer = self.crossings.take.get(action)
        if self.mode is not Mode.FREE and source != rank and transfer is not None:
            return str(transfer.receive)
        return str(action)


def _units(run: Run) -> list[tuple[tuple[Action, ...], Item]]:
    """What has a duration of its own: a pair as a whole, joined actions one by one."""
    actions = run.actions
    if len(actions) > 1 and run.pair:
        return [(actions, run.items[0])]
    if len(actions) == 1 and actions[0].kind.computes:
        return [(actions, actions[0])]
    return [((action,), action) for action in actions if action.kind.computes]
