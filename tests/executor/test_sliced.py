"""What is the same on several devices of a rank crosses once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from octojax.executor import sliced
from tests.api.test_param_specs import SPECS, assert_trains, compiled, mesh_of


@pytest.fixture(autouse=True)
def _small_values_too(monkeypatch):
    monkeypatch.setattr(sliced, "LEAST_BYTES", 1)


def placed(shape, spec, mesh):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))


def test_how_values_cross():
    mesh = mesh_of(2, 2, axes=("data", "tensor"))
    for shape, spec, cut in [
        ((8, 4), P(), P(("data", "tensor"))),
        ((2, 8), P(), P(None, ("data", "tensor"))),
        ((2, 3, 4), P("data"), P("data", None, "tensor")),
        ((4, 3, 4), P("data"), P(("data", "tensor"))),
        ((4, 4), P("data", "tensor"), P("data", "tensor")),
        ((3, 5), P(), P()),
    ]:
        found = sliced.on_the_link(placed(shape, spec, mesh)).sharding
        assert found.is_equivalent_to(NamedSharding(mesh, cut), len(shape)), (shape, spec)


def test_small_values_cross_whole(monkeypatch):
    monkeypatch.setattr(sliced, "LEAST_BYTES", 1 << 20)
    value = placed((8, 4), P(), mesh_of(2, axes=("tensor",)))
    assert sliced.on_the_link(value) is value


def test_a_step_whose_transfers_are_cut():
    with compiled(mesh_of(2, 1, 2), SPECS, transport="ppermute") as step:
        assert_trains(step)
        crossing, whole = step.report.link_bytes
        assert f"{crossing / 1024:.1f}K in slices, instead of {whole / 1024:.1f}K" in str(
            step.report
        )
        engine = step.loss.trainer.engine
        activations = [
            v
            for t, group in zip(engine.step.transfers, engine._at_targets(), strict=True)
            if t.kind in "FB"
            for v in group
        ]
        saved = sum(int(np.prod(v.shape)) * 4 for v in activations)  # one of two copies
        assert whole - crossing >= saved > 0


def test_copies_in_one_memory_are_not_cut():
    with compiled(mesh_of(2, 1, 2), SPECS) as step:
        crossing, whole = step.report.link_bytes
        assert crossing == whole > 0
