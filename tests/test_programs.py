"""Recipes, microbatches, and how results of microbatches join."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax.mesh import Rank, pipeline_mesh
from octojax.programs import build
from octojax.programs.accumulator import accumulator_dtype, add_term, widened
from octojax.programs.build import Job, compile_all
from octojax.programs.finish import join_results, sum_gradients
from octojax.programs.microbatch import plan_microbatches
from octojax.programs.recipe import (
    Call,
    Layout,
    Recipe,
    arguments,
    function,
    on_devices,
    on_rank,
    stored,
)
from octojax.rows.join import Join


def plan(rows: int, count: int, shards: int = 1, **leaves):
    every = {"x": jax.ShapeDtypeStruct((rows, 2), jnp.float32), **leaves}
    return plan_microbatches(list(every.values()), list(every), count, shards)


@given(rows=st.integers(1, 40), count=st.integers(1, 40), shards=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_sizes_cover_the_rows_and_differ_by_one_share(rows, count, shards):
    if rows % shards or rows < count * shards:
        with pytest.raises(ValueError, match="cannot form"):
            plan(rows, count, shards)
        return
    found = plan(rows, count, shards)
    assert sum(found.sizes) == rows
    assert max(found.sizes) - min(found.sizes) in (0, shards)
    assert all(size % shards == 0 for size in found.sizes)
    assert sum(found.shares) == pytest.approx(1)


def test_eight_rows_into_three():
    found = plan(8, 3)
    assert found.sizes == (3, 3, 2)
    assert [a.shape for a in found.shapes(2)] == [(2, 2)]


def test_the_nearest_number_is_named():
    with pytest.raises(ValueError, match="nearest possible number of microbatches is 4"):
        plan(8, 5, 2)
    with pytest.raises(ValueError, match="Give a batch of 6 rows"):
        plan(7, 2, 3)


def test_scalars_are_shared_and_keys_folded():
    key = jax.random.key(1)
    found = plan(4, 2, key=key, scale=2.0)
    x = jnp.arange(8.0).reshape(4, 2)
    pieces = found.split({0: x, 1: key}, [(0, 1), (1, 0), (1, 1)], first=0, start=0, size=2)
    np.testing.assert_array_equal(pieces[0], x[2:])
    for m in (0, 1):
        wanted = jax.random.key_data(jax.random.fold_in(key, m))
        np.testing.assert_array_equal(pieces[1 + m], wanted)
    assert found.piece(2, 2.0, 1) == 2.0


def test_a_batch_without_rows_is_shared():
    found = plan_microbatches([jax.random.key(0)], ["key"], 3)
    assert found.sizes == (1, 1, 1)


def test_a_raw_key_is_not_taken_for_two_rows():
    with pytest.raises(ValueError, match=r"key is uint32\[2\]: a raw PRNG key, or two rows"):
        plan_microbatches([jnp.ones((2, 3)), jax.random.PRNGKey(0)], ["x", "key"], 2)


def test_a_batch_that_differs_is_named():
    with pytest.raises(ValueError, match=r"x is int32\[4, 2\], compiled for float32\[4, 2\]"):
        plan(4, 2).check([jnp.zeros((4, 2), jnp.int32)])
    plan(4, 2).check([np.zeros((4, 2), np.float64)])  # as JAX takes it


def join(pieces, batch, rule, axis=0, outer=1, stacked=False):
    return join_results(pieces, batch, Join(rule, axis, outer), stacked=stacked)


def test_results_join_by_their_rules():
    batch = plan(8, 3)  # 3, 3, 2 rows
    pieces = [jnp.float32(m) for m in (1, 2, 4)]
    assert float(join(pieces, batch, "mean")) == pytest.approx((3 * 1 + 3 * 2 + 2 * 4) / 8)
    values = {"sum": 7, "max": 4, "min": 1, "first": 1, "last": 4}
    assert {rule: float(join(pieces, batch, rule)) for rule in values} == values
    rows = [jnp.full((size,), m) for m, size in enumerate(batch.sizes)]
    np.testing.assert_array_equal(join(rows, batch, "rows"), [0, 0, 0, 1, 1, 1, 2, 2])
    flags = [jnp.bool_(v) for v in (True, False, True)]
    assert not join(flags, batch, "all")
    assert join(flags, batch, "any")


@pytest.mark.parametrize(("narrow", "wide"), [("int8", "int32"), ("uint8", "uint32")])
def test_sums_of_narrow_integers_do_not_wrap(narrow, wide):
    count = join([jnp.asarray(100, narrow)] * 3, plan(8, 3), "sum")
    assert (int(count), count.dtype) == (300, wide)


def test_rows_join_along_their_axis_and_in_their_blocks():
    whole = np.arange(48).reshape(2, 8, 3)
    pieces = [whole[:, start:stop] for start, stop in ((0, 3), (3, 6), (6, 8))]
    np.testing.assert_array_equal(join(pieces, plan(8, 3), "rows", axis=1), whole)
    views = [x.reshape(-1, 3) for x in pieces]  # two views of the rows, one after the other
    np.testing.assert_array_equal(join(views, plan(8, 3), "rows", outer=2), whole.reshape(16, 3))


def test_results_of_data_shards_join_first():
    batch = plan(8, 2, 2)
    pieces = [jnp.float32([1, 3]), jnp.float32([5, 7])]
    assert float(join(pieces, batch, "mean", stacked=True)) == 4
    assert float(join(pieces, batch, "sum", stacked=True)) == 16
    assert float(join(pieces, batch, "last", stacked=True)) == 7
    rows = [jnp.arange(4).reshape(2, 2), jnp.arange(4, 8).reshape(2, 2)]
    np.testing.assert_array_equal(join(rows, batch, "rows", stacked=True), range(8))


def test_leaves_that_are_said_to_be_shared_have_no_rows():
    table = jax.ShapeDtypeStruct((5, 2), jnp.float32)
    x = jax.ShapeDtypeStruct((8, 2), jnp.float32)
    cut = plan_microbatches([x, table], ["x", "table"], 2, shared=[1])
    assert [a.shape for a in cut.shapes(0)] == [(4, 2), (5, 2)]
    assert cut.piece(1, "all of it", 1) == "all of it"


def test_gradients_of_half_types_are_summed_in_float32():
    assert accumulator_dtype(jnp.bfloat16) == jnp.float32
    assert accumulator_dtype(jnp.float64) == jnp.float64
    sums = [jnp.float32([1.0]), jnp.float32([2.0**-9])]
    assert sum_gradients(sums, jnp.bfloat16, None).dtype == jnp.bfloat16


PROGRAMS = [
    jax.make_jaxpr(lambda w, x: (w * x, x + 1))(1.0, 1.0),
    jax.make_jaxpr(lambda y, w: (y * w, y * y))(1.0, 1.0),
]
RECIPE = Recipe(
    calls=(Call(0, (0, 1), (3, -1), (-1, -1)), Call(1, (3, 0), (4, 5), (-1, 2))),
    layouts=(Layout.WHOLE, Layout.STACKED, Layout.STACKED),
    outputs=(4, 5),
    donated=(2,),
)


def test_calls_are_chained_and_sums_added_to():
    run = function(RECIPE, PROGRAMS)
    # y = 2 * 3; the result y * w, and y * y on top of the sum so far.
    assert [float(v) for v in run(2.0, 3.0, jnp.float32(10))] == [12.0, 46.0]
    assert [a.shape for a in arguments(RECIPE, PROGRAMS)] == [(), (), ()]


def test_a_rank_of_two_devices_keeps_a_value_per_data_shard():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("pipe", "data"))
    rank = pipeline_mesh(mesh).ranks[0]
    run, placed = on_rank(RECIPE, PROGRAMS, rank)
    assert [p.shape for p in placed] == [(), (2,), (2,)]
    (compiled,) = compile_all([Job("recipe", run, placed, RECIPE.donated)], progress=False)
    values = [
        jax.device_put(jnp.asarray(v, jnp.float32), p.sharding)
        for v, p in zip((2.0, [3.0, 5.0], [10.0, 20.0]), placed, strict=True)
    ]
    found = compiled(*values)
    np.testing.assert_allclose(found[0], [12, 20])
    np.testing.assert_allclose(found[1], [46, 120])
    assert values[2].is_deleted()  # the sum was given away


def test_keys_are_stored_as_integers():
    key = jax.random.key(0)
    aval = stored(jax.typeof(key))
    assert (aval.shape, aval.dtype) == ((2,), jnp.uint32)
    jaxpr = jax.make_jaxpr(lambda k: (jax.random.fold_in(k, 1), jax.random.uniform(k)))(key)
    run = function(Recipe((Call(0, (0,), (1, 2), (-1, -1)),), (Layout.WHOLE,), (1, 2), ()), [jaxpr])
    folded, number = run(jax.random.key_data(key))
    np.testing.assert_array_equal(folded, jax.random.key_data(jax.random.fold_in(key, 1)))
    assert float(number) == float(jax.random.uniform(key))


def test_layouts_on_devices():
    rank: Rank = pipeline_mesh(num_ranks=1).ranks[0]
    aval = jax.ShapeDtypeStruct((3,), jnp.float32)
    assert {on_devices(aval, layout, rank).shape for layout in Layout} == {(3,)}


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        ("float8_e4m3fn", "float32"),
        ("float16", "float32"),
        ("float32", "float32"),
        ("complex64", "complex64"),
        ("bool", "int32"),
        ("int8", "int32"),
        ("uint16", "uint32"),
        ("int32", "int32"),
        ("uint32", "uint32"),
    ],
)
def test_terms_are_added_up_in_a_type_that_holds_their_sum(dtype, wide):
    assert accumulator_dtype(jnp.dtype(dtype)) == jnp.dtype(wide)
    total = add_term(widened(jnp.ones(3, dtype)), jnp.ones(3, dtype))
    assert total.dtype == jnp.dtype(wide)
    np.testing.assert_array_equal(total.astype(jnp.complex64), 2)


def test_compilation_says_how_far_it_is_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr(build, "EVERY_S", 0.0)
    with build._bar(3, True) as advance:
        for name in ("F of stage 0", "B of stage 0", "F of stage 1"):
            advance(name)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "compiling: 1 of 3 programs in 0 s (F of stage 0)",
        "compiling: 2 of 3 programs in 0 s (B of stage 0)",
    ]
    with build._bar(3, False) as advance:
        advance("F of stage 0")
    assert capsys.readouterr().err == ""
