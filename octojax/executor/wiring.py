"""What the stages of a model exchange, as lowering wants to know it: programs as plain data."""

from collections.abc import Iterable, Sequence

from octojax.ir import Cargo, Kind, Unit, Wiring
from octojax.stages.program import Program, Ref, Role, Stage

_BACKWARD = (Kind.BACKWARD, Kind.INPUT_GRAD)
_IDLE = (*_BACKWARD, Kind.WEIGHT_GRAD)


def wiring_of(stages: Sequence[Sequence[Stage]], num_units: int) -> Wiring:
    """Returns the wiring of `stages[m][s]`, stage s for microbatch m, with `num_units` parameters.

    What is idle or silent is so for every microbatch.
    """
    every = list({id(one): one for one in stages}.values())
    count = len(every[0])
    readers: list[set[int]] = [set() for _ in range(num_units)]
    summers: list[set[int]] = [set() for _ in range(num_units)]
    results: dict[int, set[int]] = {}
    for index, stage in ((s, one[s]) for one in every for s in range(count)):
        for program in _programs(stage):
            for unit in _indices(program.reads, Role.PARAM):
                readers[unit].add(index)
            for unit in _indices(program.writes, Role.PARAM_GRAD):
                readers[unit].add(index)
                summers[unit].add(index)
            for leaf in _indices(program.writes, Role.EMIT):
                results.setdefault(leaf, set()).add(index)
    return Wiring(
        count,
        tuple(
            Unit(tuple(sorted(read)), tuple(sorted(added)))
            for read, added in zip(readers, summers, strict=True)
        ),
        tuple(tuple(sorted(results[leaf])) for leaf in sorted(results)),
        frozenset(_silent(every, count)),
        frozenset(
            (s, kind)
            for s in range(count)
            for kind in Kind
            if kind in _IDLE and not any(p.writes for one in every for p in _programs(one[s], kind))
        ),
    )


def _silent(every: Iterable[Sequence[Stage]], count: int) -> Iterable[tuple[Cargo, int]]:
    for s in range(count - 1):
        ends = [(one[s], one[s + 1]) for one in every]
        there = any(
            _write_indices(a, (Kind.FORWARD,), Role.OUTPUT) & _read(b, Role.INPUT) for a, b in ends
        )
        back = any(
            _write_indices(b, _BACKWARD, Role.INPUT_GRAD) & _read(a, Role.OUTPUT_GRAD)
            for a, b in ends
        )
        if not there:
            yield Cargo.OUTPUT, s
        if not back:
            yield Cargo.GRADIENT, s + 1


def _write_indices(stage: Stage, kinds: Iterable[Kind], role: Role) -> set[int]:
    return {i for k in kinds for p in _programs(stage, k) for i in _indices(p.writes, role)}


def _read(stage: Stage, role: Role) -> set[int]:
    return {i for p in _programs(stage) for i in _indices(p.reads, role)}


def _indices(refs: Iterable[Ref], role: Role) -> Iterable[int]:
    return (ref.index for ref in refs if ref.role is role)


def _programs(stage: Stage, kind: Kind | None = None) -> list[Program]:
    """Returns the programs of a stage, or those that its actions of one kind may run."""
    by_kind = {
        Kind.FORWARD: (stage.forward,),
        Kind.BACKWARD: (stage.backward, stage.backward_after_recompute),
        Kind.INPUT_GRAD: (stage.input_grad, stage.input_grad_after_recompute),
        Kind.WEIGHT_GRAD: (stage.weight_grad, stage.weight_grad_after_recompute),
        Kind.RECOMPUTE: (stage.recompute,),
    }
    groups = by_kind.values() if kind is None else (by_kind[kind],)
    return [p for programs in groups for p in programs if p is not None]
