"""The options of a pipeline, and the decorator that records them on a model's class."""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

from octojax.ir import Partition, Placement, Plan, Profile, Schedule

OPTIONS = "__octopipe_options__"
"""The class attribute in which `pipeline` records its options."""

Class = TypeVar("Class", bound=type)


@dataclass(frozen=True)
class Options:
    """How a loss is to be pipelined. None means: choose what fits.

    What is run and where:

    * `microbatches`: how many the batch is cut into; `axis`: the mesh's pipeline axis.
    * `schedule`: a name (`octopipe schedules` lists them), a table, the path of a CSV table, or
      "auto": the plan is tuned for `tune_seconds` on `profile`, by default measured here, with
      `seed`. `schedule_options` are those of a named schedule, `chunks` its stages per rank.
    * `plan`: partition, placement and schedule in one, such as `Plan.load` reads.
    * `partition`: layers per stage, or the name of a partitioner: "balanced" (the default),
      "uniform", "alpa", ... (`octojax.partitioners`), which sees `profile`, or operations where
      none is given.
    * `placement`: the rank of every stage, such as `(0, 1, 1, 0, 2, 3, 3, 2)`: a named schedule
      is laid out for it.
    * `recompute`: for every stage, or for all, whether its forward is run again instead of stored.
    * `param_specs`: how parameters lie on a rank's devices, beyond what the model's metadata and
      its arrays say: a tree of `PartitionSpec`s whose paths begin those of the parameters, or a
      function of path and shape; see docs/meshes.md.
    * `zero` spreads over the data axis: 1 the optimizer's moments, 3 the parameters between steps,
      too.

    What the loss means (docs/exactness.md):

    * `shared` names the leaves of the batch without rows, `rows` those with rows (then all others
      are shared), by path or its beginning (`shared=("class_weights",)`), or by number in a batch
      that is a tuple.
    * `aux`: how values of microbatches join, one rule or one per path:
      `aux={"load": "sum", "logits": "rows"}`; rules are sum, mean, max, min, all, any, first,
      last, rows.
    * `weight`: a function of a batch, the weight of a microbatch in what the analysis of rows
      cannot see. `strict` makes an error of its warning.
    * `reduction` is deprecated: sums and means are told apart.

    How it runs:

    * `transport`: "auto", "device_put", "ppermute" or "in_order"; see docs/processes.md, Transfers.
    * `passes`: how the plan is lowered: text such as "split,transfers,join,reorder,ownership", or
      a list of such text, `octojax.passes`, and callables of one's own that take a plan and
      return one. Without, they are those of `octojax.passes.pipeline.DEFAULT`; a table with SEND
      and RECV is run in the order in which it is written.
    * `compiler_options` go to XLA for every stage program, as those of `jax.jit` do.
    * `timeout_s` bounds every wait in a step, such as that of a rank for a value from another: by
      default as long as `octopipe launch --timeout` or `octopipe.initialize` say, else 600 seconds.
    * `compare_values`: several processes compare their values before the first step, and a sum of
      the batch every so many steps; 0: never.
    * `keep_memory`: on CPU with glibc the whole process keeps freed memory for later steps, which
      makes them up to a third faster, and never becomes smaller again; see
      `octojax.executor.kept_memory`. False leaves the allocator as it is.
    * `progress`: show it while plans are searched and programs compiled.
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
    passes: Any = None
    compiler_options: dict[str, Any] = field(default_factory=dict)
    param_specs: Any = None
    zero: int = 0
    rows: tuple[str | int, ...] | str | int | None = None
    shared: tuple[str | int, ...] | str | int | None = None
    aux: Mapping[str, Any] | str | None = None
    weight: Callable[[Any], Any] | None = None
    strict: bool = False
    reduction: str | None = None
    timeout_s: float | None = None
    keep_memory: bool = True
    compare_values: int = 1
    seed: int = 0
    progress: bool = True

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={value!r}, expected {expected}"
            for name, fits, expected in _FORMS
            if (value := getattr(self, name)) is not None and not fits(value)
        ]
        if wrong:
            raise TypeError(f"pipeline option(s) of the wrong form: {'; '.join(wrong)}")
        if self.microbatches is not None and self.microbatches < 1:
            raise ValueError(f"microbatches = {self.microbatches}, expected a number >= 1")
        if self.reduction not in (None, "mean", "sum"):
            raise ValueError(
                f"reduction = {self.reduction!r}, expected 'mean' (the loss averages over the "
                f"rows of its batch) or 'sum' (it adds them up)"
            )
        if self.reduction is not None:
            warnings.warn(
                "reduction= is no longer needed and goes with version 0.3: means, sums and masked "
                "means are told apart. For a loss that cannot be seen through give weight=, a "
                "function of the batch",
                DeprecationWarning,
                stacklevel=3,
            )
        if self.rows is not None and self.shared is not None:
            raise ValueError(
                f"rows={self.rows!r} and shared={self.shared!r} were both given: name the leaves "
                f"of the batch with rows, or those without; the others follow"
            )
        if self.zero not in (0, 1, 3):
            raise ValueError(
                f"zero = {self.zero}, expected 0 (everything whole on every data shard), 1 (the "
                f"optimizer's state spread over the data axis) or 3 (the parameters, too). Sums of "
                f"gradients are reduced once per step, so that 2 would be 1"
            )
        if self.compare_values < 0:
            raise ValueError(
                f"compare_values = {self.compare_values}, expected every how many steps processes "
                f"compare their batches, or 0 for never"
            )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"timeout_s = {self.timeout_s}, expected seconds > 0")

        if isinstance(self.partition, str) and self.partition.replace(" ", "").isdigit():
            object.__setattr__(self, "partition", Partition.parse(self.partition))

    def updated(self, **changes: Any) -> "Options":
        """Returns the options with those of `changes` that are not None in their place."""
        names = {f.name for f in fields(self)}
        unknown = sorted(set(changes) - names)
        if unknown:
            raise TypeError(
                f"unknown pipeline option(s) {', '.join(unknown)}; "
                f"known are {', '.join(sorted(names))}"
            )
        return replace(self, **{k: v for k, v in changes.items() if v is not None})


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _all_whole(value: Any) -> bool:
    return isinstance(value, Sequence) and all(map(_whole, value))


def _names(value: Any) -> bool:
    def name(x: Any) -> bool:
        return isinstance(x, str) or _whole(x)

    return name(value) or (isinstance(value, Collection) and all(map(name, value)))


_FORMS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("microbatches", _whole, "a whole number"),
    ("compare_values", _whole, "a whole number"),
    ("chunks", _whole, "a whole number"),
    ("zero", _whole, "a whole number"),
    (
        "schedule",
        lambda x: isinstance(x, (str, Path, Schedule)),
        "a name, a table (octopipe.Schedule) or the path of a CSV table",
    ),
    ("plan", lambda x: isinstance(x, Plan), "an octopipe.Plan (Plan.load reads a file)"),
    (
        "partition",
        lambda x: isinstance(x, (str, Partition)) or _all_whole(x),
        "'balanced', 'uniform' or layers per stage such as (2, 3)",
    ),
    (
        "recompute",
        lambda x: isinstance(x, bool) or (isinstance(x, Sequence) and not isinstance(x, str)),
        "True, False or one of them per stage",
    ),
    ("keep_memory", lambda x: isinstance(x, bool), "True or False"),
    ("rows", _names, "paths of leaves of the batch, such as ('x', 'labels') or (0, 1)"),
    ("shared", _names, "paths of leaves of the batch, such as ('class_weights',) or (2,)"),
    ("aux", lambda x: isinstance(x, (str, Mapping)), "a rule or a dictionary of them by path"),
    ("weight", callable, "a function of the batch"),
    ("timeout_s", lambda x: isinstance(x, Real), "a number of seconds"),
    ("schedule_options", lambda x: isinstance(x, Mapping), "a dictionary"),
)
"""What each option must look like, and how to say so."""


def pipeline(*misplaced: Any, **options: Any) -> Callable[[Class], Class]:
    """Returns a class decorator that records pipeline options on a Flax module.

        @octopipe.pipeline(microbatches=8, schedule="zb-h1")
        class Model(nnx.Module): ...

    The class stays what it was and runs unpipelined as before; `octopipe.compile` takes the
    options as its defaults. They are those of `Options`; a mistaken name is a `TypeError` here.
    """
    if misplaced:  # also of `@octopipe.pipeline` without parentheses
        raise TypeError(
            f"octopipe.pipeline takes options by name only, found {misplaced[0]!r}; write "
            f"@octopipe.pipeline(microbatches=8), or @octopipe.pipeline() without any"
        )
    recorded = Options().updated(**options)
    choices = {k: v for k, v in options.items() if v is not None}
    assert recorded is not None

    def decorate(cls: Class) -> Class:
        setattr(cls, OPTIONS, choices)
        return cls

    return decorate


def options_of(model: Any, **overrides: Any) -> Options:
    """Returns the options recorded on the model's class, overridden by `overrides`."""
    recorded = getattr(type(model), OPTIONS, {})
    return Options().updated(**recorded).updated(**overrides)
