"""`octopipe emulate`: race a plan in real time on processes that sleep instead of computing."""

import json
import math
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from octojax.cli.children import run_children
from octojax.cli.read import (
    AnyProfile,
    expect_profile_of,
    expect_writable,
    read_plan,
    read_profile,
)


def command(
    file: Annotated[str, typer.Argument(help="A plan (JSON), or a schedule (CSV).")],
    profile: Annotated[str, typer.Option(help="A profile (JSON) with the times of layers.")],
    any_profile: AnyProfile = False,
    processes: Annotated[
        int | None,
        typer.Option("-n", "--processes", help="Processes; default: one per rank.", min=1),
    ] = None,
    scale: Annotated[float, typer.Option(help="Factor on every time of the profile.")] = 1.0,
    steps: Annotated[
        int, typer.Option(help="Steps to measure, after one that warms up.", min=1)
    ] = 3,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a peer.", min=1)] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the measured timeline (JSON) here.")
    ] = None,
) -> None:
    """Run a plan through the real executor and transfers, each action a sleep of its time."""
    from octojax.report.data import load_timeline, save_timeline
    from octojax.simulate import simulate

    if not 0 < scale < math.inf:
        raise ValueError(f"--scale {scale}: expected a number > 0")
    expect_writable(output)
    plan = read_plan(file, profile)
    costs = read_profile(profile)
    expect_profile_of(file, plan, costs, any_profile)
    simulated = simulate(plan, costs)  # refuses what does not fit, before launch
    count = processes or plan.num_ranks
    if count < 1 or plan.num_ranks % count:
        raise ValueError(
            f"{plan.num_ranks} ranks cannot be spread over {count} processes evenly; use -n with "
            f"a divisor of {plan.num_ranks}"
        )
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            "-m",
            "octojax.cli.emulate_process",
            file,
            profile,
            folder,
            str(scale),
            str(steps),
        ]
        run_children(
            arguments,
            count,
            devices_per_process=plan.num_ranks // count,
            timeout_s=timeout,
        )
        timelines = [load_timeline(p) for p in sorted(Path(folder).glob("step*.json"))]
    ordered = sorted(timelines, key=lambda t: t.makespan_s)
    middle = ordered[len(ordered) // 2]
    if output is not None:
        save_timeline(middle, output)
    answer = _account(plan, simulated, scale, timelines, middle)
    if as_json:
        typer.echo(json.dumps(answer, indent=1))
        return
    typer.echo(
        f"emulated devices: {plan.num_ranks} ranks in {count} processes, {steps} steps, times "
        f"x{scale:g}\nmeasured {answer['measured_s']:.6g} s, simulated "
        f"{answer['simulated_s']:.6g} s, error {answer['error']:+.2%}\n"
        f"{answer['stages']} stages, {answer['transfers']} transfers, "
        f"{answer['overlapped']} overlapped by both ranks' computation "
        f"({answer['sender_overlapped']} by the sender's)"
    )


def _account(
    plan: Any, simulated: Any, scale: float, timelines: list[Any], middle: Any
) -> dict[str, Any]:
    measured_s = middle.makespan_s / scale
    return {
        "measured_s": measured_s,
        "simulated_s": simulated.makespan_s,
        "error": measured_s / simulated.makespan_s - 1,
        "steps_s": [t.makespan_s / scale for t in timelines],
        "scale": scale,
        "stages": plan.num_stages,
        "transfers": len(middle.transfers),
        "overlapped": middle.overlapped,
        "sender_overlapped": middle.to_json()["transfers"]["sender_overlapped"],
        "bubble_s": [r.bubble_s / scale for r in middle.ranks],
        "simulated_bubble_s": [r.bubble_s for r in simulated.ranks],
    }
