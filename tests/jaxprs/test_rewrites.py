"""Rewrites keep the value of a jaxpr, and give it the form that they promise."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octojax import compat
from octojax.jaxprs.count import is_heavy, operations
from octojax.jaxprs.flat import FlatJaxpr, flatten, rewrite, without_dead
from octojax.jaxprs.fold import fold_integers
from octojax.jaxprs.forward import forward_outputs
from octojax.jaxprs.inline import inline_jits
from octojax.jaxprs.rows import push_rows
from octojax.jaxprs.stacks import split_stacks
from octojax.jaxprs.unroll import unroll_scan

W = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3, 3)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3)), jnp.float32)


def flat_of(fn: Any, *args: Any) -> FlatJaxpr:
    return inline_jits(flatten(compat.trace(fn, *args)[0]))


def run(flat: FlatJaxpr, *args: Any) -> list[Any]:
    invars = [*flat.invars, *flat.constvars]
    jaxpr = compat.new_jaxpr(invars, flat.outvars, flat.eqns)
    return compat.eval_jaxpr(jaxpr, [*args, *flat.constants])


def names(flat: FlatJaxpr) -> Counter[str]:
    return Counter(eqn.primitive.name for eqn in flat.eqns)


def unrolled(flat: FlatJaxpr) -> FlatJaxpr:
    def rule(builder: Any, eqn: Any, args: Any) -> Any:
        return unroll_scan(builder, eqn, args) if eqn.primitive.name == "scan" else None

    return rewrite(flat, rule)


def same(flat: FlatJaxpr, fn: Any, *args: Any) -> None:
    found, wanted = run(flat, *jax.tree.leaves(args)), jax.tree.leaves(fn(*args))
    assert len(found) == len(wanted)
    for x, y in zip(found, wanted):
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-6)


def test_jits_are_inlined_at_any_depth_and_custom_rules_kept() -> None:
    inner = jax.jit(lambda x: jax.nn.relu(x) + 1)

    @jax.jit
    def fn(x: jax.Array) -> jax.Array:
        return inner(inner(x)) * 2

    flat = flat_of(fn, X)
    assert not names(flat).keys() & compat.JIT_NAMES
    assert sum(n for name, n in names(flat).items() if name in compat.CUSTOM_NAMES) == 2
    same(flat, fn, X)


def test_a_jaxpr_inlined_twice_has_its_own_variables() -> None:
    inner = jax.jit(lambda x: jnp.sin(x) * 2)
    flat = flat_of(lambda x: inner(x) + inner(x + 1), X)
    made = [v for eqn in flat.eqns for v in eqn.outvars]
    assert len(set(made)) == len(made)
    same(flat, lambda x: inner(x) + inner(x + 1), X)


def test_dead_equations_go_and_effects_stay() -> None:
    def fn(x: jax.Array) -> jax.Array:
        jnp.cos(x)
        jax.debug.callback(lambda _: None, x)
        return jnp.sin(x)

    flat = without_dead(flatten(compat.trace(fn, X)[0]))
    assert names(flat)["cos"] == 0
    assert names(flat)["sin"] == 1
    assert sum(bool(eqn.effects) for eqn in flat.eqns) == 1


@pytest.mark.parametrize("reverse", [False, True])
def test_scans_come_apart_with_outputs_in_row_order(reverse: bool) -> None:
    def fn(w: jax.Array, x: jax.Array, s: jax.Array) -> Any:
        def body(h: jax.Array, row: Any) -> Any:
            h = jnp.tanh(h @ row["w"]) * row["s"]
            return h, {"mean": jnp.mean(h), "h": h}

        return jax.lax.scan(body, x, {"w": w, "s": s}, reverse=reverse)

    flat = unrolled(flat_of(fn, W, X, jnp.arange(4.0)))
    assert names(flat)["scan"] == 0
    assert names(flat)["dot_general"] == 4
    same(flat, fn, W, X, jnp.arange(4.0))


def test_rows_are_taken_from_the_parameter_itself() -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        stack = (w * 2).astype(jnp.bfloat16)
        for i in range(4):
            x = jnp.tanh(x @ stack[i].astype(jnp.float32))
        return x

    flat = without_dead(push_rows(flat_of(fn, W, X)))
    for eqn in flat.eqns:
        if eqn.primitive.name == "slice":
            assert eqn.invars[0] is flat.invars[0]
        assert all(compat.aval_of(v).shape != (4, 3, 3) for v in eqn.outvars)
    same(flat, fn, W, X)


def test_rows_pass_through_stacked_results() -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        _, hs = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), h), x, w)
        return jax.lax.scan(lambda h, hw: (hw[0] + h @ hw[1], None), x, (hs, w), reverse=True)[0]

    flat = without_dead(push_rows(unrolled(flat_of(fn, W, X))))
    assert names(flat)["concatenate"] == 0
    same(flat, fn, W, X)


@pytest.mark.parametrize(
    "take",
    [
        lambda w: [w[i] for i in range(4)],
        lambda w: list(w),
        lambda w: [w[i] for i in (-1, -2, 1, 0)],
        lambda w: [half[i] for half in jnp.split(w, 2) for i in range(2)],
        lambda w: [jax.lax.index_in_dim(w, i, keepdims=False) for i in range(4)],
        lambda w: [jax.lax.dynamic_index_in_dim(w, i, keepdims=False) for i in range(4)],
        lambda w: [w[2:][0], w[1:][2], w[0], w[1]],
        lambda w: list(jnp.stack([w[i] for i in (3, 2, 1, 0)])),
        lambda w: list(jnp.concatenate([w[2:], w[:2]])),
    ],
    ids=[
        "index",
        "iterate",
        "negative",
        "split",
        "index_in_dim",
        "dynamic",
        "range",
        "stack",
        "concatenate",
    ],
)
def test_stacks_come_apart_however_they_are_indexed(take: Any) -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        for row in take(w):
            x = jnp.tanh(x @ row)
        return x

    flat = push_rows(fold_integers(flat_of(fn, W, X)))
    split, rows = split_stacks(without_dead(flat), flat.invars)
    (stack,) = rows
    assert stack is flat.invars[0]
    assert [i for i, _ in rows[stack]] == [0, 1, 2, 3]
    free = [v for _, v in rows[stack]]
    jaxpr = compat.new_jaxpr([*free, flat.invars[1]], split.outvars, split.eqns)
    found = compat.eval_jaxpr(jaxpr, [*W, X])
    np.testing.assert_allclose(found[0], fn(W, X), rtol=2e-6)
    assert names(split)["slice"] == 0


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: x @ w[0] + jnp.sum(w),  # read whole as well
        lambda w, x: x @ w[0] @ w[2],  # rows that nobody reads
        lambda w, x: x @ w[0:2].reshape(6, 3)[:3],  # two rows at once
    ],
)
def test_stacks_read_in_another_way_stay_whole(fn: Any) -> None:
    flat = without_dead(push_rows(fold_integers(flat_of(fn, W, X))))
    split, rows = split_stacks(flat, flat.invars)
    assert not rows
    same(split, fn, W, X)


def test_a_counted_loop_indexes_with_literals_after_folding() -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 4, lambda i, h: jnp.tanh(h @ w[i]), x)

    flat = without_dead(fold_integers(unrolled(flat_of(fn, W, X))))
    assert names(flat)["dynamic_slice"] == 0
    assert names(flat)["slice"] == 4
    same(flat, fn, W, X)


@pytest.mark.parametrize("index", [-3, -1, 0, 3, 7])
def test_folding_clamps_like_dynamic_slice(index: int) -> None:
    def fn(w: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(w, (jnp.int32(index), 0, 0), (1, 3, 3))

    same(fold_integers(flat_of(fn, W)), fn, W)


def test_outputs_that_pass_through_calls_and_scans_name_the_input() -> None:
    def fn(w: jax.Array, x: jax.Array) -> Any:
        @jax.checkpoint
        def layer(h: jax.Array, c: jax.Array, row: jax.Array) -> Any:
            return h @ row, c, row

        def body(carry: Any, row: jax.Array) -> Any:
            h, c = carry
            h, c, row = layer(h, c, row)
            return (h, c), (row, row + 1)

        (h, c), (rows, more) = jax.lax.scan(body, (x, 2 * x), w)
        return h, c, rows, more

    flat = forward_outputs(flatten(compat.trace(jax.jit(fn), W, X)[0]))
    assert flat.outvars[2] is flat.invars[0]
    assert flat.outvars[3] is not flat.invars[0]
    flat = forward_outputs(flat_of(fn, W, X))
    (scan,) = [eqn for eqn in flat.eqns if eqn.primitive.name == "scan"]
    assert flat.outvars[0] in scan.outvars
    assert flat.outvars[1] not in scan.outvars
    same(flat, fn, W, X)


def test_operations_count_products_loops_and_branches() -> None:
    def count(fn: Any, *args: Any) -> float:
        return sum(map(operations, flat_of(fn, *args).eqns))

    product = 2 * 2 * 3 * 3
    assert count(lambda w, x: x @ w[0], W, X) == product
    looped = count(lambda w, x: jax.lax.scan(lambda h, w: (h @ w, None), x, w), W, X)
    assert looped == 4 * product
    branch = count(
        lambda w, x, p: jax.lax.cond(p, lambda: x @ w[0], lambda: x @ w[0] @ w[1]), W, X, True
    )
    assert 2 * product <= branch <= 2 * product + 4
    image, kernel = jnp.ones((1, 1, 5, 5)), jnp.ones((2, 1, 3, 3))
    assert count(lambda a, b: jax.lax.conv(a, b, (1, 1), "VALID"), image, kernel) == 2 * 2 * 9 * 9


def test_heavy_is_found_inside_calls() -> None:
    def heavy(fn: Any, *args: Any) -> list[bool]:
        return [is_heavy(eqn) for eqn in compat.trace(fn, *args)[0].eqns]

    assert heavy(jax.checkpoint(lambda x: x @ x.T), X) == [True]
    assert heavy(jax.checkpoint(jnp.sin), X) == [False]
    assert heavy(jnp.tanh, X) == [False]
