"""Pipelines of zoo models for tests, and what they are compared with."""

import contextlib
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import octojax as octopipe
from octojax.api.options import Options, options_of
from octojax.api.pipelined import PipelinedLoss
from octojax.api.reference import by_microbatches, reference
from octojax.api.whole_batch import WholeBatch
from octojax.frontends import PureLoss
from octojax.ir import Schedule
from octojax.programs.microbatch import plan_microbatches
from tests.zoo import CASES, Case

FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Tiny models run once: compile time is all that counts."""

FIG3 = Schedule.parse(
    "0F0 1F0 0F1 1F1 4F0 4I0 4F1 4W0 4I1 4W1 1I0 1I1 0I0 0W0 1W0 0I1 0W1 1W1\n"
    "2F0 3F0 2F1 3F1 5F0 5I0 5F1 5I1 3I0 2I0 5W0 3I1 2I1 5W1 3W0 2W0 3W1 2W1"
)
"""Six stages on two ranks, hand-written in the manner of the paper's Fig. 3."""


def pipe(num_ranks: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:num_ranks]), ("pipe",))


@cache
def case_of(name: str) -> Case:
    return CASES[name]()


def mixing(case: Case, microbatches: int) -> contextlib.AbstractContextManager[Any]:
    """Expects the warning of a model that mixes rows or puts gradients in, and no other."""
    if case.adds_up and microbatches > 1:
        return pytest.warns(octopipe.GradientWarning, match="are added up")
    if case.mixes_rows and microbatches > 1:
        return pytest.warns(octopipe.RowsWarning, match="not of the whole batch")
    return contextlib.nullcontext()


def compiled(
    case: Case,
    schedule: Any,
    ranks: int,
    microbatches: int,
    *,
    rows: int = 8,
    optimizer: optax.GradientTransformation | None = None,
    mesh: Mesh | None = None,
    **options: Any,
) -> octopipe.TrainStep:
    """Returns the step of a zoo case, compiled quickly."""
    with mixing(case, microbatches):
        return octopipe.compile(
            case.model,
            case.loss_fn,
            optimizer or optax.sgd(0.1),
            case.batch(rows),
            params=case.params,
            mesh=mesh or pipe(ranks),
            microbatches=microbatches,
            schedule=schedule,
            progress=False,
            compiler_options=FAST,
            **case.options,
            **options,
        )


def chain(
    schedule: Any, weights: tuple[str, ...], microbatches: int, width: int = 16, **options: Any
) -> tuple[octopipe.TrainStep, jax.Array]:
    """Returns the step of `tanh(h @ w)` for each named weight in turn, on two ranks, and a batch.

    A name that comes twice is one weight that two stages may hold.
    """
    names = dict.fromkeys(weights)
    keys = jax.random.split(jax.random.key(0), len(names))
    params = {n: jax.random.normal(k, (width, width)) / 4 for n, k in zip(names, keys, strict=True)}

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        h = batch
        for name in weights:
            h = jnp.tanh(h @ params[name])
        return jnp.mean(h**2)

    batch = jax.random.normal(jax.random.key(1), (8, width))
    step = octopipe.compile(
        params,
        loss,
        optax.adam(1e-2),
        batch,
        mesh=pipe(2),
        schedule=schedule,
        microbatches=microbatches,
        progress=False,
        **options,
    )
    return step, batch


def gradients(
    case: Case,
    schedule: Any,
    ranks: int,
    microbatches: int,
    mesh: Mesh | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Returns loss and gradients of a zoo case through a pipeline, without an optimizer."""
    pure, batch = case.pure(), case.batch(8)
    given = {"schedule": schedule, "microbatches": microbatches, **options}
    chosen = options_of(case.model, **given, progress=False, compiler_options=FAST)
    with mixing(case, microbatches):
        loss = PipelinedLoss(pure, batch, chosen, mesh or pipe(ranks))
    results, value, _ = loss.run(
        loss.trainer, loss.place(loss.source(pure.params, pure.state)), batch
    )
    loss.trainer.engine.close()
    return value, loss.tree(loss.filled(results))


@cache
def expected(name: str, microbatches: int, rows: int = 8) -> tuple[Any, Any]:
    """Returns loss and gradients by plain `jax.value_and_grad`.

    Of the full batch where the loss is a mean over rows; else of the same microbatches.
    """
    case = case_of(name)
    pure, batch = case.pure(), case.batch(rows)
    if case.per_sample:
        whole = lambda p: pure.fn(p, pure.state, batch)[0]  # noqa: E731
        plain = jax.jit(jax.value_and_grad(whole, allow_int=True)).lower(pure.params)
        return plain.compile(compiler_options=FAST)(pure.params)
    plainly = by_microbatches if case.adds_up else reference
    loss, _, grads, _ = plainly(
        whole_batch(pure, batch, microbatches), pure.params, pure.state, batch
    )
    return loss, grads


def whole_batch(pure: PureLoss, batch: Any, microbatches: int, shards: int = 1) -> WholeBatch:
    """Returns a loss and the cut of its batch, as a pipeline has them."""
    leaves, tree = jax.tree.flatten(batch)
    parts = plan_microbatches(leaves, [""] * len(leaves), microbatches, shards)
    return WholeBatch(pure, parts, tree, Options(microbatches))


def relative_error(found: Any, wanted: Any) -> float:
    """Returns the largest difference of any leaf, relative to that leaf's largest entry.

    A leaf that is zero but for rounding (the bias of attention's keys) has no relative error of
    its own: below 1e-6 of the largest gradient anywhere, it is measured against that one.
    """

    def values(tree: Any) -> list[np.ndarray]:
        leaves = jax.tree.leaves(tree)
        return [
            np.zeros(0)  # an integer parameter
            if getattr(x, "dtype", None) == jax.dtypes.float0
            else np.asarray(x, np.float64)
            for x in leaves
        ]

    pairs = list(zip(values(found), values(wanted), strict=True))
    largest = max((np.max(np.abs(b), initial=0.0) for _, b in pairs), default=0.0)

    def error(a: np.ndarray, b: np.ndarray) -> float:
        assert a.shape == b.shape or not b.size
        own = np.max(np.abs(b), initial=0.0)
        scale = own if own >= 1e-6 * largest else largest
        return float(np.max(np.abs(a - b), initial=0.0)) / (scale or 1.0) if b.size else 0.0

    return max(error(a, b) for a, b in pairs)


def assert_exact(
    name: str, schedule: Any, ranks: int, microbatches: int, tolerance: float = 1e-5, **options: Any
) -> None:
    """Asserts that loss and every gradient are those of the unpipelined model."""
    loss, grads = gradients(case_of(name), schedule, ranks, microbatches, **options)
    wanted_loss, wanted_grads = expected(name, microbatches)
    assert abs(float(loss) - float(wanted_loss)) <= tolerance * max(abs(float(wanted_loss)), 1e-3)
    assert relative_error(grads, wanted_grads) <= tolerance
