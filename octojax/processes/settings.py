"""What the processes of a program know from the start."""

import os

import jax

from octojax.launch_environment import TIMEOUT

DEFAULT_TIMEOUT_S = 60.0
DEFAULT_STEP_TIMEOUT_S = 600.0


def timeout_s() -> float:
    """How long any process waits for another before it gives up, in seconds.

    Set by `octopipe launch --timeout` or the argument of `initialize`; 60 by default.
    """
    return float(os.environ.get(TIMEOUT, DEFAULT_TIMEOUT_S))


def step_timeout_s() -> float:
    """How long a wait in a step lasts where nobody said otherwise, in seconds: what the processes
    were started with (`octopipe launch --timeout`, `initialize`), else 600."""
    return float(os.environ.get(TIMEOUT, DEFAULT_STEP_TIMEOUT_S))


def several() -> bool:
    """Whether this program runs as more than one process."""
    return jax.process_count() > 1
