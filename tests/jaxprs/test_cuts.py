"""The cuts one by one: what they store, where they put work, what they refuse to touch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxpr_as_fun

from octojax.compat import new_jaxpr
from octojax.jaxprs.choose_residuals import choose_residuals
from octojax.jaxprs.dataflow import free_vars, needed_for, reached_from, rename, var_bytes
from octojax.jaxprs.inline import inline_calls
from octojax.jaxprs.operations import contraction_work
from octojax.jaxprs.partition_backward import partition_backward
from octojax.jaxprs.split_loops import split_loops
from octojax.jaxprs.thin_stacks import thin_stacks
from octojax.jaxprs.trim_loops import trim_loops

W, X = jnp.ones((8, 8)), jnp.ones((4, 8))


def names_of(eqns):
    return [e.primitive.name for e in eqns]


def trace(fn, *args):
    return inline_calls(jax.make_jaxpr(fn)(*args)).jaxpr


def test_calls_are_written_out_also_inside_loops_and_branches():
    @jax.jit
    def inner(x):
        return jax.checkpoint(lambda y: jnp.sin(jax.jit(jnp.cos)(y)))(x)

    def fn(x):
        x = jax.lax.scan(lambda c, _: (inner(c), None), x, None, length=2)[0]
        return jax.lax.cond(x[0, 0] > 0, inner, lambda y: y, inner(x))

    closed = jax.make_jaxpr(fn)(X)
    flat = inline_calls(closed)
    text = str(flat)
    assert "jit" not in text
    assert "remat" not in text
    np.testing.assert_allclose(jaxpr_as_fun(flat)(X)[0], fn(X), rtol=1e-6)


def test_a_body_used_twice_binds_its_variables_twice():
    inner = jax.jit(lambda x: jnp.sin(x) + 1)
    closed = inline_calls(jax.make_jaxpr(lambda x: inner(inner(x)))(X))
    bound = [v for e in closed.jaxpr.eqns for v in e.outvars]
    assert len(bound) == len(set(bound)) == 4


def test_captured_arrays_become_literals():
    table = np.arange(8, dtype=np.float32)
    closed = inline_calls(jax.make_jaxpr(jax.jit(lambda x: x + jnp.asarray(table)[None, :]))(X))
    assert not closed.consts
    np.testing.assert_allclose(jaxpr_as_fun(closed)(X)[0], X + table[None])


def test_recomputation_of_a_checkpoint_stays_behind_its_barrier():
    fn = jax.grad(lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)).sum())(x))
    assert "optimization_barrier" in names_of(trace(fn, X).eqns)


def test_dataflow_of_a_chain():
    jaxpr = trace(lambda x, y: (jnp.sin(x) * y, jnp.cos(y)), X, X)
    x, y = jaxpr.invars
    assert free_vars(jaxpr.eqns) == [x, y]
    assert len(needed_for(jaxpr.eqns, jaxpr.outvars[:1])) == 2
    assert jaxpr.outvars[1] not in reached_from(jaxpr.eqns, [x])
    assert var_bytes(x) == 128


def stored_of(fn, *args, at_hand=()):
    jaxpr = trace(fn, *args)
    hand = {jaxpr.invars[i] for i in at_hand}
    stored = choose_residuals(jaxpr.eqns, jaxpr.outvars, hand, [hand])
    back = new_jaxpr(
        [*stored.values, *sorted(hand, key=jaxpr.invars.index)],
        jaxpr.outvars,
        [jaxpr.eqns[at] for at in stored.repeated],
    )
    inputs = new_jaxpr(jaxpr.invars, stored.values, jaxpr.eqns)
    given = jaxpr_as_fun(inputs)(*args)
    again = jaxpr_as_fun(back)(*given, *(args[i] for i in at_hand))
    for one, other in zip(again, jax.tree.leaves(fn(*args)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    return [(v.aval.shape, v.aval.dtype) for v in stored.values]


def test_a_broadcast_is_stored_as_its_source():
    def fn(x):
        row = jnp.exp(x[0])
        return jnp.broadcast_to(row, (4, 8))

    assert stored_of(fn, X) == [((8,), jnp.float32)]


def test_a_wide_cast_is_stored_narrow():
    def fn(x):
        return jnp.exp(x).astype(jnp.bfloat16).astype(jnp.float32)

    assert stored_of(fn, X) == [((4, 8), jnp.bfloat16)]


def test_arithmetic_on_stored_values_is_repeated():
    def fn(x):
        t = jnp.tanh(x)
        return t, 1 - t, (1 - t) * t

    assert len(stored_of(fn, X)) == 1


def test_what_weights_alone_give_is_not_stored():
    def fn(w, x):
        return jnp.exp(w) * 2, jnp.exp(x)

    assert len(stored_of(fn, W, X, at_hand=(0,))) == 1


def test_expensive_values_are_stored_even_if_weights_alone_give_them():
    assert len(stored_of(lambda w: jnp.exp(w @ w), W, at_hand=(0,))) == 1


def test_cut_of_two_dense_layers():
    def backward(dy, x, h, w1, w2):
        dh = (dy @ w2.T) * h
        return dh @ w1.T, x.T @ dh, h.T @ dy

    jaxpr = trace(backward, X, X, X, W, W)
    _, x, _, w1, w2 = jaxpr.invars
    dx, dw1, dw2 = jaxpr.outvars
    cut = partition_backward(jaxpr.eqns, [dx], [dw1, dw2], {x, w1, w2})
    assert cut.second_outputs == (0, 1)
    assert names_of(jaxpr.eqns[at] for at in cut.first).count("dot_general") == 2
    assert names_of(jaxpr.eqns[at] for at in cut.second).count("dot_general") == 2
    assert set(cut.first) | set(cut.second) == set(range(len(jaxpr.eqns)))


def convolved(x, k):
    numbers = ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated(x, k, (1,), "SAME", dimension_numbers=numbers)


def repeated(w, x):
    return jax.lax.scan(lambda c, _: (c @ w, None), x, None, length=5)[0]


@pytest.mark.parametrize(
    ("fn", "args", "work"),
    [
        (lambda a, b: a @ b, (X, W), 2 * 4 * 8 * 8),
        (jnp.matmul, (jnp.ones((3, 4, 8)), jnp.ones((3, 8, 5))), 2 * 3 * 4 * 8 * 5),
        (lambda x, i: jnp.zeros((9, 8)).at[i].add(x), (X, jnp.arange(4)), 9 * 8 + 4 * 8),
        (convolved, (jnp.ones((2, 6, 8)), jnp.ones((3, 8, 5))), 2 * 2 * 6 * 5 * 3 * 8),
        (repeated, (W, X), 5 * 2 * 4 * 8 * 8),
        (lambda a, b: jnp.sin(a), (X, W), 0),
    ],
)
def test_operations_of_contractions(fn, args, work):
    eqns = trace(fn, *args).eqns
    assert sum(map(contraction_work, eqns)) == work


def backward_of(step, *args):
    """Returns the traced gradient of a scanned step in all of `args`, and the arguments."""

    def loss(*args):
        carry = jax.lax.scan(lambda c, x: step(c, x, *args[2:]), args[0], args[1])
        return sum(jnp.sum(v * v) for v in jax.tree.leaves(carry))

    return trace(jax.grad(loss, tuple(range(len(args)))), *args)


def rnn_step(c, x, w, u):
    c = jnp.tanh(c @ w + x @ u)
    return c, c


def test_fission_leaves_no_weight_in_the_carry():
    xs = jnp.ones((6, 4, 8)) * 0.1
    jaxpr = backward_of(rnn_step, X, xs, W * 0.1, W * 0.2)
    dc, dx, dw, du = jaxpr.outvars
    eqns = split_loops(jaxpr.eqns, [dc, dx], [dw, du])
    loops = [e for e in eqns if e.primitive.name == "scan"]
    assert len(loops) == 2  # forward and propagation; the weights became two contractions
    assert not any(v.aval.shape == (8, 8) for v in loops[-1].outvars)
    assert names_of(eqns).count("dot_general") == 2
    split = new_jaxpr(jaxpr.invars, jaxpr.outvars, eqns)
    whole = new_jaxpr(jaxpr.invars, jaxpr.outvars, jaxpr.eqns)
    args = (X, xs, W * 0.1, W * 0.2)
    for a, b in zip(jaxpr_as_fun(split)(*args), jaxpr_as_fun(whole)(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)


def test_rest_that_is_no_plain_sum_stays_a_scan():
    def step(c, x, w, u):
        c = jnp.tanh(c @ (w * x[0, 0]) + x @ u)  # the weight's gradient is scaled per step
        return c, c

    start, xs, weight = jnp.ones((4, 32)), jnp.ones((6, 4, 32)) * 0.1, jnp.ones((32, 32)) * 0.1
    jaxpr = backward_of(step, start, xs, weight, weight)
    dc, _, dw, du = jaxpr.outvars
    eqns = split_loops(trim_loops(jaxpr.eqns, [dc, dw, du]), [dc], [dw, du])
    args = (start, xs, weight, weight)
    split = jaxpr_as_fun(new_jaxpr(jaxpr.invars, (dc, dw, du), eqns))(*args)
    whole = jaxpr_as_fun(new_jaxpr(jaxpr.invars, (dc, dw, du), jaxpr.eqns))(*args)
    for a, b in zip(split, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)
    assert sum(e.primitive.name == "scan" for e in eqns) == 3


def test_stacks_that_follow_from_others_are_not_made_by_the_loop():
    def fn(x, w):
        def step(c, x):
            h = jnp.tanh(c @ w + x)
            return h, (h, h, 1 - h, (1 - h) * x)

        return jax.lax.scan(step, x[0], x)

    args = (jnp.ones((5, 4, 8)) * 0.1, W * 0.1)
    jaxpr = trace(fn, *args)
    eqns, names = thin_stacks(jaxpr.eqns)
    (loop,) = [e for e in eqns if e.primitive.name == "scan"]
    assert len(loop.outvars) == 2  # the carry and one stack
    thin = new_jaxpr(jaxpr.invars, rename(jaxpr.outvars, names), eqns)
    for a, b in zip(jaxpr_as_fun(thin)(*args), jax.tree.leaves(fn(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_unread_carries_stacks_and_branch_outputs_are_not_computed():
    def fn(x, w):
        def step(c, x):
            a, b = c
            return (jnp.sin(a), b @ w), (a, jnp.cos(x))

        def both(v):
            return jnp.sin(v), jnp.cos(v)

        (a, _), _ = jax.lax.scan(step, (x[0], x[0]), x)
        return jax.lax.cond(a[0, 0] > 0, both, lambda v: (v, v @ w), a)[0]

    args = (jnp.ones((5, 4, 8)) * 0.1, W)
    jaxpr = trace(fn, *args)
    eqns = trim_loops(jaxpr.eqns, jaxpr.outvars)
    loop = next(e for e in eqns if e.primitive.name == "scan")
    assert names_of(loop.params["jaxpr"].jaxpr.eqns) == ["sin"]
    assert sum(map(contraction_work, eqns)) == 0
    trimmed = new_jaxpr(jaxpr.invars, jaxpr.outvars, eqns)
    np.testing.assert_allclose(jaxpr_as_fun(trimmed)(*args)[0], fn(*args), rtol=1e-6)


def test_branches_share_the_places_of_what_they_keep():
    def fn(i, x, w1, w2):
        def loss(x, w1, w2):
            y = jax.lax.switch(i, [lambda: jnp.tanh(x @ w1), lambda: jnp.sin(x @ w2)])
            return jnp.sum(y * y)

        return jax.grad(loss, (0, 1, 2))(x, w1, w2)

    jaxpr = trace(fn, 1, X, W, W)
    dx, dw1, dw2 = jaxpr.outvars
    eqns = split_loops(jaxpr.eqns, [dx], [dw1, dw2])
    first, second = [e for e in eqns if e.primitive.name == "cond"][-2:]
    assert [v.aval.shape for v in second.outvars] == [(8, 8), (8, 8)]
    kept = [v for v in second.invars if v in first.outvars]
    assert len(kept) == 1
    for index in (0, 1):
        args = (index, X, W * 0.1, W * 0.2)
        split = jaxpr_as_fun(new_jaxpr(jaxpr.invars, jaxpr.outvars, eqns))(*args)
        for a, b in zip(split, fn(*args), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)


NODES = {
    "dot": lambda a, b: a @ b,
    "mul": jnp.multiply,
    "add": jnp.add,
    "tanh": lambda a, b: jnp.tanh(a),
    "transpose": lambda a, b: a.T,
}


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_any_cut_computes_the_same(data):
    """Random graphs of products, sums and contractions: both parts give all outputs back."""
    count = data.draw(st.integers(3, 12))
    kinds = [data.draw(st.sampled_from(list(NODES))) for _ in range(count)]
    earlier = [st.integers(0, 2 + i) for i in range(count)]
    picks = [data.draw(st.tuples(at, at)) for at in earlier]
    ends = data.draw(st.lists(st.integers(3, 2 + count), min_size=1, max_size=4, unique=True))
    urgent = data.draw(st.integers(0, len(ends)))

    def fn(*values):
        values = list(values)
        for kind, (i, j) in zip(kinds, picks, strict=True):
            a, b = values[i], values[j]
            values.append(NODES[kind](a, b))
        return [values[i] for i in ends]

    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=(8, 8)) * 0.3, jnp.float32) for _ in range(3)]
    jaxpr = trace(fn, *args)
    outs = list(jaxpr.outvars)
    cut = partition_backward(jaxpr.eqns, outs[:urgent], outs[urgent:], {jaxpr.invars[0]})
    late = [outs[urgent:][i] for i in cut.second_outputs]
    second = [jaxpr.eqns[at] for at in cut.second]
    assert set(cut.first).isdisjoint(cut.second)
    made_late = {v for e in second for v in e.outvars}
    assert made_late.isdisjoint(free_vars([jaxpr.eqns[at] for at in cut.first]))
    crossing = free_vars(second, late)
    first = new_jaxpr(jaxpr.invars, crossing, [jaxpr.eqns[at] for at in cut.first])
    kept = jaxpr_as_fun(first)(*args)
    found = jaxpr_as_fun(new_jaxpr(crossing, late, second))(*kept)
    wanted = dict(zip(outs, fn(*args), strict=True))
    for v, value in zip(late, found, strict=True):
        np.testing.assert_allclose(value, wanted[v], rtol=1e-5, atol=1e-6)
