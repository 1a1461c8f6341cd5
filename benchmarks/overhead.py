"""What the executor costs: a pipelined step against the plain accumulating step, in one run.

    python benchmarks/overhead.py                  tiny and mid-size hybrid, 2 ranks
    python benchmarks/overhead.py --sizes tiny --schedules 1f1b,gpipe --repeats 30

Both steps do the same work: gradients of 8 microbatches, summed, and one Adam update. Times are
medians over repeats that take turns, so that a busy machine slows all alike.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "experiments"))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from pair import accumulating_step
from rich.console import Console
from rich.table import Table

import octojax as octopipe
from octojax.executor.run import run_rank
from octojax.models import jamba

SIZES = {
    # name: (width, vocabulary, rows, sequence)
    "tiny": (24, 64, 16, 16),
    "mid": (104, 256, 32, 64),
}


def python_per_action_us(step: octopipe.TrainStep, repeats: int = 20) -> float:
    """Returns the executor's own Python time per instruction: every program is a stub."""
    times, count = [], 0
    for part in step.loss.trainer.engine.parts:
        stubs = [(_stub(len(writes)), read, writes, frees) for _, read, writes, frees in part.bound]
        slots: list[Any] = [None] * part.program.num_slots
        count += len(stubs)
        best = float("inf")
        for _ in range(repeats):
            start = time.perf_counter()
            run_rank(stubs, slots)
            best = min(best, time.perf_counter() - start)
        times.append(best)
    return 1e6 * sum(times) / count


def _stub(results: int) -> Callable[..., tuple[None, ...]]:
    made = (None,) * results
    return lambda *_: made


def measure(size: str, schedules: list[str], ranks: int, repeats: int, transport: str) -> Table:
    width, vocabulary, rows, sequence = SIZES[size]
    microbatches, optimizer = 8, optax.adam(1e-3)
    model = jamba.Jamba(jamba.tiny(width, vocabulary=vocabulary), rngs=nnx.Rngs(0))
    count = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, vocabulary, (rows, sequence + 1)), jnp.int32)
    batch = {"tokens": tokens}
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("pipe",))

    plain, params = accumulating_step(model, jamba.loss, optimizer, microbatches)
    start = time.perf_counter()
    held = [params, optimizer.init(params)]

    def run_plain() -> None:
        *held[:], loss = plain(*held, batch)
        jax.block_until_ready((held, loss))

    run_plain()
    first_plain = time.perf_counter() - start
    runs: dict[str, Callable[[], None]] = {"plain": run_plain}
    facts: dict[str, tuple[float, int, float]] = {"plain": (first_plain, 1, 0.0)}
    for name in schedules:
        start = time.perf_counter()
        step = octopipe.compile(
            model,
            jamba.loss,
            optimizer,
            batch,
            mesh=mesh,
            microbatches=microbatches,
            schedule=name,
            transport=transport,
            progress=False,
        )
        state = [step.init()]

        def run(step: octopipe.TrainStep = step, state: list[Any] = state) -> None:
            state[0], metrics = step(state[0], batch)
            jax.block_until_ready((state[0], metrics))

        run()
        first = time.perf_counter() - start
        runs[name] = run
        facts[name] = (first, step.report.compilations, python_per_action_us(step))

    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    base = statistics.median(seconds["plain"])
    table = Table(title=f"{size}: {count / 1e3:.0f}k parameters, {ranks} ranks, {transport}")
    for column in ("step", "ms", "x plain", "first call s", "x plain", "compilations", "us/action"):
        table.add_column(column, justify="left" if column == "step" else "right")
    for name, found in seconds.items():
        median = statistics.median(found)
        first, compilations, python_us = facts[name]
        table.add_row(
            name,
            f"{1e3 * median:.1f}",
            f"{median / base:.2f}",
            f"{first:.1f}",
            f"{first / first_plain:.2f}",
            str(compilations),
            f"{python_us:.1f}" if python_us else "",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sizes", default="tiny,mid")
    parser.add_argument("--schedules", default="1f1b,gpipe,zb-h1,interleaved")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--transport", default="auto")
    arguments = parser.parse_args()
    for size in arguments.sizes.split(","):
        table = measure(
            size,
            arguments.schedules.split(","),
            arguments.ranks,
            arguments.repeats,
            arguments.transport,
        )
        Console(width=110).print(table)


if __name__ == "__main__":
    main()
