"""From layers and a partition to the forward program of every stage."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var

from octojax import compat
from octojax.errors import CutError
from octojax.ir.action import Kind
from octojax.ir.graph import LayerGraph
from octojax.ir.partition import Partition
from octojax.layers import classify
from octojax.layers.find import LayeredLoss
from octojax.layers.rules import shared_values
from octojax.layers.state import Counters, StateKind, StateLeaf, counters, new_value, state_kinds
from octojax.layers.terms import place_terms
from octojax.stages.program import ForwardStage, OwnTerm, ParamUnit, Program, Ref, Role
from octojax.trace import TracedLoss


@dataclass(frozen=True)
class Border:
    """One value sent from a stage to the next. `differentiable`: a gradient comes back."""

    aval: Any
    differentiable: bool


@dataclass(frozen=True)
class StagedLoss:
    """The forward programs of all stages and what their ends mean.

    `borders[s][k]` is OUTPUT k of stage s and INPUT k of stage s + 1. `emits` are the avals of
    the loss and of the leaves of aux. `constants` are the values of the units behind the leaves
    of params and state, in the order of their `leaf`. `terms` of the emits are in no stage.
    """

    traced: TracedLoss
    graph: LayerGraph
    partition: Partition
    units: tuple[ParamUnit, ...]
    unit_avals: tuple[Any, ...]
    constants: tuple[Any, ...]
    forwards: tuple[ForwardStage, ...]
    borders: tuple[tuple[Border, ...], ...]
    emits: tuple[Any, ...]
    state: tuple[StateLeaf, ...]
    counters: Counters
    terms: tuple[OwnTerm, ...] = ()


def cut_stages(
    layered: LayeredLoss, partition: Partition, ranks: Sequence[int] | None = None
) -> StagedLoss:
    """Returns the stages of a partition of the layers. `ranks` are those of the stages, if known.

    Raises:
        CutError: the partition is of another number of layers, or a state leaf would be
            written in one stage and read in another.
    """
    _check_size(layered, partition)
    layered, terms = place_terms(layered, _owners(layered, partition, ranks))
    traced, normal = layered.traced, layered.normal
    kinds = state_kinds(traced, normal)
    writers = _writers(layered, partition, kinds)
    sent = _sent(layered, partition, writers)
    stages = [_stage(layered, partition, s, writers, sent) for s in range(partition.num_stages)]
    _check_state(layered, stages, writers)
    emits = normal.flat.outvars[: traced.num_emits]
    return StagedLoss(
        traced=traced,
        graph=layered.graph,
        partition=partition,
        units=normal.units,
        unit_avals=normal.unit_avals,
        constants=normal.flat.constants,
        forwards=tuple(stages),
        borders=tuple(map(_border, sent[:-1])),
        emits=tuple(x.aval for x in emits),
        state=tuple(
            StateLeaf(k, unit.name, unit.aval, kind, writers.get(k), unit.leaf, unit.index)
            for k, (unit, kind) in enumerate(zip(normal.state, kinds, strict=True))
        ),
        counters=counters(traced, normal, kinds),
        terms=terms,
    )


def _owners(
    layered: LayeredLoss, partition: Partition, ranks: Sequence[int] | None
) -> Callable[[int], int | None]:
    """Returns the rank (or stage) owning a parameter unit: that of the first stage to read it."""
    first: dict[int, int] = {}
    for stage in range(partition.num_stages if layered.traced.terms else 0):
        for ref in _reads(layered, _steps(layered, partition, stage)):
            if ref.role is Role.PARAM:
                first.setdefault(ref.index, stage if ranks is None else ranks[stage])
    return first.get


def _check_size(layered: LayeredLoss, partition: Partition) -> None:
    num_layers = layered.graph.num_layers
    if partition.num_layers == num_layers:
        return
    shortage = partition.num_stages > num_layers
    remedy = (
        "Use fewer stages, mark more borders with octopipe.boundary, or ask for finer layers "
        "with find_layers(traced, min_layers=...)"
        if shortage
        else f"Give a partition of {num_layers} layers"
    )
    names = ", ".join(layer.name for layer in layered.graph.layers[:12])
    raise CutError(
        f"partition [{partition}] has {partition.num_layers} layers in {partition.num_stages} "
        f"stages, the model has {num_layers}: {names}{', ...' if num_layers > 12 else ''}. {remedy}"
    )


def _steps(layered: LayeredLoss, partition: Partition, stage: int) -> Sequence[int]:
    """Returns the activation equations of a stage."""
    first, last = partition.bounds[stage], partition.bounds[stage + 1]
    return layered.steps[layered.bounds[first] : layered.bounds[last]]


def _alive_after(layered: LayeredLoss, partition: Partition, stage: int) -> tuple[Var, ...]:
    """Returns what the stage sends to the next."""
    if stage < 0 or stage == partition.num_stages - 1:
        return ()
    return layered.live[layered.bounds[partition.bounds[stage + 1]] - 1]


def _border(sent: Sequence[Var]) -> tuple[Border, ...]:
    return tuple(Border(var.aval, compat.is_float(var.aval)) for var in sent)


def _sent(
    layered: LayeredLoss, partition: Partition, writers: Mapping[int, int]
) -> list[tuple[Var, ...]]:
    """Returns what each stage sends to the next: activations, and what only one may make."""
    stages = range(partition.num_stages)
    alive = [_alive_after(layered, partition, s) for s in stages]
    missing = []
    for s in stages:
        ends = [value for _, value in _ends(layered, partition, s, writers)]
        available = {*(alive[s - 1] if s else ()), *_activations(layered, partition, s)}
        missing.append(_missing(layered, partition, s, ends, available))
    shared = shared_values(layered, missing)
    return [(*alive[s], *(v for v, where in shared.items() if s in where)) for s in stages]


def _writers(
    layered: LayeredLoss, partition: Partition, kinds: Sequence[StateKind]
) -> dict[int, int]:
    """Returns the stage that writes each carried leaf: where its new value is made.

    A value made of batch and state alone is made where the leaf is read, or in stage 0.
    """
    home = _homes(layered, partition)
    readers = _readers(layered, partition)
    writers: dict[int, int] = {}
    for leaf, kind in enumerate(kinds):
        if kind is not StateKind.CARRIED:
            continue
        value = new_value(layered.traced, layered.normal, leaf)
        stage = home.get(value) if isinstance(value, Var) else None
        writers[leaf] = min(readers.get(leaf, {0})) if stage is None else stage
    return writers


def _homes(layered: LayeredLoss, partition: Partition) -> dict[Var, int]:
    """Returns the stage that makes each activation."""
    eqns = layered.normal.flat.eqns
    return {
        var: stage
        for stage in range(partition.num_stages)
        for at in _steps(layered, partition, stage)
        for var in eqns[at].outvars
    }


def _readers(layered: LayeredLoss, partition: Partition) -> dict[int, set[int]]:
    """Returns the stages whose activation equations read each state leaf."""
    readers: dict[int, set[int]] = {}
    for stage in range(partition.num_stages):
        for ref in _reads(layered, _steps(layered, partition, stage)):
            if ref.role is Role.STATE:
                readers.setdefault(ref.index, set()).add(stage)
    return readers


def _reads(layered: LayeredLoss, steps: Sequence[int]) -> Iterable[Ref]:
    normal = layered.normal
    operands = classify.side_inputs((normal.flat.eqns[at] for at in steps), layered.depends)
    return [normal.inputs[var] for var in normal.recomputed(operands, ())[1]]


def _stage(
    layered: LayeredLoss,
    partition: Partition,
    stage: int,
    writers: Mapping[int, int],
    sent: Sequence[Sequence[Var]],
) -> ForwardStage:
    normal = layered.normal
    inputs = sent[stage - 1] if stage else ()
    steps = set(_steps(layered, partition, stage))
    ends = [
        *((Ref(Role.OUTPUT, k), var) for k, var in enumerate(sent[stage])),
        *_ends(layered, partition, stage, writers),
    ]
    available = {*inputs, *_activations(layered, partition, stage)}
    missing = _missing(layered, partition, stage, [v for _, v in ends], available)
    again, sources = normal.recomputed(missing, available)
    sources.sort(key=lambda var: normal.inputs[var])
    eqns = [normal.flat.eqns[at] for at in sorted(steps | again)]
    reads = [normal.inputs[var] for var in sources]
    reads += [Ref(Role.INPUT, k) for k in range(len(inputs))]
    program = _program([*sources, *inputs], [v for _, v in ends], eqns, reads, [r for r, _ in ends])
    return ForwardStage(stage, program, tuple(partition.layers(stage)))


def _activations(layered: LayeredLoss, partition: Partition, stage: int) -> list[Var]:
    """Returns the activations that a stage makes."""
    eqns = layered.normal.flat.eqns
    return [var for at in _steps(layered, partition, stage) for var in eqns[at].outvars]


def _missing(
    layered: LayeredLoss,
    partition: Partition,
    stage: int,
    ends: Iterable[compat.Atom],
    available: Collection[Var],
) -> list[Var]:
    """Returns what a stage reads or returns and does not make in its steps."""
    eqns = layered.normal.flat.eqns
    read = (v for at in _steps(layered, partition, stage) for v in eqns[at].invars)
    return [v for v in (*read, *ends) if isinstance(v, Var) and v not in available]


def _ends(
    layered: LayeredLoss, partition: Partition, stage: int, writers: Mapping[int, int]
) -> list[tuple[Ref, compat.Atom]]:
    """Returns what a stage returns to the caller: results and new state."""
    return [
        *_emits(layered, partition, stage),
        *(
            (Ref(Role.NEW_STATE, leaf), new_value(layered.traced, layered.normal, leaf))
            for leaf, where in writers.items()
            if where == stage
        ),
    ]


def _program(
    invars: Sequence[Var],
    outvars: Sequence[compat.Atom],
    eqns: Sequence[JaxprEqn],
    reads: Sequence[Ref],
    writes: Sequence[Ref],
) -> Program:
    """Returns the program, without inputs that nothing reads."""
    used = {v for eqn in eqns for v in eqn.invars if isinstance(v, Var)}
    used |= {v for v in outvars if isinstance(v, Var)}
    pairs = [(var, ref) for var, ref in zip(invars, reads) if var in used]
    jaxpr = compat.new_jaxpr([var for var, _ in pairs], outvars, eqns)
    return Program(Kind.FORWARD, jaxpr, tuple(ref for _, ref in pairs), tuple(writes))


def _emits(layered: LayeredLoss, partition: Partition, stage: int) -> list[tuple[Ref, compat.Atom]]:
    """Returns the results of a stage; the last also has the loss and what needs no stage."""
    home = _homes(layered, partition)
    last = partition.num_stages - 1
    emits = []
    for index, value in enumerate(layered.normal.flat.outvars[: layered.traced.num_emits]):
        where = last if index == 0 or isinstance(value, Literal) else home.get(value, last)
        if where == stage:
            emits.append((Ref(Role.EMIT, index), value))
    return emits


def _check_state(
    layered: LayeredLoss, stages: Sequence[ForwardStage], writers: Mapping[int, int]
) -> None:
    wrong = []
    for leaf, writer in writers.items():
        read = [s.index for s in stages if Ref(Role.STATE, leaf) in s.forward.reads]
        if any(s != writer for s in read):
            name = layered.normal.state[leaf].name
            wrong.append(f"{name} (written by stage {writer}, read by {read})")
    if wrong:
        raise CutError(
            f"state crosses stages: {'; '.join(wrong)}. A state leaf must be read and written "
            f"in one stage: move the cut, use fewer stages, or update it where it is read"
        )
