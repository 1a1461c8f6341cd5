"""A lowered step on real devices: compiles its programs, then runs them step after step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from operator import itemgetter
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from octojax import compat
from octojax.arrays import put
from octojax.errors import NonFiniteError
from octojax.executor.instructions import RankProgram, StepProgram
from octojax.executor.lower import Lowered
from octojax.executor.nonfinite import non_finite
from octojax.executor.prepare import Model, Preparation
from octojax.executor.recorded import Recorder
from octojax.executor.routine import (
    Crew,
    Routine,
    RoutineBuilder,
    copied_units,
    copies_of,
    run_routines,
)
from octojax.executor.run import Bound, RankThreads, Walk, bind, run_rank
from octojax.executor.sliced import Sliced, bytes_on_links, on_the_link
from octojax.executor.stop import Stop
from octojax.executor.transport import StandIns, Transport
from octojax.executor.values import Place, Value
from octojax.executor.waves import compile_in_waves
from octojax.ir import Cargo, Transfer
from octojax.ir.exchange import end_rows
from octojax.jaxprs.dataflow import shape_of
from octojax.mesh import PipelineMesh, Rank
from octojax.programs.accumulator import accumulator_dtype
from octojax.programs.build import Job
from octojax.programs.finish import add_terms, join_results, reduction, sum_gradients
from octojax.programs.microbatch import Microbatches
from octojax.programs.recipe import (
    WHOLE,
    Layout,
    on_devices,
    stored,
    unstored,
)
from octojax.stages.program import OwnTerm
from octojax.update import End, Role

MakeTransport = Callable[
    [Sequence[Transfer], Sequence[Sequence[jax.ShapeDtypeStruct]], PipelineMesh], Transport
]
"""`make(transfers, values, mesh)`: `values[k]` say how transfer k's values lie at its target."""


@dataclass(frozen=True)
class Results:
    """What one step made. `gradients[u]` is None where unit u has none (or another process's).

    `emits[e]` is leaf e of what the loss returns, over the whole batch, without its terms:
    `terms[e, rank]` is what the parameters of a rank add to it. `state` maps a leaf of carried
    module state to its final value; `counters[i]` are those of local rank i.
    """

    gradients: tuple[jax.Array | None, ...]
    emits: Mapping[int, jax.Array]
    state: Mapping[int, jax.Array]
    counters: tuple[tuple[jax.Array, ...], ...]
    terms: Mapping[tuple[int, int], jax.Array] = field(default_factory=dict)


class Engine:
    """Runs one `StepProgram` in this process. Holds programs, threads and constant buffers."""

    def __init__(
        self,
        lowered: Lowered,
        mesh: PipelineMesh,
        batch: Microbatches,
        model: Model,
        make_transport: MakeTransport,
        timeout_s: float = 600.0,
        update_values: Mapping[Transfer, Sequence[jax.ShapeDtypeStruct]] | None = None,
    ) -> None:
        self.timeout_s, self.update_values = timeout_s, update_values or {}
        self.lowered, self.mesh, self.batch, self.model = lowered, mesh, batch, model
        self.step: StepProgram = lowered.step
        self.ranks = [self.step.ranks[r] for r in mesh.local_ranks]
        self.make_transport = make_transport
        self.threads: RankThreads | None = None
        self.further_transports: list[Transport] = []

    # ------------------------------------------------------------------ compilation

    def compile(self, compile_jobs: Callable[[Sequence[Job]], list[Any]]) -> int:
        """Compiles everything, and prepares transports and threads; returns the programs' number.

        `compile_jobs` compiles many at once.
        """
        local = {
            k: (self.mesh.ranks[rank], recipe)
            for k, (rank, recipe) in enumerate(self.step.recipes)
            if rank in self.mesh.local_ranks
        }
        own = list(chain.from_iterable(map(self._own_jobs, self.ranks)))
        result = compile_in_waves(local, self.step.names, self.lowered.jaxprs, own, compile_jobs)
        self.programs = [result.programs.get(k) for k in range(len(self.step.recipes))]
        self.specs = result.specs
        self._ready(result.others)
        return result.compilations

    @property
    def named_programs(self) -> list[tuple[int, str, Any]]:
        """Rank, name and compiled form of every stage program here, and of what ends a step."""
        stages = [
            (rank, name, program)
            for (rank, _), name, program in zip(
                self.step.recipes, self.step.names, self.programs, strict=True
            )
            if program is not None
        ]
        return [
            *stages,
            *((part.rank.index, "the end of a step", part.finish) for part in self.parts),
        ]

    def _own_jobs(self, program: RankProgram) -> list[Job]:
        rank = self.mesh.ranks[program.rank]
        finish, inputs, donated = self._finish(program)
        return [
            *self._preparations[program.rank].jobs(),
            *self._gathering(program),
            Job(
                f"finish on rank {rank.index}",
                finish,
                inputs,
                donated,
                self._finish_places(program),
            ),
        ]

    def _finish_places(self, program: RankProgram) -> tuple[jax.sharding.Sharding, ...]:
        """Where gradients, results of the loss and terms lie at the end of a rank's step."""
        rank = self.mesh.ranks[program.rank]
        gradients = (rank.sharding(self._gradient(unit)) for unit, _ in self._owned(program))
        others = len(self._emitted(program)) + len(self._term_emits(program.rank))
        return (*gradients, *[rank.replicated] * others)

    def _spec(self, unit: int) -> PartitionSpec:
        """How the stages' programs see a unit."""
        return WHOLE if self.model.specs is None else self.model.specs.params[unit]

    def _gradient(self, unit: int) -> PartitionSpec:
        return WHOLE if self.model.specs is None else self.model.specs.gradients[unit]

    def _gathering(self, program: RankProgram) -> list[Job]:
        """The program that gathers a rank's parameters, where they are stored otherwise."""
        rank = self.mesh.ranks[program.rank]
        at_rest = [self._param(u, rank, at_rest=True) for u in program.params]
        whole = tuple(self._param(u, rank).sharding for u in program.params)
        if all(x.sharding == where for x, where in zip(at_rest, whole, strict=True)):
            return []
        name = f"gather parameters on rank {rank.index}"
        return [Job(name, lambda *values: values, tuple(at_rest), (), whole)]

    @cached_property
    def _preparations(self) -> dict[int, Preparation]:
        """Per local rank, how a step begins."""
        preparations = {}
        for program in self.ranks:
            rank = self.mesh.ranks[program.rank]
            totals = [self._total(u, rank) for u in program.totals]
            preparations[program.rank] = Preparation(program, rank, self.batch, self.model, totals)
        return preparations

    def _counts(self, value: Value) -> bool:
        return value.place is Place.STATE and value.index in self.model.counters

    def _total(self, unit: int, rank: Rank) -> jax.ShapeDtypeStruct:
        aval = self.model.params[unit]
        total = jax.ShapeDtypeStruct(aval.shape, accumulator_dtype(aval.dtype))
        return on_devices(total, Layout.STACKED, rank, self._spec(unit))

    def _param(self, unit: int, rank: Rank, *, at_rest: bool = False) -> jax.ShapeDtypeStruct:
        specs, aval = self.model.specs, stored(self.model.params[unit])
        spec = specs.stored[unit] if at_rest and specs is not None else self._spec(unit)
        return on_devices(aval, Layout.WHOLE, rank, spec)

    def _owned(self, program: RankProgram) -> list[tuple[int, tuple[int, ...]]]:
        """The units whose gradient this rank makes, and the slots of their sums."""
        slots: dict[int, list[int]] = {}
        for at, unit in enumerate(program.totals):
            if self.step.owners[unit] == program.rank:
                slots.setdefault(unit, []).append(program.first_total + at)
        for unit, slot in program.extra_totals:
            slots.setdefault(unit, []).append(slot)
        if self._trains:
            for term in self._terms(program.rank):
                for unit in term.units:
                    if unit in self.model.trainable:
                        slots.setdefault(unit, [])
        return [(unit, tuple(sums)) for unit, sums in sorted(slots.items())]

    @cached_property
    def _trains(self) -> bool:
        """Whether the step makes gradients."""
        return any(program.totals for program in self.step.ranks)

    def _terms(self, rank: int) -> tuple[OwnTerm, ...]:
        """The terms of parameters alone that a rank adds."""
        return tuple(t for t in self.model.terms if self.step.owners[t.units[0]] == rank)

    def _emitted(self, program: RankProgram) -> list[tuple[int, tuple[int, ...]]]:
        """The leaves of the result that this rank makes, and their slots by microbatch."""
        slots: dict[int, list[int]] = {}
        for value, slot in program.results:
            if value.place is Place.EMIT:
                slots.setdefault(value.index, []).append(slot)
        return [(leaf, tuple(leaf_slots)) for leaf, leaf_slots in sorted(slots.items())]

    def _finish(
        self, program: RankProgram
    ) -> tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...], tuple[int, ...]]:
        """The end of a rank's step: the program, its inputs, and which of them it may reuse."""
        rank = self.mesh.ranks[program.rank]
        owned, emitted = self._owned(program), self._emitted(program)
        stacked = rank.data_size > 1
        batch, dtypes = self.batch, [self.model.params[u].dtype for u, _ in owned]
        joins = self.model.joins
        terms, units = self._terms(program.rank), self._term_units(program.rank)
        trained = tuple(u for u, _ in owned) if terms else ()
        named = {slot: value for value, slot in program.results}
        reductions = [reduction(rank, self._spec(u), self._gradient(u)) for u, _ in owned]

        def finish(*values: Any) -> tuple[Any, ...]:
            rest = iter(values)
            sums = [[next(rest) for _ in slots] for _, slots in owned]
            emits = []
            for leaf, slots in emitted:
                pieces = [unstored(next(rest), self.lowered.avals[named[slots[0]]]) for _ in slots]
                emits.append(join_results(pieces, batch, joins[leaf], stacked=stacked))
            params = dict(zip(units, rest, strict=True))
            added, more = add_terms(terms, params, trained)
            grads = [
                sum_gradients(parts, dtype, over_data, more=more.get(unit))
                for parts, (unit, _), dtype, over_data in zip(
                    sums, owned, dtypes, reductions, strict=True
                )
            ]
            return (*grads, *emits, *added)

        inputs = [self._total(u, rank) for u, slots in owned for _ in slots]
        inputs += [
            on_devices(stored(self.lowered.avals[named[slot]]), Layout.STACKED, rank)
            for _, slots in emitted
            for slot in slots
        ]
        inputs += [self._param(u, rank) for u in units]
        donated, at = [], 0
        for (_, slots), dtype in zip(owned, dtypes, strict=True):
            if slots and inputs[at].dtype == dtype and not stacked:  # else no result has its form
                donated.append(at)
            at += len(slots)
        return finish, tuple(inputs), tuple(donated)

    def _term_units(self, rank: int) -> tuple[int, ...]:
        return tuple(sorted({u for term in self._terms(rank) for u in term.units}))

    def _term_emits(self, rank: int) -> tuple[int, ...]:
        """The results that a rank's terms are added to."""
        return tuple(dict.fromkeys(term.emit for term in self._terms(rank)))

    @cached_property
    def added(self) -> dict[tuple[int, int], jax.ShapeDtypeStruct]:
        """The types of `Results.terms` of all ranks."""
        return {
            (term.emit, program.rank): shape_of(term.jaxpr.jaxpr.outvars[0])
            for program in self.step.ranks
            for term in self._terms(program.rank)
        }

    @cached_property
    def emitted(self) -> dict[int, tuple[int, jax.ShapeDtypeStruct]]:
        """Per leaf of what the loss returns, the rank that makes it and its type."""
        emits = {}
        for program in self.step.ranks:
            leaves = [leaf for leaf, _ in self._emitted(program)]
            if leaves:
                finish, inputs, _ = self._finish(program)
                first = len(self._owned(program))
                avals = jax.eval_shape(finish, *inputs)[first : first + len(leaves)]
                emits.update((x, (program.rank, a)) for x, a in zip(leaves, avals, strict=True))
        return emits

    def _ready(self, compiled: Sequence[Any]) -> None:
        """Takes what `_own_jobs` of all ranks compiled to, and prepares transports and threads."""
        rest = iter(compiled)
        ends: dict[int, tuple[Any, Any]] = {}
        for program in self.ranks:
            preparation = self._preparations[program.rank]
            preparation.ready([next(rest) for _ in preparation.forms])
            gather = next(rest) if self._gathering(program) else None
            ends[program.rank] = gather, next(rest)
        self.transport = self.make_transport(self.step.transfers, self._at_targets(), self.mesh)
        self.parts = [self._part(r, *ends[r.rank]) for r in self.ranks]
        self.threads = RankThreads(self.mesh.local_ranks, self.timeout_s, self.mesh.shared_rank)
        self.copying = self._copying(self.crew("P"))

    def crew(self, kinds: str) -> Crew:
        """Returns who carries out the end of a step; `kinds` are the transfers in it."""
        assert self.threads is not None, "Engine.ready was not called"
        numbers = {t: k for k, t in enumerate(self.step.transfers)}
        return Crew(self.threads, self.transport, numbers, self.step.order_of(kinds))

    @property
    def copies(self) -> dict[Transfer, tuple[jax.ShapeDtypeStruct, ...]]:
        """What each `P` transfer carries, as it lies at its target."""
        pairs = zip(self.step.transfers, self._at_targets(), strict=True)
        return {t: values for t, values in pairs if t.kind is Cargo.PARAMETERS}

    def further_crew(self, values: Mapping[Transfer, Sequence[jax.ShapeDtypeStruct]]) -> Crew:
        """Returns who carries out what is no part of the compiled step (an optimizer's first
        state), with a transport of its own if there are transfers."""
        assert self.threads is not None, "Engine.ready was not called"
        numbers = {transfer: k for k, transfer in enumerate(values)}
        transport = self.transport
        if values:
            transport = self.make_transport(tuple(values), tuple(values.values()), self.mesh)
            self.further_transports.append(transport)
        return Crew(self.threads, transport, numbers, tuple(numbers.values()))

    def _copying(self, crew: Crew) -> list[tuple[Routine, list[Bound]]]:
        """What the local ranks do to renew the copies of parameters."""
        rows = end_rows(self.lowered.plan.without_update())
        routines = []
        for program in self.ranks:
            row = rows[program.rank]
            inputs = [End(Role.COPY, unit) for unit in copied_units(row, {})]
            routines.append(RoutineBuilder(None, program.rank, crew.numbers, {}).build(row, inputs))
        return [(routine, bind(routine, (), self.transport)) for routine in routines]

    @property
    def bytes_on_links(self) -> tuple[int, int]:
        """What crosses between ranks in a step, and what would if every device of a rank sent all
        that it has."""
        whole = self._at_targets()
        cut = isinstance(self.transport, Sliced)
        links = [tuple(map(on_the_link, group)) for group in whole] if cut else whole
        return bytes_on_links(links), bytes_on_links(whole)

    def _at_targets(self) -> list[tuple[jax.ShapeDtypeStruct, ...]]:
        """How the values of each transfer lie at its target."""
        pairs = zip(self.step.transfers, self.step.values, strict=True)
        return [
            tuple(self.update_values[transfer])
            if transfer.kind is Cargo.UPDATE
            else tuple(self._on_rank(value, self.mesh.ranks[transfer.target]) for value in values)
            for transfer, values in pairs
        ]

    def _on_rank(self, value: Value, rank: Rank) -> jax.ShapeDtypeStruct:
        if value.place is Place.TOTAL:
            return self._total(value.index, rank)
        if value.place is Place.PARAM:
            return self._param(value.index, rank, at_rest=True)
        return on_devices(stored(self.lowered.avals[value]), Layout.STACKED, rank)

    def _part(self, program: RankProgram, gather: Any, finish: Any) -> "_Part":
        rank = self.mesh.ranks[program.rank]
        owned, emitted = self._owned(program), self._emitted(program)
        outputs = [slot for _, slots in (*owned, *emitted) for slot in slots]
        outputs += [program.params.index(u) for u in self._term_units(program.rank)]
        return _Part(
            lowered=self.lowered,
            program=program,
            rank=rank,
            constants=tuple(self._constant(v, rank) for v in program.constants),
            bound=bind(program, self.programs, self.transport),
            preparation=self._preparations[program.rank],
            gather=gather,
            finish=finish,
            outputs=itemgetter(*outputs) if len(outputs) > 1 else lambda s: [s[o] for o in outputs],
            units=tuple(unit for unit, _ in owned),
            emits=tuple(leaf for leaf, _ in emitted),
            terms=self._term_emits(program.rank),
            carried=tuple(None if self._counts(v) else v.index for v in program.state),
            final=tuple(
                (value.index, slot)
                for value, slot in program.results
                if value.place is Place.STATE and not self._counts(value)
            ),
        )

    def _constant(self, value: Value, rank: Rank) -> jax.Array:
        if value.place is Place.SEED:
            one = np.ones((), self.lowered.avals[value].dtype)  # losses of microbatches add up
            return put(one, rank.replicated)
        where = on_devices(stored(self.lowered.avals[value]), Layout.STACKED, rank)
        return put(np.zeros(where.shape, where.dtype), where.sharding)

    # ------------------------------------------------------------------ running

    def run(
        self,
        params: Sequence[Sequence[jax.Array]],
        state: Sequence[Mapping[int, jax.Array]],
        counters: Sequence[Sequence[jax.Array]],
        batch: Sequence[Any],
        record: Recorder | None = None,
        stop: Stop | None = None,
    ) -> Results:
        """Returns gradients and results of one batch.

        Per local rank: `params[i]` are the arrays of `RankProgram.params`, `state[i]` carried
        leaves by number, `counters[i]` what `Model.count_reads` names. `batch` are the flat
        leaves of the whole batch. Nothing waits for the devices at the end; a failing rank
        stops the others, and so does `stop`. With `record`, what happens is noted there.
        """
        stop = stop or Stop()
        self.transport.clock = None if record is None else record.clock
        self.transport.begin(self.step.order_of("FBGE"), stop)
        results = self._launched(self.parts, (params, state, counters), batch, record, stop)
        gradients: list[jax.Array | None] = [None] * len(self.model.params)
        emits: dict[int, jax.Array] = {}
        final: dict[int, jax.Array] = {}
        terms: dict[tuple[int, int], jax.Array] = {}
        for part, (outputs, states, _) in zip(self.parts, results, strict=True):
            for unit, value in zip(part.units, outputs, strict=False):
                gradients[unit] = value
            rest = outputs[len(part.units) :]
            emits.update(zip(part.emits, rest, strict=False))
            ends = ((emit, part.program.rank) for emit in part.terms)
            terms.update(zip(ends, rest[len(part.emits) :], strict=True))
            final.update(states)
        counters_ = tuple(counted for _, _, counted in results)
        return Results(tuple(gradients), emits, final, counters_, terms)

    def rehearse(
        self,
        params: Sequence[Sequence[jax.Array]],
        state: Sequence[Mapping[int, jax.Array]],
        counters: Sequence[Sequence[jax.Array]],
        batch: Sequence[Any],
        record: Recorder,
        stop: Stop | None = None,
    ) -> None:
        """Runs each local rank's programs in their order as `run` does, with stand-ins for all
        that it receives: nobody waits for a peer, and the results mean nothing."""
        inputs = params, state, counters
        results = self._launched(self._rehearsed, inputs, batch, record, stop or Stop())
        jax.block_until_ready(results)

    @cached_property
    def _rehearsed(self) -> "list[_Part]":
        transfers = self.step.transfers
        alone = StandIns(transfers, self._at_targets(), self.mesh.local_ranks)
        return [
            replace(part, bound=bind(part.program, self.programs, alone)) for part in self.parts
        ]

    def _launched(
        self,
        parts: "Sequence[_Part]",
        inputs: tuple[Sequence[Any], Sequence[Any], Sequence[Any]],
        batch: Sequence[Any],
        record: Recorder | None,
        stop: Stop,
    ) -> list[Any]:
        """Runs the parts, one per local rank, and returns what each made."""
        assert self.threads is not None, "Engine.ready was not called"
        loops = [run_rank if record is None else record.loop(r.rank) for r in self.ranks]
        walks = [Walk(part.program, part.bound, stop) for part in parts]
        works = [
            partial(part.run, walk, *own, batch, loop)
            for part, walk, loop, own in zip(
                parts, walks, loops, zip(*inputs, strict=True), strict=True
            )
        ]
        return self.threads.run(works, stop, walks)

    def drain(self, results: Results) -> None:
        """Returns when the local ranks' part of a step is done, transfers included.

        A gathering over all ranks that is launched earlier could hold up the last of them.
        """
        jax.block_until_ready((results.gradients, results.emits, results.state, results.terms))
        self.transport.drain()

    def refresh(
        self, params: Sequence[jax.Array | None], stop: Stop | None = None
    ) -> tuple[tuple[jax.Array, ...], ...]:
        """Returns, per `P` transfer, the copies of shared parameters at their other holders."""
        crew, routines = self.crew("P"), [routine for routine, _ in self.copying]
        inputs = [[params[end.index] for end in routine.inputs] for routine in routines]
        slots = run_routines(self.copying, inputs, crew, stop or Stop())
        return copies_of(crew, routines, slots)

    def close(self) -> None:
        """Ends the threads; the engine cannot run afterwards."""
        if self.threads is not None:
            self.threads.close()
            for transport in (self.transport, *self.further_transports):
                transport.close()


@dataclass(frozen=True)
class _Part:
    """One local rank, ready to run."""

    lowered: Lowered
    program: RankProgram
    rank: Rank
    constants: tuple[jax.Array, ...]
    bound: list[Bound]
    preparation: Preparation
    gather: Any  # None: parameters are stored as the stages read them
    finish: Any
    outputs: Callable[[list[Any]], Sequence[Any]]
    units: tuple[int, ...]
    emits: tuple[int, ...]
    terms: tuple[int, ...]
    carried: tuple[int | None, ...]  # per state value: its leaf, or None where it is counted
    final: tuple[tuple[int, int], ...]  # carried leaves and the slots of their last values

    def run(
        self,
        walk: Walk,
        params: Sequence[jax.Array],
        state: Mapping[int, jax.Array],
        counters: Sequence[jax.Array],
        batch: Sequence[Any],
        loop: Callable[[Iterable[Bound], list[Any]], None],
    ) -> tuple[Sequence[jax.Array], list[tuple[int, jax.Array]], tuple[jax.Array, ...]]:
        slots: list[Any] = []
        try:
            start = self.preparation.run(counters, batch)
            counted, counters = iter(start.counted), start.counters
            states = [next(counted) if leaf is None else state[leaf] for leaf in self.carried]
            params = params if self.gather is None else self.gather(*params)
            slots = [*params, *self.constants, *states, *start.pieces, *start.totals]
            del start, counted  # the slots alone keep them alive
            slots += [None] * (self.program.num_slots - len(slots))
            loop(walk, slots)
            results = self.finish(*self.outputs(slots))
            if len(self.rank.processes) > 1:  # here, where the wait for the others is bounded
                jax.block_until_ready((results, counters, [slots[slot] for _, slot in self.final]))
        except Exception as error:
            if compat.is_nan_report(error) and not isinstance(error, NonFiniteError):
                raise non_finite(self.lowered, walk, slots, self.rank.data_size) from error
            raise
        return results, [(leaf, slots[slot]) for leaf, slot in self.final], counters
