"""The one form in which the parts of a stage are handed on: a jaxpr whose ends have names.

    forward       PARAM STATE BATCH INPUT                     -> OUTPUT EMIT RESIDUAL NEW_STATE
    backward      PARAM BATCH INPUT RESIDUAL OUTPUT_GRAD SEED -> INPUT_GRAD PARAM_GRAD
      or
    input_grad    (the same)                         -> INPUT_GRAD PARAM_GRAD(small) KEPT
    weight_grad   PARAM BATCH INPUT RESIDUAL OUTPUT_GRAD SEED KEPT -> PARAM_GRAD(the rest)

A program lists only what it really reads and writes, so the executor learns from the lists
alone how long each value must live. Nothing is stored twice: a residual that is an input or a
weight is read from there, and W reads the gradient that came in from there too. A gradient that
is zero whatever comes in is not written; where nothing at all is to be done (frozen weights, no
gradient coming in) a backward program writes nothing.
"""

import enum
from dataclasses import dataclass

from jax.extend.core import ClosedJaxpr

from octojax.ir.action import Kind


class Role(enum.StrEnum):
    """What a value at the end of a program is. `index` of its `Ref` counts within the role."""

    PARAM = "param"  # index: parameter unit of the whole model (see `ParamUnit`)
    STATE = "state"  # index: leaf of mutable module state, or row of one, before this microbatch
    NEW_STATE = "new_state"  # ... and after it
    BATCH = "batch"  # index: flat leaf of the (micro)batch
    INPUT = "input"  # index k: the OUTPUT k of the stage before
    OUTPUT = "output"
    EMIT = "emit"  # index: flat leaf of what the loss returns; 0 is the loss
    RESIDUAL = "residual"  # F (or R) -> I, B, W of the same stage and microbatch
    OUTPUT_GRAD = "output_grad"  # index k: the INPUT_GRAD k of the stage after
    INPUT_GRAD = "input_grad"
    PARAM_GRAD = "param_grad"  # index: parameter unit; to be added to the accumulator
    KEPT = "kept"  # I -> W of the same stage and microbatch
    SEED = "seed"  # index 0: the cotangent of the loss, of its dtype


@dataclass(frozen=True, slots=True, order=True)
class Ref:
    role: Role
    index: int

    def __str__(self) -> str:
        return f"{self.role.value}{self.index}"


@dataclass(frozen=True, slots=True)
class ParamUnit:
    """One placeable parameter: a whole flat leaf, or one slice of a leaf stacked over layers.

    `index` is None for a whole leaf, else the position along axis 0 (an unrolled `scan`).
    `leaf` counts the leaves of params, then of state, then the constants of the loss: state
    that no step changes and constants are read as PARAM, too. Units that are not `trainable`
    (these, and leaves of integers) get no PARAM_GRAD.
    """

    leaf: int
    index: int | None = None
    name: str = ""
    trainable: bool = True


@dataclass(frozen=True)
class Program:
    """A jaxpr without constants whose invars are `reads` and whose outvars are `writes`."""

    kind: Kind
    jaxpr: ClosedJaxpr
    reads: tuple[Ref, ...]
    writes: tuple[Ref, ...]

    def __post_init__(self) -> None:
        ends = len(self.jaxpr.jaxpr.invars), len(self.jaxpr.jaxpr.outvars)
        if ends != (len(self.reads), len(self.writes)):
            raise ValueError(
                f"{self.kind} program has {ends[0]} inputs and {ends[1]} outputs, "
                f"named {len(self.reads)} and {len(self.writes)}"
            )


@dataclass(frozen=True)
class OwnTerm:
    """A summand of EMIT `emit` that depends on parameters alone: `jaxpr(units) -> scalar`.

    The rank that owns the units adds its value and gradient once per step; it is in no stage.
    """

    emit: int
    units: tuple[int, ...]
    jaxpr: ClosedJaxpr


@dataclass(frozen=True)
class ForwardStage:
    """A stage before differentiation. `forward` writes no residuals yet."""

    index: int
    forward: Program
    layers: tuple[int, ...]  # indices into the LayerGraph


@dataclass(frozen=True)
class Stage:
    """A differentiated stage.

    With recompute, `forward` writes no residuals (but copies of STATE leaves that the
    recomputation reads again, which the next microbatch overwrites), `backward` and
    `input_grad` rebuild them from PARAM, BATCH, INPUT, and `recompute` is the program of an
    explicit R action (reads like F, writes RESIDUAL), after which `backward_after_recompute` and
    `input_grad_after_recompute` take them. Without, these three are None.
    `weight_grad` is None where I already makes every gradient.
    """

    index: int
    layers: tuple[int, ...]
    forward: Program
    backward: Program
    input_grad: Program
    weight_grad: Program | None
    recompute: Program | None = None
    backward_after_recompute: Program | None = None
    input_grad_after_recompute: Program | None = None
    weight_grad_after_recompute: Program | None = None
