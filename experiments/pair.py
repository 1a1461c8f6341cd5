"""Steps that take turns on two cores: the plain one alone on one, pipelined ones on both.

process 0            1f1b  tuned             1f1b  tuned
process 1     plain  1f1b  tuned      plain  1f1b  tuned

Both processes are bound to a core each. In a round every step runs a few times while the others
wait, so that a busy machine slows all alike.
"""

import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from octojax.processes import barrier, everyone

Step = Callable[[], None]
"""Runs one step and returns when all of it is done."""


@dataclass(frozen=True)
class Turn:
    """Steps of one process in one turn: seconds of each; means of the turn's processor time, of
    the time that its thread waited for the core while others had it, and of page faults.
    """

    seconds: tuple[float, ...]
    processor_s: float
    queued_s: float = 0.0
    faults: float = 0.0


@dataclass(frozen=True)
class Figures:
    """One kind of step over all turns, of one process or of both together.

    `step_s` is the median of the steps, the slower process counting in each; `processor_s` is
    the median over turns of all processes' time together, `by_process_s` that of each.
    """

    step_s: float
    processor_s: float
    by_process_s: tuple[float, ...]
    queued_s: float
    faults: float

    @classmethod
    def of(cls, turns: Sequence[Sequence[Turn]]) -> "Figures":
        """`turns[p][i]` is turn i of process p. Raises `ValueError` where there are none."""
        if not turns or not all(turns):
            raise ValueError("no turn was taken: there is nothing to take figures from")
        together = list(zip(*turns, strict=True))
        steps = [max(each) for turn in together for each in zip(*(t.seconds for t in turn))]
        return cls(
            statistics.median(steps),
            statistics.median(sum(t.processor_s for t in turn) for turn in together),
            tuple(statistics.median(t.processor_s for t in own) for own in turns),
            statistics.median(max(t.queued_s for t in turn) for turn in together),
            statistics.median(sum(t.faults for t in turn) for turn in together),
        )


def timed(step: Step, times: int) -> Turn:
    """Returns what so many steps take, run one after the other."""
    before, queued, seconds = resource.getrusage(resource.RUSAGE_SELF), _queued_s(), []
    for _ in range(times):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    after = resource.getrusage(resource.RUSAGE_SELF)
    processor_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Turn(
        tuple(seconds),
        processor_s / times,
        (_queued_s() - queued) / times,
        (after.ru_minflt - before.ru_minflt) / times,
    )


def take_turns(
    steps: Mapping[str, Step | None], rounds: int, times: int, until_s: float = float("inf")
) -> dict[str, Figures]:
    """Returns the figures of every step, the same in every process; all call this alike.

    A step that is None is another process's alone. Every step runs twice to warm up. There are
    at most `rounds` rounds; none but the first begins after `until_s` of process 0's monotonic
    clock.
    """
    turns: dict[str, list[Turn]] = {name: [] for name, step in steps.items() if step is not None}
    for number in range(-1, rounds):
        late = number > 0 and time.monotonic() > until_s
        if everyone(json.dumps(late), "round")[0] == "true":
            break
        for name, step in steps.items():
            barrier("turn")
            if step is None:
                continue
            turn = timed(step, times if number >= 0 else 2)
            if number >= 0:
                turns[name].append(turn)
    texts = everyone(json.dumps({n: [asdict(t) for t in own] for n, own in turns.items()}), "turns")
    told = [
        {n: [Turn(**turn) for turn in own] for n, own in json.loads(text).items()} for text in texts
    ]
    return {name: Figures.of([each[name] for each in told if name in each]) for name in steps}


def accumulating_step(
    model: nnx.Module,
    loss_fn: Callable[[Any, Any], jax.Array],
    optimizer: optax.GradientTransformation,
    microbatches: int,
) -> tuple[Callable[[Any, Any, Any], Any], Any]:
    """Returns the step of the unpipelined model, and a copy of its parameters.

    The step is one jitted program: `lax.scan` over the microbatches, gradients added up, one
    update. It takes parameters and optimizer state, which it overwrites, and a batch, and returns
    both anew and the mean loss.
    """
    graphdef, params = nnx.split(model, nnx.Param)
    update = optax.with_extra_args_support(optimizer).update

    def loss(params: Any, batch: Any) -> jax.Array:
        return loss_fn(nnx.merge(graphdef, params), batch)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        pieces = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)

        def add(total: Any, piece: Any) -> tuple[Any, None]:
            value_and_grads = jax.value_and_grad(loss)(params, piece)
            return jax.tree.map(lambda a, b: a + b / microbatches, total, value_and_grads), None

        zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        (value, grads), _ = jax.lax.scan(add, zeros, pieces)
        updates, opt_state = update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return jax.jit(step, donate_argnums=(0, 1)), jax.tree.map(jnp.copy, params)


def plain_step(
    model: nnx.Module,
    loss_fn: Callable[[Any, Any], jax.Array],
    optimizer: optax.GradientTransformation,
    batch: Any,
    microbatches: int,
) -> Step:
    """Returns `accumulating_step` on the first device as one without arguments; it keeps its own
    state."""
    step, params = accumulating_step(model, loss_fn, optimizer, microbatches)
    device = jax.local_devices()[0]
    batch, params = jax.device_put((batch, params), device)
    state = [params, jax.device_put(optimizer.init(params), device)]

    def run() -> None:
        *state[:], value = step(*state, batch)
        jax.block_until_ready((state, value))

    return run


def pipelined_step(step: Any, batch: Any) -> Step:
    """Returns the compiled pipeline's step as one without arguments; it keeps its own state."""
    state = [step.init()]

    def run() -> None:
        state[0], metrics = step(state[0], batch)
        jax.block_until_ready((state[0], metrics))

    return run


def _queued_s() -> float:
    """Returns how long the threads of this process have been ready to run while others ran; 0.0
    where the system does not say."""
    total = 0
    try:
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/schedstat", encoding="ascii") as file:
                total += int(file.read().split()[1])
    except (OSError, IndexError, ValueError):
        return 0.0
    return total / 1e9
