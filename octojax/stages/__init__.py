"""From forward stages to the programs that the schedule's actions run."""

from octojax.stages.differentiate import differentiate
from octojax.stages.program import ForwardStage, ParamUnit, Program, Ref, Role, Stage

__all__ = [
    "ForwardStage",
    "ParamUnit",
    "Program",
    "Ref",
    "Role",
    "Stage",
    "differentiate",
]
