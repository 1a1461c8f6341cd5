"""Compile the programs of an update and bind them to slots, so that a step only runs them."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from octojax.compat import under_thread_settings
from octojax.update.exchange import ExchangeFunction
from octojax.update.places import Places
from octojax.update.plan import Distributed, End, Role, UpdatePlan, UpdateProgram


@dataclass(frozen=True)
class BoundProgram:
    """A compiled program that reads and writes slots of its rank's list of values."""

    run: Callable[..., Sequence[Any]]
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True)
class BoundPhase:
    """One phase on this process's ranks. `packed[r]` is the slot that rank r offers, and
    `arrivals[r]` the slots for the vectors it gets, in the order of `needs`."""

    index: int
    programs: tuple[tuple[int, BoundProgram], ...]
    packed: tuple[tuple[int, int], ...] = ()
    arrivals: tuple[tuple[int, tuple[int, ...]], ...] = ()
    exchanges: bool = False


class Bound:
    """All phases of a distributed function, on this process's ranks.

    `run(values)` takes per rank the list of its inputs in the order of `inputs[rank]` and
    returns per rank what `outputs[rank]` lists.
    """

    def __init__(
        self,
        plan: UpdatePlan,
        distributed: Distributed,
        places: Places,
        inputs: dict[int, list[End]],
        outputs: dict[int, list[End]],
        exchange: ExchangeFunction,
        donate: bool,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._exchange = exchange
        slots = {rank: {end: k for k, end in enumerate(ends)} for rank, ends in inputs.items()}
        ranks = places.local_ranks
        compiled = _compile_all(plan, distributed, places, donate, compiler_options)
        self._phases = tuple(
            self._bind(k, distributed, slots, compiled, plan.num_ranks)
            for k in range(len(distributed.phases))
        )
        self._spare = {rank: [None] * (len(slots[rank]) - len(inputs[rank])) for rank in ranks}
        self._outputs = {rank: [slots[rank][end] for end in outputs[rank]] for rank in ranks}

    @property
    def num_programs(self) -> int:
        """How many programs were compiled for this process's ranks."""
        return sum(len(phase.programs) for phase in self._phases)

    def _bind(
        self,
        k: int,
        distributed: Distributed,
        slots: dict[int, dict[End, int]],
        compiled: dict[tuple[int, int], Callable[..., Any]],
        num_ranks: int,
    ) -> BoundPhase:
        def slot(rank: int, end: End) -> int:
            return slots[rank].setdefault(end, len(slots[rank]))

        programs = []
        for (phase, rank), run in compiled.items():
            program = distributed.phases[phase].programs[rank]
            if phase != k or program is None:
                continue
            reads = tuple(slot(rank, end) for end in program.reads)
            writes = tuple(slot(rank, end) for end in program.writes)
            programs.append((rank, BoundProgram(run, reads, writes)))
        exchange = distributed.phases[k].exchange
        if exchange is None:
            return BoundPhase(k, tuple(programs))
        offered = End(Role.PACKED, k)
        packed = tuple((rank, slot(rank, offered)) for rank in slots if offered in slots[rank])
        arrivals = tuple(
            (rank, tuple(slot(rank, End(Role.GATHERED, k * num_ranks + s)) for s in needed))
            for rank, needed in enumerate(exchange.needs)
            if rank in slots
        )
        return BoundPhase(k, tuple(programs), packed, arrivals, True)

    def run(self, inputs: dict[int, list[Any]]) -> dict[int, list[Any]]:
        """Returns the outputs of every rank. Dispatches only; nothing waits for the devices."""
        values = {rank: given + self._spare[rank] for rank, given in inputs.items()}
        for phase in self._phases:
            for rank, program in phase.programs:
                mine = values[rank]
                results = program.run(*[mine[slot] for slot in program.reads])
                for slot, result in zip(program.writes, results, strict=True):
                    mine[slot] = result
            if phase.exchanges:
                packed = {rank: values[rank][slot] for rank, slot in phase.packed}
                received = self._exchange(phase.index, packed)
                for rank, arrivals in phase.arrivals:
                    for slot, vector in zip(arrivals, received[rank], strict=True):
                        values[rank][slot] = vector
        return {rank: [values[rank][s] for s in slots] for rank, slots in self._outputs.items()}


def _compile_all(
    plan: UpdatePlan,
    distributed: Distributed,
    places: Places,
    donate: bool,
    options: Mapping[str, Any] | None,
) -> dict[tuple[int, int], Callable[..., Any]]:
    """Compiles the programs of this process's ranks in parallel, keyed by (phase, rank).

    A program that only joins metrics is kept on the first rank.
    """
    local = places.local_ranks
    compile_one = under_thread_settings(compile_program)
    with ThreadPoolExecutor() as pool:
        futures = {}
        for k, phase in enumerate(distributed.phases):
            gives = donate and k == distributed.final_phase
            for rank in local:
                program = phase.programs[rank]
                if program is not None and (rank == local[0] or not _only_joins(program)):
                    task = plan, program, places, gives, options
                    futures[k, rank] = pool.submit(compile_one, *task)
        return {key: future.result() for key, future in futures.items()}


def _only_joins(program: UpdateProgram) -> bool:
    return all(end.role is Role.SCALAR for end in program.writes)


def compile_program(
    plan: UpdatePlan,
    program: UpdateProgram,
    places: Places,
    donate: bool,
    compiler_options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Returns one program compiled for its rank; parameters and state are given away."""
    function = jaxpr_as_fun(program.jaxpr)

    def update(*leaves: Any) -> tuple[Any, ...]:
        return tuple(function(*leaves))

    update.__name__ = f"update{program.phase}_rank{program.rank}"
    given = [
        at
        for at, end in enumerate(program.reads)
        if donate and end.role in (Role.PARAM, Role.STATE)
    ]
    rank = program.rank
    jitted = jax.jit(
        update,
        in_shardings=[places.of_end(plan, end, rank) for end in program.reads],
        out_shardings=tuple(places.of_end(plan, end, rank) for end in program.writes),
        donate_argnums=given,
        keep_unused=True,
    )
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in program.jaxpr.jaxpr.invars]
    return jitted.lower(*shapes).compile(dict(compiler_options) if compiler_options else None)
