"""Names for every value that lives between two programs of one step."""

import enum
from dataclasses import dataclass

from octojax.ir import Action, Kind
from octojax.stages.program import Program, Ref, Role, Stage


class Place(enum.StrEnum):
    """What a value is; the other fields of a `Value` count within it."""

    PARAM = "param"  # index: parameter unit
    TOTAL = "total"  # index: parameter unit; the running sum of its gradient on this rank
    OTHER = "other"  # the same sum, as the rank `stage` made and sent it
    STATE = "state"  # index: leaf of module state, as microbatch `microbatch` finds it
    BATCH = "batch"  # index: leaf of the batch
    SEED = "seed"  # the cotangent of the loss of a microbatch: one
    FORWARD = "forward"  # index k: output k of a stage
    BACKWARD = "backward"  # index k: gradient of output k of a stage
    RESIDUAL = "residual"
    KEPT = "kept"
    EMIT = "emit"  # index: leaf of what the loss returns


@dataclass(frozen=True, slots=True, order=True)
class Value:
    """The name of one value. `stage` or `microbatch` is -1 where the place has none."""

    place: Place
    stage: int
    microbatch: int
    index: int

    def __str__(self) -> str:
        of = f" of stage {self.stage}" if self.stage >= 0 else ""
        return f"{self.place.value} {self.index}{of}, microbatch {self.microbatch}"


CROSSING = frozenset({Place.FORWARD, Place.BACKWARD})
"""What may travel between ranks during a step."""


def value_of(ref: Ref, stage: int, microbatch: int) -> Value:
    """Returns the name of what program end `ref` of (stage, microbatch) reads or writes."""
    match ref.role:
        case Role.PARAM:
            return Value(Place.PARAM, -1, -1, ref.index)
        case Role.PARAM_GRAD:
            return Value(Place.TOTAL, -1, -1, ref.index)
        case Role.STATE:
            return Value(Place.STATE, -1, microbatch, ref.index)
        case Role.NEW_STATE:
            return Value(Place.STATE, -1, microbatch + 1, ref.index)
        case Role.BATCH:
            return Value(Place.BATCH, -1, microbatch, ref.index)
        case Role.SEED:
            return Value(Place.SEED, -1, microbatch, ref.index)
        case Role.EMIT:
            return Value(Place.EMIT, -1, microbatch, ref.index)
        case Role.INPUT:
            return Value(Place.FORWARD, stage - 1, microbatch, ref.index)
        case Role.OUTPUT:
            return Value(Place.FORWARD, stage, microbatch, ref.index)
        case Role.OUTPUT_GRAD:
            return Value(Place.BACKWARD, stage, microbatch, ref.index)
        case Role.INPUT_GRAD:
            return Value(Place.BACKWARD, stage - 1, microbatch, ref.index)
        case Role.RESIDUAL:
            return Value(Place.RESIDUAL, stage, microbatch, ref.index)
        case Role.KEPT:
            return Value(Place.KEPT, stage, microbatch, ref.index)


def program_of(stage: Stage, action: Action, recomputed: bool) -> Program | None:
    """Returns what `action` runs; None where it has nothing to do.

    `recomputed`: an explicit R action of this stage and microbatch comes before.
    """
    match action.kind:
        case Kind.FORWARD:
            return stage.forward
        case Kind.RECOMPUTE:
            return stage.recompute
        case Kind.BACKWARD if recomputed and stage.backward_after_recompute is not None:
            return stage.backward_after_recompute
        case Kind.BACKWARD:
            return stage.backward
        case Kind.INPUT_GRAD if recomputed and stage.input_grad_after_recompute is not None:
            return stage.input_grad_after_recompute
        case Kind.INPUT_GRAD:
            return stage.input_grad
        case Kind.WEIGHT_GRAD if recomputed and stage.weight_grad_after_recompute is not None:
            return stage.weight_grad_after_recompute
        case Kind.WEIGHT_GRAD:
            return stage.weight_grad
        case _:
            return None
