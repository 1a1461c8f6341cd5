"""What a rank gets before its first action, however many microbatches there are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from octojax.api.options import options_of
from octojax.api.pipelined import PipelinedLoss
from octojax.executor.prepare import MOST_PIECES, group_microbatches
from octojax.executor.values import Place, Value
from octojax.programs.microbatch import plan_microbatches
from tests.pipelines import FAST, case_of, expected, pipe, relative_error


def values(place: Place, wanted: dict[int, list[int]]) -> list[Value]:
    found = [Value(place, -1, m, leaf) for leaf, some in wanted.items() for m in some]
    return sorted(found)


@given(
    rows=st.integers(1, 400),
    count=st.integers(1, 200),
    leaves=st.integers(0, 40),
    counters=st.integers(0, 2),
)
@settings(max_examples=60, deadline=None)
def test_groups_make_every_piece_once_and_in_order(rows, count, leaves, counters):
    count = min(rows, count)
    sizes = [rows // count + (m < rows % count) for m in range(count)]
    wanted = {leaf: range(leaf % 2, count, 1 + leaf % 2) for leaf in range(leaves)}
    pieces = values(Place.BATCH, wanted)
    counted = values(Place.STATE, {leaf: list(range(count)) for leaf in range(counters)})
    groups = group_microbatches(sizes, pieces, counted, counters)
    assert sum(g.form.clears for g in groups) == 1
    found = [(k + g.first, leaf) for g in groups for leaf, k in g.form.pieces]
    assert found == [(v.microbatch, v.index) for v in pieces]
    found = [(k + g.first, leaf) for g in groups for leaf, k in g.form.counted]
    assert found == [(v.microbatch, v.index) for v in counted]
    if pieces or counted:
        assert sum(g.form.count for g in groups) == count
    for group in groups:
        assert {sizes[group.first + k] for _, k in group.form.pieces} <= {group.form.size}
        if group.form.count > 1:
            assert len(group.form.pieces) + len(group.form.counted) <= MOST_PIECES


@pytest.mark.parametrize("count", [1, 16, 64, 1024, 4096])
def test_the_number_of_programs_does_not_grow_with_the_microbatches(count):
    pieces = values(Place.BATCH, {0: list(range(count)), 1: list(range(count))})
    for uneven in (0, 1):
        sizes = [3] * (count // 2) + [3 - uneven] * (count - count // 2)
        forms = {g.form for g in group_microbatches(sizes, pieces, [], 0)}
        assert len(forms) <= 3 + 2 * uneven
        assert all(len(f.pieces) <= MOST_PIECES for f in forms)


@pytest.mark.parametrize("shards", [1, 2])
def test_pieces_of_rows_and_keys_are_those_of_each_microbatch(shards):
    key, keys = jax.random.key(1), jax.random.split(jax.random.key(2), 20)
    x = jnp.arange(40.0).reshape(20, 2)
    batch = plan_microbatches([x, key, keys], ["x", "key", "keys"], 4 if shards == 1 else 5, shards)
    wanted = [(leaf, k) for k in (0, 1) for leaf in (0, 1, 2)]
    size = batch.sizes[2]
    cut = jax.jit(lambda leaves, at: batch.split(leaves, wanted, at[0], at[1], size))
    found = cut({0: x, 1: key, 2: keys}, jnp.int32([2, batch.bounds[2]]))
    for (leaf, k), piece in zip(wanted, found, strict=True):
        whole = (x, key, keys)[leaf]
        if leaf == 1 and shards > 1:
            parts = [batch.piece(leaf, whole, 2 + k, shard) for shard in range(shards)]
            np.testing.assert_array_equal(piece, jax.random.key_data(jnp.stack(parts)))
            continue
        plain = batch.piece(leaf, whole, 2 + k)
        np.testing.assert_array_equal(piece, jax.random.key_data(plain) if leaf else plain)


MANY = [
    ("dropout-key", 21, 20, 1),  # keys folded per microbatch, uneven sizes
    ("dropout-rngs", 20, 20, 1),  # counters advance once per microbatch
    ("toy", 76, 38, 2),  # a data axis
]


@pytest.mark.parametrize(("name", "rows", "microbatches", "shards"), MANY)
def test_many_microbatches_are_exact(name, rows, microbatches, shards):
    case = case_of(name)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("pipe", "data"))
    chosen = options_of(
        case.model, microbatches=microbatches, progress=False, compiler_options=FAST
    )
    pure = case.pure()
    loss = PipelinedLoss(pure, case.batch(rows), chosen, mesh if shards > 1 else pipe(2))
    held = loss.place(loss.source(pure.params, pure.state))
    results, value, _ = loss.run(loss.trainer, held, case.batch(rows))
    loss.trainer.engine.close()
    wanted, gradients = expected(name, microbatches, rows)
    assert float(value) == pytest.approx(float(wanted), rel=1e-5)
    assert relative_error(loss.tree(loss.filled(results)), gradients) <= 1e-5
