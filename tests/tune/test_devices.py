"""Sizes of a mesh: what a rank of several devices costs, and which sizes are chosen."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax.errors import CapacityError, ProfileError
from octojax.ir import LayerCost, Machine, Profile
from octojax.ir.collectives import Group
from octojax.tune.devices import tune_devices
from octojax.tune.mesh_costs import MeshSizes, StepEnds, on_mesh, step_ends

GIB = 2**30
LAYER = LayerCost("mlp", 1.0, 1.0, 1.0, 400, 1600, 1000, 600, 100)
NODE = Machine(
    "nodes of 4", latency_s=0.25, bandwidth_bytes_per_s=100.0, ranks_per_node=4,
    inter_latency_s=1.0, inter_bandwidth_bytes_per_s=10.0,
)  # fmt: skip


def profile_of(layers: int = 4, machine: Machine = NODE, **extra: object) -> Profile:
    return Profile("model", (LAYER,) * layers, machine, extra=tuple(extra.items()))


@given(st.integers(1, 16), st.floats(0, 1e6))
def test_rings_take_what_their_closed_forms_say(size: int, nbytes: float) -> None:
    group = Group(size, 2.0, 50.0)
    ring_s = 0.0 if size == 1 else (size - 1) * 2.0 + nbytes * (size - 1) / size / 50.0
    assert group.all_gather_s(nbytes) == pytest.approx(ring_s)
    assert group.reduce_scatter_s(nbytes) == pytest.approx(ring_s)
    assert group.all_to_all_s(nbytes) == pytest.approx(ring_s)
    assert group.all_reduce_s(nbytes) == pytest.approx(2 * ring_s)


def test_one_device_and_the_same_samples_cost_what_the_profile_says() -> None:
    profile = profile_of(microbatch_size=3)
    assert on_mesh(profile, MeshSizes(2, samples=3)).layers == profile.layers


def test_a_mixer_has_one_all_reduce_in_f_and_i_and_none_in_w() -> None:
    found = on_mesh(profile_of(), MeshSizes(1, tensor=4, samples=2)).layers[0]
    ring_s = 2 * (3 * 0.25 + 200 * 3 / 4 / 100)
    assert found.forward_s == pytest.approx(2 / 4 + ring_s)
    assert found.input_grad_s == pytest.approx(2 / 4 + ring_s)
    assert found.weight_grad_s == pytest.approx(2 / 4)


def test_groups_wider_than_a_node_take_the_links_between_nodes() -> None:
    found = on_mesh(profile_of(), MeshSizes(1, tensor=8)).layers[0]
    assert found.forward_s == pytest.approx(1 / 8 + 2 * (7 * 1.0 + 100 * 7 / 8 / 10))
    machine = on_mesh(profile_of(), MeshSizes(4, tensor=2, data=1)).machine
    assert machine.ranks_per_node == 2
    assert on_mesh(profile_of(), MeshSizes(4, tensor=2, data=4)).machine.ranks_per_node == 1


def test_experts_travel_there_and_back_and_blocks_count_their_parts() -> None:
    def seconds(kind: str) -> float:
        layer = replace(LAYER, kind=kind)
        profile = Profile("x", (layer,), NODE, extra=(("experts_per_token", 4),))
        return on_mesh(profile, MeshSizes(1, tensor=2)).layers[0].forward_s - 0.5

    group = Group(2, 0.25, 100.0)
    experts_s = 2 * group.all_to_all_s(100 * 4 / 2) + group.all_gather_s(100)
    assert seconds("mamba1") == pytest.approx(group.all_reduce_s(100))
    assert seconds("mamba1+mlp") == pytest.approx(2 * group.all_reduce_s(100))
    assert seconds("mamba1+moe") == pytest.approx(group.all_reduce_s(100) + experts_s)
    assert seconds("head+loss") == pytest.approx(group.all_reduce_s(100))


def test_bytes_of_a_device_are_its_share_and_streams_are_whole() -> None:
    found = on_mesh(profile_of(), MeshSizes(1, tensor=4, samples=3)).layers[0]
    assert (found.param_bytes, found.state_bytes) == (100, 400)
    assert found.residual_bytes == 3 * (200 + 800 / 4)
    assert found.weight_residual_bytes == 3 * (200 + 400 / 4)
    assert found.output_bytes == 300


def test_zero_divides_the_optimizer_state_and_three_stores_parameters_by_share() -> None:
    def state(zero: int, **extra: object) -> int:
        sizes = MeshSizes(1, tensor=2, data=4, zero=zero)
        return on_mesh(profile_of(**extra), sizes).layers[0].state_bytes

    assert state(0) == 200 + 200 + 400
    assert state(1) == 200 + 200 + 400 / 4
    assert state(3) == 200 + 200 + 400 / 4 + 200 / 4
    assert state(1, gradient_ratio=2) == 200 + 400 + 200 / 4


def test_reductions_hide_behind_the_drain_and_gathers_behind_the_fill() -> None:
    ends = StepEnds(before_s=(0.0, 3.0), after_s=(1.0, 4.0))
    assert ends.step_s(first_s=(0.0, 5.0), last_s=(20.0, 12.0)) == 21.0
    assert ends.step_s(first_s=(0.0, 1.0), last_s=(20.0, 19.0)) == 2.0 + 23.0

    def of(zero: int) -> StepEnds:
        return step_ends(profile_of(), MeshSizes(2, data=2, zero=zero), [[0, 1, 2], [3]])

    group = Group(2, 0.25, 100.0)
    assert of(0).after_s == (group.all_reduce_s(1200), group.all_reduce_s(400))
    assert of(1).after_s[1] == group.reduce_scatter_s(400) + group.all_gather_s(400)
    assert of(3).after_s[1] == group.reduce_scatter_s(400)
    assert of(3).before_s == (group.all_gather_s(1200), group.all_gather_s(400))
    assert of(0).before_s == (0.0, 0.0)


@pytest.mark.slow
@settings(max_examples=8)
@given(st.sampled_from([2, 4]), st.sampled_from([1, 4, 6]), st.floats(1.0, 1e9), st.integers(2, 5))
def test_every_way_is_weighed_once_and_none_beats_its_bound(
    devices: int, batch: int, bandwidth: float, layers: int
) -> None:
    profile = profile_of(layers, Machine(bandwidth_bytes_per_s=bandwidth))
    found = tune_devices(profile, devices, batch, iterations=1)
    assert len({row.sizes for row in found.rows}) == len(found.rows)
    for row in found.rows:
        sizes = row.sizes
        assert sizes.devices == devices
        assert sizes.samples * sizes.data * row.microbatches == batch
        assert row.step_s is not None
        assert row.makespan_s is not None
        assert row.step_s >= row.makespan_s >= row.bound_s * (1 - 1e-9)
    steps = [row.step_s for row in found.rows if not row.note]
    assert found.best.step_s == min(s for s in steps if s is not None)
    assert found.result.plan.num_ranks == found.best.sizes.pipeline


def test_links_and_memory_decide_which_axis_the_devices_go_to() -> None:
    slow = profile_of(8, Machine(bandwidth_bytes_per_s=1.0))
    assert tune_devices(slow, 2, 4, iterations=1).best.sizes.tensor == 1
    fast = profile_of(2, Machine())  # two layers: no more than two ranks
    best = tune_devices(fast, 4, 1, iterations=1).best.sizes  # one sample: no data axis
    assert (best.tensor, best.data) == (4, 1)
    tight = replace(fast, machine=Machine(capacity_bytes=3200.0))
    assert tune_devices(tight, 2, 2, iterations=1).best.peak_bytes <= 3200  # type: ignore[operator]


def test_the_same_iterations_give_the_same_table() -> None:
    texts = {str(tune_devices(profile_of(2), 2, 2, iterations=1, seed=3)) for _ in range(2)}
    assert len(texts) == 1
    (text,) = texts
    assert "samples a step (simulated)" in text
    assert "best: jax.make_mesh((" in text


def test_what_does_not_fit_is_listed_with_what_is_lacking() -> None:
    profile = replace(profile_of(2), machine=replace(NODE, capacity_bytes=1600.0))
    with pytest.raises(CapacityError, match="no plan of 'model' fits on 2 devices") as error:
        tune_devices(profile, 2, 2, iterations=1)
    lines = str(error.value).splitlines()
    assert len(lines) == 2 + 6
    assert lines[1] == (
        "  pipeline 1 x tensor 1 x data 2, 1 samples a microbatch, zero 0: weights, gradients and "
        "optimizer state alone lack 1600 bytes a device"
    )
    assert sum("1F1B lacks" in x and "no plan was found that fits" in x for x in lines) == 4


def test_input_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="devices = 0, expected a number >= 1"):
        tune_devices(profile_of(), 0, 4)
    with pytest.raises(CapacityError, match="no way to divide 7 devices and a global batch of 4"):
        tune_devices(profile_of(3), 7, 4, max_tensor=2)
    with pytest.raises(ProfileError, match="made for tensor_parallel = 8"):
        on_mesh(profile_of(tensor_parallel=8), MeshSizes(1, tensor=4))
    with pytest.raises(ProfileError, match="speeds or capacities by rank"):
        on_mesh(profile_of(machine=Machine(speeds=(1.0, 2.0))), MeshSizes(2))
    with pytest.raises(ProfileError, match=r"microbatch_size = 'two', .*expected numbers > 0"):
        tune_devices(profile_of(microbatch_size="two"), 2, 2)
    with pytest.raises(ValueError, match="zero one of 0, 1, 3"):
        MeshSizes(1, zero=2)


def test_a_profile_of_several_tensor_devices_keeps_them() -> None:
    profile = profile_of(4, Machine(), tensor_parallel=2)
    found = tune_devices(profile, 4, 4, iterations=1)
    assert {row.sizes.tensor for row in found.rows} == {2}
    one = next(r for r in found.rows if r.sizes.pipeline == 2)
    assert math.isclose(one.bound_s, 4 * 12 / 2, rel_tol=0.3)


def test_a_divided_stream_is_gathered_again_in_w_and_crosses_ranks_in_shares() -> None:
    kinds = ("embedding", "mamba1+mlp", "head+loss")
    layers = tuple(replace(LAYER, kind=kind) for kind in kinds)
    profile = replace(profile_of(), layers=layers)
    whole, shares = (
        on_mesh(profile, MeshSizes(1, tensor=2, sequence=flag)).layers for flag in (False, True)
    )
    ring = Group(2, 0.25, 100.0).all_gather_s(100)
    added = [(x.forward_s - 0.5, x.input_grad_s - 0.5, x.weight_grad_s - 0.5) for x in shares]
    wanted = [(ring, 0, ring), (4 * ring, 4 * ring, 2 * ring), (ring, ring, 0)]
    for seconds, expected in zip(added, wanted, strict=True):
        assert seconds == pytest.approx(expected)
    assert [x.forward_s - 0.5 for x in whole] == pytest.approx([2 * ring, 4 * ring, 2 * ring])
    assert whole[0].input_grad_s == 0.5
    assert [x.output_bytes for x in shares] == [50] * 3
    assert shares[1].residual_bytes == 1000 / 2


def test_replicas_of_the_machine_and_a_data_axis_are_two_of_one_thing() -> None:
    profile = profile_of(machine=replace(NODE, replicas=2))
    assert on_mesh(profile, MeshSizes(2, tensor=2)).machine.replicas == 2
    with pytest.raises(ProfileError, match="2 replicas, and sizes have a data axis of 4"):
        on_mesh(profile, MeshSizes(1, data=4))
