"""The options of a pipeline, and the decorator that records them on a model's class."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from octojax.ir import Partition, Placement, Plan, Profile, Schedule

OPTIONS = "__octopipe_options__"
"""The class attribute in which `pipeline` records its options."""

Class = TypeVar("Class", bound=type)


@dataclass(frozen=True)
class Options:
    """How a loss is to be pipelined. None means: choose what fits.

    `schedule` is a name (`octopipe schedules` lists them), a table, the path of a CSV table, or
    "auto": the plan is tuned for `tune_seconds` on `profile`, by default measured here.
    `schedule_options` are those of a named schedule. `partition` is "balanced" (by operations),
    "uniform" (by count), or layers per stage. `transport` is "auto", "device_put" or "ppermute".
    `recompute` says for every stage, or for all, whether its forward is run again instead of
    stored. `timeout_s` bounds how long a rank waits for a value from another.
    `compiler_options` go to XLA for every stage program, as those of `jax.jit` do.
    """

    microbatches: int | None = None
    schedule: str | Path | Schedule = "1f1b"
    axis: str = "pipe"
    plan: Plan | None = None
    partition: str | Partition | tuple[int, ...] | None = None
    placement: Placement | str | tuple[int, ...] | None = None
    chunks: int | None = None
    recompute: bool | tuple[bool, ...] | None = None
    transport: str = "auto"
    schedule_options: dict[str, Any] = field(default_factory=dict)
    profile: Profile | None = None
    tune_seconds: float = 10.0
    compiler_options: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0
    seed: int = 0
    progress: bool = True

    def updated(self, **given: Any) -> "Options":
        """Returns the options with those that are given (not None) in their place."""
        known = {f.name for f in fields(self)}
        unknown = sorted(set(given) - known)
        if unknown:
            raise TypeError(
                f"unknown pipeline option(s) {', '.join(unknown)}; "
                f"known are {', '.join(sorted(known))}"
            )
        return replace(self, **{k: v for k, v in given.items() if v is not None})


def pipeline(**options: Any) -> Callable[[Class], Class]:
    """Returns a class decorator that records pipeline options on a Flax module.

        @octopipe.pipeline(microbatches=8, schedule="zb-h1")
        class Model(nnx.Module): ...

    The class stays what it was and runs unpipelined as before; `octopipe.compile` takes the
    options as its defaults. They are those of `Options`; a mistaken name is a `TypeError` here.
    """
    recorded = Options().updated(**options)
    given = {k: v for k, v in options.items() if v is not None}
    assert recorded is not None

    def decorate(cls: Class) -> Class:
        setattr(cls, OPTIONS, given)
        return cls

    return decorate


def options_of(model: Any, **given: Any) -> Options:
    """Returns the options recorded on the model's class, overridden by those given."""
    recorded = getattr(type(model), OPTIONS, {})
    return Options().updated(**recorded).updated(**given)
