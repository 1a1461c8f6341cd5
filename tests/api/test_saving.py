"""A training run continues from a checkpoint under another plan as if nothing had happened."""

from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from octojax import checkpoint
from octojax.errors import FormatError
from tests.pipelines import case_of, compiled

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
