"""Emulated devices: the real executor and real transfers, each action a sleep of its time.

    octopipe emulate PLAN.json --profile P.json -n 8

Processes, threads, instruction lists, order of transfers and payload sizes are those of a real
step; only the stage programs are replaced. So schedules of any width race in real time on a
machine of few cores.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from octojax.executor.instructions import Do, Operation, RankProgram, StepProgram
from octojax.executor.lower import lower
from octojax.executor.record import Span, TransferClock, action_spans, measured
from octojax.executor.run import RankThreads, bind, run_recorded
from octojax.executor.stop import Stop
from octojax.executor.transport import Transport
from octojax.executor.transports import transport
from octojax.executor.wiring import wiring_of
from octojax.ir import Action, ActionSpan, Kind, Plan, Profile, Run, Timeline, parse_item
from octojax.ir.verify import verify
from octojax.mesh import PipelineMesh, pipeline_mesh
from octojax.passes import lowered
from octojax.processes import barrier, everyone
from octojax.simulate import StageCosts
from octojax.simulate.durations import durations
from octojax.stages.fingerprint import fingerprint
from octojax.stages.program import Program, Ref, Role, Stage


@dataclass(frozen=True)
class Emulation:
    """The measured steps of a plan, in their order, the same in every process."""

    timelines: tuple[Timeline, ...]

    @property
    def median(self) -> Timeline:
        """The step of median makespan."""
        ordered = sorted(self.timelines, key=lambda t: t.makespan_s)
        return ordered[len(ordered) // 2]

    @property
    def makespan_s(self) -> float:
        return statistics.median(t.makespan_s for t in self.timelines)


def emulate(
    plan: Plan,
    profile: Profile,
    *,
    scale: float = 1.0,
    steps: int = 3,
    mesh: PipelineMesh | None = None,
    transport_name: str = "auto",
    timeout: float = 60.0,
) -> Emulation:
    """Returns what `steps` emulated steps of `plan` took, after one that does not count.

    Every action sleeps `scale` times its time in `profile` (divided by its rank's speed), and
    every transfer carries a payload of the profile's bytes. Call it in every process, under
    `octopipe launch` with one device per rank in all.

    Raises `PlanError` for a profile of another model, `ScheduleError` for a broken table,
    `MeshError` for too few devices.
    """
    verify(plan.schedule)
    costs = StageCosts.of(profile, plan.partition, plan.recompute)
    mesh = mesh or pipeline_mesh(num_ranks=plan.num_ranks)
    sizes = [max(1, round(float(b) / 4)) for b in costs.output_bytes]
    seconds = durations(plan, profile, scale)
    step = _lowered(plan, profile, sizes, seconds)
    values = [[_payload(sizes, t.kind, t.stage, mesh, t.target)] for t in step.transfers]
    moves = transport(transport_name, timeout)(step.transfers, values, mesh)
    local = [step.ranks[r] for r in mesh.local_ranks]
    threads = RankThreads([r.rank for r in local], timeout)
    payloads: dict[int, Sequence[jax.Array]] = {
        k: [jnp.zeros(v[0].shape, v[0].dtype, device=mesh.ranks[t.source].replicated)]
        for k, (t, v) in enumerate(zip(step.transfers, values, strict=True))
        if t.source in mesh.local_ranks
    }
    jax.block_until_ready(list(payloads.values()))
    bound = [
        bind(*_sleeping(p, partial(seconds, p.rank)), cast(Transport, _Payloads(moves, payloads)))
        for p in local
    ]
    nbytes = [4.0 * sizes[t.stage if t.kind == "F" else t.stage - 1] for t in step.transfers]
    times = []
    try:
        for _ in range(steps + 1):
            barrier("emulated step")
            moves.clock = TransferClock()
            stop = Stop()
            moves.begin(step.order, stop)
            works = [
                partial(run_recorded, b, [None] * p.num_slots, time.monotonic, _done)
                for b, p in zip(bound, local, strict=True)
            ]
            spans = threads.run(works, stop)
            own = [
                a
                for p, s in zip(local, spans, strict=True)
                for a in action_spans(p.rank, p.body, s)
            ]
            actions, transfers = _joined(own, moves.clock)
            times.append(measured(plan.schedule, actions, step.transfers, transfers, nbytes))
    finally:
        threads.close()
        moves.close()
    return Emulation(tuple(times[1:]))


def _done(_: Any) -> None:
    """A sleep has ended when it returns."""


@dataclass
class _Payloads:
    """A transport whose senders have their payload ready from the start."""

    moves: Any
    payloads: dict[int, Sequence[jax.Array]]

    def post(self, number: int) -> None:
        self.moves.post(number)

    def send(self, number: int, values: Any) -> None:
        self.moves.send(number, self.payloads[number])

    def receive(self, number: int) -> Any:
        return self.moves.receive(number)


def _payload(
    sizes: Sequence[int], kind: str, stage: int, mesh: PipelineMesh, target: int
) -> jax.ShapeDtypeStruct:
    if kind not in "FB":
        return jax.ShapeDtypeStruct((1,), jnp.float32, sharding=mesh.ranks[target].replicated)
    boundary = stage if kind == "F" else stage - 1
    where = mesh.ranks[target].replicated
    return jax.ShapeDtypeStruct((sizes[boundary],), jnp.float32, sharding=where)


def _sleeping(
    program: RankProgram, seconds: Callable[[Action], float]
) -> tuple[RankProgram, list[Callable[..., Any]]]:
    """Returns the rank's program with a recipe of its own per unit, each a sleep."""
    sleeps: list[Callable[..., Any]] = []
    body: list[Operation] = []
    for operation in program.body:
        if isinstance(operation.of, Run):
            sleeps.append(partial(_sleep, sum(map(seconds, operation.of.actions))))
            operation = replace(operation, target=len(sleeps) - 1, reads=(), writes=())
        elif operation.do is Do.SEND:
            operation = replace(operation, reads=())
        body.append(operation)
    return replace(program, body=tuple(body)), sleeps


def _sleep(seconds: float) -> tuple[()]:
    time.sleep(seconds)
    return ()


def _joined(
    own: Sequence[ActionSpan], clock: TransferClock
) -> tuple[list[ActionSpan], dict[int, Span]]:
    """Returns the spans of all processes, which share this machine's monotonic clock."""
    mine = {
        "actions": [(a.rank, str(a.item), a.start_s, a.end_s) for a in own],
        "transfers": [(k, *span) for k, span in clock.spans.items()],
    }
    actions: list[ActionSpan] = []
    joined = TransferClock()
    for text in everyone(json.dumps(mine), "recorded step"):
        theirs = json.loads(text)
        actions += [ActionSpan(r, parse_item(i), b, e) for r, i, b, e in theirs["actions"]]
        for number, begin, end in theirs["transfers"]:
            joined.note(number, begin, end)
    return actions, joined.spans


# ---------------------------------------------------------------------- stages without work


def _lowered(
    plan: Plan,
    profile: Profile,
    sizes: Sequence[int],
    seconds: Callable[[int, Action], float],
) -> StepProgram:
    stages = tuple(_stage(s, plan.num_stages, sizes, r) for s, r in enumerate(plan.recomputes))
    every = [stages] * plan.num_microbatches
    passes = "ownership" if plan.schedule.has_transfers else "transfers,reorder,ownership"
    wiring = wiring_of(every, plan.num_stages)
    table = lowered(plan, passes, wiring=wiring, costs=profile)
    return lower(table, every, fingerprint, [], seconds).step


def _stage(index: int, count: int, sizes: Sequence[int], recompute: bool) -> Stage:
    """Returns stage `index` of `count`, with the ends of a real one and the payloads' shapes."""
    first, last = index == 0, index == count - 1
    before = [] if first else [(Ref(Role.INPUT, 0), (sizes[index - 1],))]
    after = (Ref(Role.EMIT, 0), ()) if last else (Ref(Role.OUTPUT, 0), (sizes[index],))
    pull = (Ref(Role.SEED, 0), ()) if last else (Ref(Role.OUTPUT_GRAD, 0), (sizes[index],))
    back = [] if first else [(Ref(Role.INPUT_GRAD, 0), (sizes[index - 1],))]
    weight = (Ref(Role.PARAM, index), (1,))
    gradient = (Ref(Role.PARAM_GRAD, index), (1,))
    kept, residual = (Ref(Role.KEPT, 0), (1,)), (Ref(Role.RESIDUAL, 0), (1,))
    stored = [] if recompute else [residual]
    need = [weight, *before] if recompute else [residual]
    program = partial(_program, index)
    return Stage(
        index=index,
        layers=(index,),
        forward=program(Kind.FORWARD, [weight, *before], [after, *stored]),
        backward=program(Kind.BACKWARD, [*need, pull], [*back, gradient]),
        input_grad=program(Kind.INPUT_GRAD, [*need, pull], [*back, kept]),
        weight_grad=program(Kind.WEIGHT_GRAD, [kept], [gradient]),
        recompute=program(Kind.RECOMPUTE, [weight, *before], [residual]),
        backward_after_recompute=program(Kind.BACKWARD, [residual, pull], [*back, gradient]),
        input_grad_after_recompute=program(Kind.INPUT_GRAD, [residual, pull], [*back, kept]),
        weight_grad_after_recompute=program(Kind.WEIGHT_GRAD, [kept], [gradient]),
    )


End = tuple[Ref, tuple[int, ...]]


def _program(stage: int, kind: Kind, reads: Sequence[End], writes: Sequence[End]) -> Program:
    shapes = [jax.ShapeDtypeStruct(shape, np.float32) for _, shape in reads]

    def zeros(*_: Any) -> list[jax.Array]:
        return [jnp.zeros(shape, jnp.float32) for _, shape in writes]

    jaxpr = jax.make_jaxpr(zeros)(*shapes)
    return Program(kind, jaxpr, tuple(r for r, _ in reads), tuple(w for w, _ in writes))
