"""Compile the programs of an update and bind them to slots, so that a step only runs them."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from octojax.compat import is_nan_report, under_thread_settings
from octojax.errors import NonFiniteError
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
    `arrivals[r]` the slots for the vectors it gets, in the order of `needs`. `moves` are the
    `(rank, slot)` that each row comes from and goes to, None in another process."""

    index: int
    programs: tuple[tuple[int, BoundProgram], ...]
    packed: tuple[tuple[int, int], ...] = ()
    arrivals: tuple[tuple[int, tuple[int, ...]], ...] = ()
    moves: tuple[tuple[tuple[int, int] | None, tuple[int, int] | None], ...] = ()
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
        self._spare = {
            rank: [
                _row_number(end.index, places, rank) if end.role is Role.ROW else None
                for end in list(slots[rank])[len(inputs[rank]) :]
            ]
            for rank in ranks
        }
        self._outputs = {rank: [slots[rank][end] for end in outputs[rank]] for rank in ranks}

    @property
    def num_programs(self) -> int:
        """How many programs were compiled for this process's ranks."""
        return len({id(p.run) for phase in self._phases for _, p in phase.programs})

    def _bind(
        self,
        k: int,
        distributed: Distributed,
        slots: dict[int, dict[End, int]],
        compiled: Sequence[tuple[UpdateProgram, Callable[..., Any]]],
        num_ranks: int,
    ) -> BoundPhase:
        def slot(rank: int, end: End) -> int:
            return slots[rank].setdefault(end, len(slots[rank]))

        programs = tuple(
            (
                program.rank,
                BoundProgram(
                    run,
                    tuple(slot(program.rank, end) for end in binding.reads),
                    tuple(slot(program.rank, end) for end in binding.writes),
                ),
            )
            for program, run in compiled
            if program.phase == k
            for binding in program.bindings
        )
        exchange = distributed.phases[k].exchange
        if exchange is None:
            return BoundPhase(k, programs)
        offered = End(Role.PACKED, k)
        packed = tuple((rank, slot(rank, offered)) for rank in slots if offered in slots[rank])
        arrivals = tuple(
            (rank, tuple(slot(rank, End(Role.GATHERED, k * num_ranks + s)) for s in needed))
            for rank, needed in enumerate(exchange.needs)
            if rank in slots
        )
        moves = tuple(
            (
                (move.source, slot(move.source, move.end)) if move.source in slots else None,
                (move.target, slot(move.target, move.end)) if move.target in slots else None,
            )
            for move in exchange.moves
        )
        return BoundPhase(k, programs, packed, arrivals, moves, exchange.width > 0)

    def run(self, inputs: dict[int, list[Any]]) -> dict[int, list[Any]]:
        """Returns the outputs of every rank. Dispatches only; nothing waits for the devices."""
        values = {rank: given + self._spare[rank] for rank, given in inputs.items()}
        for phase in self._phases:
            for rank, program in phase.programs:
                mine = values[rank]
                try:
                    results = program.run(*[mine[slot] for slot in program.reads])
                except Exception as error:
                    if not is_nan_report(error):
                        raise
                    raise NonFiniteError(
                        f"rank {rank} has a NaN or an infinity in the results of its part"
                    ) from error
                for slot, result in zip(program.writes, results, strict=True):
                    mine[slot] = result
            if phase.exchanges:
                packed = {rank: values[rank][slot] for rank, slot in phase.packed}
                received = self._exchange(phase.index, packed)
                for rank, arrivals in phase.arrivals:
                    for slot, vector in zip(arrivals, received[rank], strict=True):
                        values[rank][slot] = vector
            if phase.moves:
                rows = [values[x[0]][x[1]] if x else None for x, _ in phase.moves]
                moved = self._exchange.move(phase.index, rows)
                for (_, target), row in zip(phase.moves, moved, strict=True):
                    if target is not None:
                        values[target[0]][target[1]] = row
        return {rank: [values[rank][s] for s in slots] for rank, slots in self._outputs.items()}


def _compile_all(
    plan: UpdatePlan,
    distributed: Distributed,
    places: Places,
    donate: bool,
    options: Mapping[str, Any] | None,
) -> list[tuple[UpdateProgram, Callable[..., Any]]]:
    """Compiles the programs of this process's ranks in parallel, in the order of running.

    A program that only joins metrics is kept on the first rank.
    """
    local = places.local_ranks
    programs = [
        (program, donate and k == distributed.final_phase)
        for k, phase in enumerate(distributed.phases)
        for program in phase.every_program
        if program.rank in local and (program.rank == local[0] or not _only_joins(program))
    ]
    compile_one = under_thread_settings(compile_program)
    with ThreadPoolExecutor() as pool:
        futures = [
            pool.submit(compile_one, plan, program, places, gives, options)
            for program, gives in programs
        ]
        results = [future.result() for future in futures]
    return [(program, run) for (program, _), run in zip(programs, results, strict=True)]


def _row_number(row: int, places: Places, rank: int) -> jax.Array:
    return jax.device_put(np.int32(row), places.ranks[rank])


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
    kind = "rows" if len(program.bindings) > 1 else "rank"

    def update(*leaves: Any) -> tuple[Any, ...]:
        return tuple(function(*leaves))

    update.__name__ = f"update{program.phase}_{kind}{program.rank}"
    given = [
        at
        for at, end in enumerate(program.reads)
        if donate and end.role in (Role.PARAM, Role.STATE) and end not in program.shared
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
