"""How well the simulator predicts real computation: two processes, each bound to a core.

python experiments/fidelity_real.py

Each process times the layers of the hybrid model (`hybrid.py`) while the other does, and the
link is measured between them. On that profile plans are chosen: 1F1B, interleaved, zb-h1 and the
tuned one. Then all of them train in turns, recorded and unrecorded, and in every round the layers
are timed once more and each plan is rehearsed (`step.rehearse`), so that a busy machine slows all
alike. The simulator predicts each recorded step twice: from the layers' times of that round, as the
tuner does, and from the plan's rehearsal just before. Layers take turns with each other, one run at
a time: repeated alone they would find their values in the caches, as they do not in a step.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fidelity_common import in_processes, plans, row, table

import octojax as octopipe
from octojax.ir import Plan, Profile, Timeline
from octojax.simulate import simulate


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument(
        "--vocabulary", type=int, help="default: 32 times the width, as in Nemotron-H 8B"
    )
    parser.add_argument("--rows", type=int, default=4, help="of one microbatch")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tune-seconds", type=float, default=10.0)
    parser.add_argument("-o", "--output", help="write rows (JSON) here")
    return parser.parse_args(arguments)


def paired(
    name: str, plan: Plan, simulated: Sequence[Timeline], measured: Sequence[Timeline]
) -> dict[str, Any]:
    """Returns one line of results: `simulated[i]` is the prediction of `measured[i]`, from times
    taken just before, as the machine was then. Times are medians, and `error` is the median of
    the rounds' errors; `error_of_medians` compares the times."""
    found = row(name, plan, usual(simulated), usual(measured))
    ratios = [s.makespan_s / m.makespan_s for s, m in zip(simulated, measured, strict=True)]
    return {
        **found,
        "error": statistics.median(ratios) - 1,
        "error_of_medians": found["error"],
        "ratios": ratios,
    }


def usual(timelines: Sequence[Timeline]) -> Timeline:
    """Returns the one of median makespan."""
    return sorted(timelines, key=lambda t: t.makespan_s)[len(timelines) // 2]


def run(arguments: Sequence[str]) -> None:
    octopipe.initialize()
    import jax
    import jax.numpy as jnp
    import optax
    from hybrid import mid

    from octojax.mesh import pipeline_mesh
    from octojax.processes import barrier
    from octojax.profiling.together import Together

    wanted = options(arguments)
    say = print if jax.process_index() == 0 else (lambda *_, **__: None)
    vocabulary = wanted.vocabulary or 32 * wanted.width
    model, loss, microbatch = mid(
        wanted.width, wanted.layers, wanted.rows, wanted.length, vocabulary
    )
    batch = jax.tree.map(lambda x: jnp.concatenate([x] * wanted.microbatches), microbatch)
    mesh, optimizer = pipeline_mesh(), optax.adamw(1e-3)
    begin = time.monotonic()
    timer = Together(octopipe.adapt(model, loss), microbatch, mesh, optimizer)
    profile = timer.profile(9, microbatches=wanted.microbatches, target_s=0.0)
    machine = profile.machine
    say(
        f"profiled in {time.monotonic() - begin:.0f} s: {profile.num_layers} layers, "
        f"{sum(x.compute_s for x in profile.layers) * 1e3:.4g} ms a microbatch, speeds "
        f"{machine.speeds}, link {machine.latency_s * 1e3:.3g} ms + bytes / "
        f"{machine.bandwidth_bytes_per_s / 1e9:.3g} GB/s, host {machine.host_cost_s * 1e3:.3g} ms",
        flush=True,
    )
    alike = profile.on(replace(machine, speeds=()))  # two cores of one kind: the rest is noise
    chosen = plans(alike, mesh.num_ranks, wanted.microbatches, wanted.tune_seconds)
    chosen.pop("partition-only", None)
    begin = time.monotonic()
    steps: dict[str, Any] = {}
    for name, plan in chosen.items():
        steps[name] = octopipe.compile(
            model,
            loss,
            optimizer,
            batch,
            mesh=mesh.mesh,
            plan=plan,
            microbatches=wanted.microbatches,
            progress=False,
            timeout_s=120.0,
        )
    say(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    states = {name: step.init() for name, step in steps.items()}
    rehearsals: dict[str, list[Timeline]] = {name: [] for name in steps}
    plain: dict[str, list[float]] = {name: [] for name in steps}
    recorded: dict[str, list[float]] = {name: [] for name in steps}
    timelines: dict[str, list[Any]] = {name: [] for name in steps}
    profiles: list[Profile] = []
    for turn in range(wanted.rounds + 2):
        profiles.append(timer.profile(3, microbatches=wanted.microbatches, target_s=0.0))
        for name, step in list(steps.items())[:: 1 if turn % 2 else -1]:
            rehearsals[name].append(
                step.rehearse(states[name], batch, rounds=1, machine=machine).timeline
            )
            for record in (True, False):  # the rehearsal is of the recorded one
                barrier("turn")
                begin = time.monotonic()
                if record:
                    states[name], metrics, timeline = step(states[name], batch, record=True)
                    timelines[name].append(timeline)
                else:
                    states[name], metrics = step(states[name], batch)
                jax.block_until_ready((states[name], metrics))
                (recorded if record else plain)[name].append(time.monotonic() - begin)
    rows = []
    for name, plan in chosen.items():
        layered = [simulate(plan, profile) for profile in profiles]
        found = paired(name, plan, layered[2:], timelines[name][2:])
        own = paired(name, plan, rehearsals[name][2:], timelines[name][2:])
        found["rehearsed"] = {
            k: own[k] for k in ("simulated_s", "error", "error_of_medians", "ms_by_item")
        }
        found["step_s"] = statistics.median(plain[name][2:])
        found["recorded_step_s"] = statistics.median(recorded[name][2:])
        rows.append(found)
    by_source = {
        "the layers' times": rows,
        "each plan's rehearsal": [{**found, **found["rehearsed"]} for found in rows],
    }
    for source, found in by_source.items():
        say(f"from {source}:\n\n{table(found)}")
        errors = [abs(line["error_of_medians"]) for line in found]
        say(f"mean error of the median times {statistics.mean(errors):.2%}\n")
    say("\n| plan | step ms | makespan ms | peak MiB measured | simulated | error |")
    say("|---|---|---|---|---|---|")
    errors = []
    for found in rows:
        peaks = list(zip(found["peak_bytes"], found["simulated_peak_bytes"], strict=True))
        errors += [s / m - 1 for m, s in peaks]
        say(
            f"| {found['plan']} | {found['step_s'] * 1e3:.4g} | {found['measured_s'] * 1e3:.4g} | "
            f"{', '.join(f'{m / 2**20:.4g}' for m, _ in peaks)} | "
            f"{', '.join(f'{s / 2**20:.4g}' for _, s in peaks)} | "
            f"{', '.join(f'{s / m - 1:+.1%}' for m, s in peaks)} |"
        )
    say(f"\nmean error of the peak memory {statistics.mean(map(abs, errors)):.2%}")
    if wanted.output and jax.process_index() == 0:
        Path(wanted.output).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    barrier("done")


if __name__ == "__main__":
    in_processes(run, options(sys.argv[1:]).processes, pin=True, timeout_s=120.0)
