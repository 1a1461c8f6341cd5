"""A list scheduler for chains of stages: every rank takes the best action it can start next.

Searched schedules (zb-auto, hanayo, zb-greedy) lay out several orders with it and keep the
best. It knows one chain of stages, one rank per stage, transfers of one fixed latency that run
beside computation, and a limit of live activations per rank.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from octojax.ir import Machine
from octojax.ir.action import Action, Kind
from octojax.ir.placement import Placement
from octojax.ir.schedule import Schedule
from octojax.simulate import StageCosts, simulate
from octojax.simulate.oracle import peak_live

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD  # noqa: E741


@dataclass(frozen=True)
class ChainCosts:
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


class Offer(NamedTuple):
    start_s: float
    choice: tuple[int, ...]
    action: Action


@dataclass(frozen=True)
class Outcome:
    """What rows come to, best first. `peaks[r]` are the most activations alive on rank r, each
    from the start of F to the end of W (or of B).
    """

    makespan_s: float
    longest_span_s: float
    peaks: tuple[int, ...]

    @property
    def key(self) -> tuple[float, float, int]:
        return (round(self.makespan_s, 9), round(self.longest_span_s, 9), max(self.peaks))


class Layout(NamedTuple):
    """One row of actions per rank, and what they come to."""

    rows: list[list[Action]]
    outcome: Outcome


class _State:
    """Progress of every stage and rank while actions are placed one after another."""

    def __init__(self, costs: ChainCosts, policy: Policy) -> None:
        self.costs, self.policy = costs, policy
        self.rows: list[list[Action]] = [[] for _ in range(costs.num_ranks)]
        self.free_s = [0.0] * costs.num_ranks
        self.live = [0] * costs.num_ranks
        self.done = {kind: [0] * costs.num_stages for kind in (F, I, W)}
        self.end_s: dict[tuple[Kind, int, int], float] = {}

    def best(self, rank: int) -> Offer | None:
        """Returns what the rank would run next, or None if nothing can start yet."""
        moves = [c for s in self.costs.placement.ranks[rank] for c in self._moves(rank, s)]
        fills = [c for s in self.costs.placement.ranks[rank] for c in self._fills(rank, s)]
        move, fill = min(moves, default=None), min(fills, default=None)
        if move is None or fill is None:
            return move or fill
        if fill.start_s + self.costs.cost(fill.action) <= move.start_s:
            return fill
        if self.policy.patient or fill.start_s > move.start_s:
            return move
        return min(move, fill)

    def place(self, candidate: Offer) -> None:
        action = candidate.action
        rank = self.costs.rank_of[action.stage]
        kind = I if action.kind is B else action.kind
        self.rows[rank].append(action)
        self.free_s[rank] = candidate.start_s + self.costs.cost(action)
        self.end_s[kind, action.stage, action.microbatch] = self.free_s[rank]
        self.done[kind][action.stage] += 1
        frees_at = W if self.costs.weight_grad and not self.policy.held_until_input_grad else I
        self.live[rank] += (kind is F) - (kind is frees_at)

    def layout(self) -> Layout:
        """Returns the rows and what they come to, once every action is placed."""
        starts = [
            self.end_s[F, row[0].stage, row[0].microbatch] - self.costs.cost(row[0]) if row else 0.0
            for row in self.rows
        ]
        spans = [end - start for end, start in zip(self.free_s, starts, strict=True)]
        peaks = tuple(peak_live(row, W) for row in self.rows)
        return Layout(self.rows, Outcome(max(self.free_s), max(spans), peaks))

    def _moves(self, rank: int, stage: int) -> list[Offer]:
        offers = []
        microbatch = self.done[F][stage]
        room = self.live[rank] < self.costs.memory[rank]
        flying = microbatch - self.done[I][stage]
        if microbatch < self.costs.microbatches and room and flying < self.policy.in_flight[stage]:
            came = 0.0 if stage == 0 else self._arrival(F, stage - 1, stage, microbatch)
            if came is not None:
                offers.append(self._candidate(rank, came, Action(stage, F, microbatch)))
        microbatch = self.done[I][stage]
        if microbatch < self.done[F][stage]:
            last = stage == self.costs.num_stages - 1
            came = 0.0 if last else self._arrival(I, stage + 1, stage, microbatch)
            if came is not None:
                kind = I if self.costs.weight_grad else B
                came = max(came, self.end_s[F, stage, microbatch])
                offers.append(self._candidate(rank, came, Action(stage, kind, microbatch)))
        return offers

    def _fills(self, rank: int, stage: int) -> list[Offer]:
        microbatch = self.done[W][stage]
        if self.costs.weight_grad is None or microbatch >= self.done[I][stage]:
            return []
        ready = self.end_s[I, stage, microbatch]
        return [self._candidate(rank, ready, Action(stage, W, microbatch))]

    def _arrival(self, kind: Kind, source: int, target: int, microbatch: int) -> float | None:
        end = self.end_s.get((kind, source, microbatch))
        return None if end is None else end + self.costs.hop(source, target)

    def _candidate(self, rank: int, ready_s: float, action: Action) -> Offer:
        place = self.policy.order.index("I" if action.kind is B else action.kind.value)
        depth = -action.stage if self.policy.deep_first else 0
        choice = (place, depth, action.microbatch, -action.stage)
        return Offer(max(self.free_s[rank], ready_s), choice, action)


def list_schedule(costs: ChainCosts, policy: Policy) -> Layout | None:
    """Returns one row of actions per rank and what they come to, or None if the limits stop all
    ranks.

    The rank that can start earliest goes first, so no rank idles while it could run something
    it prefers.
    """
    state = _State(costs, policy)
    kinds = 2 if costs.weight_grad is None else 3
    offers = [state.best(rank) for rank in range(costs.num_ranks)]
    for _ in range(kinds * costs.num_stages * costs.microbatches):
        chosen = min((offer for offer in offers if offer is not None), default=None)
        if chosen is None:
            return None
        state.place(chosen)
        stage = chosen.action.stage
        near = range(max(0, stage - 1), min(stage + 2, costs.num_stages))
        for rank in {costs.rank_of[s] for s in near}:  # nobody else's choice has changed
            offers[rank] = state.best(rank)
    return state.layout()


def outcome_of(costs: ChainCosts, schedule: Schedule) -> Outcome:
    """Returns what a table comes to if each rank runs its row in order, as soon as it can."""
    stages = costs.num_stages
    grads = costs.weight_grad or (0.0,) * stages
    columns = (costs.forward, costs.input_grad, costs.input_grad, grads, costs.forward)
    per_stage = StageCosts(
        np.array(columns).T.copy(), np.zeros((stages, 5)), np.zeros(stages, np.bool_)
    )
    timeline = simulate(schedule, per_stage, Machine(latency_s=costs.comm), compiled=False)
    spans = [0.0] * costs.num_ranks
    for rank in range(costs.num_ranks):
        row = [span for span in timeline.actions if span.rank == rank]
        if row:
            spans[rank] = row[-1].end_s - row[0].start_s
    peaks = tuple(rank.peak_microbatches_until_weight for rank in timeline.ranks)
    return Outcome(timeline.makespan_s, max(spans), peaks)
