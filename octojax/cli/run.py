"""`octopipe run`: train a model for a few steps under a plan, and see what really happened."""

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from octojax.cli.children import run_children
from octojax.cli.panels import write_pictures
from octojax.cli.read import (
    AnyProfile,
    expect_profile_of,
    expect_writable,
    read_profile,
    read_schedule,
)
from octojax.ir import Schedule

_MODEL = (
    "A function without arguments that returns (model, loss_fn, batch[, params]), as for "
    "`octopipe profile`: the batch is one microbatch, and is repeated for each."
)


def command(
    target: Annotated[str, typer.Argument(metavar="MODULE:NAME", help=_MODEL)],
    processes: Annotated[
        int, typer.Option("-n", "--processes", help="How many to start.", min=1)
    ] = 1,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Default: those of the plan, else one per process, 2 at least."),
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(min=1, help="Default: the plan's, else 4 a rank.")
    ] = None,
    schedule: Annotated[str, typer.Option(help="A name, a CSV table, or auto.")] = "1f1b",
    plan: Annotated[
        str | None, typer.Option(help="A plan (JSON) in place of --schedule; default: none.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps to time, after two that warm up.", min=1)] = 5,
    optimizer: Annotated[str, typer.Option(help="Name in optax.")] = "adamw",
    record: Annotated[
        bool, typer.Option("--record", help="Show the measured timeline above the simulated one.")
    ] = False,
    profile: Annotated[
        str | None,
        typer.Option(help="Profile to simulate with (JSON); default: the plan is rehearsed here."),
    ] = None,
    any_profile: AnyProfile = False,
    factor: Annotated[
        float, typer.Option(help="Name ranks so many times slower than expected.", min=1)
    ] = 1.2,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a peer.", min=1)] = 60.0,
    pin: Annotated[bool, typer.Option(help="Bind each process to one core.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the measured timeline (JSON) here.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page: the measured timeline above the simulated one."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train MODULE:NAME for a few steps in N processes; --record compares with the simulator."""
    from octojax.report.data import load_timeline, save_timeline

    if target.endswith(".py"):
        raise ValueError(
            f"{target!r} is a script: start it with `octopipe launch -n {processes} {target}`; "
            f"`octopipe run` takes MODULE:NAME, such as my_package.models:tiny"
        )
    expect_writable(output, html)
    if profile is not None:
        costs = read_profile(profile)
        if plan is not None:
            expect_profile_of(plan, read_schedule(plan), costs, any_profile)
    planned = _ranks_of(plan)
    total = ranks or planned or max(2, processes)
    if planned not in (None, total):
        raise ValueError(f"{plan} is a plan for {planned} ranks, asked for {total} (--ranks)")
    if total % processes:
        raise ValueError(
            f"{total} ranks cannot be spread over {processes} processes evenly; use --ranks with "
            f"a multiple of {processes}, or -n with a divisor of {total}"
        )
    with tempfile.TemporaryDirectory() as folder:
        wanted = {
            "target": target,
            "ranks": total,
            "microbatches": microbatches,
            "schedule": schedule,
            "plan": plan,
            "steps": steps,
            "optimizer": optimizer,
            "record": record or output is not None or html is not None,
            "profile": profile,
            "factor": factor,
        }
        run_children(
            ["-m", "octojax.cli.run_process", json.dumps(wanted), folder],
            processes,
            devices_per_process=total // processes,
            timeout_s=timeout,
            pin=pin,
        )
        answer = json.loads((Path(folder) / "answer.json").read_text(encoding="utf-8"))
        figures = {
            name: load_timeline(path)
            for name in ("measured", "simulated")
            if (path := Path(folder) / f"{name}.json").exists()
        }
    if output is not None:
        save_timeline(figures["measured"], output)
    if html is not None:
        from octojax.report import Panel

        layers = tuple(answer["layers"])
        write_pictures([Panel(name, line, layers=layers) for name, line in figures.items()], html)
    typer.echo(json.dumps(answer, indent=1) if as_json else _text(answer, figures))


def _ranks_of(plan: str | None) -> int | None:
    if plan is None:
        return None
    subject = read_schedule(plan)
    if isinstance(subject, Schedule):
        raise ValueError(
            f"{plan} is a schedule table; --plan takes a plan (JSON) that says which layers form "
            f"each stage, as `octopipe tune -o` writes it. Give the table as --schedule"
        )
    return subject.num_ranks


def _text(answer: dict[str, Any], figures: dict[str, Any]) -> str:
    lines = [
        f"{answer['plan']}: {answer['ranks']} ranks in {answer['processes']} processes, "
        f"{answer['microbatches']} microbatches, loss {answer['loss']:.6g}",
        f"step {answer['step_s'] * 1e3:.4g} ms (median of {answer['steps']})",
    ]
    if not figures:
        return "\n".join(lines)
    from octojax.report import Panel, render_text

    panels = [Panel(name, timeline) for name, timeline in figures.items()]
    compared = answer["compared"]
    lines += [
        render_text(panels).rstrip(),
        f"simulated against measured: makespan {compared['makespan_error']:+.1%}, "
        f"bubble {', '.join(f'{e:+.1%}' for e in compared['bubble_error'])} of the makespan, "
        f"peak memory {', '.join(f'{e:+.1%}' for e in compared['peak_error'])} "
        f"(simulated from {compared['simulated_from']})",
        f"recorded step {compared['recorded_step_s'] * 1e3:.4g} ms, "
        f"{compared['recording_cost']:+.1%} against an unrecorded one",
        *compared["stragglers"],
    ]
    return "\n".join(lines)
