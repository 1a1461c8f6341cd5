"""`octopipe check`: is this schedule complete, and can it run?"""

from typing import Annotated

import typer

from octojax.cli.read import AnyProfile, expect_profile_of, read_profile, read_table
from octojax.errors import PlanError


def command(
    file: Annotated[str, typer.Argument(help="A schedule (CSV), a plan (JSON) or a lowered one.")],
    microbatches: Annotated[
        int | None,
        typer.Option(
            help="How many microbatches must be there; default: as many as there are.", min=1
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(help="A profile (JSON) to check a plan's memory against; default: none is."),
    ] = None,
    any_profile: AnyProfile = False,
) -> None:
    """Check a schedule: nothing missing, doubled, misplaced, cyclic or undeliverable.

    Exit code 0 if all is well; 1 with what is wrong and where; 2 if the file cannot be read.
    """
    try:
        text = _report(file, microbatches, profile, any_profile)
    except PlanError as error:
        typer.echo(f"{file}: {error}")
        raise typer.Exit(1) from None
    typer.echo(text)


def _report(file: str, microbatches: int | None, profile: str | None, any_profile: bool) -> str:
    from octojax.ir import LoweredPlan, Plan
    from octojax.ir.lowering import transfers_of, without_transfers
    from octojax.ir.verify import verify

    table = read_table(file)
    verify(table, microbatches)
    if isinstance(table, LoweredPlan):
        bare, count, lowered = table.schedule, len(table.transfers), True
    else:
        schedule = table.schedule if isinstance(table, Plan) else table
        bare, lowered = without_transfers(schedule), schedule.has_transfers
        count = len(transfers_of(bare))
    actions = sum(1 for _ in bare.actions())
    how = "deliverable under rendezvous" if lowered else "crossing ranks"
    lines = [
        f"{file}: ok: {bare.num_ranks} ranks, {bare.num_stages} stages, "
        f"{bare.num_microbatches} microbatches, {actions} actions, {count} transfers {how}"
    ]
    if profile is not None:
        if not isinstance(table, Plan):
            raise ValueError(
                f"--profile needs a plan (JSON), and {file} is a bare schedule: "
                f"it does not say which layers form a stage"
            )
        from octojax.simulate.capacity import check_capacity

        costs = read_profile(profile)
        expect_profile_of(file, table, costs, any_profile)
        check_capacity(table, costs)
        lines.append("every rank's peak is within its memory")
    return "\n".join(lines)
