"""`octopipe tune`: partition, placement and schedule for a profile, with a proven bound."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octojax.cli.panels import write_pictures
from octojax.cli.read import expect_writable, read_profile, read_schedule
from octojax.ir import Plan, Profile

if TYPE_CHECKING:
    from octojax.report import Panel
    from octojax.tune import TuneResult
    from octojax.tune.initial import Start
    from octojax.tune.sizes_table import DevicesResult

GIB = 2**30


def command(
    profile: Annotated[str, typer.Argument(help="A profile (JSON): layer costs and machine.")],
    ranks: Annotated[
        int | None, typer.Option(help="Pipeline ranks; default: the profile's.")
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(help="Microbatches per step; default: the profile's.")
    ] = None,
    offer: Annotated[
        str | None,
        typer.Option(
            "--offer-microbatches",
            help="Numbers such as 4,8,16 to choose from, for one global batch; default: no choice.",
        ),
    ] = None,
    capacity_gib: Annotated[
        float | None,
        typer.Option(help="Memory of every rank (or device), in GiB; default: the profile's."),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            help="Choose pipeline x tensor x data and the microbatches for so many devices; "
            "default: ranks of one device each.",
            min=1,
        ),
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(help="Samples of a step, with --devices; default: none.", min=1)
    ] = None,
    max_tensor: Annotated[
        int | None,
        typer.Option(help="Widest tensor axis, with --devices; default: a node, or 8.", min=1),
    ] = None,
    host_cost: Annotated[
        float | None,
        typer.Option(
            help="Seconds that a transfer costs each of its ranks; default: the profile's."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Stop after so many seconds; default: 20 if nothing else stops it."),
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(help="Stop after so many iterations; default: any number.")
    ] = None,
    target_gap: Annotated[
        float | None,
        typer.Option(help="Stop when within this share of the lower bound; default: 0."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed and iterations: same plan.", min=0)] = 0,
    method: Annotated[
        str, typer.Option(help="best, octopipe (Algorithm 1), random, or exact (small cases).")
    ] = "best",
    phases: Annotated[
        str, typer.Option(help="Which of partition,placement,schedule may change.")
    ] = "partition,placement,schedule",
    start: Annotated[
        str | None,
        typer.Option(
            help="Begin from a plan's file, partition:2,4 (layers per stage) or placement:0,1,1,0 "
            "(rank per stage), or both of these; phases that may not change stay as there. "
            "Default: from many points."
        ),
    ] = None,
    recompute: Annotated[
        str,
        typer.Option(
            help="Stages that rebuild their residuals, in plans and baselines: auto (the search "
            "decides), all, none, or stages such as 0-3,7."
        ),
    ] = "auto",
    baselines: Annotated[
        str | None,
        typer.Option(
            help="Published ways to measure: all, or names such as 1f1b,interleaved,tessel,mist "
            "(docs/tuner.md). Default: the best of each kind."
        ),
    ] = None,
    overlap: Annotated[
        bool, typer.Option("--overlap/--no-overlap", help="Order so as to hide transfers.")
    ] = True,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the plan (JSON) here.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page: the plan above 1F1B on the uniform partition."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Find partition, placement and schedule together; print the plan's account."""
    from octojax.tune import tune, tune_microbatches
    from octojax.tune.ticker import Ticker

    if offer is not None and microbatches is not None:
        raise ValueError("give either --microbatches or --offer-microbatches, not both")
    expect_writable(output, html)
    costs = read_profile(profile)
    if host_cost is not None:
        costs = costs.on(replace(costs.machine, host_cost_s=host_cost))
    if devices is None and (global_batch or max_tensor):
        raise ValueError("--global-batch and --max-tensor choose sizes for --devices; give that")
    if devices is not None:
        decided = {
            "--ranks": ranks,
            "--microbatches": microbatches,
            "--offer-microbatches": offer,
            "--target-gap": target_gap,
            "--html": html,
            "--start": start,
            "--baselines": baselines,
            "--recompute": None if recompute == "auto" else recompute,
        }
        if wrong := [name for name, value in decided.items() if value is not None]:
            raise ValueError(f"--devices chooses the sizes: leave {', '.join(wrong)} out")
        if global_batch is None:
            raise ValueError("--devices needs --global-batch, the samples of one step")
        chosen = choose_sizes(
            costs, devices, global_batch, max_tensor, capacity_gib, seconds, iterations, seed
        )
        if output is not None:
            chosen.result.plan.save(output)
        typer.echo(json.dumps(chosen.to_json(), indent=1) if as_json else str(chosen))
        if output is not None and not as_json:
            typer.echo(f"plan written to {output}")
        return
    with Ticker(seconds, iterations) as ticker:
        choose = tune if offer is None else tune_microbatches
        sizes = microbatches if offer is None else read_numbers(offer)
        result = choose(
            costs,
            **{"microbatches" if offer is None else "offered": sizes},
            ranks=ranks,
            method=method,
            seconds=seconds,
            iterations=iterations,
            seed=seed,
            capacity_bytes=None if capacity_gib is None else capacity_gib * GIB,
            phases=tuple(x.strip() for x in phases.split(",") if x.strip()),
            overlap=overlap,
            target_gap=target_gap,
            start=None if start is None else read_start(start),
            recompute=recompute,
            baselines=baselines,
            progress=ticker.show,
        )
    if output is not None:
        result.plan.save(output)
    if html is not None:
        write_pictures(_panels(result, costs), html)
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=1))
        return
    typer.echo(str(result))
    if output is not None:
        typer.echo(f"plan written to {output}")


def _panels(result: "TuneResult", profile: Profile) -> "list[Panel]":
    """The plan with its bound, and what it is most often compared with."""
    from octojax.diagnosis import compare
    from octojax.schedules import generate
    from octojax.tune.batch import with_microbatches
    from octojax.tune.tuner import without_overlap

    plan, offered = result.plan, [profile]
    if profile.microbatches:
        offered.append(with_microbatches(profile, plan.num_microbatches))
    offered += [without_overlap(p) for p in offered]
    print_of = plan.prediction.fingerprint if plan.prediction else ""
    costs = next((p for p in offered if p.fingerprint == print_of), profile)
    table = generate("1f1b", plan.num_ranks, plan.num_microbatches)
    return compare({plan.name or "tuned": plan, "1f1b": table}, costs).panels()


def choose_sizes(
    profile: Profile,
    devices: int,
    global_batch: int,
    max_tensor: int | None,
    capacity_gib: float | None,
    seconds: float | None,
    iterations: int | None,
    seed: int,
) -> "DevicesResult":
    """Returns the best sizes for `devices`, saying on standard error what is being searched."""
    from octojax.tune.devices import tune_devices

    return tune_devices(
        profile,
        devices,
        global_batch,
        max_tensor=max_tensor,
        capacity_bytes=None if capacity_gib is None else capacity_gib * GIB,
        seconds=seconds,
        iterations=iterations,
        seed=seed,
        progress=lambda text: print(f"tune: {text}", file=sys.stderr, flush=True),
    )


def read_start(text: str) -> "Start":
    """Returns the start that `--start` means: a plan's file, or text."""
    from octojax.tune.initial import Start

    if ":" in text and not Path(text).exists():
        return Start.of(text)
    if not Path(text).exists() and not text.endswith(".json"):
        return Start.of(text)
    plan = read_schedule(text)
    if not isinstance(plan, Plan):
        raise ValueError(
            f"--start {text}: a table says no partition; give a plan (JSON), as octopipe tune -o "
            f"or octopipe schedules make it, or partition:2,4"
        )
    return Start(plan=plan)


def read_numbers(text: str) -> tuple[int, ...]:
    """Returns the whole numbers in `text`, separated by commas."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ValueError(
            f"--offer-microbatches {text!r}: expected numbers such as 4,8,16"
        ) from None
