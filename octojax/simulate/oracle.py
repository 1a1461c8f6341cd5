"""The simulator's meaning in plain Python: the judge of the compiled one.

Everything is looked up by name, and a fixed point is reached by trying every rank again and
again. It does the same arithmetic in the same order as `engine.py`, so the two agree to the
last bit. Small tables are simulated with it, which is quicker than loading a compiler.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from octojax.ir import Action, Item, Kind, Machine, Schedule
from octojax.ir.lowering import Transfer, actions_of, owners, received, sent
from octojax.ir.progress import Value, makes, reads
from octojax.simulate.costs import KINDS, StageCosts
from octojax.simulate.links import fitting

_BACKWARD = (Kind.BACKWARD, Kind.INPUT_GRAD)
Cell = tuple[int, int]
"""`(rank, position)` in the table without transfers."""


@dataclass
class Run:
    """When every cell and every transfer starts and ends, in seconds."""

    start: dict[Cell, float] = field(default_factory=dict)
    end: dict[Cell, float] = field(default_factory=dict)
    moves: dict[Transfer, tuple[float, float]] = field(default_factory=dict)


class Meaning:
    """What the cells and transfers of a table without transfer actions cost."""

    def __init__(
        self,
        schedule: Schedule,
        costs: StageCosts,
        machine: Machine | None,
        seconds: Callable[[int, Action], float] | None = None,
    ) -> None:
        self.schedule = schedule
        self.costs = costs
        self.seconds = seconds
        self.machine = fitting(machine, schedule.num_ranks)
        self.last_stage = costs.num_stages - 1
        self.owner = owners(schedule)
        self.rebuilt = {a for _, _, a in schedule.actions() if a.kind is Kind.RECOMPUTE}

    def duration_s(self, rank: int, item: Item) -> float:
        """Returns how long a rank is busy with an item: compute time plus host costs."""
        seconds, transfers = 0.0, 0
        for action in actions_of(item):
            if self.seconds is not None:
                seconds += self.seconds(rank, action)
            else:
                seconds += float(self.costs.seconds[action.stage, KINDS.index(action.kind)])
                if self.rebuilds(action):
                    seconds += float(self.costs.forward_s[action.stage])
            transfers += received(action, rank, self.owner) is not None
            transfers += sent(action, rank, self.owner) is not None
        speed = self.machine.speed(rank) if self.seconds is None else 1.0
        return seconds / speed + transfers * self.machine.host_cost_s

    def rebuilds(self, action: Action) -> bool:
        """Whether a backward runs its stage's forward again, having no R to do it."""
        again = Action(action.stage, Kind.RECOMPUTE, action.microbatch)
        backward = action.kind in _BACKWARD
        return backward and bool(self.costs.recompute[action.stage]) and again not in self.rebuilt

    def size_bytes(self, transfer: Transfer) -> float:
        """Returns the bytes of a stage's output, or of the gradient of its input."""
        column = self.costs.output_bytes if transfer.kind == "F" else self.costs.input_bytes
        return float(column[transfer.stage])

    def wire_s(self, transfer: Transfer) -> tuple[float, float]:
        """Returns a transfer's latency and the time it occupies its link."""
        latency, bandwidth = self.machine.link(transfer.source, transfer.target)
        return latency, self.size_bytes(transfer) / bandwidth


def run(meaning: Meaning) -> Run:
    """Returns when everything happens with asynchronous transfers. Expects a valid table."""
    rows = meaning.schedule.ranks
    result = Run()
    at: dict[tuple[int, Value], float] = {}  # when a value is on a rank
    free = [0.0] * len(rows)
    link_free: dict[tuple[int, int], float] = defaultdict(float)
    head = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while head[rank] < len(row):
                item = row[head[rank]]
                needs = [v for a in actions_of(item) for v in reads(a, meaning.last_stage)]
                if not all((rank, v) in at for v in needs):
                    break
                start = max([free[rank], *(at[rank, v] for v in needs)])
                end = start + meaning.duration_s(rank, item)
                result.start[rank, head[rank]], result.end[rank, head[rank]] = start, end
                free[rank] = end
                head[rank] += 1
                moved = True
                for action in actions_of(item):
                    value = makes(action)
                    if value is None:
                        continue
                    at[rank, value] = end
                    transfer = sent(action, rank, meaning.owner)
                    if transfer is None:
                        continue
                    link = (rank, transfer.target)
                    latency, occupied = meaning.wire_s(transfer)
                    leaves = max(end, link_free[link])
                    link_free[link] = leaves + occupied
                    arrives = leaves + (latency + occupied)
                    result.moves[transfer] = (leaves, arrives)
                    at[transfer.target, value] = arrives
    return result


def held_bytes(meaning: Meaning, done: Run, rank: int) -> list[tuple[float, float, float]]:
    """Returns `(from_s, until_s, bytes)` of everything a rank holds beside its static state.

    Residuals from F's start (with recompute only the input, and the residuals from the start
    of R, I or B) to the end of I or B; what I keeps, to the end of W; a received value from
    the start of its transfer to its consumer's end; a sent one from its producer's end to the
    end of its transfer. A span includes its start and not its end.
    """
    costs = meaning.costs
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    for position, item in enumerate(meaning.schedule.ranks[rank]):
        for action in actions_of(item):
            start[action], end[action] = done.start[rank, position], done.end[rank, position]
    spans: list[tuple[float, float, float]] = []
    for action in start:
        stage, microbatch = action.stage, action.microbatch
        forward = Action(stage, Kind.FORWARD, microbatch)
        if action.kind in _BACKWARD:
            residual = float(costs.residual_bytes[stage])
            if costs.recompute[stage]:
                again = Action(stage, Kind.RECOMPUTE, microbatch)
                spans.append((start[forward], end[action], float(costs.input_bytes[stage])))
                spans.append((start.get(again, start[action]), end[action], residual))
            else:
                spans.append((start[forward], end[action], residual))
        if action.kind is Kind.WEIGHT_GRAD:
            split = Action(stage, Kind.INPUT_GRAD, microbatch)
            spans.append((end[split], end[action], float(costs.weight_residual_bytes[stage])))
        bring, take = received(action, rank, meaning.owner), sent(action, rank, meaning.owner)
        if bring is not None:
            spans.append((done.moves[bring][0], end[action], meaning.size_bytes(bring)))
        if take is not None:
            spans.append((end[action], done.moves[take][1], meaning.size_bytes(take)))
    return spans


def peak_live(schedule: Schedule, rank: int, until: Kind) -> int:
    """Returns the most live (stage, microbatch)s of a rank, freed at B or at `until` (I or W)."""
    live, peak = 0, 0
    for item in schedule.ranks[rank]:
        kinds = [action.kind for action in actions_of(item)]
        live += kinds.count(Kind.FORWARD)
        peak = max(peak, live)
        live -= kinds.count(Kind.BACKWARD) + kinds.count(until)
    return peak
