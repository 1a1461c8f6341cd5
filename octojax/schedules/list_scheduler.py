"""A list scheduler for chains of stages: every rank takes the best action it can start next.

Searched schedules (zb-auto, hanayo, zb-greedy) lay out several orders with it and keep the
best. It knows one chain of stages, one rank per stage, transfers of one fixed latency that run
beside computation, and a limit of live activations per rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from octojax.ir.action import Action, Kind
from octojax.ir.placement import Placement

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD  # noqa: E741


@dataclass(frozen=True)
class Work:
    """What has to be done: `microbatches` through a chain of stages with these costs.

    `weight_grad` is None where the backward stays whole; `input_grad` is then its full cost.
    `memory[r]` is how many (stage, microbatch) activations rank r can hold at once.
    """

    placement: Placement
    microbatches: int
    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...] | None
    comm: float
    memory: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        return tuple(ranks[0] for ranks in self.placement.stages)

    def hop(self, source: int, target: int) -> float:
        """Returns the latency from stage to stage."""
        return self.comm if self.rank_of[source] != self.rank_of[target] else 0.0

    def cost(self, action: Action) -> float:
        stage = action.stage
        if action.kind is F:
            return self.forward[stage]
        if action.kind is W:
            assert self.weight_grad is not None
            return self.weight_grad[stage]
        return self.input_grad[stage]


@dataclass(frozen=True)
class Policy:
    """How a rank chooses among what it can start.

    `in_flight[s]` bounds the forwards of stage s whose gradient has not come back yet.
    `order` ranks kinds that can start at the same time. A `patient` rank starts a W only if it
    ends before the next F or I can start; otherwise W fills every gap. `deep_first` prefers
    later stages to older microbatches. `held_until_input_grad` frees memory at I, not at W.
    """

    in_flight: tuple[int, ...]
    order: str = "IFW"
    patient: bool = True
    deep_first: bool = False
    held_until_input_grad: bool = False


class Candidate(NamedTuple):
    start_s: float
    choice: tuple[int, ...]
    action: Action


class _State:
    """Progress of every stage and rank while actions are placed one after another."""

    def __init__(self, work: Work, policy: Policy) -> None:
        self.work, self.policy = work, policy
        self.rows: list[list[Action]] = [[] for _ in range(work.num_ranks)]
        self.free_s = [0.0] * work.num_ranks
        self.live = [0] * work.num_ranks
        self.done = {kind: [0] * work.num_stages for kind in (F, I, W)}
        self.end_s: dict[tuple[Kind, int, int], float] = {}

    def best(self, rank: int) -> Candidate | None:
        """Returns what the rank would run next, or None if nothing can start yet."""
        moves = [c for s in self.work.placement.ranks[rank] for c in self._moves(rank, s)]
        fills = [c for s in self.work.placement.ranks[rank] for c in self._fills(rank, s)]
        move, fill = min(moves, default=None), min(fills, default=None)
        if move is None or fill is None:
            return move or fill
        if fill.start_s + self.work.cost(fill.action) <= move.start_s:
            return fill
        if self.policy.patient or fill.start_s > move.start_s:
            return move
        return min(move, fill)

    def place(self, candidate: Candidate) -> None:
        action = candidate.action
        rank = self.work.rank_of[action.stage]
        kind = I if action.kind is B else action.kind
        self.rows[rank].append(action)
        self.free_s[rank] = candidate.start_s + self.work.cost(action)
        self.end_s[kind, action.stage, action.microbatch] = self.free_s[rank]
        self.done[kind][action.stage] += 1
        frees_at = W if self.work.weight_grad and not self.policy.held_until_input_grad else I
        self.live[rank] += (kind is F) - (kind is frees_at)

    def _moves(self, rank: int, stage: int) -> list[Candidate]:
        found = []
        microbatch = self.done[F][stage]
        room = self.live[rank] < self.work.memory[rank]
        flying = microbatch - self.done[I][stage]
        if microbatch < self.work.microbatches and room and flying < self.policy.in_flight[stage]:
            came = 0.0 if stage == 0 else self._arrival(F, stage - 1, stage, microbatch)
            if came is not None:
                found.append(self._candidate(rank, came, Action(stage, F, microbatch)))
        microbatch = self.done[I][stage]
        if microbatch < self.done[F][stage]:
            last = stage == self.work.num_stages - 1
            came = 0.0 if last else self._arrival(I, stage + 1, stage, microbatch)
            if came is not None:
                kind = I if self.work.weight_grad else B
                came = max(came, self.end_s[F, stage, microbatch])
                found.append(self._candidate(rank, came, Action(stage, kind, microbatch)))
        return found

    def _fills(self, rank: int, stage: int) -> list[Candidate]:
        microbatch = self.done[W][stage]
        if self.work.weight_grad is None or microbatch >= self.done[I][stage]:
            return []
        ready = self.end_s[I, stage, microbatch]
        return [self._candidate(rank, ready, Action(stage, W, microbatch))]

    def _arrival(self, kind: Kind, source: int, target: int, microbatch: int) -> float | None:
        end = self.end_s.get((kind, source, microbatch))
        return None if end is None else end + self.work.hop(source, target)

    def _candidate(self, rank: int, ready_s: float, action: Action) -> Candidate:
        place = self.policy.order.index("I" if action.kind is B else action.kind.value)
        depth = -action.stage if self.policy.deep_first else 0
        choice = (place, depth, action.microbatch, -action.stage)
        return Candidate(max(self.free_s[rank], ready_s), choice, action)


def list_schedule(work: Work, policy: Policy) -> list[list[Action]] | None:
    """Returns one row of actions per rank, or None if the limits stop all ranks.

    The rank that can start earliest goes first, so no rank idles while it could run something
    it prefers.
    """
    state = _State(work, policy)
    kinds = 2 if work.weight_grad is None else 3
    offers = [state.best(rank) for rank in range(work.num_ranks)]
    for _ in range(kinds * work.num_stages * work.microbatches):
        chosen = min((offer for offer in offers if offer is not None), default=None)
        if chosen is None:
            return None
        state.place(chosen)
        stage = chosen.action.stage
        near = range(max(0, stage - 1), min(stage + 2, work.num_stages))
        for rank in {work.rank_of[s] for s in near}:  # nobody else's choice has changed
            offers[rank] = state.best(rank)
    return state.rows


@dataclass(frozen=True)
class Outcome:
    """What running rows in their order as soon as possible comes to, best first."""

    makespan_s: float
    longest_span_s: float
    peaks: tuple[int, ...]

    @property
    def key(self) -> tuple[float, float, int]:
        return (round(self.makespan_s, 9), round(self.longest_span_s, 9), max(self.peaks))


def run(work: Work, rows: Sequence[Sequence[Action]]) -> Outcome | None:
    """Returns the outcome of running the rows in order, or None if they cannot finish.

    Activations are held from the start of F to the end of W (or of B).
    """
    end_s: dict[tuple[Kind, int, int], float] = {}
    at, clock = [0] * len(rows), [0.0] * len(rows)
    left = sum(map(len, rows))
    while left:
        before = left
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                ready = _ready_s(work, end_s, row[at[rank]])
                if ready is None:
                    break
                action = row[at[rank]]
                clock[rank] = max(clock[rank], ready) + work.cost(action)
                kind = I if action.kind is B else action.kind
                end_s[kind, action.stage, action.microbatch] = clock[rank]
                at[rank] += 1
                left -= 1
        if left == before:
            return None
    starts = [
        end_s[F, row[0].stage, row[0].microbatch] - work.cost(row[0]) if row else 0.0
        for row in rows
    ]
    spans = [end - start for end, start in zip(clock, starts, strict=True)]
    return Outcome(max(clock), max(spans), tuple(_peak(work, row) for row in rows))


def _ready_s(work: Work, end_s: dict[tuple[Kind, int, int], float], action: Action) -> float | None:
    stage, microbatch = action.stage, action.microbatch
    if action.kind is W:
        return end_s.get((I, stage, microbatch))
    if action.kind is F:
        return (
            _plus(end_s.get((F, stage - 1, microbatch)), work, stage - 1, stage) if stage else 0.0
        )
    own = end_s.get((F, stage, microbatch))
    if own is None or stage == work.num_stages - 1:
        return own
    came = _plus(end_s.get((I, stage + 1, microbatch)), work, stage + 1, stage)
    return None if came is None else max(own, came)


def _plus(end: float | None, work: Work, source: int, target: int) -> float | None:
    return None if end is None else end + work.hop(source, target)


def _peak(work: Work, row: Sequence[Action]) -> int:
    live = peak = 0
    for action in row:
        if action.kind is F:
            live += 1
            peak = max(peak, live)
        elif action.kind is (W if work.weight_grad else B):
            live -= 1
    return peak
