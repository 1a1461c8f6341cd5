"""The cost model: contractions by the longer of operations and bytes, fused elementwise work."""

import math

import jax
import jax.numpy as jnp
import pytest

from octojax.costs import Device, seconds
from octojax.errors import ProfileError

DEVICE = Device(flops_per_s=1e12, memory_bytes_per_s=1e9)


def cost(function, *shapes) -> float:
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    return seconds(jax.make_jaxpr(function)(*arguments), DEVICE)


def test_matmul_is_bound_by_the_longer_of_operations_and_bytes() -> None:
    narrow = cost(lambda a, b: a @ b, (4, 8), (8, 4))
    assert math.isclose(narrow, 4 * (32 + 32 + 16) / 1e9)
    slow = Device(flops_per_s=1e3, memory_bytes_per_s=1e9)
    closed = jax.make_jaxpr(lambda a, b: a @ b)(jnp.ones((4, 8)), jnp.ones((8, 4)))
    assert math.isclose(seconds(closed, slow), 2 * 4 * 8 * 4 / 1e3)


def test_elementwise_work_is_read_once_and_written_once() -> None:
    one = cost(lambda a: jnp.tanh(a), (100,))
    many = cost(lambda a: jnp.tanh(jnp.sin(a) * a) + 2 * a, (100,))
    assert one == many == 2 * 400 / 1e9


def test_elementwise_work_behind_a_contraction_costs_its_border() -> None:
    both = cost(lambda a, b: jnp.tanh(a @ b), (4, 8), (8, 4))
    assert math.isclose(both, (4 * (32 + 32 + 16) + 2 * 4 * 16) / 1e9)


def test_a_scan_takes_its_length_times_its_body() -> None:
    def scanned(a, ws):
        return jax.lax.scan(lambda h, w: (h @ w, None), a, ws)[0]

    once = cost(lambda a, w: a @ w, (8, 8), (8, 8))
    assert math.isclose(cost(scanned, (8, 8), (5, 8, 8)), 5 * once)


def test_a_cond_takes_its_dearest_branch_and_calls_are_looked_into() -> None:
    @jax.jit
    def inner(a, b):
        return a @ b

    def branches(a, b):
        return jax.lax.cond(a[0, 0] > 0, inner, lambda a, b: a, a, b)

    plain = cost(lambda a, b: a @ b, (8, 8), (8, 8))
    assert cost(branches, (8, 8), (8, 8)) >= plain


def test_rates_must_be_positive() -> None:
    with pytest.raises(ProfileError, match="flops_per_s > 0, found 0"):
        Device(0, 1)
