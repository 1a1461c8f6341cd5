"""What ranks hold more than once is said aloud, where it is much."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import octojax as octopipe
from octojax.api.copies import Copy, warn_of_copies
from octojax.api.options import options_of
from octojax.api.pipelined import PipelinedLoss
from octojax.frontends import adapt
from tests.pipelines import chain, pipe

D = 128
PARAMS = [jnp.eye(D) for _ in range(4)]


def cut(loss: Any, **options: Any) -> PipelinedLoss:
    chosen = options_of(PARAMS, **{"microbatches": 4, "schedule": "1f1b", **options})
    return PipelinedLoss(adapt(PARAMS, loss, None), jnp.ones((8, D)), chosen, pipe(2))


def net(p: Any, h: jax.Array) -> jax.Array:
    for w in p:
        h = jnp.tanh(h @ w)
    return h


def test_a_model_called_on_its_own_output_is_told_what_it_costs() -> None:
    with pytest.warns(UserWarning, match="step.report shows the bytes of each rank") as caught:
        cut(lambda p, x: jnp.mean(net(p, net(p, x)) ** 2))
    (text,) = [str(w.message) for w in caught]
    assert "hold 256 KiB of copies beside a model of 256 KiB" in text
    assert all(f"{k} (64 KiB on ranks 0, 1)" in text for k in range(4))


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, x: jnp.mean(net(p, x) ** 2),
        lambda p, x: jnp.mean((net(p, x) - net(p, 2 * x)) ** 2),  # called twice, side by side
        lambda p, x: jnp.mean(jax.lax.map(lambda c: net(p, c), x.reshape(-1, 1, D)) ** 2),
    ],
)
def test_what_is_held_once_is_not(loss: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = cut(loss)
    assert [len(ranks) for ranks in found.lowered.step.holders] == [1] * 4


@pytest.mark.parametrize("schedule", ["dualpipe", "chimera"])
def test_a_schedule_that_holds_stages_twice_does_so_on_purpose(schedule: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = cut(lambda p, x: jnp.mean(net(p, x) ** 2), schedule=schedule)
    assert [len(ranks) for ranks in found.lowered.step.holders] == [2] * 4


def test_few_or_small_copies_are_no_matter_and_long_lists_are_cut() -> None:
    def copies(count: int, size: int) -> list[Copy]:
        return [Copy(f"w{k}", (0, 1), size, 1) for k in range(count)]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_copies(copies(10, 1000), 10_000)  # small
        warn_of_copies(copies(1, 10**6), 10**7)  # few
    with pytest.warns(UserWarning, match=r"w7 \(977 KiB on ranks 0, 1\) and 2 more"):
        warn_of_copies(copies(10, 10**6), 10**7)


def test_the_report_has_the_bytes_of_each_rank() -> None:
    step, _ = chain("1f1b", ("a", "b", "c", "a"), 2)
    try:
        report = step.report
    finally:
        step.loss.trainer.engine.close()
    assert report.model_bytes == 3 * 1024
    assert sorted(report.param_bytes) == [2048, 2048]
    assert "parameters by rank: 2.0K, 2.0K; of the model: 3.0K" in str(report)


def test_the_warning_points_at_the_caller_of_compile() -> None:
    with pytest.warns(UserWarning, match="copies beside a model") as caught:
        octopipe.value_and_grad(
            lambda p, x: jnp.mean(net(p, net(p, x)) ** 2),
            PARAMS,
            jnp.ones((8, D)),
            mesh=pipe(2),
            microbatches=2,
            progress=False,
        )
    assert caught[0].filename == __file__
