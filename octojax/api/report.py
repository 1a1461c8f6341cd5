"""What a compiled step consists of, in numbers."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from octojax import compat
from octojax.layers.cut import StagedLoss
from octojax.stages.program import Program, Role, Stage


@dataclass(frozen=True)
class StageReport:
    """Bytes of one stage, for the largest microbatch on one data shard."""

    stage: int
    ranks: tuple[int, ...]
    layers: tuple[int, ...]
    param_bytes: int
    residual_bytes: int  # kept from F until I or B
    kept_bytes: int  # kept from I until W
    output_bytes: int  # sent to the next stage
    input_grad_bytes: int  # sent to the stage before


@dataclass(frozen=True)
class StepReport:
    """`compilations` counts XLA programs; `programs` the distinct stage programs behind them.

    `param_bytes` are what each rank holds of parameters, copies included, and `model_bytes`
    those of the model.
    """

    compilations: int
    programs: int
    instructions: tuple[int, ...]  # per rank
    transfers: int
    stages: tuple[StageReport, ...]
    param_bytes: tuple[int, ...]  # per rank
    model_bytes: int

    def __str__(self) -> str:
        rows = [
            f"{self.compilations} XLA compilations of {self.programs} stage programs, "
            f"{self.transfers} transfers a step",
            "stage  ranks  layers      params   residuals        kept      output  input grad",
        ]
        rows += [
            f"{s.stage:5d}  {'+'.join(map(str, s.ranks)):>5s}  {len(s.layers):6d}"
            + "".join(
                f"{value / 1024:10.1f}K "
                for value in (
                    s.param_bytes,
                    s.residual_bytes,
                    s.kept_bytes,
                    s.output_bytes,
                    s.input_grad_bytes,
                )
            )
            for s in self.stages
        ]
        held = ", ".join(f"{size / 1024:.1f}K" for size in self.param_bytes)
        rows.append(f"parameters by rank: {held}; of the model: {self.model_bytes / 1024:.1f}K")
        return "\n".join(rows)


def report(loss: Any, further_compilations: int = 0) -> StepReport:
    """Returns the figures of a `PipelinedLoss`, and of an update compiled beside it."""
    step = loss.lowered.step
    sizes = unit_bytes(loss.staged)
    links = getattr(loss.trainer.engine.transport, "num_programs", 0)
    return StepReport(
        compilations=loss.compilations + links + further_compilations,
        programs=len(loss.lowered.jaxprs),
        instructions=tuple(len(r.body) for r in step.ranks),
        transfers=len(step.transfers),
        stages=tuple(_stage(s, loss) for s in loss.stages[0]),
        param_bytes=tuple(
            sum(size for size, ranks in zip(sizes, step.holders, strict=True) if r.rank in ranks)
            for r in step.ranks
        ),
        model_bytes=sum(sizes),
    )


def unit_bytes(staged: StagedLoss) -> tuple[int, ...]:
    """Returns the bytes of every parameter unit: 0 for module state and constants."""
    num_params = len(staged.traced.params)
    return tuple(
        compat.num_bytes(aval) if unit.leaf < num_params else 0
        for unit, aval in zip(staged.units, staged.unit_avals, strict=True)
    )


def _stage(stage: Stage, loss: Any) -> StageReport:
    programs = [p for p in (stage.forward, stage.input_grad, stage.weight_grad) if p is not None]
    units = {r.index for p in programs for r in p.reads if r.role is Role.PARAM}
    return StageReport(
        stage=stage.index,
        ranks=loss.plan.placement.stages[stage.index],
        layers=stage.layers,
        param_bytes=int(sum(np.int64(compat.num_bytes(loss.staged.unit_avals[u])) for u in units)),
        residual_bytes=_written(stage.forward, Role.RESIDUAL),
        kept_bytes=_written(stage.input_grad, Role.KEPT),
        output_bytes=_written(stage.forward, Role.OUTPUT),
        input_grad_bytes=_written(stage.input_grad, Role.INPUT_GRAD),
    )


def _written(program: Program, role: Role) -> int:
    return sum(
        compat.num_bytes(aval)
        for ref, aval in zip(program.writes, program.jaxpr.out_avals, strict=True)
        if ref.role is role
    )
