"""What each process of `test_saving_processes` runs: train, save, restore, train on."""

import sys
from pathlib import Path

import jax
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[2]))

from octojax.processes import initialize

initialize()

from tests.pipelines import case_of, compiled  # noqa: E402

path = sys.argv[1]
case = case_of("scan")
optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
step = compiled(case, "1f1b", 2, 2, optimizer=optimizer)
batch = case.batch(8)
state, _ = step(step.init(), batch)
step.save(path, state)
again = step.restore(path)
state, metrics = step(state, batch)
again, same = step(again, batch)
assert metrics["loss"] == same["loss"]
for a, b in zip(
    jax.tree.leaves(step.params(state)), jax.tree.leaves(step.params(again)), strict=True
):
    np.testing.assert_array_equal(a, b)
print("continues alike")
