"""What the processes of `octopipe run` and `octopipe emulate` have in common: how they fail."""

import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import octojax
from octojax.cli.backend import backend_mistake
from octojax.errors import OctoPipeError
from octojax.processes import fail_fast

PACKAGE = Path(octojax.__file__).parent


def run_child(main: Callable[..., None], arguments: list[str]) -> None:
    """Runs `main(*arguments)`. A mistake that octojax names ends this process with its message
    alone; an error of the user's own code shows where it happened.
    """
    try:
        main(*arguments)
    except (OctoPipeError, ValueError, TypeError, OSError, RuntimeError) as error:
        mistake = backend_mistake(error) if isinstance(error, RuntimeError) else None
        if mistake is None and not is_named(error):
            raise
        print(f"octopipe: {mistake or error}", file=sys.stderr, flush=True)
        fail_fast(mistake or str(error))
        sys.exit(1)


def is_named(error: Exception) -> bool:
    """Whether octojax raised the error on purpose."""
    if isinstance(error, OctoPipeError):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    return PACKAGE in Path(last.filename).parents and (last.line or "").startswith("raise ")
