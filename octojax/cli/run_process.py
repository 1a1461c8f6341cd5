"""One process of `octopipe run`; process 0 writes what was found into a folder."""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from octojax.api.step import TrainState, TrainStep, compile
from octojax.cli.child import run_child
from octojax.cli.profile import named_optimizer
from octojax.cli.read import read_profile
from octojax.cli.targets import load_target
from octojax.executor.stragglers import stragglers
from octojax.ir import Plan, Profile, Timeline
from octojax.mesh import pipeline_mesh
from octojax.processes import barrier, initialize, timeout_s
from octojax.report.data import save_timeline
from octojax.report.panel import stage_layers
from octojax.simulate import simulate


def main(text: str, folder: str) -> None:
    wanted = json.loads(text)
    initialize()
    model, loss, microbatch, params = load_target(wanted["target"])
    optimizer = named_optimizer(wanted["optimizer"])
    if optimizer is None:
        raise ValueError("a training step needs an optimizer: --optimizer adamw, sgd, ...")
    plan = Plan.load(wanted["plan"]) if wanted["plan"] else None
    ranks = wanted["ranks"]
    count = plan.num_microbatches if plan else wanted["microbatches"] or 4 * ranks
    batch = jax.tree.map(lambda x: repeated(x, count), microbatch)
    mesh = pipeline_mesh(num_ranks=ranks)
    profile = read_profile(wanted["profile"]) if wanted["profile"] else None
    step = compile(
        model,
        loss,
        optimizer,
        batch,
        params=params,
        mesh=mesh.mesh,
        microbatches=count,
        schedule=wanted["schedule"],
        plan=plan,
        profile=profile,
        progress=False,
        timeout_s=timeout_s(),
    )
    state = step.init()
    times: list[float] = []
    metrics: Any = {}
    for _ in range(wanted["steps"] + 2):
        state, metrics, seconds = timed(step, state, batch)
        times.append(seconds)
    answer: dict[str, Any] = {
        "plan": step.plan.name or str(wanted["schedule"]),
        "ranks": ranks,
        "processes": jax.process_count(),
        "microbatches": count,
        "layers": stage_layers(step.plan, profile),
        "steps": wanted["steps"],
        "loss": float(metrics["loss"]),
        "steps_s": times[2:],
        "step_s": statistics.median(times[2:]),
    }
    if wanted["record"]:
        measured, simulated, recorded_s = recorded(step, state, batch, profile, wanted["steps"])
        answer["compared"] = {
            **compared(measured, simulated),
            "simulated_from": wanted["profile"] or "a rehearsal",
            "recorded_step_s": recorded_s,
            "recording_cost": recorded_s / answer["step_s"] - 1,
            "stragglers": [str(s) for s in stragglers(measured, simulated, wanted["factor"])],
        }
        if jax.process_index() == 0:
            save_timeline(measured, Path(folder) / "measured.json")
            save_timeline(simulated, Path(folder) / "simulated.json")
    if jax.process_index() == 0:
        (Path(folder) / "answer.json").write_text(json.dumps(answer), encoding="utf-8")
    barrier("written")


def repeated(leaf: Any, count: int) -> Any:
    """Returns the rows of a leaf `count` times; scalars as they are."""
    return leaf if jnp.ndim(leaf) == 0 else jnp.concatenate([jnp.asarray(leaf)] * count)


def timed(
    step: TrainStep, state: TrainState, batch: Any
) -> tuple[TrainState, dict[str, Any], float]:
    """Returns the next state, the metrics, and the seconds until all of it was there."""
    barrier("timed step")
    begin = time.monotonic()
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    return state, metrics, time.monotonic() - begin


def recorded(
    step: TrainStep, state: TrainState, batch: Any, profile: Profile | None, steps: int
) -> tuple[Timeline, Timeline, float]:
    """Returns the recorded step of median makespan, its simulation, and the median seconds.

    The simulation is of the profile, without one of a rehearsal just before.
    """
    simulated = (
        step.rehearse(state, batch, rounds=steps).timeline
        if profile is None
        else simulate(step.plan, profile)
    )
    timelines, times = [], []
    for _ in range(steps):
        barrier("recorded step")
        begin = time.monotonic()
        state, metrics, timeline = step(state, batch, record=True)
        jax.block_until_ready((state, metrics))
        times.append(time.monotonic() - begin)
        timelines.append(timeline)
    timelines.sort(key=lambda t: t.makespan_s)
    return timelines[len(timelines) // 2], simulated, statistics.median(times)


def compared(measured: Timeline, simulated: Timeline) -> dict[str, Any]:
    """Returns the simulator's relative errors; those of bubbles in parts of the makespan."""
    pairs = list(zip(measured.ranks, simulated.ranks, strict=True))
    return {
        "measured_s": measured.makespan_s,
        "simulated_s": simulated.makespan_s,
        "makespan_error": simulated.makespan_s / measured.makespan_s - 1,
        "bubble_error": [(s.bubble_s - m.bubble_s) / measured.makespan_s for m, s in pairs],
        "peak_bytes": [m.peak_bytes for m, _ in pairs],
        "simulated_peak_bytes": [s.peak_bytes for _, s in pairs],
        "peak_error": [s.peak_bytes / m.peak_bytes - 1 for m, s in pairs],
    }


if __name__ == "__main__":
    run_child(main, sys.argv[1:])
