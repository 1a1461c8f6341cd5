"""Stages that compute the same are differentiated once.

stage 3   forward reads param12 param13 input0          layers of one form, as most
stage 4   forward reads param14 param15 input0          models are made of
  the programs of stage 4 are those of stage 3, with param14 for param12 and so on
"""

import dataclasses
from collections.abc import Sequence

from octojax.stages.fingerprint import fingerprint
from octojax.stages.program import ForwardStage, Program, Ref, Role, Stage

_FAMILIES = (
    (Role.PARAM, Role.PARAM_GRAD),
    (Role.INPUT, Role.INPUT_GRAD),
    (Role.OUTPUT, Role.OUTPUT_GRAD),
)
"""Roles that count alike: unit 12 is `param12`, and its gradient is `param_grad12`."""


def likeness(program: Program, *some: Sequence[Ref]) -> tuple[object, ...]:
    """Returns a key: equal for forward programs of which one is the other under new names.

    `some` are groups of refs among the ends of the program (or their gradients), which must be
    at the same ends.
    """
    ends = {ref: at for at, ref in enumerate((*program.reads, *program.writes))}
    for primal, gradient in _FAMILIES:
        ends |= {Ref(gradient, r.index): at for r, at in ends.items() if r.role is primal}
    places = (tuple(ends.get(ref, -1) for ref in refs) for refs in some)
    return (fingerprint(program), *places)


def renamed(stage: Stage, template: Program, forward: ForwardStage) -> Stage:
    """Returns the differentiated `stage` of the forward program `template` as that of `forward`."""
    names = dict(
        zip(
            (*template.reads, *template.writes),
            (*forward.forward.reads, *forward.forward.writes),
            strict=True,
        )
    )
    for primal, gradient in _FAMILIES:
        pairs = [(old, new) for old, new in names.items() if old.role is primal]
        names |= {Ref(gradient, old.index): Ref(gradient, new.index) for old, new in pairs}

    def program(old: Program) -> Program:
        reads, writes = (
            tuple(names.get(ref, ref) for ref in refs) for refs in (old.reads, old.writes)
        )
        return dataclasses.replace(old, reads=reads, writes=writes)

    programs = {
        field.name: program(value)
        for field in dataclasses.fields(stage)
        if isinstance(value := getattr(stage, field.name), Program)
    }
    return dataclasses.replace(stage, index=forward.index, layers=forward.layers, **programs)
