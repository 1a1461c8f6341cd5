"""The `octopipe` command. One file per command, each with one function named `command`."""

import importlib
import sys
from typing import Annotated

import typer

import octojax
from octojax.cli.backend import backend_mistake
from octojax.errors import OctoPipeError

COMMANDS = (
    "schedules",
    "schedule",
    "check",
    "lower",
    "simulate",
    "tune",
    "show",
    "explain",
    "compare",
    "profile",
    "machines",
    "launch",
    "run",
    "emulate",
)
"""In the order that `octopipe --help` lists them."""

_HELP = {"help_option_names": ["-h", "--help"]}
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]  # type: ignore[assignment]
# ClickException: click's own, or that of the copy of click inside newer versions of typer.


def build() -> typer.Typer:
    """Returns the whole command line."""
    app = typer.Typer(
        name="octopipe",
        help="Pipeline parallelism for heterogeneous models in JAX.",
        no_args_is_help=True,
        invoke_without_command=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        context_settings=_HELP,
    )
    app.callback()(_options)
    for name in COMMANDS:
        module = importlib.import_module(f"octojax.cli.{name}")
        settings = {**_HELP, **getattr(module, "SETTINGS", {})}
        app.command(name, context_settings=settings)(module.command)
    return app


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)
    ] = False,
) -> None:
    """Pipeline parallelism for heterogeneous models in JAX."""
    if version:
        typer.echo(f"octopipe {octojax.__version__}")
        raise typer.Exit


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; mistakes go to standard error with exit code 2."""
    try:
        code = build()(args=arguments, prog_name="octopipe", standalone_mode=False)
    except _UsageError as error:
        error.show()  # type: ignore[attr-defined]
        sys.exit(2)
    except (OctoPipeError, ValueError, OSError) as error:
        print(f"octopipe: {error}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:
        if (message := backend_mistake(error)) is None:
            raise
        print(f"octopipe: {message}", file=sys.stderr)
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    sys.exit(code if isinstance(code, int) else 0)
