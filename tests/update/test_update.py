"""The distributed update against plain optax on the same tree."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import SingleDeviceSharding

from octojax.executor.update import Update
from octojax.update import Places, UpdatePlan, build_update

FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Programs that run a few times on small arrays: compile time is all that counts."""

NUM_RANKS = 2
OWNERS = (0, 0, 1, 1, 1)


def make_params() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 5)
    return {
        "block0": {
            "bias": jax.random.normal(keys[0], (8,)),
            "kernel": jax.random.normal(keys[1], (140, 8)),
        },
        "block1": {"kernel": jax.random.normal(keys[2], (8, 140))},
        "head": {
            "kernel": jax.random.normal(keys[3], (40, 40)),
            "scale": jax.random.normal(keys[4], ()),
        },
    }


def make_grads(step: int) -> Any:
    params = make_params()
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(100 + step), len(leaves))
    return tree.unflatten(
        [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    )


def places() -> Places:
    return Places(tuple(SingleDeviceSharding(d) for d in jax.devices()[:NUM_RANKS]))


def put(tree: Any, plan: UpdatePlan, where: Places) -> list[jax.Array]:
    return [
        jax.device_put(np.asarray(leaf), where.of_param(plan, i))
        for i, leaf in enumerate(jax.tree.leaves(tree))
    ]


def is_weight(tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: "kernel" in str(path[-1]), tree)


def labels(tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "head" if "head" in str(path[0]) else "body", tree
    )


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw-mask-schedule": lambda: optax.adamw(SCHEDULE, weight_decay=0.1, mask=is_weight),
    "lion": lambda: optax.lion(1e-3, weight_decay=0.1),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8, momentum=0.9),
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1),
    "clip-adamw": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    "clip-clip": lambda: optax.chain(
        optax.clip_by_global_norm(9.0), optax.scale_by_adam(), optax.clip_by_global_norm(0.5)
    ),
    "finite": lambda: optax.apply_if_finite(
        optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)), 2
    ),
    "multisteps": lambda: optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)), 2
    ).gradient_transformation(),
    "multi-transform": lambda: optax.multi_transform(
        {
            "body": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
            "head": optax.sgd(0.1, 0.9),
        },
        labels,
    ),
    "frozen": lambda: optax.multi_transform(
        {"body": optax.set_to_zero(), "head": optax.adamw(1e-2)}, labels
    ),
    "masked": lambda: optax.chain(optax.masked(optax.clip(0.1), is_weight), optax.adam(1e-2)),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.scale(-0.1)),
    "hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE),
    "rmsprop-centered": lambda: optax.rmsprop(1e-2, centered=True, momentum=0.9),
    "adagrad": lambda: optax.adagrad(1e-2),
    "noisy": lambda: optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(3)), optax.sgd(0.1)),
    "unit-norm": lambda: optax.chain(optax.normalize_by_update_norm(), optax.scale(-0.1)),
    "agc": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "schedule-free": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "prodigy": lambda: optax.contrib.prodigy(1.0),
    "muon": lambda: optax.contrib.muon(1e-2),
    "dog": lambda: optax.contrib.dog(1.0),
}


def reference_step(optimizer: Any) -> Any:
    @jax.jit
    def step(params: Any, grads: Any, state: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, optax.tree.norm(grads)

    return step


def assert_close(got: Any, expected: Any, what: str, tolerance: float = 1e-6) -> None:
    paths = jax.tree_util.tree_leaves_with_path(expected)
    for leaf, (path, want) in zip(jax.tree.leaves(got), paths, strict=True):
        name = f"{what}{jax.tree_util.keystr(path)}"
        if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
            leaf, want = jax.random.key_data(leaf), jax.random.key_data(want)
        want = np.asarray(want)
        assert leaf.shape == want.shape, name
        assert leaf.dtype == want.dtype, name
        scale = np.max(np.abs(want), initial=0.0) if want.dtype.kind == "f" else 0
        np.testing.assert_allclose(
            np.asarray(leaf), want, rtol=tolerance, atol=tolerance * float(scale), err_msg=name
        )


COMMON = (
    "momentum",
    "adamw-mask-schedule",
    "adafactor",
    "lamb",
    "finite",
    "multisteps",
    "multi-transform",
    "hyperparams",
)


@pytest.mark.parametrize(
    "name", [n if n in COMMON else pytest.param(n, marks=pytest.mark.slow) for n in OPTIMIZERS]
)
def test_equals_plain_optax_over_three_steps(name: str) -> None:
    optimizer = OPTIMIZERS[name]()
    expected = make_params()
    plan = build_update(optimizer, expected, OWNERS, NUM_RANKS)
    where = places()
    update = Update(plan, where, compiler_options=FAST)
    params: Any = put(expected, plan, where)
    state = update.init(params)
    expected_state = optimizer.init(expected)
    assert_close(update.gather(state), expected_state, "state")
    step = reference_step(optimizer)
    for i in range(3):
        grads = make_grads(i)
        params, state, scalars, _ = update.apply(params, put(grads, plan, where), state)
        expected, expected_state, norm = step(expected, grads, expected_state)
        assert_close(params, expected, f"step {i} params")
        assert_close(update.gather(state), expected_state, f"step {i} state")
        np.testing.assert_allclose(scalars["grad_norm"], norm, rtol=1e-6)
    for rank, leaf in zip(OWNERS, params, strict=True):
        assert leaf.devices() == {jax.devices()[rank]}
