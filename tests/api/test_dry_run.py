"""A dry run says what `compile` decides and what its devices will hold, without making anything."""

import importlib
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import octojax as octopipe
from octojax.api.dry_run import DryRun, largest_dimension
from octojax.costs import Device
from octojax.errors import CapacityError, MeshError
from octojax.ir import Machine
from tests.pipelines import FAST

WIDTH, LAYERS, ROWS = 16, 6, 8
MACHINE = Machine("four", 1e9, 1e-6, 1e9, ranks_per_node=4)
DEVICE = Device(1e12, 1e11)
SHAPES = {"x": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)}


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def make() -> Model:
    return Model(nnx.Rngs(0))


def loss(model: Model, batch: Any) -> jax.Array:
    return jnp.mean(model(batch["x"]) ** 2)


def mesh_of(*sizes: int) -> Mesh:
    count = int(np.prod(sizes))
    return Mesh(np.array(jax.devices()[:count]).reshape(sizes), ("pipe", "tensor"))


OPTIONS: dict[str, Any] = {"microbatches": 4, "schedule": "1f1b", "progress": False}


@pytest.mark.parametrize(("axis", "zero"), [("tensor", 0), ("data", 1)])
def test_bytes_are_those_of_the_state_that_the_same_step_makes(axis: str, zero: int) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("pipe", axis))
    specs = largest_dimension(2) if axis == "tensor" else None
    dry = octopipe.dry_run(
        make, loss, optax.adam(1e-3), SHAPES, machine=MACHINE, device=DEVICE, mesh=mesh,
        zero=zero, **OPTIONS,
    )  # fmt: skip
    assert dry.assumed_specs == (axis == "tensor")
    assert dry.fits
    step = octopipe.compile(
        make, loss, optax.adam(1e-3), SHAPES, mesh=mesh, param_specs=specs, compiler_options=FAST,
        partition=dry.plan.partition, zero=zero, **OPTIONS,
    )  # fmt: skip
    with step:
        state = step.init()
        for memory in dry.memory:
            first = step.loss.mesh.ranks[memory.rank].devices[0]

            def held(values: Any, device: Any = first) -> int:
                shards = [s for x in jax.tree.leaves(values) for s in x.addressable_shards]
                return sum(s.data.nbytes for s in shards if s.device == device)

            assert memory.params == held(state.model)
            assert memory.gradients == memory.params  # float32
            assert memory.optimizer == held(state.opt_state)
            assert zero == 0 or memory.optimizer < 1.2 * memory.params
    text = str(dry)
    assert f"{LAYERS * WIDTH * (WIDTH + 1):,} parameters on 4 devices (pipe 2 x {axis} 2)" in text
    assert ("taken as divided along their largest dimension" in text) == dry.assumed_specs


@pytest.mark.slow
def test_sizes_are_chosen_for_devices_and_a_larger_tensor_axis_keeps_less() -> None:
    given: dict[str, Any] = {"machine": MACHINE, "device": DEVICE, "progress": False}
    chosen = octopipe.dry_run(
        make, loss, optax.adam(1e-3), SHAPES, devices=2, tune_seconds=0.5, **given
    )
    assert chosen.choice is not None
    assert chosen.mesh == {
        "pipe": chosen.choice.best.sizes.pipeline,
        "data": chosen.choice.best.sizes.data,
        "tensor": chosen.choice.best.sizes.tensor,
    }
    assert "best: jax.make_mesh" in str(chosen)
    whole, half = (
        octopipe.dry_run(
            make, loss, optax.adam(1e-3), SHAPES, mesh=mesh_of(1, size), microbatches=2, **given
        ).memory[0]
        for size in (1, 2)
    )
    kernels, biases = 4 * LAYERS * WIDTH * WIDTH, 4 * LAYERS * WIDTH
    assert (whole.params, half.params) == (kernels + biases, kernels // 2 + biases)
    assert half.activations <= whole.activations


@pytest.mark.slow
def test_what_does_not_fit_and_what_is_not_there_is_said() -> None:
    given: dict[str, Any] = {"device": DEVICE, "progress": False}
    small = Machine("small", 1000.0)
    with pytest.raises(CapacityError, match="no plan of 'dry run' fits on 2 devices"):
        octopipe.dry_run(
            make, loss, optax.adam(1e-3), SHAPES, machine=small, devices=2, tune_seconds=0.5,
            **given,
        )  # fmt: skip
    with pytest.raises(MeshError, match=r"there are 4. Emulate them"):
        octopipe.dry_run(
            make, loss, optax.adam(1e-3), SHAPES, machine=MACHINE, devices=8, tune_seconds=0.5,
            **given,
        )  # fmt: skip
    with pytest.raises(MeshError, match="needs devices=, or the mesh="):
        octopipe.dry_run(make, loss, optax.adam(1e-3), SHAPES, machine=MACHINE, **given)


@pytest.mark.parametrize("plans", [1, 9])
def test_plans_that_need_more_than_the_search_knew_give_way_or_are_said_loudly(
    plans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many plans whose programs keep 500 bytes more than there is room."""
    module = importlib.import_module("octojax.api.dry_run")
    count, search, rooms = module._memory, module.tune_devices, []

    def tune_devices(*args: Any, **options: Any) -> Any:
        rooms.append(options["capacity_bytes"])
        return search(*args, **{**options, "seconds": None, "iterations": 3})

    def memory(step: Any, timeline: Any) -> Any:
        first, *others = count(step, timeline)
        if machine is not MACHINE and len(rooms) <= plans:
            lack = machine.capacity_bytes + 500 - first.peak
            first = replace(first, activations=first.activations + round(lack))
        return (first, *others)

    def dry() -> DryRun:
        return octopipe.dry_run(
            make, loss, optax.adam(1e-3), SHAPES, machine=machine, device=DEVICE, devices=2,
            progress=False,
        )  # fmt: skip

    monkeypatch.setattr(module, "_memory", memory)
    monkeypatch.setattr(module, "tune_devices", tune_devices)
    machine = MACHINE
    free = dry()
    assert free.fits
    assert free.choice is not None
    assert rooms == [MACHINE.capacity_bytes]
    room = max(free.choice.result.peak_bytes) + 100
    rooms.clear()
    machine = replace(MACHINE, capacity_bytes=room)
    tight = dry()
    assert rooms[0] == room
    assert max(rooms[1:]) <= room - 250
    assert tight.fits == (plans == 1)
    assert tight.fits != ("DOES NOT FIT: " in str(tight))


def test_the_largest_dimension_that_divides_is_divided() -> None:
    spec = largest_dimension(4)
    assert spec("bias", (8,)) == PartitionSpec()
    assert spec("kernel", (8, 16)) == PartitionSpec(None, "tensor")
    assert spec("kernel", (16, 6)) == PartitionSpec("tensor")
    assert spec("experts", (16, 8, 8)) == PartitionSpec("tensor")
    assert spec("odd", (3, 5)) == PartitionSpec()
