"""Tiny pipelines for the tests of stage programs: plain functions in, gradients out.

A stage is `fn(params, batch, inputs) -> outputs`: a tuple of parameter units, the batch's
leaves, the tuple of the stage before. The last one returns `(loss, *other emitted leaves)`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from octojax.ir.action import Kind
from octojax.jaxprs.dataflow import free_vars
from octojax.stages import ForwardStage, Program, Ref, Role, Stage


@dataclass(frozen=True)
class Piece:
    """One stage's function and the indices of the parameter units that it takes."""

    run: Callable
    units: tuple[int, ...] = ()


def forward_stages(pieces: Sequence[Piece], params, batch) -> tuple[ForwardStage, ...]:
    """Returns the pieces as forward stages; every batch leaf may be read by every stage."""
    stages, inputs = [], ()
    for at, piece in enumerate(pieces):
        mine = tuple(params[u] for u in piece.units)
        closed, shapes = jax.make_jaxpr(piece.run, return_shape=True)(mine, batch, inputs)
        reads = [Ref(Role.PARAM, u) for u in piece.units]
        reads += [Ref(Role.BATCH, i) for i in range(len(batch))]
        reads += [Ref(Role.INPUT, i) for i in range(len(inputs))]
        role = Role.EMIT if at == len(pieces) - 1 else Role.OUTPUT
        writes = tuple(Ref(role, i) for i in range(len(shapes)))
        stages.append(ForwardStage(at, _trimmed(closed, reads, writes), (at,)))
        inputs = shapes
    return tuple(stages)


def _trimmed(closed, reads, writes) -> Program:
    jaxpr = closed.jaxpr
    used = set(free_vars(jaxpr.eqns, jaxpr.outvars))
    assert not closed.consts
    kept = [(r, v) for r, v in zip(reads, jaxpr.invars, strict=True) if v in used]
    names = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    made = jaxpr.replace(invars=[v for _, v in kept], debug_info=names)
    closed = jax.extend.core.ClosedJaxpr(made, ())
    return Program(Kind.FORWARD, closed, tuple(r for r, _ in kept), writes)


def whole_loss(pieces: Sequence[Piece], params, batch):
    """Returns the loss of the unpipelined model."""
    values = ()
    for piece in pieces:
        values = piece.run(tuple(params[u] for u in piece.units), batch, values)
    return values[0]


def run_program(program: Program, values: dict) -> dict:
    """Runs a program on values by ref and returns what it writes."""
    outs = jaxpr_as_fun(program.jaxpr)(*(values[r] for r in program.reads))
    return dict(zip(program.writes, outs, strict=True))


def run_chain(stages: Sequence[Stage], params, batch, mode: str = "split", seed: float = 1.0):
    """Returns `(loss, {unit: gradient})`. `mode`: "fused", "split", or either with "+R"."""
    base = {Ref(Role.PARAM, i): p for i, p in enumerate(params)}
    base |= {Ref(Role.BATCH, i): b for i, b in enumerate(batch)}
    slots, inputs, loss = [], {}, None
    for stage in stages:
        values = base | inputs
        written = run_program(stage.forward, values)
        residuals = {r: v for r, v in written.items() if r.role is Role.RESIDUAL}
        slots.append(values | residuals)
        inputs = {Ref(Role.INPUT, r.index): v for r, v in written.items() if r.role is Role.OUTPUT}
        loss = written.get(Ref(Role.EMIT, 0), loss)
    grads: dict[int, jax.Array] = {}
    arriving = {}
    for stage, values in zip(reversed(stages), reversed(slots), strict=True):
        values = values | arriving | {Ref(Role.SEED, 0): jnp.float32(seed)}
        backward, first, second = stage.backward, stage.input_grad, stage.weight_grad
        if mode.endswith("+R") and stage.recompute is not None:
            values |= run_program(stage.recompute, values)
            backward = stage.backward_after_recompute
            first = stage.input_grad_after_recompute
            second = stage.weight_grad_after_recompute
        if mode.startswith("fused"):
            written = run_program(backward, values)
        else:
            written = run_program(first, values)
            kept = {r: v for r, v in written.items() if r.role is Role.KEPT}
            written |= run_program(second, values | kept) if second is not None else {}
        for r, v in written.items():
            if r.role is Role.PARAM_GRAD:
                grads[r.index] = grads[r.index] + v if r.index in grads else v
        arriving = {
            Ref(Role.OUTPUT_GRAD, r.index): v
            for r, v in written.items()
            if r.role is Role.INPUT_GRAD
        }
    return loss, grads


def assert_gradients(stages, pieces, params, batch, tolerance=1e-6, modes=("fused", "split")):
    """Checks loss and every gradient against `jax.grad` of the whole, relative per leaf.

    All runs are one XLA program, which takes a tenth of the time of compiling each by itself.
    """
    inexact = [i for i, p in enumerate(params) if jnp.issubdtype(p.dtype, jnp.inexact)]

    def loss_of(some):
        full = list(params)
        for i, p in zip(inexact, some, strict=True):
            full[i] = p
        return whole_loss(pieces, full, batch)

    @jax.jit
    def everything(params, batch):
        some = [params[i] for i in inexact]
        runs = [run_chain(stages, params, batch, mode) for mode in modes]
        return jax.value_and_grad(loss_of)(some), runs

    (loss, expected), runs = everything(params, batch)
    for mode, (found_loss, found) in zip(modes, runs, strict=True):
        np.testing.assert_allclose(np.float32(found_loss), np.float32(loss), rtol=tolerance)
        for i, want in zip(inexact, expected, strict=True):
            want = np.asarray(want, np.complex64 if want.dtype == jnp.complex64 else np.float32)
            got = np.asarray(found.get(i, np.zeros_like(want)), want.dtype)
            scale = max(np.abs(want).max(initial=0.0), 1e-6)
            worst = np.abs(got - want).max(initial=0.0) / scale
            assert worst <= tolerance, f"{mode}: unit {i} differs by {worst:.2e}"
