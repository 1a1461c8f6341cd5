"""From a schedule and its stages to one `StepProgram`: slots, recipes, transfers, their order."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import ClosedJaxpr

from octojax.errors import ScheduleError
from octojax.executor.instructions import Do, Instruction, RankProgram, StepProgram, Transfer
from octojax.executor.values import CROSSING, Place, Value
from octojax.executor.work import Group, Work, check_local, fuse, works
from octojax.ir import Action, Schedule, parse_action
from octojax.programs.recipe import Call, Layout, Recipe
from octojax.stages.program import Program, Stage


@dataclass(frozen=True)
class Lowered:
    """A step program, the distinct jaxprs its recipes call, and what its values look like.

    `avals` are those of one data shard, for every value that a program reads or writes.
    """

    step: StepProgram
    jaxprs: tuple[ClosedJaxpr, ...]
    avals: Mapping[Value, Any]


def lower(
    schedule: Schedule,
    stages: Sequence[Sequence[Stage]],
    num_units: int,
    fingerprint: Callable[[Program], str],
    batch_layouts: Sequence[Layout],
    *,
    join: bool = True,
    seconds: Callable[[int, Action], float] = lambda rank, action: 1.0,
) -> Lowered:
    """Returns what every rank does in one step of `schedule`.

    `stages[m][s]` is stage s for microbatch m (microbatches of two sizes have two programs
    each); `fingerprint` tells equal programs; `batch_layouts[leaf]` says how a leaf of the
    microbatch lies on a rank's devices. Transfers are issued in the order in which their values
    are made if every action takes `seconds(rank, action)`: where two ranks' transfers share a
    queue, none waits for one that is made much later.
    """
    rows = works(schedule, stages)
    check_local(rows)
    groups = fuse(rows) if join else tuple(tuple(Group((w,)) for w in row) for row in rows)
    table = _Programs(fingerprint)
    transfers = _transfers(rows)
    owners, holders = _ownership(rows, num_units)
    returned = _gradient_returns(owners, holders, rows)
    refreshed = _refreshes(owners, holders)
    every = (*transfers, *returned, *_emit_returns(rows), *refreshed)
    recipes: dict[tuple[int, Recipe], int] = {}
    names: list[str] = []
    ranks = []
    for rank, row in enumerate(groups):
        builder = _RankBuilder(rank, every, batch_layouts, table, recipes, names)
        ranks.append(builder.build(row))
    step = StepProgram(
        ranks=tuple(ranks),
        recipes=tuple(recipes),
        names=tuple(names),
        transfers=every,
        order=_order(ranks, every, seconds),
        owners=owners,
        holders=holders,
    )
    return Lowered(step, tuple(table.jaxprs), _avals(rows))


def _avals(rows: Sequence[Sequence[Work]]) -> dict[Value, Any]:
    found: dict[Value, Any] = {}
    for work in (w for row in rows for w in row):
        found.update(zip(work.reads, work.program.jaxpr.in_avals, strict=True))
        found.update(zip(work.writes, work.program.jaxpr.out_avals, strict=True))
    return found


@dataclass
class _Programs:
    """Numbers the distinct jaxprs."""

    fingerprint: Callable[[Program], str]
    jaxprs: list[ClosedJaxpr] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    seen: dict[int, tuple[Program, int]] = field(default_factory=dict)

    def number(self, program: Program) -> int:
        known = self.seen.get(id(program))
        if known is not None:
            return known[1]
        key = self.fingerprint(program)
        if key not in self.numbers:
            self.numbers[key] = len(self.jaxprs)
            self.jaxprs.append(program.jaxpr)
        self.seen[id(program)] = (program, self.numbers[key])
        return self.numbers[key]


def _transfers(rows: Sequence[Sequence[Work]]) -> tuple[Transfer, ...]:
    """One per boundary and microbatch whose two sides are on different ranks."""
    homes = {v: (r, w) for r, row in enumerate(rows) for w in row for v in w.writes}
    leaves: dict[tuple[int, int, str, int, int], set[Value]] = defaultdict(set)
    for rank, row in enumerate(rows):
        for work in row:
            for value in work.reads:
                if value.place not in CROSSING or value not in homes:
                    continue
                source, maker = homes[value]
                if source != rank:
                    kind = "F" if value.place is Place.FORWARD else "B"
                    key = (source, rank, kind, maker.action.stage, value.microbatch)
                    leaves[key].add(value)
    return tuple(Transfer(*key, tuple(sorted(values))) for key, values in leaves.items())


def _ownership(
    rows: Sequence[Sequence[Work]], num_units: int
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Owner and holders of each parameter: the rank of the lowest stage that reads it owns it.

    A stage that two ranks hold makes both of them holders.
    """
    first: dict[int, tuple[int, int]] = {}
    held: list[set[int]] = [set() for _ in range(num_units)]
    for rank, row in enumerate(rows):
        for work in row:
            for value in (*work.reads, *work.writes):
                if value.place not in (Place.PARAM, Place.TOTAL):
                    continue
                held[value.index].add(rank)
                mine = (work.action.stage, rank)
                first[value.index] = min(first.get(value.index, mine), mine)
    owners = tuple(first[u][1] if u in first else -1 for u in range(num_units))
    return owners, tuple(tuple(sorted(ranks)) for ranks in held)


def _summed(row: Sequence[Work]) -> set[int]:
    return {v.index for w in row for v in w.writes if v.place is Place.TOTAL}


def _gradient_returns(
    owners: Sequence[int], holders: Sequence[Sequence[int]], rows: Sequence[Sequence[Work]]
) -> tuple[Transfer, ...]:
    """Gradient sums of parameters that several ranks hold, sent to the owner."""
    summed = [_summed(row) for row in rows]
    pairs: dict[tuple[int, int], list[int]] = defaultdict(list)
    for unit, owner in enumerate(owners):
        for rank in holders[unit]:
            if rank != owner and unit in summed[rank]:
                pairs[rank, owner].append(unit)
    return tuple(
        Transfer(*pair, "G", -1, -1, tuple(Value(Place.TOTAL, -1, -1, u) for u in units))
        for pair, units in pairs.items()
    )


def _emit_returns(rows: Sequence[Sequence[Work]]) -> tuple[Transfer, ...]:
    """Results that several ranks make (a bidirectional pipeline's loss), sent to the first."""
    made = {
        (v, rank)
        for rank, row in enumerate(rows)
        for w in row
        for v in w.writes
        if v.place is Place.EMIT
    }
    homes: dict[int, int] = {}
    for value, rank in made:
        homes[value.index] = min(homes.get(value.index, rank), rank)
    pairs: dict[tuple[int, int], list[Value]] = defaultdict(list)
    for value, rank in sorted(made):
        if rank != homes[value.index]:
            pairs[rank, homes[value.index]].append(value)
    return tuple(Transfer(*pair, "E", -1, -1, tuple(values)) for pair, values in pairs.items())


def _refreshes(owners: Sequence[int], holders: Sequence[Sequence[int]]) -> tuple[Transfer, ...]:
    """Updated parameters, sent from their owner to every other holder."""
    pairs: dict[tuple[int, int], list[int]] = defaultdict(list)
    for unit, owner in enumerate(owners):
        for rank in holders[unit]:
            if rank != owner:
                pairs[owner, rank].append(unit)
    return tuple(
        Transfer(*pair, "P", -1, -1, tuple(Value(Place.PARAM, -1, -1, u) for u in units))
        for pair, units in pairs.items()
    )


class _RankBuilder:
    """Lays out one rank's slots and instructions."""

    def __init__(
        self,
        rank: int,
        transfers: Sequence[Transfer],
        batch_layouts: Sequence[Layout],
        table: _Programs,
        recipes: dict[tuple[int, Recipe], int],
        names: list[str],
    ) -> None:
        self.rank = rank
        self.batch_layouts = batch_layouts
        self.table, self.recipes, self.names = table, recipes, names
        self.arriving = {
            v: k
            for k, t in enumerate(transfers)
            if t.target == rank and t.kind in "FB"
            for v in t.values
        }
        self.leaving = {
            v: [] for t in transfers if t.source == rank and t.kind in "FB" for v in t.values
        }
        for k, t in enumerate(transfers):
            if t.source == rank and t.kind in "FB":
                for v in t.values:
                    self.leaving[v].append(k)
        self.transfers = transfers
        self.slots: dict[Value, int] = {}

    def build(self, row: Sequence[Group]) -> RankProgram:
        flat = [w for g in row for w in g.works]
        written = {v for w in flat for v in w.writes}
        read = {v for w in flat for v in w.reads}
        params = sorted({v.index for v in read | written if v.place in (Place.PARAM, Place.TOTAL)})
        totals = sorted({v.index for v in written if v.place is Place.TOTAL})
        outside = [v for v in sorted(read - written) if v not in self.arriving]
        constants, state, batch = [], [], []
        for value in outside:
            match value.place:
                case Place.SEED:
                    constants.append(value)
                case Place.BACKWARD:  # no later stage makes this gradient: it is zero
                    constants.append(value)
                case Place.STATE:
                    state.append(value)
                case Place.BATCH:
                    batch.append(value)
                case Place.PARAM:
                    pass
                case _:
                    raise ScheduleError(f"rank {self.rank} needs {value}, which no action makes")
        ordered = (
            *(Value(Place.PARAM, -1, -1, u) for u in params),
            *constants,
            *state,
            *batch,
            *(Value(Place.TOTAL, -1, -1, u) for u in totals),
        )
        for value in ordered:
            self._slot(value)
        body = self._body(row)
        extra, tail = self._returns()
        results = self._results(written, state)
        kept = {self.slots[v] for v in ordered if v.place is Place.TOTAL}
        kept |= {slot for _, slot in (*results, *extra)}
        return RankProgram(
            rank=self.rank,
            params=tuple(params),
            constants=tuple(constants),
            state=tuple(state),
            batch=tuple(batch),
            totals=tuple(totals),
            body=_with_frees([*body, *tail], kept, len(params) + len(constants)),
            num_slots=len(self.slots),
            results=results,
            extra_totals=extra,
        )

    def _slot(self, value: Value) -> int:
        return self.slots.setdefault(value, len(self.slots))

    def _body(self, row: Sequence[Group]) -> list[Instruction]:
        last_read = {v: at for at, g in enumerate(row) for w in g.works for v in w.reads}
        received: set[int] = set()
        body: list[Instruction] = []
        for at, group in enumerate(row):
            written = (v for w in group.works for v in w.writes)
            later = {v for v in written if last_read.get(v, -1) > at}
            for value in dict.fromkeys(v for w in group.works for v in w.reads):
                k = self.arriving.get(value)
                if k is not None and k not in received:
                    received.add(k)
                    body.append(self._receive(k))
            body.append(self._run(group, later))
            sent = dict.fromkeys(
                k for w in group.works for v in w.writes for k in self.leaving.get(v, ())
            )
            body += [self._send(k) for k in sent]
        return body

    def _receive(self, k: int) -> Instruction:
        writes = tuple(self._slot(v) for v in self.transfers[k].values)
        return Instruction(Do.RECEIVE, k, (), writes, (), self.transfers[k].name)

    def _send(self, k: int) -> Instruction:
        reads = tuple(self.slots[v] for v in self.transfers[k].values)
        return Instruction(Do.SEND, k, reads, (), (), self.transfers[k].name)

    def _run(self, group: Group, later: set[Value]) -> Instruction:
        recipe, inputs, outputs = self._recipe(group, later)
        key = (self.rank, recipe)
        if key not in self.recipes:
            self.recipes[key] = len(self.recipes)
            self.names.append(group.name)
        return Instruction(
            Do.RUN,
            self.recipes[key],
            tuple(self._slot(v) for v in inputs),
            tuple(self._slot(v) for v in outputs),
            (),
            group.name,
        )

    def _recipe(
        self, group: Group, later: set[Value]
    ) -> tuple[Recipe, tuple[Value, ...], tuple[Value, ...]]:
        made: set[Value] = set()
        inputs: dict[Value, int] = {}
        for work in group.works:
            for v in (*work.reads, *(v for v in work.writes if v.place is Place.TOTAL)):
                if v not in made:
                    inputs.setdefault(v, len(inputs))
            made |= set(work.writes)
        local, count, calls = dict(inputs), len(inputs), []
        read = {v for work in group.works for v in work.reads}
        for work in group.works:
            reads = tuple(local[v] for v in work.reads)
            writes, adds = [], []
            for v in work.writes:
                adds.append(local[v] if v.place is Place.TOTAL else -1)
                wanted = v.place is Place.TOTAL or v in read or self._outlives(v, later)
                writes.append(count if wanted else -1)
                if wanted:
                    local[v] = count
                    count += 1
            calls.append(Call(self.table.number(work.program), reads, tuple(writes), tuple(adds)))
        outputs = tuple(
            dict.fromkeys(
                v
                for w in group.works
                for v in w.writes
                if v.place is Place.TOTAL or self._outlives(v, later)
            )
        )
        recipe = Recipe(
            tuple(calls),
            tuple(self._layout(v) for v in inputs),
            tuple(local[v] for v in outputs),
            tuple(i for v, i in inputs.items() if v.place is Place.TOTAL),
        )
        return recipe, tuple(inputs), outputs

    def _outlives(self, value: Value, later: set[Value]) -> bool:
        return value in later or value in self.leaving or value.place in (Place.EMIT, Place.STATE)

    def _layout(self, value: Value) -> Layout:
        match value.place:
            case Place.PARAM | Place.SEED | Place.STATE:
                return Layout.WHOLE
            case Place.BATCH:
                return self.batch_layouts[value.index]
            case _:
                return Layout.STACKED

    def _returns(self) -> tuple[tuple[tuple[int, int], ...], list[Instruction]]:
        """Gradient sums of shared parameters, and results that belong to another rank's: sent
        to the rank that joins them, or received there."""
        extra: list[tuple[int, int]] = []
        tail: list[Instruction] = []
        for k, transfer in enumerate(self.transfers):
            if transfer.kind not in "GE":
                continue
            if transfer.source == self.rank:
                tail.append(self._send(k))
            if transfer.target == self.rank and transfer.kind == "E":
                tail.append(self._receive(k))
            if transfer.target == self.rank and transfer.kind == "G":
                first = len(self.slots)
                for i, value in enumerate(transfer.values):
                    self.slots[replace(value, stage=transfer.source)] = first + i
                    extra.append((value.index, first + i))
                writes = tuple(range(first, first + len(transfer.values)))
                tail.append(Instruction(Do.RECEIVE, k, (), writes, (), transfer.name))
        # Sends first: the owner of one parameter may be a plain holder of another.
        tail.sort(key=lambda i: i.do is Do.RECEIVE)
        return tuple(extra), tail

    def _results(
        self, written: set[Value], state: Sequence[Value]
    ) -> tuple[tuple[Value, int], ...]:
        ends = [t for t in self.transfers if t.kind == "E"]
        received = {v for t in ends if t.target == self.rank for v in t.values}
        sent = {v for t in ends if t.source == self.rank for v in t.values}
        emits = sorted({v for v in written if v.place is Place.EMIT} - sent | received)
        final: dict[int, Value] = {}
        for value in sorted(v for v in written | set(state) if v.place is Place.STATE):
            final[value.index] = value  # ascending: the last microbatch wins
        return tuple((v, self.slots[v]) for v in (*emits, *final.values()))


def _with_frees(
    body: Sequence[Instruction], kept: set[int], num_permanent: int
) -> tuple[Instruction, ...]:
    """Returns `body` with each slot freed by the last instruction that touches it.

    Parameters and constants stay referenced elsewhere, so clearing them would free nothing.
    """
    done = set(kept) | set(range(num_permanent))
    result = []
    for instruction in reversed(body):
        touched = dict.fromkeys((*instruction.reads, *instruction.writes))
        frees = tuple(s for s in touched if s not in done)
        done |= set(frees)
        result.append(
            Instruction(
                instruction.do,
                instruction.target,
                instruction.reads,
                instruction.writes,
                frees,
                instruction.name,
            )
        )
    return tuple(reversed(result))


def _order(
    ranks: Sequence[RankProgram],
    transfers: Sequence[Transfer],
    seconds: Callable[[int, Action], float],
) -> tuple[int, ...]:
    """Returns all transfers in the order in which a run with these times makes their values.

    It is a linear extension of the dependences, so issuing in it cannot deadlock. New
    parameters (`P`) come after everything else. Raises `ScheduleError` if the lists deadlock.
    """
    position, clock = [0] * len(ranks), [0.0] * len(ranks)
    made: dict[int, float] = {}  # in an order that keeps dependences, for equal times
    moved = True
    while moved:
        moved = False
        for r, program in enumerate(ranks):
            while position[r] < len(program.body):
                instruction = program.body[position[r]]
                if instruction.do is Do.RECEIVE:
                    if instruction.target not in made:
                        break
                    clock[r] = max(clock[r], made[instruction.target])
                position[r] += 1
                moved = True
                if instruction.do is Do.SEND:
                    made[instruction.target] = clock[r]
                if instruction.do is Do.RUN:
                    actions = map(parse_action, instruction.name.split("+"))
                    clock[r] += sum(seconds(program.rank, action) for action in actions)
                    break
    stuck = [
        f"rank {p.rank} waits at {p.body[position[r]].name} (instruction {position[r]} of "
        f"{len(p.body)})"
        for r, p in enumerate(ranks)
        if position[r] < len(p.body)
    ]
    if stuck:
        raise ScheduleError("the schedule deadlocks: " + "; ".join(stuck))
    sent = sorted(made, key=lambda k: made[k])
    return (*sent, *(k for k, t in enumerate(transfers) if t.kind == "P"))
