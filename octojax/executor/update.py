"""The optimizer's update on real devices: its programs compiled, and run by the ranks' threads.

rank 0   UPDATE0 SEND_U(0->1;0) RECV_U(1->0;0) UPDATE1 SEND_P(0->1;4)
rank 1   UPDATE0 RECV_U(0->1;0) SEND_U(1->0;0) UPDATE1 RECV_P(0->1;4)
"""

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from octojax.arrays import put
from octojax.executor.recorded import Recorder
from octojax.executor.routine import (
    Crew,
    RoutineBuilder,
    copied_units,
    copies_of,
    run_routines,
)
from octojax.executor.run import RankThreads, bind
from octojax.executor.stop import Stop
from octojax.executor.transport import DevicePut
from octojax.ir import Cargo, Transfer
from octojax.ir.exchange import update_rows
from octojax.ir.instruction import Rows
from octojax.programs.build import Job, compile_all
from octojax.update import Distributed, End, OptState, Places, Role, UpdatePlan, UpdateProgram
from octojax.update.state import gather_state, scatter_state


class UpdateResults(NamedTuple):
    """What an update makes. `params` is flat, one entry per piece; `copies` are those of the `P`
    transfers, in their order: () where another process gets them."""

    params: tuple[jax.Array | None, ...]
    opt_state: OptState
    scalars: dict[str, jax.Array]
    copies: tuple[tuple[jax.Array, ...], ...]


class Update:
    """A compiled update. Holds programs only; parameters and state belong to the caller.

        init(params)                    -> opt_state
        apply(params, grads, opt_state) -> params, opt_state, scalars, copies

    `params` and `grads` are flat, one entry per piece of the plan (a leaf of the user's tree, or
    a row of a stacked one); those of other processes are None. `apply` donates parameters and
    state, not gradients.

    `rows` is the end of a step: the instructions of every rank, from its first `UPDATE` on. `crew`
    carries them out; `units[i]` is the parameter, as `P` transfers number them, that piece i of
    the plan is. By default every rank is in this process, and there are no copies.
    """

    def __init__(
        self,
        plan: UpdatePlan,
        places: Places,
        rows: Rows | None = None,
        crew: Crew | None = None,
        init_crew: Crew | None = None,
        *,
        units: Sequence[int] = (),
        donate: bool = True,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.plan, self.places = plan, places
        self.ranks = places.local_ranks
        rows = rows or rows_of(plan.update)
        self._leaves = {rank: plan.params_on(rank) for rank in self.ranks}
        self._states = {rank: plan.states_on(rank) for rank in self.ranks}
        params = {rank: [End(Role.PARAM, i) for i in self._leaves[rank]] for rank in self.ranks}
        states = {rank: [End(Role.NEW_STATE, k) for k in self._states[rank]] for rank in self.ranks}
        renewed = {unit: End(Role.NEW_PARAM, i) for i, unit in enumerate(units)}
        self.copied = {rank: copied_units(rows[rank], renewed) for rank in self.ranks}
        start = partial(_Function, plan, places, compiler_options=compiler_options)
        self._init = start(
            plan.init,
            rows_of(plan.init),
            params,
            states,
            init_crew or local_crew(plan.init, places),
            donate=False,
        )
        self._update = start(
            plan.update,
            rows,
            {rank: [*params[rank], *self._further_inputs(rank)] for rank in self.ranks},
            {rank: self._outputs_of(rank) for rank in self.ranks},
            crew or local_crew(plan.update, places),
            donate=donate,
            renewed=renewed,
        )

    @property
    def num_programs(self) -> int:
        """How many programs were compiled, for `init` and for `apply`."""
        return self._init.num_programs + self._update.num_programs

    def init(self, params: Sequence[jax.Array | None], stop: Stop | None = None) -> OptState:
        """Returns the first optimizer state, every leaf on its rank."""
        inputs = [[params[i] for i in self._leaves[r]] for r in self.ranks]
        states, _ = self._init.run(inputs, stop or Stop())
        return self._per_rank(dict(zip(self.ranks, map(tuple, states), strict=True)))

    def apply(
        self,
        params: Sequence[jax.Array | None],
        grads: Sequence[jax.Array | None],
        opt_state: OptState,
        extra: Mapping[int, Any] | None = None,
        others: Mapping[int, jax.Array | None] | None = None,
        stop: Stop | None = None,
        record: Recorder | None = None,
    ) -> UpdateResults:
        """Returns new parameters, new state, scalars of this step (`grad_norm`), and copies.

        `extra[r]` is the tree of extra arguments on the devices of rank r, for the ranks in
        `extra_ranks`; `others[u]` is parameter u, for those that ranks keep copies of and that no
        optimizer sees. Nothing waits for the devices.
        """
        inputs = []
        absent = [None] * self.plan.extra_tree.num_leaves
        for rank in self.ranks:
            mine, own = self._leaves[rank], opt_state[rank]
            assert own is not None, f"rank {rank} is in this process, its state is not"
            more = jax.tree.leaves(extra[rank]) if extra and rank in extra else absent
            copied = [(others or {})[unit] for unit in self.copied[rank]]
            pieces = (params[i] for i in mine), (grads[i] for i in mine)
            inputs.append([*pieces[0], *pieces[1], *own, *more, *copied])
        results, copies = self._update.run(inputs, stop or Stop(), record)
        new: list[jax.Array | None] = [None] * len(self.plan.owners)
        state, scalars = {}, {}
        for rank, outputs in zip(self.ranks, results, strict=True):
            mine, own = self._leaves[rank], self._states[rank]
            for i, leaf in zip(mine, outputs, strict=False):
                new[i] = leaf
            state[rank] = tuple(outputs[len(mine) : len(mine) + len(own)])
            scalars.update(zip(self.plan.scalars, outputs[len(mine) + len(own) :], strict=False))
        return UpdateResults(tuple(new), self._per_rank(state), scalars, copies)

    @cached_property
    def extra_ranks(self) -> tuple[int, ...]:
        """Ranks of this process whose programs read the extra arguments (the loss, if any)."""
        return tuple(
            rank
            for rank in self.ranks
            if any(
                end.role is Role.EXTRA
                for phase in self.plan.update.phases
                for program in phase.every_program
                if program.rank == rank
                for end in program.reads
            )
        )

    def gather(self, opt_state: OptState) -> Any:
        """Returns `gather_state` of the plan; every rank must be in this process."""
        return gather_state(self.plan, opt_state)

    def scatter(self, tree: Any) -> OptState:
        """Returns the per-rank state that the whole tree holds; see `scatter_state`."""
        return scatter_state(self.plan, self.places, tree)

    def _further_inputs(self, rank: int) -> list[End]:
        extras = self.plan.extra_tree.num_leaves
        return [
            *(End(Role.GRAD, i) for i in self._leaves[rank]),
            *(End(Role.STATE, k) for k in self._states[rank]),
            *(End(Role.EXTRA, k) for k in range(extras)),
            *(End(Role.COPY, unit) for unit in self.copied[rank]),
        ]

    def _outputs_of(self, rank: int) -> list[End]:
        """New leaves, new state, and on the first rank the scalars."""
        scalars = range(len(self.plan.scalars) if rank == self.ranks[0] else 0)
        return [
            *(End(Role.NEW_PARAM, i) for i in self._leaves[rank]),
            *(End(Role.NEW_STATE, k) for k in self._states[rank]),
            *(End(Role.SCALAR, k) for k in scalars),
        ]

    def _per_rank(self, states: Mapping[int, tuple[jax.Array, ...]]) -> OptState:
        return tuple(states.get(rank) for rank in range(self.plan.num_ranks))


class _Function:
    """A function of an update plan (`init` or `update`), compiled and bound on the local ranks."""

    def __init__(
        self,
        plan: UpdatePlan,
        places: Places,
        distributed: Distributed,
        rows: Rows,
        inputs: Mapping[int, Sequence[End]],
        outputs: Mapping[int, Sequence[End]],
        crew: Crew,
        *,
        donate: bool,
        compiler_options: Mapping[str, Any] | None,
        renewed: Mapping[int, End] | None = None,
    ) -> None:
        self.crew, ranks = crew, places.local_ranks
        programs = [
            (program, donate and k == distributed.final_phase)
            for k, phase in enumerate(distributed.phases)
            for program in phase.every_program
            if program.rank in ranks
        ]
        jobs = [_job(plan, program, places, donates) for program, donates in programs]
        compiled = compile_all(jobs, False, compiler_options)
        self.num_programs = len(compiled)
        builders = [RoutineBuilder(distributed, r, crew.numbers, renewed or {}) for r in ranks]
        self.routines = [
            builder.build(rows[rank], inputs[rank], outputs[rank], [p for p, _ in programs])
            for rank, builder in zip(ranks, builders, strict=True)
        ]
        self.parts = [(x, bind(x, compiled, crew.transport)) for x in self.routines]
        self.numbers_of_rows = [
            [put(np.int32(row), places.on_rank(x.rank)) for row in x.row_numbers]
            for x in self.routines
        ]

    def run(
        self, inputs: Sequence[list[Any]], stop: Stop, record: Recorder | None = None
    ) -> tuple[list[list[Any]], tuple[tuple[jax.Array, ...], ...]]:
        """Returns what every local rank's outputs are, and the copies that came to them."""
        filled = [x + numbers for x, numbers in zip(inputs, self.numbers_of_rows, strict=True)]
        slots = run_routines(self.parts, filled, self.crew, stop, record)
        outputs = [[s[o] for o in x.outputs] for x, s in zip(self.routines, slots, strict=True)]
        return outputs, copies_of(self.crew, self.routines, slots)


def _job(plan: UpdatePlan, program: UpdateProgram, places: Places, donates: bool) -> Job:
    """How a program is compiled for its rank: with the parameters and state that it may reuse."""
    function, rank = jaxpr_as_fun(program.jaxpr), program.rank
    kind = "rows" if len(program.bindings) > 1 else "rank"

    def at_work(ends: Sequence[End], leaves: Sequence[Any]) -> list[Any]:
        """Lets parameters that are stored otherwise lie as their gradients while they change."""
        return [
            leaf
            if (work := places.of_work(plan, end, rank)) == places.of_end(plan, end, rank)
            else jax.lax.with_sharding_constraint(leaf, work)
            for end, leaf in zip(ends, leaves, strict=True)
        ]

    def update(*leaves: Any) -> tuple[Any, ...]:
        return tuple(at_work(program.writes, function(*at_work(program.reads, leaves))))

    update.__name__ = f"update{program.phase}_{kind}{rank}"
    arguments = tuple(
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=places.of_end(plan, end, rank))
        for v, end in zip(program.jaxpr.jaxpr.invars, program.reads, strict=True)
    )
    donated = tuple(
        at
        for at, end in enumerate(program.reads)
        if donates and end.role in (Role.PARAM, Role.STATE) and end not in program.shared
    )
    where = tuple(places.of_end(plan, end, rank) for end in program.writes)
    return Job(f"update {program.phase} on rank {rank}", update, arguments, donated, where)


def rows_of(distributed: Distributed) -> Rows:
    """Returns the instructions of every rank for a function that is spread over ranks."""
    return update_rows(distributed.num_ranks, distributed.outline)


def values_of(
    distributed: Distributed, where: Sequence[jax.sharding.Sharding | None]
) -> dict[Transfer, tuple[jax.ShapeDtypeStruct, ...]]:
    """Returns what each `U` transfer carries, as it lies at its target (`where[rank]`)."""
    return {
        Transfer(m.source, m.target, Cargo.UPDATE, parts=(phase,)): tuple(
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where[m.target]) for a in m.avals
        )
        for phase, messages in enumerate(distributed.messages)
        for m in messages
    }


def local_crew(distributed: Distributed, places: Places) -> Crew:
    """Returns who carries out a function whose ranks are all in this process: copies, threads."""
    values = values_of(distributed, places.ranks)
    shardings = [[v.sharding for v in group] for group in values.values()]
    transport = DevicePut(tuple(values), shardings)  # type: ignore[arg-type]
    numbers = {transfer: k for k, transfer in enumerate(values)}
    return Crew(RankThreads(places.local_ranks), transport, numbers, tuple(numbers.values()))
