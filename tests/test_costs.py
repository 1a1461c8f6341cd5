"""The analytic cost model against figures counted by hand."""

import jax
import jax.numpy as jnp
import pytest

from octojax.costs import Device, estimate, layer_operations
from octojax.ir.profile import Machine, Profile
from octojax.layers import LayeredLoss, find_layers
from octojax.trace import trace_loss
from tests.zoo import CASES
from tests.zoo.case import D, T, V

B = 4


def layered(name: str, min_layers: int = 1) -> LayeredLoss:
    case = CASES[name]()
    pure = case.pure()
    return find_layers(trace_loss(pure.fn, pure.params, case.batch(B), pure.state), min_layers)


def test_a_dense_layer_counts_its_product_once_forward_once_per_gradient() -> None:
    first = layer_operations(layered("toy"))[1]
    assert first.weighted == 2 * B * D * D
    assert first.other == 0
    assert first.light == 2 * B * D  # bias and tanh
    assert first.param_bytes == 4 * (D * D + D)
    assert first.residual_bytes == 4 * 2 * B * D  # input and tanh's result
    assert first.weight_residual_bytes == 4 * 2 * B * D  # input and gradient of the output
    device = Device(flops_per_s=1.0, bandwidth_bytes_per_s=1e30, efficiency=1.0)
    cost = estimate(layered("toy"), device).layers[1]
    assert cost.forward_s == 2 * B * D * D + 2 * B * D
    assert cost.input_grad_s == 2 * B * D * D + 2 * 2 * B * D
    assert cost.weight_grad_s == 2 * B * D * D
    assert cost.backward_s == cost.input_grad_s + cost.weight_grad_s
    assert cost.state_bytes == 4 * cost.param_bytes


def test_attention_scores_have_no_weight_gradient() -> None:
    attention = layer_operations(layered("tied-lm"))[1]
    assert attention.weighted == 4 * 2 * B * T * D * D
    assert attention.other == 2 * 2 * B * T * T * D


def test_weights_inside_scan_cond_and_checkpoint_are_found() -> None:
    recurrence = layer_operations(layered("scan-time"))[1]
    assert recurrence.weighted == 2 * T * 2 * B * D * D
    for work in layer_operations(layered("cond")):
        assert work.weighted == 2 * 2 * B * D * D  # the dearer branch has two products
    block = layer_operations(layered("checkpoint"))[1]
    assert block.weighted == (4 * D * D + 2 * 2 * D * D) * 2 * B * T
    assert block.repeated > block.weighted


def test_operations_agree_with_xla() -> None:
    found = layered("toy")
    pure = CASES["toy"]().pure()
    batch = CASES["toy"]().batch(B)
    analysis = jax.jit(pure.fn).lower(pure.params, None, batch).compile().cost_analysis()
    analysis = analysis[0] if isinstance(analysis, list) else analysis
    counted = sum(w.weighted + w.other for w in layer_operations(found))
    assert counted == pytest.approx(analysis["flops"], rel=0.15)


def test_bandwidth_bounds_small_work() -> None:
    slow = Device(flops_per_s=1e30, bandwidth_bytes_per_s=1.0, launch_s=100.0)
    cost = estimate(layered("toy"), slow).layers[1]
    moved = 4 * 2 * B * D  # in and out of the product
    assert cost.forward_s == 100 + moved + cost.param_bytes


def test_the_estimate_is_a_profile_that_saves_and_loads(tmp_path) -> None:
    machine = Machine("two nodes", latency_s=1e-5, bandwidth_bytes_per_s=1e11)
    device = Device(1e14, 1e12)
    profile = estimate(
        layered("nnx-hybrid"), device, machine, name="hybrid", ranks=2, microbatches=4
    )
    assert profile.num_layers == 8
    assert profile.layers[0].output_bytes == 4 * B * T * D
    assert profile.layers[-1].param_bytes == 4 * (D * V + D)
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile


def test_a_device_needs_positive_rates() -> None:
    with pytest.raises(ValueError, match="flops_per_s = 0"):
        Device(0, 1.0)
    with pytest.raises(ValueError, match="launch_s = -1"):
        Device(1.0, 1.0, launch_s=-1)


def test_parameterless_layers_have_no_weight_work() -> None:
    work = layer_operations(layered("parameterless"))[2]
    assert (work.weighted, work.param_bytes, work.weight_residual_bytes) == (0, 0, 0)
    assert jnp.isfinite(work.light)
