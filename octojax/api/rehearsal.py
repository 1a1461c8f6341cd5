"""A step in which no rank waits for another: what a plan's actions cost where they run."""

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import optax

from octojax.api.pipelined import ModelValues, PipelinedLoss
from octojax.executor.recorded import Ledger, Recorder, action_times
from octojax.ir import Action, Kind, Machine, Plan, Profile, Timeline, parse_action
from octojax.jaxprs.count import operations
from octojax.processes import barrier, everyone, several
from octojax.profiling.layers import layer_costs, names_of, stages_of
from octojax.profiling.measure import measure_machine
from octojax.profiling.together import measure_links, typical_bytes
from octojax.simulate import simulate
from octojax.stages.program import Program, Stage

Times = Mapping[tuple[int, Action], float]
"""What each action of each rank took, in seconds; those without a program are left out."""


@dataclass(frozen=True)
class Rehearsal:
    """A plan's actions timed by themselves, the same in every process.

    `profile` has one "layer" per stage (`Profile.of_partition`) with the medians over
    microbatches and rounds; `rounds[i]` are the times of each action in one rehearsed step.
    """

    plan: Plan
    profile: Profile
    rounds: tuple[Times, ...]

    @cached_property
    def timelines(self) -> tuple[Timeline, ...]:
        """The simulated step of each round, every action with its measured duration.

        Actions of one kind differ from each other on a real machine, and a pipeline waits for
        the slowest: with medians alone a step looks shorter than it is.
        """
        return tuple(
            simulate(
                self.plan, self.profile, seconds=lambda rank, a, t=times: t.get((rank, a), 0.0)
            )
            for times in self.rounds
        )

    @property
    def timeline(self) -> Timeline:
        """The simulated step of median makespan."""
        ordered = sorted(self.timelines, key=lambda t: t.makespan_s)
        return ordered[len(ordered) // 2]


def rehearse(
    loss: PipelinedLoss,
    model: ModelValues,
    batch: Any,
    optimizer: optax.GradientTransformation | None,
    rounds: int,
    machine: Machine | None,
) -> Rehearsal:
    """Returns the rehearsal of the plan with these parameters; see `TrainStep.rehearse`."""
    if rounds < 1:
        raise ValueError(f"rounds = {rounds}, expected at least 1")
    ledger, steps = Ledger(), []
    for _ in range(rounds + 1):
        recorder = Recorder(ledger)
        barrier("rehearsal")
        loss.rehearse(model, batch, recorder)
        steps.append(
            [(r, str(a), seconds) for r, a, seconds in action_times(recorder, loss.lowered)]
        )
    by_round: list[dict[tuple[int, Action], float]] = [{} for _ in range(rounds)]
    for text in everyone(json.dumps(steps[1:]), "rehearsal"):  # the first step warmed up
        for times, theirs in zip(by_round, json.loads(text), strict=True):
            times.update({(rank, parse_action(a)): seconds for rank, a, seconds in theirs})
    samples: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for (_, action), seconds in chain.from_iterable(times.items() for times in by_round):
        samples[action.stage, action.kind].append(seconds)
    by_stage = [
        by_kind(
            stage,
            {kind: statistics.median(x) for (s, kind), x in samples.items() if s == stage.index},
            loss.plan.recomputes[stage.index],
        )
        for stage in loss.stages[0]
    ]
    profile = Profile(
        loss.plan.name or "rehearsed",
        layer_costs(loss.staged, loss.stages[0], by_stage, optimizer),
        replace(machine or _machine(loss), speeds=()),  # times are those of a stage's own rank
        loss.mesh.num_ranks,
        loss.batch.count,
        (
            ("costs", f"measured, median of {rounds} rehearsed steps, each stage on its rank"),
            ("names", names_of(loss.staged)),
            *stages_of(loss.plan.partition),
        ),
    )
    return Rehearsal(loss.plan, profile, tuple(by_round))


def _machine(loss: PipelinedLoss) -> Machine:
    if several():
        return measure_links(loss.mesh, typical_bytes=typical_bytes(loss.layers))
    name = "ppermute" if loss.options.transport == "ppermute" else "device_put"
    return measure_machine([rank.devices[0] for rank in loss.mesh.ranks], name)


def by_kind(stage: Stage, times: Mapping[Kind, float], recomputes: bool) -> dict[str, float]:
    """Returns F, B, I and W of a stage, from the kinds of action that the schedule has.

    A backward that the schedule keeps whole is divided by its operations. The simulator adds a
    forward to what recomputes, so what that adds in truth is part of the rest.
    """
    forward = times.get(Kind.FORWARD, 0.0)
    again = forward - times.get(Kind.RECOMPUTE, 0.0) if recomputes else 0.0
    weight = times.get(Kind.WEIGHT_GRAD, 0.0)
    whole, grad = (
        None if (seconds := times.get(kind)) is None else max(0.0, seconds - again)
        for kind in (Kind.BACKWARD, Kind.INPUT_GRAD)
    )
    if grad is None and whole is not None:
        parts = _operations(stage.input_grad), _operations(stage.weight_grad)
        grad = whole * parts[0] / max(1.0, sum(parts))
        weight = whole - grad
    grad = grad or 0.0  # none: an I that has nothing to compute
    return {"F": forward, "B": grad + weight if whole is None else whole, "I": grad, "W": weight}


def _operations(program: Program | None) -> float:
    return 0.0 if program is None else float(sum(map(operations, program.jaxpr.jaxpr.eqns)))
