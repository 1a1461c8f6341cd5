"""The simulator's meaning in plain Python: slow, short, and the judge of the compiled one.

Everything is looked up by name in dictionaries, and a fixed point is reached by trying every
rank again and again. Written for its reader; for speed see `engine.py` and `memory.py`.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from octojax.ir import Action, Item, Kind, Machine, Placement, Schedule
from octojax.ir.lowering import Transfer, actions_of, owners, received, sent
from octojax.ir.progress import Value, makes, reads
from octojax.simulate.costs import KINDS, StageCosts


@dataclass
class Run:
    """When everything happens. Rows are as in the schedule; transfers in order of discovery."""

    start: dict[tuple[int, int], float] = field(default_factory=dict)  # (rank, position)
    end: dict[tuple[int, int], float] = field(default_factory=dict)
    transfers: dict[Transfer, tuple[float, float]] = field(default_factory=dict)

    @property
    def makespan_s(self) -> float:
        return max(self.end.values(), default=0.0)


def duration_s(
    item: Item, rank: int, schedule: Schedule, costs: StageCosts, machine: Machine
) -> float:
    """Returns how long a rank is busy with an item: compute time plus host costs."""
    owner = owners(schedule)
    explicit = {a for _, _, a in schedule.actions() if a.kind is Kind.RECOMPUTE}
    seconds, transfers = 0.0, 0
    for action in actions_of(item):
        seconds += costs.seconds[action.stage, KINDS.index(action.kind)]
        rebuilds = action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD) and costs.recompute[action.stage]
        if rebuilds and Action(action.stage, Kind.RECOMPUTE, action.microbatch) not in explicit:
            seconds += costs.forward_s[action.stage]
        transfers += received(action, rank, owner) is not None
        transfers += sent(action, rank, owner) is not None
    return seconds / machine.speed(rank) + transfers * machine.host_cost_s


def size_bytes(transfer: Transfer, costs: StageCosts) -> float:
    """Returns the bytes of a stage's output, or of the gradient of its input."""
    column = costs.output_bytes if transfer.kind == "F" else costs.input_bytes
    return column[transfer.stage]


def run(schedule: Schedule, costs: StageCosts, machine: Machine | None = None) -> Run:
    """Returns when everything happens with asynchronous transfers. Expects a valid schedule."""
    machine = machine or Machine()
    owner = owners(schedule)
    last_stage = costs.num_stages - 1
    result = Run()
    at: dict[tuple[int, Value], float] = {}  # (rank, value): when the value is there
    free: dict[int, float] = defaultdict(float)
    link_free: dict[tuple[int, int], float] = defaultdict(float)
    head = [0] * schedule.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.ranks):
            if head[rank] == len(row):
                continue
            item = row[head[rank]]
            needs = [v for a in actions_of(item) for v in reads(a, last_stage)]
            if not all((rank, v) in at for v in needs):
                continue
            start = max([free[rank], *(at[rank, v] for v in needs)])
            end = start + duration_s(item, rank, schedule, costs, machine)
            result.start[rank, head[rank]], result.end[rank, head[rank]] = start, end
            free[rank] = end
            head[rank] += 1
            moved = True
            for action in actions_of(item):
                value = makes(action)
                if value is not None:
                    at[rank, value] = end
                transfer = sent(action, rank, owner)
                if transfer is None or value is None:
                    continue
                latency, bandwidth = machine.link(rank, transfer.target)
                occupied = size_bytes(transfer, costs) / bandwidth
                leaves = max(end, link_free[rank, transfer.target])
                link_free[rank, transfer.target] = leaves + occupied
                arrives = leaves + latency + occupied
                result.transfers[transfer] = (leaves, arrives)
                at[transfer.target, value] = arrives
    return result


def held_bytes(
    schedule: Schedule, costs: StageCosts, done: Run, rank: int
) -> list[tuple[float, float, float]]:
    """Returns `(from_s, until_s, bytes)` of everything a rank holds beside its static state."""
    owner = owners(schedule)
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    for position, item in enumerate(schedule.ranks[rank]):
        for action in actions_of(item):
            start[action], end[action] = done.start[rank, position], done.end[rank, position]
    spans = []
    for action in start:
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            back = next(
                a
                for kind in (Kind.BACKWARD, Kind.INPUT_GRAD)
                if (a := Action(stage, kind, microbatch)) in start
            )
            weight = Action(stage, Kind.WEIGHT_GRAD, microbatch)
            rebuilt = start.get(Action(stage, Kind.RECOMPUTE, microbatch), start[back])
            residual = costs.residual_bytes[stage]
            if costs.recompute[stage]:
                spans.append((start[action], end[back], costs.input_bytes[stage]))
                spans.append((rebuilt, end[back], residual))
            else:
                spans.append((start[action], end[back], residual))
            if weight in start:
                spans.append((end[back], end[weight], costs.weight_residual_bytes[stage]))
        bring, take = received(action, rank, owner), sent(action, rank, owner)
        if bring is not None:
            spans.append((done.transfers[bring][0], end[action], size_bytes(bring, costs)))
        if take is not None:
            spans.append((end[action], done.transfers[take][1], size_bytes(take, costs)))
    return spans


def peak_bytes(
    schedule: Schedule,
    costs: StageCosts,
    done: Run,
    rank: int,
    placement: Placement | None = None,
) -> float:
    """Returns the most bytes a rank holds at any instant. A span includes its start only."""
    spans = held_bytes(schedule, costs, done, rank)
    held = (placement or schedule.placement).ranks[rank]
    static = sum(costs.state_bytes[stage] for stage in held)
    instants = {begin for begin, _, _ in spans}
    return static + max(
        (sum(size for a, b, size in spans if a <= t < b) for t in instants), default=0.0
    )


def peak_live(schedule: Schedule, rank: int, until: Kind) -> int:
    """Returns the most live (stage, microbatch)s of a rank, freed at `until` (I or W) or B."""
    live, peak = 0, 0
    for item in schedule.ranks[rank]:
        kinds = [action.kind for action in actions_of(item)]
        live += kinds.count(Kind.FORWARD)
        peak = max(peak, live)
        live -= kinds.count(Kind.BACKWARD) + kinds.count(until)
    return peak


def both_busy_s(done: Run, transfer: Transfer) -> float:
    """Returns how long the two ranks of a transfer compute at once while it is under way."""
    begin, stop = done.transfers[transfer]

    def busy(rank: int) -> list[tuple[float, float]]:
        return [
            (max(begin, done.start[key]), min(stop, done.end[key]))
            for key in done.start
            if key[0] == rank and done.start[key] < stop and done.end[key] > begin
        ]

    pairs = ((x, y) for x in busy(transfer.source) for y in busy(transfer.target))
    return sum(max(0.0, min(x[1], y[1]) - max(x[0], y[0])) for x, y in pairs)
