"""Measured profiles: bytes exact, times there, equal layers equal, links fitted."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from octojax.errors import CutError, PlanError
from octojax.frontends import PureLoss, adapt
from octojax.ir import LayerCost, Machine, Partition, Placement, Plan, Profile, Schedule
from octojax.layers import find_layers
from octojax.profiling import fit_line, measure, measure_link, measure_machine, median_times
from octojax.profiling.layers import shapes_of
from octojax.profiling.measure import LayerTimer
from octojax.rows.whole import separated
from octojax.simulate import simulate
from octojax.trace import trace_loss

D, FF, V, ROWS = 16, 32, 24, 4


def model(num_layers: int = 3) -> tuple[Any, Any, Any]:
    def weight(seed: int, *shape: int) -> jax.Array:
        return 0.1 * jax.random.normal(jax.random.key(seed), shape)

    params = {
        "emb": weight(0, V, D),
        "layers": [{"a": weight(i, D, FF), "b": weight(9 + i, FF, D)} for i in range(num_layers)],
        "out": weight(5, D, V),
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["emb"][batch["x"]]
        for layer in params["layers"]:
            x = x + jnp.tanh(x @ layer["a"]) @ layer["b"]
        logp = jax.nn.log_softmax(x @ params["out"])
        return -jnp.mean(jnp.take_along_axis(logp, batch["y"][:, None], axis=-1))

    ids = jnp.arange(ROWS)
    return params, loss, {"x": ids, "y": ids}


@pytest.fixture(scope="module")
def pure() -> PureLoss:
    params, loss, _ = model()
    return adapt(params, loss)


@pytest.fixture(scope="module")
def profile(pure: PureLoss) -> Profile:
    return measure(
        pure, model()[2], optimizer=optax.adamw(1e-3), rounds=2, target_s=1e-4, machine=Machine()
    )


def test_the_stages_of_a_partition_take_the_place_of_the_layers(
    pure: PureLoss, profile: Profile
) -> None:
    parts = Partition((2, 1, 2))
    stages = measure(
        pure, model()[2], optimizer=optax.adamw(1e-3), rounds=2, target_s=1e-4, machine=Machine(),
        partition=parts,
    )  # fmt: skip
    assert stages.num_layers == parts.num_stages
    for s, found in enumerate(stages.layers):
        own = [profile.layers[at] for at in parts.layers(s)]
        assert found.param_bytes == sum(x.param_bytes for x in own)
        assert found.output_bytes == own[-1].output_bytes
        assert found.compute_s > 0
    assert stages.layers[1].residual_bytes == profile.layers[2].residual_bytes
    assert dict(stages.extra)["names"][1] == dict(profile.extra)["names"][2]
    assert " .. " in dict(stages.extra)["names"][0]
    plan = Plan(
        parts, Placement.parse("0 1 0", 2), Schedule.parse("0F0 2F0 2I0 2W0 0I0 0W0\n1F0 1I0 1W0")
    )
    assert stages.of_partition == Profile.from_json(stages.to_json()).of_partition == (2, 1, 2)
    expected = sum(x.compute_s for x in stages.layers)  # one microbatch: nothing overlaps but W
    assert 0 < simulate(plan, stages).makespan_s <= expected
    with pytest.raises(PlanError, match="5 layers, the profile 3"):
        simulate(replace(plan, partition=Partition((1, 2, 2))), stages)
    with pytest.raises(CutError, match="5 layers"):
        measure(pure, model()[2], machine=Machine(), partition=Partition((2, 2)))


def blocks(profile: Profile) -> tuple[LayerCost, ...]:
    return profile.layers[1:-1]


def test_equal_layers_are_measured_once(profile: Profile) -> None:
    assert profile.num_layers == 5
    assert len(set(blocks(profile))) == 1


def test_bytes_are_those_of_the_programs_and_of_the_optimizer(profile: Profile) -> None:
    x = blocks(profile)[0]
    weights = 4 * 2 * D * FF
    assert x.param_bytes == weights
    # weights, float32 accumulators, two Adam moments, and Adam's counter
    assert x.state_bytes == 4 * weights + 4
    hidden, border = 4 * ROWS * FF, 4 * ROWS * D
    assert x.output_bytes == border
    assert x.residual_bytes == hidden + border  # tanh(h) and the layer's input
    # W: a from input and dh, b from tanh(h) and the incoming gradient
    assert x.weight_residual_bytes == 2 * hidden + 2 * border


def test_every_action_took_time(profile: Profile) -> None:
    for x in profile.layers[1:]:
        assert x.forward_s > 0
        assert x.input_grad_s > 0
        assert x.weight_grad_s > 0
        assert x.backward_s is not None
        assert x.backward_s > 0


def test_profile_reads_back(profile: Profile) -> None:
    again = Profile.from_json(profile.to_json())
    assert again.layers == profile.layers
    assert dict(again.extra)["names"] == dict(profile.extra)["names"]


def test_shapes_are_enough_for_the_batch_and_state_is_counted_without_an_optimizer(
    pure: PureLoss,
) -> None:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model()[2])
    found = measure(pure, shapes, rounds=1, target_s=0.0, machine=Machine())
    assert blocks(found)[0].state_bytes == 2 * 4 * 2 * D * FF


def test_tied_weights_count_once_in_the_state() -> None:
    params, _, batch = model(1)
    del params["out"]

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["emb"][batch["x"]]
        (layer,) = params["layers"]
        x = x + jnp.tanh(x @ layer["a"]) @ layer["b"]
        logp = jax.nn.log_softmax(x @ params["emb"].T)
        return -jnp.mean(jnp.take_along_axis(logp, batch["y"][:, None], axis=-1))

    found = measure(adapt(params, loss), batch, rounds=1, target_s=0.0, machine=Machine())
    assert sum(x.state_bytes for x in found.layers) == 2 * 4 * (V * D + 2 * D * FF)


def test_median_times_takes_turns_and_ignores_an_outlier() -> None:
    calls: list[str] = []
    times = median_times(
        {"a": lambda n: calls.append("a"), "b": lambda n: calls.append("b")}, rounds=3, most=1
    )
    assert calls == ["a", "a", "b", "b", *"ababab"]
    assert set(times) == {"a", "b"}


def test_fit_recovers_latency_and_bandwidth() -> None:
    samples = [(n, 2e-5 + n / 1e9) for n in (1 << 10, 1 << 16, 1 << 20, 1 << 24)]
    latency_s, bandwidth = fit_line(samples)
    assert math.isclose(latency_s, 2e-5, rel_tol=1e-6)
    assert math.isclose(bandwidth, 1e9, rel_tol=1e-6)


def test_fit_never_goes_negative() -> None:
    assert fit_line([(1000, 1e-6), (2000, 4e-6)])[0] == 0.0
    latency_s, bandwidth = fit_line([(1000, 3e-6), (1000000, 2e-6)])
    assert latency_s > 0
    assert bandwidth > 0


@pytest.mark.parametrize("transport", ["device_put", "ppermute"])
def test_link_between_two_devices(transport: str) -> None:
    first, second = jax.devices()[:2]
    sizes = (1 << 10, 1 << 20)
    link = measure_link(first, second, sizes, transport, rounds=2)
    assert [n for n, _ in link.samples] == list(sizes)
    assert link.latency_s >= 0
    assert link.bandwidth_bytes_per_s > 0
    assert 0 < link.host_cost_s < 1


def test_bad_links_are_refused() -> None:
    first, second = jax.devices()[:2]
    with pytest.raises(ValueError, match="between two devices with at least two sizes"):
        measure_link(first, first)
    with pytest.raises(ValueError, match="between two devices with at least two sizes"):
        measure_link(first, second, (8,))
    with pytest.raises(ValueError, match="unknown transport 'pigeon'; known are device_put"):
        measure_link(first, second, transport="pigeon")


def test_one_device_has_no_link() -> None:
    machine = measure_machine(jax.devices()[:1])
    assert machine.latency_s == 0
    assert machine.bandwidth_bytes_per_s == math.inf


def test_layers_with_leaves_of_four_bits_are_timed():
    table = jnp.ones((4, 4), jnp.int4)

    def loss(params, batch):
        h = batch
        for w in params:
            h = jnp.tanh(h @ (w * table.astype(h.dtype)))
            h = jax.lax.stop_gradient(jnp.sign(h)).astype(jnp.int4).astype(h.dtype) + h
        return jnp.mean(h**2)

    params = [jnp.eye(4)] * 2
    profile = measure(adapt(params, loss), jnp.ones((2, 4)), rounds=1, target_s=1e-4)
    assert len(profile.layers) >= 2
    assert all(cost.forward_s > 0 for cost in profile.layers)


def test_times_by_another_clock() -> None:
    """A clock of the caller's that each run moves on by what it is said to cost."""
    now = [0.0]

    def job(cost_s: float) -> Callable[[int], None]:
        def run(times: int) -> None:
            now[0] += cost_s * times

        return run

    times = median_times({"a": job(2.0), "b": job(5.0)}, rounds=3, clock=lambda: now[0])
    assert times == {"a": 2.0, "b": 5.0}


def test_weight_gradients_take_their_turns_long_after_the_input_gradients(pure: PureLoss) -> None:
    layered = find_layers(
        separated(trace_loss(pure.fn, pure.params, shapes_of(model()[2]), pure.state))
    )
    timer = LayerTimer(layered, pure, model()[2], jax.devices()[0])
    kinds = "".join(kind for _, kind in timer.jobs)
    assert list(kinds) == sorted(kinds, key="FIWB".index)
    assert {"F", "I", "W", "B"} == set(kinds)
