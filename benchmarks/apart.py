"""Processor time of a pipelined step's pieces, each run by itself; two processes call all alike."""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from octojax.executor.instructions import Do
from octojax.executor.recorded import Ledger, Recorder, action_times
from octojax.executor.run import run_recorded
from octojax.jaxprs.count import operations as operations_of
from octojax.processes import barrier, everyone


class ByProcessor(Recorder):
    """Notes the processor time of this process in place of the clock's."""

    def timed(self, rank: int) -> Callable[..., None]:
        def run(bound: Any, slots: list[Any]) -> None:
            self.ticks[rank] = run_recorded(bound, slots, time.process_time, jax.block_until_ready)

        return run


def programs_s(step: Any, state: Any, batch: Any, rounds: int) -> tuple[float, float]:
    """Returns processor seconds of a step's programs without transfers, all ranks': with one rank
    at work at a time, and with all at once."""

    ledger = Ledger()

    def rehearsed_s() -> float:
        recorder = ByProcessor(ledger)
        step.loss.calls.run(lambda: step.loss.rehearse(state.held, batch, recorder), "rehearse")
        return sum(seconds for *_, seconds in action_times(recorder, step.loss.lowered))

    rehearsed_s()
    samples: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for turn in range(jax.process_count()):
            barrier("apart")
            if turn == jax.process_index():
                samples[True].append(rehearsed_s())
        barrier("together")
        samples[False].append(rehearsed_s())
    mine = json.dumps([statistics.median(samples[True]), statistics.median(samples[False])])
    told = [json.loads(text) for text in everyone(mine, "rehearsals")]
    return sum(each[0] for each in told), sum(each[1] for each in told)


def gradients_s(step: Any, state: Any, batch: Any, rounds: int) -> float:
    """Returns processor seconds of a step without its update, all processes'."""
    samples = []
    for _ in range(rounds + 1):
        barrier("gradients")
        begin = time.process_time()
        for _ in range(2):
            jax.block_until_ready(step.loss.run(step.loss.trainer, state.held, batch)[0].gradients)
        samples.append((time.process_time() - begin) / 2)
    told = everyone(json.dumps(statistics.median(samples[1:])), "gradients")
    return sum(map(float, told))


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


def plain_update_s(model: Any, optimizer: Any, rounds: int) -> float:
    """Returns processor seconds of one update of all parameters, in the last process alone."""
    mine = 0.0
    if jax.process_index() == jax.process_count() - 1:
        _, params = nnx.split(model, nnx.Param)
        values = jax.device_put([jax.tree.map(jnp.copy, params), optimizer.init(params)],
                              jax.local_devices()[0])  # fmt: skip
        grads = jax.device_put(jax.tree.map(jnp.zeros_like, params), jax.local_devices()[0])

        def update(params: Any, state: Any, grads: Any) -> Any:
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        jitted = jax.jit(update, donate_argnums=(0, 1))
        samples = []
        for _ in range(rounds + 1):
            begin = time.process_time()
            values = jax.block_until_ready(jitted(*values, grads))
            samples.append(time.process_time() - begin)
        mine = statistics.median(samples[1:])
    return float(everyone(json.dumps(mine), "update")[-1])
