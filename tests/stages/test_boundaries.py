"""What crosses stage boundaries: several tensors, dtypes, skips, state, effects, no gradient."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr

from octojax.errors import PlanError
from octojax.ir.action import Kind
from octojax.stages import (
    ForwardStage,
    Program,
    Ref,
    Role,
    differentiate,
    kept_bytes,
    residual_bytes,
)
from tests.stages.chain import Piece, assert_gradients, forward_stages, run_chain, run_program


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.5, dtype)


def roles(refs, role):
    return [r.index for r in refs if r.role is role]


def test_leaves_of_three_dtypes_arrive_and_only_floats_get_gradients():
    """CASES 31: bfloat16 h, float32 residual and an integer mask."""

    def start(p, batch, inputs):
        h = (batch[0] @ p[0]).astype(jnp.bfloat16)
        return h, batch[0] * 2 + p[0][0][None, :], (batch[0] > 0).astype(jnp.int32)

    def middle(p, batch, inputs):
        h, residual, mask = inputs
        return jnp.tanh(h @ p[0].astype(jnp.bfloat16)), residual + h.astype(jnp.float32), mask

    def end(p, batch, inputs):
        h, residual, mask = inputs
        return (jnp.mean(((h.astype(jnp.float32) + residual @ p[0]) * mask) ** 2),)

    pieces = [Piece(start, (0,)), Piece(middle, (1,)), Piece(end, (2,))]
    params, batch = [normal(8, 8, seed=i) for i in range(3)], (normal(4, 8, seed=9),)
    stages = differentiate(forward_stages(pieces, params, batch))
    for before, after in itertools.pairwise(stages):
        assert roles(before.forward.writes, Role.OUTPUT) == [0, 1, 2]
        assert roles(after.backward.writes, Role.INPUT_GRAD) == [0, 1]
        assert roles(after.input_grad.writes, Role.INPUT_GRAD) == [0, 1]
        assert set(roles(before.backward.reads, Role.OUTPUT_GRAD)) <= {0, 1}
    dtypes = dict(zip(stages[1].backward.writes, stages[1].backward.jaxpr.out_avals, strict=True))
    assert dtypes[Ref(Role.INPUT_GRAD, 0)].dtype == jnp.bfloat16
    assert dtypes[Ref(Role.INPUT_GRAD, 1)].dtype == jnp.float32
    assert_gradients(stages, pieces, params, batch, tolerance=2e-2)


def test_skip_connection_passes_through_a_stage_untouched():
    """CASES 32: the output of stage 0 is used in stage 3; nothing is stored on the way."""
    pieces = [
        Piece(lambda p, b, i: (jnp.tanh(b[0] @ p[0]), b[0] @ p[0]), (0,)),
        Piece(lambda p, b, i: (jnp.sin(i[0] @ p[0]), i[1]), (1,)),
        Piece(lambda p, b, i: (jnp.sin(i[0] @ p[0]), i[1]), (2,)),
        Piece(lambda p, b, i: (jnp.sum((i[0] + i[1]) @ p[0]),), (3,)),
    ]
    params, batch = [normal(8, 8, seed=i) for i in range(4)], (normal(4, 8, seed=9),)
    stages = differentiate(forward_stages(pieces, params, batch))
    assert_gradients(stages, pieces, params, batch)
    middle = stages[1]
    outs = dict(zip(middle.backward.writes, middle.backward.jaxpr.jaxpr.outvars, strict=True))
    ins = dict(zip(middle.backward.reads, middle.backward.jaxpr.jaxpr.invars, strict=True))
    assert outs[Ref(Role.INPUT_GRAD, 1)] is ins[Ref(Role.OUTPUT_GRAD, 1)]
    assert residual_bytes(middle) == 4 * 8 * 4  # cos of the one activation


def test_stage_without_parameters_has_no_weight_program():
    """CASES 7."""
    pieces = [
        Piece(lambda p, b, i: (b[0] @ p[0],), (0,)),
        Piece(lambda p, b, i: (jnp.tanh(i[0]),), ()),
        Piece(lambda p, b, i: (jnp.mean(i[0] @ p[0]),), (1,)),
    ]
    params, batch = [normal(8, 8, seed=i) for i in range(2)], (normal(4, 8, seed=9),)
    stages = differentiate(forward_stages(pieces, params, batch))
    assert stages[1].weight_grad is None
    assert_gradients(stages, pieces, params, batch)


def test_first_stage_is_split_too():
    """Nobody waits for its input gradient: I propagates inside the stage, W contracts."""

    def two_layers(p, batch, inputs):
        return (jnp.tanh(jnp.tanh(batch[0] @ p[0]) @ p[1]),)

    pieces = [Piece(two_layers, (0, 1)), Piece(lambda p, b, i: (jnp.sum(i[0] @ p[0]),), (2,))]
    params, batch = [normal(8, 8, seed=i) for i in range(3)], (normal(4, 8, seed=9),)
    stages = differentiate(forward_stages(pieces, params, batch))
    first = stages[0]
    assert roles(first.input_grad.writes, Role.INPUT_GRAD) == []
    assert roles(first.input_grad.writes, Role.PARAM_GRAD) == []
    assert sorted(roles(first.weight_grad.writes, Role.PARAM_GRAD)) == [0, 1]
    count = [e.primitive.name for e in first.weight_grad.jaxpr.jaxpr.eqns].count("dot_general")
    assert count == 2  # one per weight; propagation between the layers is in I
    assert_gradients(stages, pieces, params, batch)


@pytest.mark.parametrize(("vocabulary", "deferred"), [(7, False), (4000, True)])
def test_embedding_gradient_is_deferred_where_its_table_outweighs_its_rows(vocabulary, deferred):
    pieces = [
        Piece(lambda p, b, i: (p[0][b[0]],), (0,)),
        Piece(lambda p, b, i: (jnp.mean(jnp.tanh(i[0] @ p[0])),), (1,)),
    ]
    params = [normal(vocabulary, 8), normal(8, 8, seed=1)]
    batch = (jnp.arange(12).reshape(3, 4) % vocabulary,)
    stages = differentiate(forward_stages(pieces, params, batch))
    assert (stages[0].weight_grad is not None) == deferred
    assert_gradients(stages, pieces, params, batch)


def test_small_gradients_are_finished_in_the_input_program():
    def layer(p, batch, inputs):
        w, b, scale = p
        return (jnp.tanh((inputs[0] * scale[None, :]) @ w + b[None, :]),)

    pieces = [
        Piece(lambda p, b, i: (b[0] @ p[0],), (0,)),
        Piece(layer, (1, 2, 3)),
        Piece(lambda p, b, i: (jnp.mean(i[0]),), ()),
    ]
    params = [normal(8, 8), normal(8, 8, seed=1), normal(8, seed=2), normal(8, seed=3)]
    batch = (normal(4, 8, seed=9),)
    stages = differentiate(forward_stages(pieces, params, batch))
    assert sorted(roles(stages[1].input_grad.writes, Role.PARAM_GRAD)) == [2, 3]
    assert roles(stages[1].weight_grad.writes, Role.PARAM_GRAD) == [1]
    assert kept_bytes(stages[1]) == 4 * 8 * 4  # the output's gradient before tanh
    assert_gradients(stages, pieces, params, batch)


def test_frozen_first_stage_sends_and_receives_nothing():
    pieces = [
        Piece(lambda p, b, i: (jnp.tanh(b[0] @ p[0]),), (0,)),
        Piece(lambda p, b, i: (jnp.mean(jnp.tanh(i[0] @ p[0])),), (1,)),
    ]
    params, batch = [normal(8, 8, seed=i) for i in range(2)], (normal(4, 8, seed=9),)
    stages = differentiate(forward_stages(pieces, params, batch), frozenset({1}))
    assert stages[0].backward.writes == stages[0].backward.reads == ()
    assert roles(stages[0].forward.writes, Role.RESIDUAL) == []
    assert roles(stages[1].backward.writes, Role.INPUT_GRAD) == []


def test_gradient_that_is_zero_by_construction_is_not_sent():
    """Stage 1 reads its input through `stop_gradient` and through an integer cast only."""
    pieces = [
        Piece(lambda p, b, i: (b[0] @ p[0], b[0] + p[0][0][None, :]), (0,)),
        Piece(lambda p, b, i: (jax.lax.stop_gradient(i[0]) @ p[0] + i[1],), (1,)),
        Piece(lambda p, b, i: (jnp.mean(i[0] ** 2),), ()),
    ]
    params, batch = [normal(8, 8, seed=i) for i in range(2)], (normal(4, 8, seed=9),)
    stages = differentiate(forward_stages(pieces, params, batch))
    assert roles(stages[1].backward.writes, Role.INPUT_GRAD) == [1]
    assert roles(stages[0].backward.reads, Role.OUTPUT_GRAD) == [1]
    assert_gradients(stages, pieces, params, batch)


def test_masks_from_the_batch_and_casts_of_weights_are_computed_again():
    def layer(p, batch, inputs):
        x = inputs[0].astype(jnp.bfloat16)
        mask = jnp.cos(jnp.broadcast_to(batch[0][:, :1], inputs[0].shape))
        y = x @ p[0].astype(jnp.bfloat16).T
        return (inputs[0] + jnp.sin(y.astype(jnp.float32) * mask),)

    pieces = [
        Piece(lambda p, b, i: (b[0] @ p[0],), (0,)),
        Piece(layer, (1,)),
        Piece(lambda p, b, i: (jnp.mean(i[0] ** 2),), ()),
    ]
    params, batch = [normal(8, 8, seed=i) for i in range(2)], (normal(4, 8, seed=9),)
    stages = differentiate(forward_stages(pieces, params, batch))
    assert residual_bytes(stages[1]) <= 4 * 8 * 4  # one activation, no mask and no weight
    assert roles(stages[1].backward.reads, Role.BATCH) == [0]
    assert_gradients(stages, pieces, params, batch, tolerance=2e-2)


def test_opaque_callback_stays_in_the_input_program():
    def host(x, w):
        return np.asarray(x) @ np.asarray(w)

    @jax.custom_vjp
    def far(x, w):
        return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x, w)

    def backward(res, g):
        x, w = res
        shapes = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(w.shape, w.dtype)
        return jax.pure_callback(lambda x, w, g: (g @ w.T, x.T @ g), shapes, x, w, g)

    far.defvjp(lambda x, w: (far(x, w), (x, w)), backward)
    pieces = [
        Piece(lambda p, b, i: (b[0] @ p[0],), (0,)),
        Piece(lambda p, b, i: (far(i[0], p[0]),), (1,)),
        Piece(lambda p, b, i: (jnp.mean(i[0] ** 2),), ()),
    ]
    params, batch = [normal(8, 8, seed=i) for i in range(2)], (normal(4, 8, seed=9),)
    stages = differentiate(forward_stages(pieces, params, batch))
    assert stages[1].weight_grad is None
    assert_gradients(stages, pieces, params, batch)


def test_bfloat16_gradients_have_their_parameters_dtype():
    pieces = [
        Piece(lambda p, b, i: (jnp.tanh(b[0].astype(jnp.bfloat16) @ p[0]),), (0,)),
        Piece(lambda p, b, i: (jnp.mean((i[0] @ p[0]).astype(jnp.float32) ** 2),), (1,)),
    ]
    params = [normal(8, 8, seed=i, dtype=jnp.bfloat16) for i in range(2)]
    batch = (normal(4, 8, seed=9),)
    stages = differentiate(forward_stages(pieces, params, batch))
    _, grads = run_chain(stages, params, batch)
    assert {g.dtype for g in grads.values()} == {jnp.dtype(jnp.bfloat16)}
    assert_gradients(stages, pieces, params, batch, tolerance=2e-2)


def test_complex_parameters():
    def rotate(p, batch, inputs):
        z = jax.lax.complex(inputs[0], jnp.zeros_like(inputs[0])) @ p[0]
        return (jnp.real(z * jnp.exp(1j * p[1])[None, :]),)

    pieces = [
        Piece(lambda p, b, i: (b[0] @ p[0],), (0,)),
        Piece(rotate, (1, 2)),
        Piece(lambda p, b, i: (jnp.mean(i[0] ** 2),), ()),
    ]
    w = jax.lax.complex(normal(8, 8, seed=3), normal(8, 8, seed=4))
    params, batch = [normal(8, 8), w, normal(8, seed=5)], (normal(4, 8, seed=9),)
    stages = differentiate(forward_stages(pieces, params, batch))
    assert_gradients(stages, pieces, params, batch, tolerance=2e-6)


def stateful(recompute):
    """A stage that reads and renews a running mean, between two plain ones."""

    def run(w, mean, x):
        y = jnp.tanh((x - mean[None, :]) @ w)
        return y, 0.9 * mean + 0.1 * x.mean(0)

    w, mean, x = normal(8, 8), normal(8, seed=1), normal(4, 8, seed=2)

    def stage(index, fn, values, reads, writes):
        program = Program(Kind.FORWARD, jax.make_jaxpr(fn)(*values), reads, writes)
        return ForwardStage(index, program, (index,))

    forwards = (
        stage(0, lambda x: x * 3, (x,), (Ref(Role.PARAM, 0),), (Ref(Role.OUTPUT, 0),)),
        stage(
            1,
            run,
            (w, mean, x),
            (Ref(Role.PARAM, 1), Ref(Role.STATE, 0), Ref(Role.INPUT, 0)),
            (Ref(Role.OUTPUT, 0), Ref(Role.NEW_STATE, 0)),
        ),
        stage(2, lambda y: jnp.sum(y**2), (x,), (Ref(Role.INPUT, 0),), (Ref(Role.EMIT, 0),)),
    )
    stages = differentiate(forwards, None, (False, recompute, False))
    values = {Ref(Role.PARAM, 1): w, Ref(Role.STATE, 0): mean, Ref(Role.INPUT, 0): x}
    expected = jax.grad(lambda w, x: jnp.sum(run(w, mean, x)[0] ** 2), (0, 1))(w, x)
    return stages[1], values, (2 * run(w, mean, x)[0], *expected)


@pytest.mark.parametrize("recompute", [False, True])
def test_state_is_renewed_and_its_old_value_saved_for_the_backward(recompute):
    stage, values, (dy, dw, dx) = stateful(recompute)
    written = run_program(stage.forward, values)
    assert Ref(Role.NEW_STATE, 0) in written
    values |= {r: v for r, v in written.items() if r.role is Role.RESIDUAL}
    values[Ref(Role.OUTPUT_GRAD, 0)] = dy
    del values[Ref(Role.STATE, 0)]  # the next microbatch has replaced it
    programs = [stage.backward]
    if recompute:
        values |= run_program(stage.recompute, values)
        programs.append(stage.backward_after_recompute)
    for program in programs:
        grads = run_program(program, values)
        np.testing.assert_allclose(grads[Ref(Role.PARAM_GRAD, 1)], dw, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(grads[Ref(Role.INPUT_GRAD, 0)], dx, rtol=1e-5, atol=1e-6)


def test_prints_happen_in_the_forward_only():
    def noisy(p, batch, inputs):
        jax.debug.print("x {x}", x=inputs[0][0, 0])
        return (jnp.tanh(inputs[0] @ p[0]),)

    pieces = [
        Piece(lambda p, b, i: (b[0] @ p[0],), (0,)),
        Piece(noisy, (1,)),
        Piece(lambda p, b, i: (jnp.mean(i[0]),), ()),
    ]
    params, batch = [normal(8, 8, seed=i) for i in range(2)], (normal(4, 8, seed=9),)
    for again in (False, True):
        stages = differentiate(forward_stages(pieces, params, batch), None, (False, again, False))
        assert stages[1].forward.jaxpr.effects
        assert not stages[1].backward.jaxpr.effects
        assert not stages[1].input_grad.jaxpr.effects
    assert stages[1].recompute is not None
    assert not stages[1].recompute.jaxpr.effects


def test_prints_of_a_custom_derivative_happen_once():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    def backward(res, g):
        dw = res[0].T @ g
        jax.debug.print("g {g} dw {dw}", g=g[0, 0], dw=dw[0, 0])
        return g @ res[1].T, dw

    product.defvjp(lambda x, w: (x @ w, (x, w)), backward)
    pieces = [
        Piece(lambda p, b, i: (b[0] @ p[0],), (0,)),
        Piece(lambda p, b, i: (product(i[0], p[0]) @ p[1],), (1, 2)),
        Piece(lambda p, b, i: (jnp.mean(i[0] ** 2),), ()),
    ]
    params, batch = [normal(8, 8, seed=i) for i in range(3)], (normal(4, 8, seed=9),)
    for again in (False, True):
        stages = differentiate(forward_stages(pieces, params, batch), None, (False, again, False))
        assert stages[1].backward.jaxpr.effects
        assert stages[1].input_grad.jaxpr.effects
        assert stages[1].weight_grad is not None
        assert not stages[1].weight_grad.jaxpr.effects
        assert roles(stages[1].weight_grad.writes, Role.PARAM_GRAD) == [2]
        assert_gradients(stages, pieces, params, batch)


def test_a_model_without_a_loss_is_refused():
    closed: ClosedJaxpr = jax.make_jaxpr(jnp.sin)(1.0)
    program = Program(Kind.FORWARD, closed, (Ref(Role.PARAM, 0),), (Ref(Role.EMIT, 1),))
    with pytest.raises(PlanError, match=r"emit0.*none"):
        differentiate((ForwardStage(0, program, (0,)),))
