"""A training run continues from a checkpoint under another plan as if nothing had happened."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import octojax as octopipe
from octojax import checkpoint
from octojax.errors import FormatError
from tests.pipelines import FAST, case_of, compiled

OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def close(got: object, expected: object) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["scan", "dropout-key", "nnx-batchnorm"])
def test_a_run_continues_under_another_plan(name: str, tmp_path: Path) -> None:
    case = case_of(name)
    batch = case.batch(8)
    one = compiled(case, "1f1b", 2, 4, optimizer=OPTIMIZER)
    state, _ = one(one.init(), batch)
    one.save(tmp_path / "c", state)
    state, metrics = one(state, batch)

    two = compiled(case, "gpipe", 3, 4, optimizer=OPTIMIZER)
    again = two.restore(tmp_path / "c")
    assert again.step == 1
    again, same = two(again, batch)
    np.testing.assert_allclose(same["loss"], metrics["loss"], rtol=1e-5)
    close(two.params(again), one.params(state))
    plain = OPTIMIZER.init(one.params(state))
    stored = checkpoint.load(tmp_path / "c", one.params(state), plain)
    assert jax.tree.structure(stored.opt_state) == jax.tree.structure(plain)


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    case = case_of("tied-lm")
    step = compiled(case, "gpipe", 2, 2, optimizer=optax.sgd(0.1))
    step.save(tmp_path / "c", step.init())
    other = compiled(case, "gpipe", 2, 2, optimizer=OPTIMIZER)
    with pytest.raises(FormatError, match="leaves of opt_state do not fit"):
        other.restore(tmp_path / "c")


WIDTH = 8
BATCH = np.linspace(-1, 1, 4 * WIDTH, dtype=np.float32).reshape(4, WIDTH)


def stacked_loss(params: Any, batch: Any) -> Any:
    """Layers stacked over a scan, which ranks keep by rows, and a head."""

    def layer(h: Any, w: Any) -> Any:
        return jnp.tanh(h @ w), None

    h, _ = jax.lax.scan(layer, batch, params["w"])
    return jnp.mean((h @ params["head"]) ** 2)


def make() -> Any:
    keys = jax.random.split(jax.random.key(0))
    return {
        "w": jax.random.normal(keys[0], (4, WIDTH, WIDTH)) / 3,
        "head": jax.random.normal(keys[1], (WIDTH, WIDTH)) / 3,
    }


def on_mesh(*sizes: int, schedule: str = "1f1b") -> octopipe.TrainStep:
    count = int(np.prod(sizes))
    devices = np.array(jax.devices()[:count]).reshape(sizes)
    return octopipe.compile(
        make,
        stacked_loss,
        OPTIMIZER,
        BATCH,
        mesh=jax.sharding.Mesh(devices, ("pipe", "data", "tensor")),
        microbatches=2,
        schedule=schedule,
        param_specs=lambda path, shape: PartitionSpec(*(None,) * (len(shape) - 1), "tensor"),
        progress=False,
        compiler_options=FAST,
    )


def test_a_sharded_state_is_restored_on_other_meshes_to_the_bit(tmp_path: Path) -> None:
    with on_mesh(2, 1, 2) as one:
        state, _ = one(one.init(), BATCH)
        one.save(tmp_path / "c", state)
        trees = jax.device_get((one.params(state), one.opt_state(state)))
        _, expected = one(state, BATCH)
    index = json.loads((tmp_path / "c" / "octojax.json").read_text())
    pieces = {".".join(x["name"]): len(x.get("pieces", ())) for x in index["leaves"]}
    assert (pieces["params.w"], pieces["params.head"]) == (4, 0)
    stored = checkpoint.load(tmp_path / "c", *trees)
    jax.tree.map(np.testing.assert_array_equal, (stored.params, stored.opt_state), trees)
    for sizes, schedule in (((4, 1, 1), "zb-h1"), ((1, 2, 2), "gpipe")):
        with on_mesh(*sizes, schedule=schedule) as other:
            again = other.restore(tmp_path / "c")
            assert again.step == 1
            same = other.params(again), other.opt_state(again)
            jax.tree.map(np.testing.assert_array_equal, same, trees)
            _, metrics = other(again, BATCH)
            np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
