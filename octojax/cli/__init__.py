"""The `octopipe` command. One file per command, each with one function named `command`."""

import importlib
import importlib.util
import sys

import click
import typer

from octojax.errors import OctoPipeError

COMMANDS = (
    "schedules",
    "schedule",
    "check",
    "simulate",
    "tune",
    "show",
    "profile",
    "launch",
    "run",
    "emulate",
)
"""In the order that `octopipe --help` lists them."""


def build() -> typer.Typer:
    """Returns the whole command line."""
    app = typer.Typer(
        name="octopipe",
        help="Pipeline parallelism for heterogeneous models in JAX.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for name in COMMANDS:
        if importlib.util.find_spec(f"octojax.cli.{name}") is None:  # under construction
            continue
        module = importlib.import_module(f"octojax.cli.{name}")
        settings = getattr(module, "SETTINGS", {})
        app.command(name, context_settings=settings or None)(module.command)
    return app


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; mistakes go to standard error with exit code 2."""
    try:
        build()(args=arguments, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (OctoPipeError, ValueError, OSError) as error:
        print(f"octopipe: {error}", file=sys.stderr)
        sys.exit(2)
    except (click.exceptions.Abort, KeyboardInterrupt):
        sys.exit(130)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    sys.exit(0)
