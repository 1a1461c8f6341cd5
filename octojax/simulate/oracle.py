"""What instructions cost, and what they hold, in plain Python: the judge of the compiled code.

Everything is looked up by name. `octojax.ir.walk` runs a table with these costs, with the same
arithmetic in the same order as `engine.py`, so the two agree to the last bit. Small tables are
simulated so, which is quicker than loading a compiler; lowered ones always.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from octojax.ir import (
    Action,
    Item,
    Kind,
    LoweredPlan,
    Machine,
    Placement,
    Schedule,
    Transfer,
)
from octojax.ir.lowering import actions_of
from octojax.ir.walk import Mode, TableWalk
from octojax.simulate.costs import KINDS, StageCosts
from octojax.simulate.links import fitting
from octojax.simulate.step_ends import ends_of_ranks

_BACKWARD = (Kind.BACKWARD, Kind.INPUT_GRAD)
Span = tuple[float, float]


@dataclass(frozen=True)
class Times:
    """Start and end of every action and transfer, in seconds."""

    actions: dict[Action, Span]
    moves: dict[Transfer, Span]


class Meaning:
    """What the actions and transfers of a lowered plan cost; one without transfers will do."""

    def __init__(
        self,
        plan: LoweredPlan | Schedule,
        costs: StageCosts,
        machine: Machine | None,
        seconds: Callable[[int, Action], float] | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.plan = LoweredPlan.of(plan) if isinstance(plan, Schedule) else plan
        self.schedule = self.plan.schedule
        self.costs = costs
        self.seconds = seconds
        self.machine = fitting(machine, self.plan.num_ranks)
        self.crossings = self.plan.crossings
        self.actions = {action for _, _, action in self.schedule.actions()}
        self._column = {kind: costs.seconds[:, k].tolist() for k, kind in enumerate(KINDS)}
        self._recompute = costs.recompute.tolist()
        self.placement = placement

    @cached_property
    def ends(self) -> tuple[tuple[float, float], ...]:
        """What every rank takes before its first action and after its last."""
        if self.costs.ends_s is None:
            return ((0.0, 0.0),) * self.plan.num_ranks
        return ends_of_ranks(self.costs.ends_s, self.placement or self.schedule.placement)

    def walk(self, mode: Mode) -> TableWalk:
        """Returns the run of the plan with these costs."""
        return TableWalk(self.plan, mode, self.duration_s, self.wire_s, self.ends)

    def duration_s(self, rank: int, actions: tuple[Action, ...]) -> float:
        """Returns how long a rank is busy with actions: compute time plus host costs."""
        bring, take = self.crossings.bring, self.crossings.take
        transfers = sum((action in bring) + (action in take) for action in actions)
        return self.compute_s(rank, actions) + transfers * self.machine.host_cost_s

    def compute_s(self, rank: int, actions: tuple[Action, ...]) -> float:
        """Returns how long a rank computes an action, or the two of an overlapped pair."""
        if self.seconds is not None:
            return sum((self.seconds(rank, action) for action in actions), 0.0)
        seconds, first = 0.0, 0.0
        for action in actions:
            first = seconds
            seconds += self._column[action.kind][action.stage]
            if self.rebuilds(action):
                seconds += self._column[Kind.FORWARD][action.stage]
        if len(actions) > 1:
            seconds -= self.machine.overlap_discount * min(first, seconds - first)
        return seconds / self.machine.speed(rank)

    def rebuilds(self, action: Action) -> bool:
        """Whether a backward runs its stage's forward again, having no R to do it."""
        return (
            action.kind in _BACKWARD
            and self._recompute[action.stage]
            and Action(action.stage, Kind.RECOMPUTE, action.microbatch) not in self.actions
        )

    def size_bytes(self, transfer: Transfer) -> float:
        """Returns the bytes of a stage's output, or of the gradient of its input.

        Sums, results and new parameters come after the last action and are not accounted for.
        """
        if not transfer.kind.crosses_stages:
            return 0.0
        column = self.costs.output_bytes if transfer.kind == "F" else self.costs.input_bytes
        return float(column[transfer.stage])

    def wire_s(self, transfer: Transfer) -> tuple[float, float]:
        """Returns a transfer's latency and the time it occupies its link."""
        if not transfer.kind.crosses_stages:
            return 0.0, 0.0
        latency, bandwidth = self.machine.link(transfer.source, transfer.target)
        return latency, self.size_bytes(transfer) / bandwidth


def times_of(walk: TableWalk) -> Times:
    """Returns when each action and transfer of a walk happens; both of a pair take all of it."""
    actions = {
        action: (start, end)
        for row in walk.spans
        for item, start, end in row
        for action in actions_of(item)
    }
    return Times(actions, walk.moves)


def held_bytes(meaning: Meaning, times: Times, rank: int) -> list[tuple[float, float, float]]:
    """Returns `(from_s, until_s, bytes)` of everything a rank holds beside its static state.

    Residuals from F's start (with recompute only the input, and the residuals from the start
    of R, I or B) to the end of I or B; what I keeps, to the end of W; a received value from
    the start of its transfer to its consumer's end; a sent one from its producer's end to the
    end of its transfer. A span includes its start and not its end.
    """
    costs, crossings, at = meaning.costs, meaning.crossings, times.actions
    spans: list[tuple[float, float, float]] = []
    for item in meaning.schedule.ranks[rank]:
        for action in actions_of(item):
            stage, microbatch = action.stage, action.microbatch
            start, end = at[action]
            split = Action(stage, Kind.INPUT_GRAD, microbatch)
            weight = action.kind is Kind.WEIGHT_GRAD
            if action.kind in _BACKWARD or (weight and split not in at):
                begin = at[Action(stage, Kind.FORWARD, microbatch)][0]
                residual = float(costs.residual_bytes[stage])
                if costs.recompute[stage]:
                    again = Action(stage, Kind.RECOMPUTE, microbatch)
                    spans.append((begin, end, float(costs.input_bytes[stage])))
                    spans.append((at[again][0] if again in at else start, end, residual))
                else:
                    spans.append((begin, end, residual))
            elif weight:
                spans.append((at[split][1], end, float(costs.weight_residual_bytes[stage])))
            bring, take = crossings.bring.get(action), crossings.take.get(action)
            if bring is not None:
                spans.append((times.moves[bring][0], end, meaning.size_bytes(bring)))
            if take is not None:
                spans.append((end, times.moves[take][1], meaning.size_bytes(take)))
    return spans


def peak_live(row: Iterable[Item], until: Kind) -> int:
    """Returns the most (stage, microbatch)s alive at once in a rank's row, each from the start of F
    to the end of B or of `until` (I or W).
    """
    live, peak = 0, 0
    for item in row:
        kinds = [action.kind for action in actions_of(item)]
        live += kinds.count(Kind.FORWARD)
        peak = max(peak, live)
        live -= sum(kind in (Kind.BACKWARD, until) for kind in kinds)
    return peak
