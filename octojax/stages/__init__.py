"""From forward stages to the programs that the schedule's actions run."""

from octojax.stages.differentiate import differentiate
from octojax.stages.fingerprint import fingerprint
from octojax.stages.program import ForwardStage, ParamUnit, Program, Ref, Role, Stage
from octojax.stages.sizes import input_bytes, kept_bytes, residual_bytes

__all__ = [
    "ForwardStage",
    "ParamUnit",
    "Program",
    "Ref",
    "Role",
    "Stage",
    "differentiate",
    "fingerprint",
    "input_bytes",
    "kept_bytes",
    "residual_bytes",
]
