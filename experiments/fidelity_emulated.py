"""How well the simulator predicts the executor: emulated devices, real processes and transfers.

python experiments/fidelity_emulated.py --ranks 4 --profile nemotron-h-s --microbatches 8

Each of RANKS processes sleeps for every action of its rank, and sends payloads of real size
through the executor. The profile's times are scaled up, its link is replaced by the one measured
between these processes, and plans are tuned for that.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fidelity_common import in_processes, plans, row, scaled, table

import octojax as octopipe
from octojax.ir import Plan, Profile
from octojax.report.data import save_timeline

PROFILES = Path(__file__).parent / "profiles"


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--profile", default="nemotron-h-s")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--scale", type=float, default=16.0, help="factor on the profile's times")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tune-seconds", type=float, default=10.0)
    parser.add_argument("--plans", help="JSON file of plans by name, in place of tuning some")
    parser.add_argument("--timelines", help="folder for the measured timelines, NAME.json")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for everything")
    parser.add_argument("-o", "--output", help="write rows (JSON) here")
    return parser.parse_args(arguments)


def run(arguments: Sequence[str]) -> None:
    octopipe.initialize()
    import jax

    from octojax.emulate import emulate
    from octojax.mesh import pipeline_mesh
    from octojax.profiling.together import measure_links
    from octojax.simulate import simulate

    wanted = options(arguments)
    mesh = pipeline_mesh(num_ranks=wanted.ranks)
    profile = scaled(Profile.load(PROFILES / f"{wanted.profile}.calibrated.json"), wanted.scale)
    link = measure_links(mesh, typical_bytes=profile.layers[1].output_bytes, computing=False)
    capacity = profile.machine.capacity_bytes
    profile = profile.on(replace(link, host_cost_s=0.0, capacity_bytes=capacity))
    if wanted.plans:
        stored = json.loads(Path(wanted.plans).read_text(encoding="utf-8"))
        chosen = {name: Plan.from_json(data, name) for name, data in stored.items()}
    else:
        chosen = plans(profile, wanted.ranks, wanted.microbatches, wanted.tune_seconds)
    rows = []
    for name, plan in chosen.items():
        found = emulate(plan, profile, steps=wanted.steps, timeout=120.0)
        rows.append(row(name, plan, simulate(plan, profile), found.median))
        if jax.process_index() == 0:
            print(f"{name}: {[round(t.makespan_s, 4) for t in found.timelines]}", flush=True)
            if wanted.timelines:
                save_timeline(found.median, Path(wanted.timelines) / f"{name}.json")
    if jax.process_index() == 0:
        print(
            f"{wanted.profile}, {wanted.ranks} emulated ranks in as many processes, "
            f"{wanted.microbatches} microbatches, times x{wanted.scale:g}; link "
            f"{link.latency_s * 1e3:.3g} ms + bytes / {link.bandwidth_bytes_per_s / 1e9:.3g} GB/s, "
            f"processor {link.host_cost_s * 1e3:.3g} ms a message"
        )
        print(table(rows))
        if wanted.output:
            Path(wanted.output).write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    wanted = options(sys.argv[1:])
    in_processes(run, wanted.ranks, pin=False, timeout_s=wanted.timeout)
