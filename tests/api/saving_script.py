"""What each process of `test_saving_processes` runs: train, save, restore, move to another plan."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[2]))

from octojax.processes import initialize

initialize()

from octojax import checkpoint  # noqa: E402
from octojax.checkpoint import sharded  # noqa: E402
from octojax.launch_environment import TIMEOUT  # noqa: E402
from tests.pipelines import case_of, compiled  # noqa: E402

path = Path(sys.argv[1])
me = jax.process_index()
case = case_of("scan")
optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
step = compiled(case, "1f1b", 2, 2, optimizer=optimizer)
batch = case.batch(8)


def same(got: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def opt_state(step: Any, state: Any) -> Any:
    return step.opt_state(state)


def error_of(work: Callable[[], Any]) -> Exception:
    try:
        work()
    except Exception as error:
        return error
    raise AssertionError("no error")


state, _ = step(step.init(), batch)
step.save(path, state)
assert {x.name for x in (path / "tree").iterdir()} == {"process-0", "process-1"}
again = step.restore(path)
after, metrics = step(state, batch)
again, repeated = step(again, batch)
assert metrics["loss"] == repeated["loss"]
same(step.params(after), step.params(again))

error = error_of(lambda: step.save(path, after))
assert isinstance(error, FileExistsError), error
assert "overwrite=True" in str(error)

write, limit = sharded.write_arrays, os.environ[TIMEOUT]


def slowly(*args: Any, **options: Any) -> None:
    if me == 0:
        time.sleep(4)  # more than anyone waits for anything else
    write(*args, **options)


os.environ[TIMEOUT] = "1.5"
sharded.write_arrays = slowly
step.save(path, after, overwrite=True)
sharded.write_arrays, os.environ[TIMEOUT] = write, limit
assert checkpoint.load(path).step == 2

other = compiled(
    case, "gpipe", 2, 4, optimizer=optimizer, partition=(1, step.layers.num_layers - 1)
)
adopted = other.adopt(after)
same(other.params(adopted), step.params(after))
same(opt_state(other, adopted), opt_state(step, after))
assert "of another step" in str(error_of(lambda: step.params(adopted)))

error = error_of(lambda: step.restore(path if me == 0 else path / "elsewhere"))
assert isinstance(error, FileNotFoundError) == (me == 1), error
assert "elsewhere" in str(error)
print("continues alike")
