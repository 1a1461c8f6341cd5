"""Stages that compute the same share one derivation, under their own names."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from octojax.ir.action import Kind
from octojax.stages import Ref, Role, differentiate
from octojax.stages.alike import likeness, renamed
from tests.stages.chain import Piece, assert_gradients, forward_stages


def block(params, batch, inputs):
    h, skip = inputs
    return jnp.tanh(h @ params[0] + params[1]), skip + jnp.sin(h) * batch[1][:, None]


def pieces(depth: int, crossed: bool = False) -> list[Piece]:
    """Equal blocks; `crossed`: of every second one the order of the parameters' units is other."""
    first = Piece(lambda p, b, i: (b[0] @ p[0], b[0]), (0,))
    units = [(2 * k + 1, 2 * k + 2) for k in range(depth)]
    if crossed:
        units = [pair[::-1] if k % 2 else pair for k, pair in enumerate(units)]
    last = Piece(lambda p, b, i: (jnp.mean((i[0] * i[1]) ** 2),), ())
    return [first, *(Piece(block, some) for some in units), last]


def values(chain: list[Piece]):
    count = 2 * len(chain) - 3
    keys = jax.random.split(jax.random.key(0), count + 1)
    rows = {piece.units[1] for piece in chain[1:-1]}
    params = [jax.random.normal(keys[u], (1, 4) if u in rows else (4, 4)) for u in range(count)]
    return params, (jax.random.normal(keys[-1], (3, 4)), jnp.arange(3.0))


@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_equal_stages_are_their_own(recompute, crossed):
    chain = pieces(4, crossed)
    params, batch = values(chain)
    stages = differentiate(forward_stages(chain, params, batch), None, (recompute,) * 6)
    assert stages[2].forward.jaxpr is stages[3].forward.jaxpr
    assert stages[2].weight_grad.jaxpr is stages[3].weight_grad.jaxpr
    assert [s.index for s in stages] == list(range(6))
    assert_gradients(stages, chain, params, batch)


def test_a_frozen_unit_or_another_choice_of_recompute_is_another_form():
    chain = pieces(3)
    params, batch = values(chain)
    forwards = forward_stages(chain, params, batch)
    frozen = differentiate(forwards, frozenset(range(7)) - {3})
    assert Ref(Role.PARAM_GRAD, 3) not in frozen[2].backward.writes
    assert Ref(Role.PARAM_GRAD, 5) in frozen[3].backward.writes
    mixed = differentiate(forwards, None, (False, True, False, True, False))
    assert [s.recompute is not None for s in mixed] == [False, True, False, True, False]


def test_names_change_and_places_stay():
    chain = pieces(2)
    params, batch = values(chain)
    one, other = forward_stages(chain, params, batch)[1:3]
    assert likeness(one.forward) == likeness(other.forward)
    grads = [Ref(Role.PARAM_GRAD, 1)], [Ref(Role.PARAM_GRAD, 3)]
    assert likeness(one.forward, grads[0]) == likeness(other.forward, grads[1])
    assert likeness(one.forward, grads[0]) != likeness(other.forward, [Ref(Role.PARAM_GRAD, 4)])
    stage = differentiate(forward_stages(chain, params, batch))[1]
    moved = renamed(stage, one.forward, other)
    assert moved.index == 2
    assert [r.index for r in moved.forward.reads if r.role is Role.PARAM] == [3, 4]
    assert {r.index for r in moved.backward.writes if r.role is Role.PARAM_GRAD} == {3, 4}
    assert moved.backward.kind is Kind.BACKWARD


def test_rules_that_differ_in_a_global_alone_are_told_apart():
    def scaled(rule: Callable) -> Callable:
        @jax.custom_vjp
        def identity(x):
            return x

        identity.defvjp(lambda x: (x, None), rule)
        return lambda params, batch, inputs: (identity(inputs[0] @ params[0]),)

    chain = [
        Piece(lambda p, b, i: (b[0] @ p[0],), (0,)),
        Piece(scaled(lambda _, g: (jnp.sin(g),)), (1,)),
        Piece(scaled(lambda _, g: (jnp.cos(g),)), (2,)),
        Piece(scaled(lambda _, g: (jnp.sin(g),)), (3,)),
        Piece(lambda p, b, i: (jnp.mean(i[0] ** 2),), ()),
    ]
    params = list(jax.random.normal(jax.random.key(0), (4, 4, 4)))
    batch = (jax.random.normal(jax.random.key(1), (3, 4)),)
    assert_gradients(differentiate(forward_stages(chain, params, batch)), chain, params, batch)
