"""The bubble-aware tuner: `tune(profile)` returns a plan with a proven bound beside it.

Nothing here imports JAX; the compiled parts are imported when `tune` is first called.
"""

from typing import Any

from octojax.tune.baseline import Baseline
from octojax.tune.result import Progress, TuneResult

__all__ = [
    "METHODS",
    "PHASES",
    "Baseline",
    "Progress",
    "TuneResult",
    "lower_bound",
    "measure_baselines",
    "tune",
    "tune_devices",
    "tune_microbatches",
]

METHODS = ("best", "octopipe", "random", "exact")
PHASES = ("partition", "placement", "schedule")


def tune(*args: Any, **kwargs: Any) -> TuneResult:
    """Returns the best plan found for a profile; see `octojax.tune.tuner.tune`."""
    from octojax.tune import tuner

    return tuner.tune(*args, **kwargs)


def lower_bound(*args: Any, **kwargs: Any) -> Any:
    """Returns the proven bound of a problem; see `octojax.tune.bound.lower_bound`."""
    from octojax.tune import bound

    return bound.lower_bound(*args, **kwargs)


def measure_baselines(*args: Any, **kwargs: Any) -> tuple[Baseline, ...]:
    """Returns published ways on a profile, by name; see `octojax.tune.named_baselines`."""
    from octojax.tune import named_baselines

    return named_baselines.measure_baselines(*args, **kwargs)


def tune_microbatches(*args: Any, **kwargs: Any) -> TuneResult:
    """Returns the best of several microbatch counts; see `octojax.tune.batch`."""
    from octojax.tune import batch

    return batch.tune_microbatches(*args, **kwargs)


def tune_devices(*args: Any, **kwargs: Any) -> Any:
    """Returns the best sizes of a mesh with their plan; see `octojax.tune.devices`."""
    from octojax.tune import devices

    return devices.tune_devices(*args, **kwargs)
