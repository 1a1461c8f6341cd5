"""`octopipe simulate`: how long a step takes, where ranks idle, what they hold."""

import json
import math
from dataclasses import replace
from typing import Annotated, Any

import typer

from octojax.cli.read import AnyProfile, expect_profile_of, read_profile, read_table


def command(
    file: Annotated[str, typer.Argument(help="A schedule (CSV), a plan (JSON) or a lowered one.")],
    costs: Annotated[
        str | None,
        typer.Option(
            help="F,I,W[,B]: costs of every stage, B being I + W if left out; default: 1,1,1,2."
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(help="A profile (JSON) with layer costs and the machine; default: --costs."),
    ] = None,
    any_profile: AnyProfile = False,
    latency: Annotated[
        float | None,
        typer.Option(
            help="Seconds of latency of every transfer; default: the profile's, or 0.", min=0.0
        ),
    ] = None,
    blocking: Annotated[
        bool, typer.Option("--blocking", help="Transfers occupy both ranks (rendezvous).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Simulate a schedule or plan; without costs in units, F = I = W = 1 and B = 2."""
    from octojax.ir import LoweredPlan, Machine, Plan
    from octojax.ir.lowering import without_transfers
    from octojax.ir.verify import verify
    from octojax.simulate import StageCosts, simulate

    if costs is not None and profile is not None:
        raise ValueError("give either --costs or --profile, not both")
    subject = read_table(file)
    schedule = subject.schedule if isinstance(subject, (Plan, LoweredPlan)) else subject
    if not isinstance(subject, LoweredPlan):
        verify(without_transfers(schedule))  # before anything as large as the table claims to be
    stages = subject.num_stages
    if profile is not None:
        priced: Any = read_profile(profile)
        expect_profile_of(file, subject, priced, any_profile)
        machine = priced.machine
    else:
        priced = StageCosts.unit(stages, *parse_costs("1,1,1,2" if costs is None else costs))
        machine = Machine()
    if latency is not None:
        machine = replace(machine, latency_s=latency, inter_latency_s=None)
    timeline = simulate(subject, priced, replace(machine, blocking=machine.blocking or blocking))
    if not math.isfinite(timeline.makespan_s):
        raise ValueError("the makespan is too large for a number; give smaller costs and latency")
    if as_json:
        typer.echo(json.dumps(timeline.to_json(), indent=1))
        return
    typer.echo(
        f"{file}: {schedule.num_ranks} ranks, {stages} stages, "
        f"{schedule.num_microbatches} microbatches"
    )
    typer.echo(
        table(timeline.to_json(), timeline.bubble_ratio, "units" if profile is None else "s")
    )


_WORST = 6  # stalls that are named


def parse_costs(text: str) -> tuple[float, ...]:
    """Returns F, I, W and, if given, B. Raises `ValueError` for anything else."""
    words = text.split(",")
    try:
        values = tuple(float(word) for word in words)
    except ValueError:
        values = ()
    if len(values) not in (3, 4) or not all(0 <= v < float("inf") for v in values):
        raise ValueError(
            f"--costs {text!r}: expected three or four numbers >= 0, F,I,W or F,I,W,B, "
            f"such as 1,1,1 or 10,12,8,20"
        )
    return values


def table(result: dict[str, Any], bubble_ratio: float, unit: str = "s") -> str:
    """Returns the account of every rank as text. `result` is `Timeline.to_json()`."""
    transfers = result["transfers"]
    lines = [
        f"makespan {result['makespan_s']:.6g} {unit}, bubble ratio {bubble_ratio:.4f}, "
        f"{transfers['count']} transfers, {transfers['overlapped']} overlapped by both ranks' "
        f"computation ({transfers['sender_overlapped']} by the sender's)",
        "rank       busy     bubble = boundary + computation + transfer  live until I  until W"
        "    peak GiB",
    ]
    for rank, x in enumerate(result["ranks"]):
        lines.append(
            f"{rank:4d} {x['busy_s']:10.6g} {x['bubble_s']:10.6g} {x['boundary_bubble_s']:10.6g} "
            f"{x['computation_wait_s']:13.6g} {x['transfer_wait_s']:10.6g} "
            f"{x['peak_microbatches']:13d} "
            f"{x['peak_microbatches_until_weight']:8d} {x['peak_bytes'] / (1 << 30):11.3f}"
        )
    stalls = transfers["stalls"]
    if stalls:
        worst = "  ".join(f"{x['transfer']} {x['stall_s']:.6g}" for x in stalls[:_WORST])
        total = sum(x["stall_s"] for x in stalls)
        lines.append(
            f"{len(stalls)} transfers stall the rank that waits for them, for {total:.6g} {unit} "
            f"in all; the longest: {worst}"
        )
    return "\n".join(lines)
