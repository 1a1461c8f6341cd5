"""Turns forward stages into stages with backward, input-gradient and weight-gradient programs.

    stage          reads                                            writes
    forward        params, state, batch, inputs                     outputs, residuals
    backward       params, batch, inputs, residuals, output_grads   input_grads, param_grads
      or
    input_grad     (the same)                                       input_grads, kept
    weight_grad    (what it needs of the same), kept                param_grads

The stages are walked from the last to the first, so which gradients exist is known when a
stage is differentiated: a gradient that JAX would not compute is neither sent nor written.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from octojax.compat import new_jaxpr
from octojax.errors import PlanError
from octojax.ir.action import Kind
from octojax.jaxprs.choose_residuals import choose_residuals
from octojax.jaxprs.dataflow import (
    Atom,
    free_vars,
    is_var,
    reached_from,
)
from octojax.jaxprs.partition_backward import partition_backward
from octojax.jaxprs.split_loops import split_loops
from octojax.jaxprs.trim_loops import trim_loops
from octojax.stages.alike import likeness, renamed
from octojax.stages.joint import Joint, trace_joint
from octojax.stages.program import ForwardStage, Program, Ref, Role, Stage

_AT_HAND = (Role.PARAM, Role.BATCH, Role.INPUT)


def differentiate(
    forwards: tuple[ForwardStage, ...],
    trainable: frozenset[int] | None = None,
    recompute: tuple[bool, ...] = (),
) -> tuple[Stage, ...]:
    """Returns the stages with their backward programs, in the order given (by depth).

    `trainable` are the parameter units that get gradients (None: all inexact ones).
    `recompute` says per stage whether the forward keeps its inputs only (empty: none does).
    Gradients start at SEED, the cotangent of EMIT 0, which one stage must write.
    """
    recompute = recompute or (False,) * len(forwards)
    if len(recompute) != len(forwards):
        raise PlanError(
            f"{len(recompute)} recompute choices for {len(forwards)} stages; give one per stage"
        )
    seeded = [s.index for s in forwards if Ref(Role.EMIT, 0) in s.forward.writes]
    if len(seeded) != 1:
        raise PlanError(
            f"the loss (emit0) is written by stages {seeded or 'none'}; exactly one must write it"
        )
    gradients = _wanted_gradients(forwards, trainable)
    stages: list[Stage] = []
    incoming: set[int] = set()
    silent: set[int] = set()
    by_likeness: dict[tuple[object, ...], tuple[Program, Stage, set[Ref], set[Ref]]] = {}
    for forward, refs, again in zip(
        reversed(forwards), reversed(gradients), reversed(recompute), strict=True
    ):
        cotangents = [
            Ref(Role.OUTPUT_GRAD, w.index)
            for w in forward.forward.writes
            if w.role is Role.OUTPUT and w.index in incoming
        ]
        if Ref(Role.EMIT, 0) in forward.forward.writes:
            cotangents.append(Ref(Role.SEED, 0))
        muted = [
            Ref(Role.OUTPUT_GRAD, w.index)
            for w in forward.forward.writes
            if w.role is Role.OUTPUT and w.index in silent
        ]
        key = (*likeness(forward.forward, refs, cotangents, muted), again)
        if key not in by_likeness:
            joint = trace_joint(forward.forward, refs, cotangents, muted)
            stage = (_recomputing if again else _storing)(forward, joint)
            by_likeness[key] = forward.forward, stage, set(joint.grads), set(joint.silent)
        template, stage, grads, quiet = by_likeness[key]
        places = dict(zip(template.reads, forward.forward.reads, strict=True))
        inputs = {r.index: new.index for r, new in places.items() if r.role is Role.INPUT}
        stages.append(renamed(stage, template, forward))
        incoming = {inputs[r.index] for r in grads if r.role is Role.INPUT_GRAD}
        silent = {inputs[r.index] for r in quiet}
    return tuple(reversed(stages))


def _wanted_gradients(
    forwards: Sequence[ForwardStage], trainable: frozenset[int] | None
) -> list[list[Ref]]:
    """Returns per stage the reads whose gradients some trainable parameter depends on."""
    gradients: list[list[Ref]] = []
    active: set[int] = set()
    for stage in forwards:
        program = stage.forward
        jaxpr = program.jaxpr.jaxpr
        refs = {
            ref: v
            for ref, v in zip(program.reads, jaxpr.invars, strict=True)
            if jnp.issubdtype(v.aval.dtype, jnp.inexact)
            and (
                (ref.role is Role.PARAM and (trainable is None or ref.index in trainable))
                or (ref.role is Role.INPUT and ref.index in active)
            )
        }
        gradients.append(list(refs))
        reached = reached_from(jaxpr.eqns, refs.values())
        active = {
            w.index
            for w, v in zip(program.writes, jaxpr.outvars, strict=True)
            if w.role is Role.OUTPUT and is_var(v) and v in reached
        }
    return gradients


def _storing(stage: ForwardStage, joint: Joint) -> Stage:
    """Returns the stage whose forward stores what its backward programs need."""
    names = _names(joint)
    at_hand = _having(joint, *_AT_HAND)
    stored = choose_residuals(joint.forward, _crossing(joint), at_hand, _sources(joint))
    names.update((v, Ref(Role.RESIDUAL, i)) for i, v in enumerate(stored.values))
    eqns = [*(joint.forward[at] for at in stored.repeated), *joint.backward]
    writes = {**joint.outputs, **{names[v]: v for v in stored.values}}
    first, second = _split(joint, eqns, names)
    return Stage(
        index=stage.index,
        layers=stage.layers,
        forward=_forward(joint, writes, effects=True),
        backward=_program(joint, Kind.BACKWARD, eqns, joint.grads, names),
        input_grad=first,
        weight_grad=second,
    )


def _recomputing(stage: ForwardStage, joint: Joint) -> Stage:
    """Returns the stage whose forward stores nothing but mutable state that it read."""
    plain = _storing(stage, joint)
    crossing = _crossing(joint)
    again = trim_loops(joint.forward, crossing)
    states = [v for v in free_vars(again, crossing) if v in _having(joint, Role.STATE)]
    count = sum(w.role is Role.RESIDUAL for w in plain.forward.writes)
    saved = {v: Ref(Role.RESIDUAL, count + i) for i, v in enumerate(states)}
    names = {**_names(joint), **saved}
    eqns = [*again, *joint.backward]
    first, second = _split(joint, eqns, names)
    residuals = {
        w: v
        for w, v in zip(plain.forward.writes, plain.forward.jaxpr.jaxpr.outvars, strict=True)
        if w.role is Role.RESIDUAL
    }
    return Stage(
        index=stage.index,
        layers=stage.layers,
        forward=_forward(joint, {**joint.outputs, **{r: v for v, r in saved.items()}}, True),
        backward=_program(joint, Kind.BACKWARD, eqns, joint.grads, names),
        input_grad=first,
        weight_grad=second,
        recompute=_program(joint, Kind.RECOMPUTE, joint.forward, residuals, names),
        backward_after_recompute=plain.backward,
        input_grad_after_recompute=plain.input_grad,
        weight_grad_after_recompute=plain.weight_grad,
    )


def _split(
    joint: Joint, eqns: Sequence[JaxprEqn], names: dict[Var, Ref]
) -> tuple[Program, Program | None]:
    """Returns the input-gradient program and, unless nothing is left for it, the other one."""
    urgent = {r: v for r, v in joint.grads.items() if r.role is Role.INPUT_GRAD}
    later = {r: v for r, v in joint.grads.items() if r.role is Role.PARAM_GRAD}
    eqns = trim_loops(eqns, joint.grads.values(), keep_effects=True)
    eqns = split_loops(eqns, list(urgent.values()), list(later.values()))
    lasting = _having(joint, *_AT_HAND)
    cut = partition_backward(eqns, list(urgent.values()), list(later.values()), lasting)
    deferred = {r: v for i, (r, v) in enumerate(later.items()) if i in cut.second_outputs}
    finished = {r: v for r, v in joint.grads.items() if r not in deferred}
    if not deferred:
        return _program(joint, Kind.INPUT_GRAD, eqns, finished, names), None
    first = [eqns[at] for at in cut.first]
    second = [eqns[at] for at in cut.second]
    residuals = choose_residuals(
        first, free_vars(second), lasting, _sources(joint), existing=frozenset(names) - lasting
    )
    new = [v for v in residuals.values if v not in names]
    crossing = {v: Ref(Role.KEPT, i) for i, v in enumerate(new)}
    second = [*(first[at] for at in residuals.repeated), *second]
    return (
        _program(
            joint,
            Kind.INPUT_GRAD,
            first,
            {**finished, **{r: v for v, r in crossing.items()}},
            names,
        ),
        _program(joint, Kind.WEIGHT_GRAD, second, deferred, {**names, **crossing}),
    )


def _names(joint: Joint) -> dict[Var, Ref]:
    """Returns what backward programs may read from outside besides residuals and kept values."""
    lasting = {v: r for r, v in joint.inputs.items() if r.role in _AT_HAND}
    return lasting | {v: r for r, v in joint.cotangents.items()}


def _having(joint: Joint, *roles: Role) -> set[Var]:
    return {v for r, v in joint.inputs.items() if r.role in roles}


def _sources(joint: Joint) -> tuple[set[Var], set[Var]]:
    return _having(joint, Role.PARAM), _having(joint, Role.BATCH)


def _crossing(joint: Joint) -> list[Var]:
    """Returns the forward's values and inputs that the backward equations read."""
    live = trim_loops(joint.backward, joint.grads.values(), keep_effects=True)
    incoming = set(joint.cotangents.values())
    return [v for v in free_vars(live, joint.grads.values()) if v not in incoming]


def _forward(joint: Joint, writes: dict[Ref, Atom], effects: bool) -> Program:
    eqns = trim_loops(joint.forward, writes.values(), keep_effects=effects)
    return _assemble(Kind.FORWARD, eqns, writes, {v: r for r, v in joint.inputs.items()})


def _program(
    joint: Joint,
    kind: Kind,
    eqns: Sequence[JaxprEqn],
    writes: dict[Ref, Atom],
    names: dict[Var, Ref],
) -> Program:
    """Returns the program that makes `writes`, reading what it needs under its name.

    What a custom derivative prints is printed once, in B or I.
    """
    effects = kind in (Kind.BACKWARD, Kind.INPUT_GRAD)
    return _assemble(kind, trim_loops(eqns, writes.values(), effects), writes, names)


def _assemble(
    kind: Kind,
    eqns: Sequence[JaxprEqn],
    writes: dict[Ref, Atom],
    names: dict[Var, Ref],
) -> Program:
    invars = sorted(free_vars(eqns, writes.values()), key=lambda v: _read_order(names[v]))
    jaxpr = new_jaxpr(invars, list(writes.values()), eqns)
    return Program(kind, jaxpr, tuple(names[v] for v in invars), tuple(writes))


def _read_order(ref: Ref) -> tuple[int, int]:
    return list(Role).index(ref.role), ref.index
