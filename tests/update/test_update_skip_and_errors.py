"""What a distributed update must also do: skip as one, refuse, exchange little, place well."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from octojax.errors import PlanError
from octojax.executor.update import Update
from octojax.update import Places, Role, UpdatePlan, build_update

FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Programs that run a few times on small arrays: compile time is all that counts."""


def on_devices(num_ranks: int) -> Places:
    return Places(tuple(SingleDeviceSharding(d) for d in jax.devices()[:num_ranks]))


def put(tree: Any, plan: UpdatePlan, where: Places) -> list[jax.Array]:
    return [
        jax.device_put(np.asarray(leaf), where.of_param(plan, i))
        for i, leaf in enumerate(jax.tree.leaves(tree))
    ]


def two_layers() -> dict[str, Any]:
    return {"a": {"w": jnp.linspace(-1.0, 1.0, 1200).reshape(30, 40)}, "b": jnp.ones((40, 50))}


def bits(leaves: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(leaves)]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("leaf", [0, 1])
def test_non_finite_gradient_on_one_rank_skips_the_update_everywhere(leaf: int, bad: float) -> None:
    optimizer = optax.apply_if_finite(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), max_consecutive_errors=2
    )
    params = two_layers()
    plan = build_update(optimizer, params, (0, 1), 2)
    where = on_devices(2)
    update = Update(plan, where, compiler_options=FAST)
    leaves: Any = put(params, plan, where)
    state = update.init(leaves)
    grads = [jnp.ones((30, 40)), jnp.ones((40, 50))]
    leaves, state, *_ = update.apply(leaves, put(grads, plan, where), state)
    before, inner = bits(leaves), bits(update.gather(state).inner_state)

    grads[leaf] = grads[leaf].at[3, 5].set(bad)
    leaves, state, scalars, _ = update.apply(leaves, put(grads, plan, where), state)
    assert bits(leaves) == before
    assert bits(update.gather(state).inner_state) == inner
    assert not np.isfinite(scalars["grad_norm"])
    for rank in range(2):
        held = dict(zip(plan.states_on(rank), state[rank] or (), strict=True))
        counters = {plan.state_names[k]: np.asarray(x) for k, x in held.items()}
        assert counters[".notfinite_count"] == 1
        assert counters[".total_notfinite"] == 1
        assert not counters[".last_finite"]

    leaves, state, *_ = update.apply(
        leaves, put([jnp.ones(x.shape) for x in grads], plan, where), state
    )
    assert bits(leaves) != before
    assert update.gather(state).notfinite_count == 0
    assert update.gather(state).total_notfinite == 1


def test_flags_and_norm_travel_in_one_exchange() -> None:
    optimizer = optax.apply_if_finite(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), 2
    )
    plan = build_update(optimizer, two_layers(), (0, 1), 2)
    assert len(plan.update.phases) == 2
    exchange = plan.update.phases[0].exchange
    assert exchange is not None
    assert exchange.width == 1 + 4  # a flag and a partial norm, of which the metric is made too
    assert plan.update.phases[1].exchange is None


def test_a_norm_over_many_leaves_of_each_rank_takes_one_exchange() -> None:
    params = [jnp.ones((40, 30))] * 20
    optimizer = optax.apply_if_finite(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), 2
    )
    plan = build_update(optimizer, params, [i // 7 for i in range(20)], 3)
    assert len(plan.update.phases) == 2
    assert plan.update.final_phase == 1


def test_update_without_coupling_ends_in_one_phase_and_joins_the_metric_after() -> None:
    plan = build_update(optax.adam(1e-2), two_layers(), (0, 1), 2)
    assert plan.update.final_phase == 0
    roles = {end.role for p in plan.update.phases[1].programs if p for end in p.writes}
    assert roles == {Role.SCALAR}
    alone = build_update(optax.adam(1e-2), two_layers(), (0, 1), 2, grad_norm=False)
    assert len(alone.update.phases) == 1
    assert alone.scalars == ()


def test_moments_live_with_their_parameter_and_counters_everywhere() -> None:
    plan = build_update(optax.adamw(1e-2), two_layers(), (1, 0), 2)
    owner = dict(zip(plan.state_names, plan.state_layouts, strict=True))
    assert owner == {
        "[0].count": None,
        "[0].mu['a']['w']": 1,
        "[0].mu['b']": 0,
        "[0].nu['a']['w']": 1,
        "[0].nu['b']": 0,
    }
    assert plan.params_on(0) == (1,)
    assert plan.states_on(0) == (0, 2, 4)


def test_no_program_touches_large_values_of_another_rank() -> None:
    plan = build_update(optax.lamb(1e-2), two_layers(), (0, 1), 2)
    for phase in plan.update.phases:
        for program in filter(None, phase.programs):
            for end in program.reads:
                if end.role in (Role.PARAM, Role.GRAD):
                    assert plan.owners[end.index] == program.rank


def test_transformation_that_mixes_large_leaves_is_refused_by_name() -> None:
    flat = optax.flatten(optax.adam(1e-2))
    with pytest.raises(PlanError) as error:
        build_update(flat, two_layers(), (0, 1), 2)
    message = str(error.value)
    assert "cannot be distributed: operation" in message
    assert "['a']['w']" in message
    assert "rank 1 (from" in message
    assert "['b']" in message
    assert build_update(flat, two_layers(), (1, 1), 2).owners == (1, 1)


@pytest.mark.parametrize(
    ("owners", "match"),
    [((0,), "1 owners for 2 parameter leaves"), ((0, 2), "leaf 1 on rank 2, but ranks are 0 to 1")],
)
def test_owners_that_do_not_fit_are_refused(owners: tuple[int, ...], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        build_update(optax.sgd(0.1), two_layers(), owners, 2)


def test_extra_arguments_reach_the_optimizer() -> None:
    optimizer = optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=0)
    )
    params = two_layers()
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    plan = build_update(optimizer, params, (0, 1), 2, extra={"value": loss})
    where = on_devices(2)
    update = Update(plan, where, compiler_options=FAST)
    leaves: Any = put(params, plan, where)
    state = update.init(leaves)
    expected, expected_state = params, optimizer.init(params)
    grads = jax.tree.map(jnp.ones_like, params)
    for _ in range(4):
        extra = {r: {"value": jax.device_put(jnp.float32(1), where.ranks[r])} for r in range(2)}
        leaves, state, *_ = update.apply(leaves, put(grads, plan, where), state, extra)
        updates, expected_state = optimizer.update(
            grads, expected_state, expected, value=jnp.float32(1)
        )
        expected = optax.apply_updates(expected, updates)
    for got, want in zip(leaves, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-8)
    assert float(update.gather(state)[-1].scale) < 1


def test_integer_leaves_stay_and_wide_gradients_are_cast() -> None:
    params = {"n": jnp.arange(3), "w": jnp.ones((4, 4), jnp.bfloat16)}
    plan = build_update(optax.adam(0.1), params, (0, 1), 2, grad_dtypes=(jnp.int32, jnp.float32))
    where = on_devices(2)
    update = Update(plan, where, compiler_options=FAST)
    leaves: Any = put(params, plan, where)
    grads = [jnp.zeros(3, jnp.int32), jnp.full((4, 4), 0.3, jnp.float32)]
    leaves, *_ = update.apply(leaves, put(grads, plan, where), update.init(leaves))
    updates, _ = optax.adam(0.1).update(
        {"w": jnp.full((4, 4), 0.3, jnp.bfloat16)}, optax.adam(0.1).init({"w": params["w"]})
    )
    np.testing.assert_array_equal(leaves[0], np.arange(3))
    assert leaves[1].dtype == jnp.bfloat16
    expected = params["w"] + updates["w"]
    np.testing.assert_allclose(
        np.asarray(leaves[1], np.float32), np.asarray(expected, np.float32), rtol=1e-2
    )


def test_rank_of_several_devices_keeps_the_sharding_of_its_parameters() -> None:
    devices = jax.devices()
    meshes = [Mesh(np.array(devices[:2]), ("data",)), Mesh(np.array(devices[2:4]), ("data",))]
    ranks = tuple(NamedSharding(mesh, PartitionSpec()) for mesh in meshes)
    split = tuple(NamedSharding(mesh, PartitionSpec("data")) for mesh in meshes)
    where = Places(ranks, split)
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    params = two_layers()
    plan = build_update(optimizer, params, (0, 1), 2)
    update = Update(plan, where, compiler_options=FAST)
    leaves: Any = put(params, plan, where)
    grads = jax.tree.map(lambda x: jnp.cos(3 * x), params)
    leaves, state, scalars, _ = update.apply(leaves, put(grads, plan, where), update.init(leaves))
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    for got, want in zip(
        leaves, jax.tree.leaves(optax.apply_updates(params, updates)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-8)
    assert leaves[0].sharding == split[0]
    assert {x.sharding.spec for x in state[1] or () if x.ndim} == {PartitionSpec("data")}
    np.testing.assert_allclose(scalars["grad_norm"], optax.tree.norm(grads), rtol=1e-6)


def test_state_survives_gather_and_scatter() -> None:
    optimizer = optax.inject_hyperparams(optax.adamw)(learning_rate=0.1)
    params = two_layers()
    where = on_devices(2)
    plan, other = (build_update(optimizer, params, owners, 2) for owners in ((0, 1), (1, 0)))
    update, moved = Update(plan, where, compiler_options=FAST), Update(other, where)
    leaves: Any = put(params, plan, where)
    state = update.init(leaves)
    grads = put(jax.tree.map(jnp.ones_like, params), plan, where)
    _, state, *_ = update.apply(leaves, grads, state)
    tree = update.gather(state)
    again = moved.scatter(tree)
    assert bits(moved.gather(again)) == bits(tree)
    assert [x.devices() for x in again[0] or ()] == [{jax.devices()[0]}] * len(again[0] or ())
    with pytest.raises(ValueError, match=r"mu\['b'\]: float32\[2\] instead of float32\[40, 50\]"):
        moved.scatter(
            jax.tree_util.tree_map_with_path(
                lambda path, x: jnp.ones(2) if "mu['b']" in jax.tree_util.keystr(path) else x, tree
            )
        )
    with pytest.raises(ValueError, match="structure"):
        moved.scatter({"other": 1})


shapes = st.lists(st.sampled_from([(), (3,), (40, 30), (5, 7), (2, 3, 4)]), min_size=1, max_size=6)


def check_random_tree(data: st.DataObject, shapes: list[tuple[int, ...]], num_ranks: int) -> None:
    rank = st.integers(0, num_ranks - 1)
    owners = data.draw(st.lists(rank, min_size=len(shapes), max_size=len(shapes)))
    generator = np.random.default_rng(len(shapes))
    params = [jnp.asarray(generator.normal(size=s), jnp.float32) for s in shapes]
    grads = [jnp.asarray(generator.normal(size=s), jnp.float32) for s in shapes]
    optimizer = optax.apply_if_finite(
        optax.chain(optax.clip_by_global_norm(0.5), optax.lamb(1e-2)), 3
    )
    plan = build_update(optimizer, params, owners, num_ranks)
    where = on_devices(num_ranks)
    update = Update(plan, where, compiler_options=FAST)
    leaves: Any = put(params, plan, where)
    state = update.init(leaves)
    expected, expected_state = params, optimizer.init(params)
    step = jax.jit(optimizer.update)
    for _ in range(2):
        leaves, state, *_ = update.apply(leaves, put(grads, plan, where), state)
        updates, expected_state = step(grads, expected_state, expected)
        expected = optax.apply_updates(expected, updates)
    for got, want in zip(
        jax.tree.leaves((list(leaves), update.gather(state))),
        jax.tree.leaves((expected, expected_state)),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-7)


@settings(deadline=None, max_examples=4, derandomize=True)
@given(data=st.data(), shapes=shapes, num_ranks=st.integers(1, 3))
def test_any_tree_on_any_ranks_equals_plain_optax(
    data: st.DataObject, shapes: list[tuple[int, ...]], num_ranks: int
) -> None:
    check_random_tree(data, shapes, num_ranks)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(data=st.data(), shapes=shapes, num_ranks=st.integers(1, 4))
def test_many_random_trees_equal_plain_optax(
    data: st.DataObject, shapes: list[tuple[int, ...]], num_ranks: int
) -> None:
    check_random_tree(data, shapes, num_ranks)


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 6))
def test_every_rank_gets_what_it_reads_in_few_messages(ranks: int) -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    plan = build_update(optimizer, [jnp.ones((2, 3))] * ranks, list(range(ranks)), ranks)
    first, last = plan.update.messages
    assert last == ()
    assert len(first) == (2 if ranks == 2 else 2 * (ranks - 1))
    known = {rank: {plan.update.gathered(0, rank)} for rank in range(ranks)}
    for message in first:
        own = plan.update.gathered(0, message.source)
        sent = {own if end.role is Role.PACKED else end for end in message.sent}
        assert sent <= known[message.source]
        assert sent == set(message.copies)
        known[message.target] |= sent
    for rank in range(ranks):
        reads = {plan.update.gathered(0, s) for s in plan.update.sources(0, rank)}
        assert reads <= known[rank]


def test_only_ranks_that_want_the_norm_wait_for_it() -> None:
    plan = build_update(optax.adam(1e-2), two_layers(), (0, 1), 2)
    alone = plan.update.with_scalars_on([0])
    assert [len(messages) for messages in plan.update.messages] == [2, 0]
    assert alone.outline == (((0, 1), ((1, 0),)), ((0,), ()))
