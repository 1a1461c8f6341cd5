"""`octopipe lower`: everything that every rank executes, pass by pass."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from octojax.cli.read import (
    AnyProfile,
    expect_profile_of,
    expect_writable,
    read_profile,
    read_table,
)
from octojax.errors import PlanError


def command(
    file: Annotated[str, typer.Argument(help="A plan (JSON) or a schedule (CSV).")],
    profile: Annotated[
        str | None,
        typer.Option(
            help="Layer costs and machine (JSON): what is worth hiding where; default: units."
        ),
    ] = None,
    any_profile: AnyProfile = False,
    passes: Annotated[
        str | None,
        typer.Option(
            help="Passes, such as split,recompute(stages=0-3),transfers,reorder(window=64),join. "
            "Default: transfers,join,reorder,ownership (reorder before join where transfers "
            "block); for a table that has SEND and RECV, join,ownership."
        ),
    ] = None,
    blocking: Annotated[
        bool,
        typer.Option(
            "--blocking", help="Order for transfers that occupy both their ranks (rendezvous)."
        ),
    ] = False,
    dump: Annotated[
        Path | None, typer.Option(help="A folder: the table before and after each pass.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write here: rows (.csv) or everything (.json)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Lower a plan: print what every rank executes, and what its transfers took.

    Without a profile F = I = W = 1, B = 2, and a transfer takes 1 where it is simulated.
    """
    expect_writable(output)
    table = read_table(file)
    known = None if profile is None else read_profile(profile)
    if known is not None:
        expect_profile_of(file, table, known, any_profile)
    unit = "units" if known is None else "s"
    lowered, counts = _lowered(table, known, passes, dump, blocking)
    if output is not None:
        lowered.save(output)
    if as_json:
        typer.echo(json.dumps({**counts, "plan": lowered.to_json()}, indent=1))
        return
    if output is None:
        typer.echo("\n".join(lowered.lines))
    typer.echo(
        f"{file}: {lowered.num_ranks} ranks, {sum(map(len, lowered.ranks))} instructions, "
        f"{counts['transfers']} transfers: {counts['mismatched']} mismatches found, "
        f"{counts['repaired']} repaired, {counts['overlapped']} overlapped, "
        f"{counts['stalled']} stall their receiver, for {counts['stall_s']:.6g} {unit} in all; "
        f"makespan {counts['makespan_s']:.6g} {unit}"
    )


def _lowered(subject, known, passes, dump, blocking):
    from octojax.ir import LoweredPlan, Machine
    from octojax.ir.delivery import mismatches
    from octojax.ir.naive import placed_naively
    from octojax.passes import lowered
    from octojax.simulate import StageCosts, simulate

    if isinstance(subject, LoweredPlan):
        raise PlanError(
            "this is lowered already; `octopipe check`, `simulate` and `show` take it as it is"
        )
    machine = Machine(latency_s=1.0) if known is None else known.machine
    if blocking:
        machine = replace(machine, blocking=True)
    result = lowered(subject, passes, costs=known, machine=machine, dump=dump)
    costs = known or StageCosts.unit(result.num_stages)
    timeline = simulate(result, costs, machine)
    naive = len(mismatches(placed_naively(result)))
    stalls = timeline.stalls_s
    return result, {
        "transfers": len(timeline.transfers),
        "mismatched": naive,  # by the rule that every table starts from
        "repaired": naive - len(mismatches(result)),
        "overlapped": timeline.overlapped,
        "stalled": len(stalls),
        "stall_s": sum(stalls.values()),
        "makespan_s": timeline.makespan_s,
    }
