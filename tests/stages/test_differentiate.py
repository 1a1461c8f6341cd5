"""Stage programs against `jax.grad` of the whole function."""

import jax.numpy as jnp
import numpy as np
import pytest

from octojax.errors import PlanError
from octojax.stages import Ref, Role, differentiate
from tests.stages.chain import Piece, assert_gradients, forward_stages, run_chain


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.5, dtype)


def dense(params, batch, inputs):
    (w, b), (x, *_) = params, inputs
    return (jnp.tanh(x @ w + b[None, :]),)


def first_dense(params, batch, inputs):
    return dense(params, batch, (batch[0],))


def mse(params, batch, inputs):
    (h,) = dense(params, batch, inputs)
    return (jnp.mean((h - batch[1]) ** 2),)


def dense_chain(depth=3, width=8):
    pieces = [Piece(dense, (2 * i, 2 * i + 1)) for i in range(depth)]
    pieces[0] = Piece(first_dense, (0, 1))
    pieces[-1] = Piece(mse, pieces[-1].units)
    params = [
        normal(*((width, width) if i % 2 == 0 else (width,)), seed=i) for i in range(2 * depth)
    ]
    return pieces, params, (normal(4, width, seed=90), normal(4, width, seed=91))


@pytest.mark.parametrize("recompute", [False, True])
def test_dense_chain(recompute):
    pieces, params, batch = dense_chain()
    stages = differentiate(forward_stages(pieces, params, batch), None, (recompute,) * 3)
    modes = ("fused", "split", "fused+R", "split+R")
    assert_gradients(stages, pieces, params, batch, modes=modes)
    for stage in stages[:-1]:
        residuals = [w for w in stage.forward.writes if w.role is Role.RESIDUAL]
        assert len(residuals) == (0 if recompute else 1)  # of tanh


def test_weight_used_twice_in_one_stage():
    """CASES 11: the exact numbers, with I then W."""
    w = jnp.array([[0.4, -0.2], [0.7, 0.3]])
    x = jnp.array([[1.1, -0.7]])

    def head(params, batch, inputs):
        return (jnp.sum(inputs[0] @ params[0] @ params[0]),)

    pieces = [Piece(lambda p, b, i: (p[0] * 1.0,), (0,)), Piece(head, (1,))]
    stages = differentiate(forward_stages(pieces, [x, w], ()))
    for mode in ("fused", "split"):
        _, grads = run_chain(stages, [x, w], (), mode)
        np.testing.assert_allclose(grads[1], [[0.17, 1.05], [-0.57, -1.13]], rtol=1e-6)
        np.testing.assert_allclose(grads[0], [[-0.12, 0.44]], rtol=1e-6)


def test_wrong_number_of_recompute_choices_is_refused():
    pieces, params, batch = dense_chain()
    with pytest.raises(PlanError, match="2 recompute choices for 3 stages"):
        differentiate(forward_stages(pieces, params, batch), None, (True, False))


def test_seed_scales_every_gradient():
    pieces, params, batch = dense_chain()
    stages = differentiate(forward_stages(pieces, params, batch))
    _, once = run_chain(stages, params, batch)
    _, thrice = run_chain(stages, params, batch, seed=3.0)
    for unit, grad in once.items():
        np.testing.assert_allclose(thrice[unit], 3 * grad, rtol=1e-5, atol=1e-7)


def test_frozen_units_get_no_gradient_and_stop_the_backward():
    pieces, params, batch = dense_chain()
    stages = differentiate(forward_stages(pieces, params, batch), frozenset({4, 5}))
    assert [w for s in stages for w in s.backward.writes] == [
        Ref(Role.PARAM_GRAD, 4),
        Ref(Role.PARAM_GRAD, 5),
    ]
    _, grads = run_chain(stages, params, batch)
    assert set(grads) == {4, 5}
