"""What a compiled step consists of, in numbers."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from octojax import compat
from octojax.api.param_specs import bytes_per_device
from octojax.layers.cut import StagedLoss
from octojax.programs.collectives import Collective, collectives_of
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
class ProgramReport:
    """The collectives inside a rank that XLA has put into one program: the actions that it runs
    (of the first microbatches), or what ends the step."""

    rank: int
    name: str
    collectives: tuple[Collective, ...]

    def count(self, kind: str, *axes: str) -> int:
        """Returns the number of operations of a kind over exactly these axes."""
        return sum(c.count for c in self.collectives if (c.kind, c.axes) == (kind, axes))

    def __str__(self) -> str:
        return f"{self.name} on rank {self.rank}: {', '.join(map(str, self.collectives)) or 'none'}"


@dataclass(frozen=True)
class StepReport:
    """`compilations` counts XLA programs; `programs` the distinct stage programs behind them.

    `param_bytes` are what each rank holds of parameters, copies included, `device_bytes` what each
    of its devices does, and `model_bytes` those of the model.
    """

    compilations: int
    programs: int
    instructions: tuple[int, ...]  # per rank
    transfers: int
    stages: tuple[StageReport, ...]
    param_bytes: tuple[int, ...]  # per rank
    model_bytes: int
    device_bytes: tuple[int, ...] = ()  # per rank
    collectives: tuple[ProgramReport, ...] = ()
    link_bytes: tuple[int, int] = (0, 0)
    """Between ranks in a step: what crosses, and what would without slices."""

    not_spread: tuple[str, ...] = ()
    """With `zero`, what stays whole on every data shard, and why."""

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
        sizes = ", ".join(f"{size / 1024:.1f}K" for size in self.param_bytes)
        rows.append(f"parameters by rank: {sizes}; of the model: {self.model_bytes / 1024:.1f}K")
        if self.device_bytes != self.param_bytes:
            sizes = ", ".join(f"{size / 1024:.1f}K" for size in self.device_bytes)
            rows.append(f"parameters on each device of a rank: {sizes}")
        crossing, whole = self.link_bytes
        if crossing != whole:
            rows.append(
                f"between ranks in a step: {crossing / 1024:.1f}K in slices, instead of "
                f"{whole / 1024:.1f}K"
            )
        rows += map(str, self.collectives)
        rows += [f"optimizer state not spread over data: {x}" for x in self.not_spread]
        return "\n".join(rows)


def report(loss: Any, further_compilations: int = 0) -> StepReport:
    """Returns the figures of a `PipelinedLoss`, and of an update compiled with it."""
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
        device_bytes=tuple(_device_bytes(loss, sizes, r.rank) for r in step.ranks),
        collectives=_collectives(loss),
        link_bytes=loss.trainer.engine.bytes_on_links,
        not_spread=_not_spread(loss),
    )


def _not_spread(loss: Any) -> tuple[str, ...]:
    """Returns the trained units whose moments stay whole although `zero` asks otherwise."""
    specs, names = loss.param_specs, [unit.name for unit in loss.staged.units]
    if not loss.options.zero or loss.mesh.ranks[0].data_size == 1:
        return ()
    whole = [u for u, spec in enumerate(specs.gradients) if spec == specs.params[u]]
    return tuple(
        f"{names[u]}, whose elements the optimizer mixes ({loss.mixed[u]})"
        if u in loss.mixed
        else f"{names[u]}, whose shape {list(loss.staged.unit_avals[u].shape)} data does not divide"
        for u in whole
        if u in loss.trainable
    )


def _device_bytes(loss: Any, sizes: tuple[int, ...], rank: int) -> int:
    """What each device of a rank keeps of the parameters."""
    every = zip(loss.param_specs.stored, sizes, loss.lowered.step.holders, strict=True)
    mesh = loss.mesh.ranks[rank].mesh
    return sum(bytes_per_device(spec, size, mesh) for spec, size, ranks in every if rank in ranks)


def _collectives(loss: Any) -> tuple[ProgramReport, ...]:
    """Returns the collectives of all programs of this process's ranks with several devices."""
    ranks = {r: loss.mesh.ranks[r] for r in loss.mesh.local_ranks}
    return tuple(
        ProgramReport(rank, name, collectives_of(program, ranks[rank].mesh))
        for rank, name, program in loss.trainer.engine.named_programs
        if len(ranks[rank].devices) > 1
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
        residual_bytes=_role_bytes(stage.forward, Role.RESIDUAL),
        kept_bytes=_role_bytes(stage.input_grad, Role.KEPT),
        output_bytes=_role_bytes(stage.forward, Role.OUTPUT),
        input_grad_bytes=_role_bytes(stage.input_grad, Role.INPUT_GRAD),
    )


def _role_bytes(program: Program, role: Role) -> int:
    return sum(
        compat.num_bytes(aval)
        for ref, aval in zip(program.writes, program.jaxpr.out_avals, strict=True)
        if ref.role is role
    )
