"""Processor time of a pipelined step's pieces, each run by itself; two processes call all alike."""

import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from pair import pipelined_step

from octojax.executor.instructions import Do
from octojax.executor.recorded import Ledger, Recorder
from octojax.executor.run import run_recorded
from octojax.jaxprs.count import operations as operations_of
from octojax.processes import barrier, everyone


class ByProcessor(Recorder):
    """Notes the processor time of this process in place of the clock's."""

    def timed(self, rank: int) -> Callable[..., None]:
        def run(bound: Any, slots: list[Any]) -> None:
            self.ticks[rank] = run_recorded(bound, slots, time.process_time, jax.block_until_ready)

        return run


def programs_s(step: Any, state: Any, batch: Any, ledger: Ledger) -> float:
    """Returns the processor seconds of one rehearsal's programs, this process' ranks': nothing of
    what the executor does between them."""
    recorder = ByProcessor(ledger)
    step.loss.calls.run(lambda: step.loss.rehearse(state.model, batch, recorder), "rehearse")
    lowered = step.loss.lowered.step
    return sum(
        end - start
        for rank, ticks in recorder.ticks.items()
        for item, (start, end) in zip(lowered.ranks[rank].body, ticks, strict=True)
        if item.do is Do.RUN
    )


def processor_s(run: Callable[[], object]) -> float:
    """Returns what one call takes of this process' processor time."""
    begin = time.process_time()
    jax.block_until_ready(run())
    return time.process_time() - begin


def pieces_s(
    step: Any, state: Any, batch: Any, alone: Mapping[str, Callable[[], object] | None], rounds: int
) -> dict[str, float]:
    """Returns processor seconds of a step and its pieces, medians over rounds in which all take
    turns, so that whatever slows the machine slows all alike; both processes' together.

    `step`, `gradients` (a step without its update), `together` (its programs, all ranks
    rehearsing at once), `apart` (the same, one rank after the other), and those of `alone`: each
    is run by one process, and None in the other.
    """
    ledger = Ledger()
    programs_s(step, state, batch, ledger)
    whole = pipelined_step(step, batch)

    def gradients() -> Any:
        return step.loss.run(step.loss.trainer, state.model, batch)[0].gradients

    samples: dict[str, list[float]] = {}
    for _ in range(rounds + 1):
        for name, run in alone.items():
            barrier("alone")
            samples.setdefault(name, []).append(0.0 if run is None else processor_s(run))
        for turn in range(jax.process_count()):
            barrier("apart")
            if turn == jax.process_index():
                samples.setdefault("apart", []).append(programs_s(step, state, batch, ledger))
        barrier("together")
        samples.setdefault("together", []).append(programs_s(step, state, batch, ledger))
        for name, run in (("gradients", gradients), ("step", whole)):
            barrier("pieces")
            samples.setdefault(name, []).append(processor_s(run))
    told = [json.loads(text) for text in everyone(json.dumps(samples), "pieces")]
    return {
        name: statistics.median(
            map(sum, list(zip(*(each[name] for each in told), strict=True))[1:])
        )
        for name in samples
    }


def split_s(plan: Any, profile: Any) -> float:
    """Returns by how much I and W of the layers take longer than B, in the stages where the plan
    splits it."""
    split = {a.stage for _, _, a in plan.schedule.actions() if a.kind.value == "I"}
    layers = [profile.layers[at] for s in split for at in plan.partition.layers(s)]
    more = sum(x.input_grad_s + x.weight_grad_s - x.fused_backward_s for x in layers)
    return plan.num_microbatches * more


def operations(step: Any) -> float:
    """Returns the operations of all programs in a step of all ranks, counted from the jaxprs."""
    lowered = step.loss.lowered
    by_program = [sum(map(operations_of, jaxpr.jaxpr.eqns)) for jaxpr in lowered.jaxprs]
    return sum(
        by_program[call.program]
        for rank in lowered.step.ranks
        for item in rank.body
        if item.do is Do.RUN
        for call in lowered.step.recipes[item.target][1].calls
    )


def plain_operations(model: Any, loss: Any, microbatch: Any) -> float:
    """Returns the operations of one microbatch in the plain step, counted alike."""
    graphdef, params = nnx.split(model, nnx.Param)
    jaxpr = jax.make_jaxpr(jax.value_and_grad(lambda p, b: loss(nnx.merge(graphdef, p), b)))(
        params, microbatch
    )
    return sum(map(operations_of, jaxpr.jaxpr.eqns))


def plain_update(model: Any, optimizer: Any) -> Callable[[], object]:
    """Returns one update of all parameters as a function, compiled."""
    device = jax.local_devices()[0]
    _, params = nnx.split(model, nnx.Param)
    grads = jax.device_put(jax.tree.map(jnp.zeros_like, params), device)
    values = jax.device_put([jax.tree.map(jnp.copy, params), optimizer.init(params)], device)

    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    jitted = jax.jit(update, donate_argnums=(0, 1))

    def run() -> object:
        values[:] = jitted(*values, grads)
        return values

    jax.block_until_ready(run())
    return run
