"""Stacked leaves whose rows lie on several ranks: the optimizer sees them whole, as plain optax."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, SingleDeviceSharding

from octojax.errors import PlanError
from octojax.executor.permute import PairPermute
from octojax.executor.routine import Crew
from octojax.executor.run import RankThreads
from octojax.executor.update import Update, rows_of, values_of
from octojax.mesh import PipelineMesh
from octojax.update import Places, UpdatePlan, build_update, gather_state
from octojax.update.evaluate import evaluate
from octojax.update.plan import End, Piece, Role

FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
OWNERS = (1, (0, 1, 1, 0), (0, 0, 1, 1), (0, 0, 1, 1))
SHAPES = {"head": (36, 36), "scan": {"b": (4, 8), "scale": (4,), "w": (4, 20, 28)}}
is_shape = lambda x: isinstance(x, tuple)  # noqa: E731


def tree_of(seed: int, shapes: Any = SHAPES) -> Any:
    flat, tree = jax.tree.flatten(shapes, is_leaf=is_shape)
    keys = jax.random.split(jax.random.key(seed), len(flat))
    return tree.unflatten([jax.random.normal(k, s) for k, s in zip(keys, flat, strict=True)])


def pieces(tree: Any, of: Sequence[Piece]) -> list[Any]:
    leaves = jax.tree.leaves(tree)
    return [leaves[p.leaf] if p.row is None else leaves[p.leaf][p.row] for p in of]


def whole(values: Sequence[Any], plan: UpdatePlan) -> Any:
    rows: dict[int, list[Any]] = {}
    for piece, value in zip(plan.param_pieces, values, strict=True):
        rows.setdefault(piece.leaf, []).append(value)
    stacked = {p.leaf for p in plan.param_pieces if p.row is not None}
    return plan.params_tree.unflatten(
        [np.stack(rows[leaf]) if leaf in stacked else rows[leaf][0] for leaf in sorted(rows)]
    )


def assert_close(got: Any, expected: Any, what: str, tolerance: float = 3e-6) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, want), leaf in zip(
        jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(got), strict=True
    ):
        if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
            leaf, want = jax.random.key_data(leaf), jax.random.key_data(want)
        assert (leaf.shape, leaf.dtype) == (want.shape, want.dtype), jax.tree_util.keystr(path)
        scale = np.max(np.abs(np.asarray(want, np.float64)), initial=0)
        np.testing.assert_allclose(
            np.asarray(leaf), np.asarray(want), tolerance, tolerance * scale,
            err_msg=f"{what}{jax.tree_util.keystr(path)}",
        )  # fmt: skip


def state_of(plan: UpdatePlan, outputs: dict[End, Any]) -> tuple[Any, ...]:
    return tuple(
        tuple(outputs[End(Role.NEW_STATE, k)] for k in plan.states_on(rank))
        for rank in range(plan.num_ranks)
    )


def check(optimizer: Any, owners: Any = OWNERS, shapes: Any = SHAPES, ranks: int = 2) -> UpdatePlan:
    """Asserts that two steps of the plan's programs, evaluated, are those of plain optax."""
    params, expected = tree_of(0, shapes), tree_of(0, shapes)
    plan = build_update(optimizer, params, owners, ranks)
    given = {End(Role.PARAM, i): x for i, x in enumerate(pieces(params, plan.param_pieces))}
    outputs = evaluate(plan.init, given)
    state = optimizer.init(expected)
    gathered = gather_state(plan, state_of(plan, outputs))
    assert_close(gathered, state, "first state ")
    for step in range(2):
        grads = tree_of(100 + step, shapes)
        inputs = {End(Role.GRAD, i): x for i, x in enumerate(pieces(grads, plan.param_pieces))}
        inputs |= {End(Role.PARAM, i): x for i, x in enumerate(pieces(params, plan.param_pieces))}
        inputs |= {
            End(Role.STATE, e.index): x for e, x in outputs.items() if e.role is Role.NEW_STATE
        }
        outputs = evaluate(plan.update, inputs)
        updates, state = optimizer.update(grads, state, expected)
        expected = optax.apply_updates(expected, updates)
        new = [outputs[End(Role.NEW_PARAM, i)] for i in range(len(plan.param_pieces))]
        params = whole(new, plan)
        assert_close(params, expected, f"step {step} params")
        assert_close(gather_state(plan, state_of(plan, outputs)), state, f"step {step} state ")
        norm = outputs[End(Role.SCALAR, 0)]
        np.testing.assert_allclose(norm, optax.tree.norm(grads), rtol=1e-6)
    return plan


def moves(plan: UpdatePlan) -> int:
    exchanges = [phase.exchange for phase in (*plan.init.phases, *plan.update.phases)]
    return sum(len(x.moves) for x in exchanges if x is not None)


def is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def by_path(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "decay" if path[-1].key == "w" else "rest", params
    )


def muon_axes(reduction: Any, output: Any) -> Any:
    numbers = optax.contrib.MuonDimensionNumbers(reduction, output)
    return optax.contrib.muon(
        1e-2,
        muon_weight_dimension_numbers=lambda p: jax.tree.map(
            lambda x: numbers if x.ndim == 3 else None, p
        ),
    )


SCHEDULE = optax.linear_schedule(1e-2, 1e-3, 4)
BY_ROWS = {
    "adamw-mask": lambda: optax.adamw(SCHEDULE, weight_decay=1.0, mask=is_matrix),
    "labels-by-path": lambda: optax.multi_transform(
        {"decay": optax.adamw(1e-2), "rest": optax.sgd(0.1, 0.9)}, by_path
    ),
    "muon": lambda: optax.contrib.muon(1e-2),
    "muon-of-layers": lambda: muon_axes(1, 2),
    "muon-transposed": lambda: muon_axes(2, 1),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=3),
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1),
    "clip-finite": lambda: optax.apply_if_finite(
        optax.chain(optax.clip_by_global_norm(0.5), optax.clip_by_block_rms(0.1), optax.adam(0.1)),
        2,
    ),
    "sm3": lambda: optax.sm3(1e-2),
    "centralize": lambda: optax.chain(optax.centralize(), optax.sgd(0.1)),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, key=3), optax.sgd(0.1)),
    "multisteps": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "hyperparams": lambda: optax.inject_hyperparams(optax.lars)(learning_rate=SCHEDULE),
    "schedule-free": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "prodigy": lambda: optax.contrib.prodigy(1.0),
}
WHOLE = {
    "muon-over-layers": lambda: muon_axes(0, 2),
    "muon-layers-as-rows": lambda: muon_axes((0, 1), 2),
    "sorted": lambda: optax.stateless(
        lambda updates, _: jax.tree.map(lambda x: -jnp.sort(x, axis=0), updates)
    ),
}


def some(names: Any, *default: str) -> list[Any]:
    """The names as parameters, those that are not among `default` marked as slow."""
    return [n if n in default else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", some(BY_ROWS, "labels-by-path", "muon-of-layers", "adafactor"))
def test_rows_are_updated_where_they_lie(name: str) -> None:
    assert moves(check(BY_ROWS[name]())) == 0


@pytest.mark.parametrize("name", some(WHOLE, "muon-over-layers"))
def test_a_leaf_that_is_needed_whole_goes_to_one_rank_and_back(name: str) -> None:
    plan = check(WHOLE[name]())
    # Two of the four rows of w are another rank's, on the way there and on the way back.
    assert moves(plan) == 2 * 2


def test_a_small_leaf_that_is_needed_whole_is_exchanged() -> None:
    assert moves(check(WHOLE["sorted"](), [(0, 1, 1)], [(3, 2, 5)])) == 0


def test_gathered_leaves_are_spread_over_the_ranks() -> None:
    shapes = [(4, 20, 28)] * 4
    plan = build_update(WHOLE["sorted"](), tree_of(0, shapes), [(0, 0, 1, 1)] * 4, 2)
    targets = [m.target for p in plan.update.phases if p.exchange for m in p.exchange.moves]
    assert targets.count(0) == targets.count(1)


def test_compiled_programs_run_on_the_rows_devices_and_are_few() -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1), muon_axes(0, 2))
    shapes = {"head": (36, 36), "w": (8, 20, 28)}
    owners = (1, (0, 1, 0, 1, 0, 1, 0, 1))
    params = tree_of(0, shapes)
    plan = build_update(optimizer, params, owners, 2)
    where = Places(tuple(SingleDeviceSharding(d) for d in jax.devices()[:2]))
    update = Update(plan, where, compiler_options=FAST)

    def put(tree: Any) -> list[jax.Array]:
        return [
            jax.device_put(np.asarray(x), where.of_param(plan, i))
            for i, x in enumerate(pieces(tree, plan.param_pieces))
        ]

    leaves: Any = put(params)
    state, expected = update.init(leaves), optimizer.init(params)
    for step in range(2):
        grads = tree_of(100 + step, shapes)
        leaves, state, *_ = update.apply(leaves, put(grads), state)
        updates, expected = jax.jit(optimizer.update)(grads, expected, params)
        params = optax.apply_updates(params, updates)
    assert_close(whole([np.asarray(x) for x in leaves], plan), params, "params")
    assert_close(update.gather(state), expected, "state ")
    assert [x.devices() for x in leaves] == [{jax.devices()[r]} for r in plan.owners]
    again = update.scatter(update.gather(state))
    assert_close(update.gather(again), update.gather(state), "again ")
    assert [x.devices() for x in again[0]] == [x.devices() for x in state[0]]
    deeper = build_update(optimizer, tree_of(0, {"head": (36, 36), "w": (80, 20, 28)}),
                          (1, (0, 1) * 40), 2)  # fmt: skip
    assert sum(len(p.every_program) for p in deeper.update.phases) == sum(
        len(p.every_program) for p in plan.update.phases
    )


def test_rows_move_by_collectives_too() -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), WHOLE["sorted"](), optax.sgd(0.1))
    params = [tree_of(0)["scan"]["w"]]
    mesh = PipelineMesh(Mesh(np.array(jax.devices()[:2]), ("pipe",)), "pipe")
    plan = build_update(optimizer, params, [(0, 1, 1, 0)], 2)
    where = tuple(rank.replicated for rank in mesh.ranks)
    values = values_of(plan.update, where)
    moving = PairPermute(tuple(values), tuple(values.values()), mesh)
    numbers = {transfer: number for number, transfer in enumerate(values)}
    crew = Crew(RankThreads((0, 1)), moving, numbers, tuple(numbers.values()))
    rows_of_ranks = rows_of(plan.update)
    update = Update(plan, Places(where), rows_of_ranks, crew, compiler_options=FAST)
    rows: Any = [
        jax.device_put(np.asarray(x), mesh.ranks[r].replicated)
        for x, r in zip(params[0], (0, 1, 1, 0), strict=True)
    ]
    new, *_ = update.apply(rows, rows, update.init(rows))
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert_close(np.stack(new), optax.apply_updates(params, updates)[0], "w")


def test_what_needs_several_whole_leaves_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"concatenate.*\['head'\].*\['scan'\]\['w'\]"):
        build_update(optax.flatten(optax.adam(0.1)), tree_of(0), OWNERS, 2)


def test_an_optimizer_that_wants_other_arguments_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"optimizer\.update\(gradients, state, params, value\)"):
        build_update(optax.lbfgs(0.1), tree_of(0), OWNERS, 2, extra={"value": jnp.float32(1)})
    with pytest.raises(PlanError, match=r"optimizer.* failed on the 4 parameter leaves.*fast"):
        build_update(optax.lookahead(optax.sgd(0.1), 2, 0.5), tree_of(0), OWNERS, 2)


def test_owners_of_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PlanError, match=r"leaf 0 of shape \[4, 3\] has 3 owners"):
        build_update(optax.sgd(0.1), [jnp.ones((4, 3))], [(0, 0, 1)], 2)
    with pytest.raises(PlanError, match="leaf 0 on rank 2, but ranks are 0 to 1"):
        build_update(optax.sgd(0.1), [jnp.ones((2, 3))], [(0, 2)], 2)


def per_leaf(fn: Any) -> optax.GradientTransformation:
    return optax.stateless(lambda updates, _: jax.tree.map(fn, updates))


FUNCTIONS = {
    "merge": lambda x: x.reshape(-1, x.shape[-1]).cumsum(1).reshape(x.shape),
    "split": lambda x: x.reshape(x.shape[0], 2, -1)[:, ::-1].reshape(x.shape),
    "transpose": lambda x: (x.T * jnp.arange(x.size).reshape(x.T.shape)).T,
    "gram": lambda x: jnp.einsum("lmn,lkn,lkp->lmp", x, x, x),
    "across": lambda x: jnp.einsum("lmn,kmn->lk", x, x)[:, :1, None] + x,
    "contract": lambda x: jnp.einsum("lmn,l->mn", x, jnp.arange(1.0, len(x) + 1))[None] + x,
    "loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y) * jnp.float32(i), x),
    "loop-over-columns": lambda x: jax.lax.scan(
        lambda c, col: (c + col, c * 2), x[:, 0] * 0, x.swapaxes(0, 1)
    )[1].swapaxes(0, 1),
    "loop-over-layers": lambda x: jax.lax.scan(lambda c, row: (c + row, c), x[0] * 0, x)[1],
    "while": lambda x: jax.lax.while_loop(lambda y: jnp.sum(y * y) > 1, lambda y: y / 2, x),
    "max": lambda x: x / jnp.max(jnp.abs(x)) + jnp.argmax(x, 0, keepdims=True).astype(x.dtype),
    "prod": lambda x: x * jnp.prod(jnp.sign(x)) * jnp.any(x > 0) * jnp.all(x < 9),
    "svd": lambda x: jnp.linalg.svd(x, full_matrices=False)[1][..., None] + 0 * x[..., :1],
    "pad-concatenate": lambda x: jnp.concatenate([jnp.pad(x, ((0, 0), (1, 0), (0, 0))), x], 1)[
        :, : x.shape[1]
    ],
    "gather": lambda x: x[jnp.arange(len(x))[::-1]],
    "roll": lambda x: jnp.roll(x, 1, axis=0) + jnp.roll(x, 1, axis=2),
    "by-index": lambda x: x * jnp.arange(len(x)).reshape(-1, 1, 1),
    "set": lambda x: x.at[:, 0].set(0.0).at[1].set(2.0),
    "one-norm-per-layer": lambda x: x / jnp.linalg.norm(x, axis=(1, 2))[:, None, None],
    "sorted-norms": lambda x: x * jnp.sort(jnp.sum(x, axis=(1, 2)))[:, None, None],
}


@pytest.mark.parametrize("name", some(FUNCTIONS, "merge", "contract", "loop", "gather", "max"))
def test_any_function_of_a_stacked_leaf_equals_itself(name: str) -> None:
    def of_shape(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(FUNCTIONS[name](x), x.shape).astype(x.dtype)

    check(per_leaf(of_shape), [(0, 1, 1, 0)], [(4, 20, 28)])


def check_random_rows(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 3))
    rank = st.integers(0, ranks - 1)
    shapes, owners = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        layers = data.draw(st.integers(1, 4))
        rest = data.draw(st.sampled_from([(), (3,), (40, 30), (4, 5)]))
        shapes.append((layers, *rest))
        owners.append(tuple(data.draw(rank) for _ in range(layers)))
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.lamb(1e-2), muon_axes(0, 2))
    check(optimizer, owners, shapes, ranks)


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_many_random_rows(data: st.DataObject) -> None:
    check_random_rows(data)
