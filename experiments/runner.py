"""What the experiments share: options, training through a pipeline, pictures, files.

An experiment is a name and a function that builds its model; see `nemotron_h.py`.
"""

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import meshes
import typer

if importlib.util.find_spec("octojax") is None:  # run from a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


@dataclass(frozen=True)
class Sizes:
    """What a model is built from."""

    vocabulary: int
    width: int
    layers: int
    seed: int


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run; the command line fills it in."""

    name: str
    data: str | None
    out: Path
    ranks: int
    microbatches: int
    schedule: str
    steps: int
    batch: int
    length: int
    width: int
    layers: int
    lr: float
    seed: int
    tune_seconds: float
    check: bool
    race: bool | None
    evaluate: bool | None
    mesh: dict[str, int] = field(default_factory=dict)
    """Sizes of the axes; without, `ranks` alone."""

    @property
    def axes(self) -> dict[str, int]:
        return self.mesh or {"pipe": self.ranks}


Build = Callable[[Sizes], tuple[Any, Callable[[Any, Any], Any]]]
"""Sizes -> (the model, its loss). Called after JAX's devices are set up."""


def main(
    name: str,
    build: Build,
    *,
    layers: int,
    width: int = 128,
    steps: int = 56,
    lr: float = 5e-3,
    published: Callable[[str, str | None], Any] | None = None,
) -> None:
    """Runs the experiment with the command line's options; mistakes end with exit code 2.

    `published` makes a `dry_runs.Published` of a preset's name, for `--dry-run`.
    """

    def command(
        data: Annotated[
            str | None, typer.Option(help="File or folder to train on [this Python's sources].")
        ] = None,
        out: Annotated[
            Path | None, typer.Option(help="Folder to write to [runs/NAME-TIME].")
        ] = None,
        ranks: Annotated[int, typer.Option(min=1, help="Pipeline ranks (emulated devices).")] = 4,
        mesh: Annotated[
            str | None,
            typer.Option(help="Devices as pipe,data,tensor, such as 2,2,2 [--ranks alone]."),
        ] = None,
        microbatches: Annotated[int, typer.Option(min=1)] = 8,
        schedule: Annotated[
            str, typer.Option(help="auto, a name (octopipe schedules), or a CSV table.")
        ] = "auto",
        steps: Annotated[int, typer.Option(min=1)] = steps,
        batch: Annotated[int, typer.Option(min=1, help="Samples per step.")] = 16,
        length: Annotated[int, typer.Option(min=2, help="Bytes per sample.")] = 64,
        width: Annotated[int, typer.Option(min=32, help="Of the residual stream.")] = width,
        layers: Annotated[int, typer.Option(min=1)] = layers,
        lr: Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")] = lr,
        seed: int = 0,
        tune_seconds: Annotated[float, typer.Option(min=0.1, help="Limit of the tuner.")] = 3.0,
        check: Annotated[
            bool, typer.Option(help="Compare step one with the unpipelined model.")
        ] = True,
        race: Annotated[
            bool | None,
            typer.Option(help="Race one core against two at the end [if time is left]."),
        ] = None,
        evaluate: Annotated[
            bool | None, typer.Option(help="Loss on held-out text at the end [if time is left].")
        ] = None,
        dry_run: Annotated[
            bool, typer.Option("--dry-run", help="Plan a published model; make and train nothing.")
        ] = False,
        preset: Annotated[str | None, typer.Option(help="Published model, with --dry-run.")] = None,
        devices: Annotated[int, typer.Option(min=1, help="To plan for, with --dry-run.")] = 64,
        global_batch: Annotated[
            int, typer.Option(min=1, help="Sequences per step, with --dry-run.")
        ] = 64,
        sequence: Annotated[
            int, typer.Option(min=1, help="Tokens per sequence, with --dry-run.")
        ] = 4096,
        max_tensor: Annotated[
            int | None, typer.Option(min=1, help="Widest tensor axis, with --dry-run [a node].")
        ] = None,
        param_dtype: Annotated[
            str | None, typer.Option(help="Of the parameters, with --dry-run [the preset's].")
        ] = None,
        machine: Annotated[
            str, typer.Option(help="By name (`octopipe machines`), TOML or JSON, with --dry-run.")
        ] = "h100",
    ) -> None:
        if dry_run != (preset is not None):
            raise ValueError("--dry-run needs --preset, and --preset is for --dry-run alone")
        if preset is not None:
            if published is None:
                raise ValueError(f"{name} has no published presets to plan")
            emulate_devices(devices)
            import dry_runs

            plan_seconds = max(tune_seconds, 20.0)
            sizes = (devices, global_batch, sequence, max_tensor, machine, plan_seconds, out)
            dry_runs.run(dry_runs.DrySettings(preset, *sizes), published(preset, param_dtype))
            return
        axes = {} if mesh is None else meshes.parsed(mesh)
        out = out or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        if width % 64:
            raise ValueError(f"--width {width}: heads are 32 wide and paired; use 64, 128, 192...")
        run(
            Settings(
                name=name,
                data=data,
                out=out,
                ranks=axes.get("pipe", ranks),
                microbatches=microbatches,
                schedule=schedule,
                steps=steps,
                batch=batch,
                length=length,
                width=width,
                layers=layers,
                lr=lr,
                seed=seed,
                tune_seconds=tune_seconds,
                check=check,
                race=race,
                evaluate=evaluate,
                mesh=axes,
            ),
            build,
        )

    command.__doc__ = f"Train {name} at byte level through a pipeline."
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    try:
        app()
    except ValueError as error:  # all of octojax's own errors about input are ValueErrors
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)


def run(settings: Settings, build: Build) -> None:
    """Trains as the settings say, and writes what happened to `settings.out`."""
    emulate_devices(meshes.devices(settings.axes))
    from training import Experiment  # imports JAX, so it must come after

    Experiment(settings, build).run()
    print(f"results in {settings.out}")


def emulate_devices(count: int) -> None:
    """Makes JAX see `count` CPU devices of one thread each, and compile a third faster for runs
    this short.

    With one thread a layer takes here what it takes on a core of its own. Flags that the user gave
    in XLA_FLAGS win, but for the number of devices.
    """
    devices = "--xla_force_host_platform_device_count"
    given = [w for w in os.environ.get("XLA_FLAGS", "").split() if not w.startswith(devices)]
    os.environ["XLA_FLAGS"] = " ".join(
        [
            "--xla_backend_optimization_level=1",
            "--xla_cpu_multi_thread_eigen=false",
            *given,
            f"{devices}={count}",
        ]
    )


def settings_json(settings: Settings) -> dict[str, Any]:
    """Returns the settings as JSON data."""
    return {**asdict(settings), "out": str(settings.out)}


def settings_from_json(data: dict[str, Any]) -> Settings:
    """Returns the settings that `settings_json` made the data of."""
    return Settings(**{**data, "out": Path(data["out"])})
