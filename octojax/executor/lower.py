"""From a lowered plan and its stages to one `StepProgram`: slots, recipes, what transfers carry.

The plan says everything that happens and in which order; here it only gets its buffers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from octojax.errors import ScheduleError
from octojax.executor.instructions import Do, Operation, RankProgram, StepProgram, with_frees
from octojax.executor.specs import Specs
from octojax.executor.values import Place, Value
from octojax.executor.work import Group, check_local, works
from octojax.ir import Action, Cargo, LoweredPlan, Receive, Send, Transfer
from octojax.ir.exchange import after_gradients, holders, owners
from octojax.ir.walk import Mode, TableWalk
from octojax.programs.recipe import Call, Layout, Recipe
from octojax.stages.program import Program, Stage


@dataclass(frozen=True)
class Lowered:
    """A step program, the plan that it carries out, and the distinct jaxprs its recipes call.

    `avals` are those of one data shard, for every value that a program reads or writes.
    """

    plan: LoweredPlan
    step: StepProgram
    jaxprs: tuple[ClosedJaxpr, ...]
    avals: Mapping[Value, Any]


def lower(
    plan: LoweredPlan,
    stages: Sequence[Sequence[Stage]],
    fingerprint: Callable[[Program], str],
    batch_layouts: Sequence[Layout],
    seconds: Callable[[int, Action], float] | None = None,
    param_specs: Sequence[PartitionSpec] = (),
) -> Lowered:
    """Returns what every rank does in one step of a verified `plan`.

    `stages[m][s]` is stage s for microbatch m (microbatches of two sizes have two programs
    each); `fingerprint` tells equal programs; `batch_layouts[leaf]` says how a leaf of the
    microbatch lies on a rank's devices. Where transfers of several ranks share a queue, those
    that come first if every action takes `seconds(rank, action)` are issued first. `param_specs`
    say how each parameter unit lies over the further axes of a rank (empty: whole). Raises
    `ScheduleError` for a plan that carries module state or residuals from rank to rank.
    """
    groups = works(plan, stages)
    check_local(groups)
    transfers = plan.transfers
    values = _carried(transfers, groups)
    table = _Programs(fingerprint)
    specs = Specs(param_specs, groups, table.number)
    recipes: dict[tuple[int, Recipe], int] = {}
    names: list[str] = []
    ranks = []
    for rank, row in enumerate(groups):
        builder = _RankBuilder(rank, transfers, values, batch_layouts, table, specs, recipes, names)
        ranks.append(builder.build(plan, row))
    step = StepProgram(
        ranks=tuple(ranks),
        recipes=tuple(recipes),
        names=tuple(names),
        transfers=transfers,
        values=values,
        order=_order(plan, seconds),
        owners=owners(plan),
        holders=holders(plan),
    )
    return Lowered(plan, step, tuple(table.jaxprs), _avals(groups))


def _order(plan: LoweredPlan, seconds: Callable[[int, Action], float] | None) -> tuple[int, ...]:
    """Returns the numbers of all transfers in one order, of which every row's is a part.

    Issuing them in it cannot deadlock; none waits behind one whose values are made much later.
    """

    def duration_s(rank: int, actions: tuple[Action, ...]) -> float:
        return sum(1.0 if seconds is None else seconds(rank, action) for action in actions)

    walk = TableWalk(plan, Mode.RENDEZVOUS, duration_s)
    numbers = {transfer: number for number, transfer in enumerate(plan.transfers)}
    # Sorting is stable: of one time, they stay in an order that keeps the dependences.
    return tuple(numbers[t] for t in sorted(walk.moves, key=lambda t: walk.moves[t][0]))


def _carried(
    transfers: Sequence[Transfer], groups: Sequence[Sequence[Group]]
) -> tuple[tuple[Value, ...], ...]:
    """Returns what each transfer carries: what its source makes, if the target reads it."""
    flat = [[work for group in row for work in group.works] for row in groups]
    writes = [{v for w in row for v in w.writes} for row in flat]
    read = [{v for w in row for v in w.reads} for row in flat]
    crossing: dict[tuple[int, Place, int, int], list[Value]] = {}
    for rank, values in enumerate(writes):
        for v in values:
            if v.place in (Place.FORWARD, Place.BACKWARD):
                crossing.setdefault((rank, v.place, v.stage, v.microbatch), []).append(v)

    def of(t: Transfer) -> list[Value]:
        match t.kind:
            case Cargo.OUTPUT:
                key = (t.source, Place.FORWARD, t.stage, t.microbatch)
            case Cargo.GRADIENT:  # named by the stage whose outputs they are the gradients of
                key = (t.source, Place.BACKWARD, t.stage - 1, t.microbatch)
            case Cargo.RESULTS:
                return [v for v in writes[t.source] if v.place is Place.EMIT and v.index in t.parts]
            case Cargo.SUMS:
                return [Value(Place.TOTAL, -1, -1, u) for u in t.parts]
            case Cargo.PARAMETERS:
                return [Value(Place.PARAM, -1, -1, u) for u in t.parts]
            case Cargo.UPDATE:  # what an update names itself
                return []
        return [v for v in crossing.get(key, ()) if v in read[t.target]]

    return tuple(tuple(sorted(of(t))) for t in transfers)


def _avals(groups: Sequence[Sequence[Group]]) -> dict[Value, Any]:
    avals: dict[Value, Any] = {}
    for work in (w for row in groups for g in row for w in g.works):
        avals.update(zip(work.reads, work.program.jaxpr.in_avals, strict=True))
        avals.update(zip(work.writes, work.program.jaxpr.out_avals, strict=True))
    return avals


@dataclass
class _Programs:
    """Numbers the distinct jaxprs."""

    fingerprint: Callable[[Program], str]
    jaxprs: list[ClosedJaxpr] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    by_identity: dict[int, tuple[Program, int]] = field(default_factory=dict)

    def number(self, program: Program) -> int:
        entry = self.by_identity.get(id(program))
        if entry is not None:
            return entry[1]
        key = self.fingerprint(program)
        if key not in self.numbers:
            self.numbers[key] = len(self.jaxprs)
            self.jaxprs.append(program.jaxpr)
        self.by_identity[id(program)] = (program, self.numbers[key])
        return self.numbers[key]


class _RankBuilder:
    """Lays out one rank's slots and instructions."""

    def __init__(
        self,
        rank: int,
        transfers: Sequence[Transfer],
        values: Sequence[Sequence[Value]],
        batch_layouts: Sequence[Layout],
        table: _Programs,
        specs: Specs,
        recipes: dict[tuple[int, Recipe], int],
        names: list[str],
    ) -> None:
        self.rank = rank
        self.batch_layouts = batch_layouts
        self.table, self.specs, self.recipes, self.names = table, specs, recipes, names
        self.transfers, self.values = transfers, values
        self.numbers = {transfer: number for number, transfer in enumerate(transfers)}
        self.arriving = {
            v: k
            for k, t in enumerate(transfers)
            if t.target == rank and t.kind.crosses_stages
            for v in values[k]
        }
        self.leaving = {
            v
            for k, t in enumerate(transfers)
            if t.source == rank and t.kind.crosses_stages
            for v in values[k]
        }
        self.slots: dict[Value, int] = {}

    def build(self, plan: LoweredPlan, row: Sequence[Group]) -> RankProgram:
        flat = [w for g in row for w in g.works]
        writes = {v for w in flat for v in w.writes}
        read = {v for w in flat for v in w.reads}
        params = sorted({v.index for v in read | writes if v.place in (Place.PARAM, Place.TOTAL)})
        totals = sorted({v.index for v in writes if v.place is Place.TOTAL})
        outside = [v for v in sorted(read - writes) if v not in self.arriving]
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
        body = self._body(plan, row)
        results = self._results(writes, state)
        extra = tuple((v.index, slot) for v, slot in self.slots.items() if v.place is Place.OTHER)
        outputs = {self.slots[v] for v in ordered if v.place is Place.TOTAL}
        outputs |= {slot for _, slot in (*results, *extra)}
        return RankProgram(
            rank=self.rank,
            params=tuple(params),
            constants=tuple(constants),
            state=tuple(state),
            batch=tuple(batch),
            totals=tuple(totals),
            body=with_frees(body, outputs, len(params) + len(constants)),
            num_slots=len(self.slots),
            results=results,
            extra_totals=extra,
        )

    def _slot(self, value: Value) -> int:
        return self.slots.setdefault(value, len(self.slots))

    def _body(self, plan: LoweredPlan, row: Sequence[Group]) -> list[Operation]:
        last_read = {v: at for at, g in enumerate(row) for w in g.works for v in w.reads}
        posted: dict[int, Receive] = {}
        body: list[Operation] = []
        units = iter(enumerate(row))
        for x in plan.ranks[self.rank]:
            if after_gradients(x):  # see `octojax.executor.routine`
                continue
            if isinstance(x, Send):
                body.append(self._send(x))
                continue
            if isinstance(x, Receive):
                posted[self.numbers[x.transfer]] = x
                body.append(Operation(Do.POST, self.numbers[x.transfer], (), (), (), x))
                continue
            at, group = next(units)
            for value in dict.fromkeys(v for w in group.works for v in w.reads):
                k = self.arriving.get(value)
                if k in posted:
                    body.append(self._receive(k, posted.pop(k)))
            if group.works:
                writes = (v for w in group.works for v in w.writes)
                later = {v for v in writes if last_read.get(v, -1) > at}
                body.append(self._run(group, later))
        body += [self._receive(k, x) for k, x in posted.items()]  # sums and results
        return body

    def _receive(self, k: int, of: Receive) -> Operation:
        values = self.values[k]
        if of.transfer.kind is Cargo.SUMS:  # the rank may have a sum of its own
            values = [Value(Place.OTHER, of.transfer.source, -1, v.index) for v in values]
        writes = tuple(self._slot(v) for v in values)
        return Operation(Do.RECEIVE, k, (), writes, (), of, tail=True)

    def _send(self, of: Send) -> Operation:
        k = self.numbers[of.transfer]
        return Operation(Do.SEND, k, tuple(self.slots[v] for v in self.values[k]), (), (), of)

    def _run(self, group: Group, later: set[Value]) -> Operation:
        recipe, inputs, outputs = self._recipe(group, later)
        key = (self.rank, recipe)
        if key not in self.recipes:
            self.recipes[key] = len(self.recipes)
            self.names.append(str(group.unit))
        return Operation(
            Do.RUN,
            self.recipes[key],
            tuple(self._slot(v) for v in inputs),
            tuple(self._slot(v) for v in outputs),
            (),
            group.unit,
        )

    def _recipe(
        self, group: Group, later: set[Value]
    ) -> tuple[Recipe, tuple[Value, ...], tuple[Value, ...]]:
        local_values: set[Value] = set()
        inputs: dict[Value, int] = {}
        for work in group.works:
            for v in (*work.reads, *(v for v in work.writes if v.place is Place.TOTAL)):
                if v not in local_values:
                    inputs.setdefault(v, len(inputs))
            local_values |= set(work.writes)
        local, count, calls = dict(inputs), len(inputs), []
        read = {v for work in group.works for v in work.reads}
        for work in group.works:
            reads = tuple(local[v] for v in work.reads)
            writes, adds = [], []
            for v in work.writes:
                adds.append(local[v] if v.place is Place.TOTAL else -1)
                needed = v.place is Place.TOTAL or v in read or self._outlives(v, later)
                writes.append(count if needed else -1)
                if needed:
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
            self.specs.of(inputs),
            self.specs.of(outputs),
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

    def _results(self, writes: set[Value], state: Sequence[Value]) -> tuple[tuple[Value, int], ...]:
        ends = [(t, v) for t, v in zip(self.transfers, self.values, strict=True) if t.kind == "E"]
        received = {v for t, values in ends if t.target == self.rank for v in values}
        sent = {v for t, values in ends if t.source == self.rank for v in values}
        emits = sorted({v for v in writes if v.place is Place.EMIT} - sent | received)
        final: dict[int, Value] = {}
        for value in sorted(v for v in writes | set(state) if v.place is Place.STATE):
            final[value.index] = value  # ascending: the last microbatch wins
        return tuple((v, self.slots[v]) for v in (*emits, *final.values()))
