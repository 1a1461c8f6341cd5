"""How many bytes a stage holds per microbatch between its programs, read off the programs."""

from octojax.jaxprs.dataflow import var_bytes
from octojax.stages.program import Program, Role, Stage


def residual_bytes(stage: Stage) -> int:
    """Returns the bytes that F stores for the backward programs, its inputs not counted."""
    return written_bytes(stage.forward, Role.RESIDUAL)


def kept_bytes(stage: Stage) -> int:
    """Returns the bytes that stay between I and W: all that W reads and that is not there anyway.

    Counts residuals that W still needs, what I keeps for it, and the gradient that came in;
    not parameters, the batch and the stage's inputs.
    """
    if stage.weight_grad is None:
        return 0
    return sum(
        var_bytes(v)
        for r, v in zip(stage.weight_grad.reads, stage.weight_grad.jaxpr.jaxpr.invars, strict=True)
        if r.role in (Role.RESIDUAL, Role.KEPT, Role.OUTPUT_GRAD)
    )


def input_bytes(stage: Stage) -> int:
    """Returns the bytes of the stage's inputs that any of its programs reads."""
    reads = {
        r: var_bytes(v)
        for program in (stage.forward, stage.backward)
        for r, v in zip(program.reads, program.jaxpr.jaxpr.invars, strict=True)
    }
    return sum(size for r, size in reads.items() if r.role is Role.INPUT)


def written_bytes(program: Program, *roles: Role) -> int:
    """Returns the bytes of what the program writes in these roles."""
    outs = zip(program.writes, program.jaxpr.jaxpr.outvars, strict=True)
    return sum(var_bytes(v) for w, v in outs if w.role in roles)
