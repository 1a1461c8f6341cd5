"""Reading the collectives of compiled programs."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from octojax.programs.collectives import Collective, collectives_of, read_collectives
from tests.api.test_param_specs import SPECS, compiled, mesh_of

LINES = [
    ("all-reduce(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add", ("tensor",)),
    ("all-reduce(%x), replica_groups=[4,2]<=[8], to_apply=%add", ("tensor",)),
    ("all-reduce-start(%x), replica_groups=[4,2]<=[4,2]T(1,0), to_apply=%add", ("context",)),
    ("all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add", ("context", "tensor")),
    ("all-reduce(%x), replica_groups=mesh['a'=2,'b'=4] {'a'}, to_apply=%add", ("data",)),
    ("all-reduce(%x), replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}, to_apply=%add", ("tensor",)),
    ("all-reduce(%x), replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}, to_apply=%add", ("context",)),
    ("all-reduce(%x), replica_groups=mesh['a'=2,'b'=4] {'a','b':(1)2}, x=y", ("context", "data")),
    ("all-reduce(%x), replica_groups={}, to_apply=%add", ("context", "data", "tensor")),
]


class Devices:
    """Stands for a mesh of eight devices."""

    devices = np.arange(8).reshape(2, 2, 2)
    axis_names = ("data", "context", "tensor")


@pytest.mark.parametrize(("text", "axes"), LINES)
def test_axes_of_groups(text, axes):
    line = f"  %all-reduce.1 = (f32[8,4]{{1,0}}, bf16[2]{{0}}) {text}"
    (found,) = read_collectives([line, "%y = f32[8] add(%all-reduce.1, %b)"], Devices())
    assert found == Collective(
        "all-reduce", tuple(sorted(axes, key=Devices.axis_names.index)), 1, 132
    )


def test_a_permutation():
    line = "%p = f32[3] collective-permute(%x), source_target_pairs={{0,2},{2,0}}, metadata={}"
    (found,) = read_collectives([line], Devices())
    assert (found.kind, found.axes, found.nbytes) == ("collective-permute", ("context",), 12)


def test_what_xla_puts_into_programs():
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x = jax.device_put(np.ones((4, 4), np.float32), jax.NamedSharding(mesh, P("a", "b")))
    program = jax.jit(lambda x: x.sum(1), out_shardings=jax.NamedSharding(mesh, P("a")))
    (found,) = collectives_of(program.lower(x).compile(), mesh)
    assert (found.kind, found.axes, found.count, found.nbytes) == ("all-reduce", ("b",), 1, 8)


# ---------------------------------------------------------------------- of a step


@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2)])
def test_one_sum_over_tensor_per_block_and_none_over_data_before_the_end(shape):
    with compiled(mesh_of(*shape), SPECS, schedule="zb-h1", partition="uniform") as step:
        programs = {(p.rank, p.name): p for p in step.report.collectives}
        ranks, data, _ = shape
        blocks = 2 // ranks
        first = programs.pop((0, "0F0"), None)
        for rank in range(ranks):
            end = programs.pop((rank, "the end of a step"))
            assert end.collectives == () or data > 1
            if data > 1:
                assert {c.axes for c in end.collectives} == {("data",)}
        if first is not None:
            assert [(c.kind, c.axes, c.count) for c in first.collectives] == [
                ("all-reduce", ("tensor",), blocks)
            ]
        every = [c for p in (first, *programs.values()) if p for c in p.collectives]
        assert {(c.kind, c.axes) for c in every} == {("all-reduce", ("tensor",))}
        # F of two blocks, and I of those whose input has a gradient: all but the first
        assert sum(c.count for c in every) == 2 + 1
        assert "all-reduce over tensor" in str(step.report)


def test_one_sum_too_many_is_seen():
    """A block that asks for its hidden layer whole gathers it."""
    from functools import partial

    whole = partial(jax.lax.with_sharding_constraint, shardings=P(None, None))

    def gathering(params, x):
        h = x
        for b in params["blocks"]:
            h = h + whole(jax.numpy.tanh(h @ b["up"])) @ b["down"]
        return jax.numpy.mean((h * params["scale"][None] - 1) ** 2)

    mesh = mesh_of(2, 1, 2)
    with compiled(mesh, SPECS, loss=gathering) as step:
        kinds = {c.kind for p in step.report.collectives for c in p.collectives}
        assert "all-gather" in kinds


def test_bytes_of_parameters_on_a_device():
    with compiled(mesh_of(2, 1, 2), SPECS) as step:
        held = [
            sum(s.data.nbytes for u in units for s in u.addressable_shards if s.device == device)
            for units in [step.init().model.units]
            for device in (r.devices[0] for r in step.loss.mesh.ranks)
        ]
        assert list(step.report.device_bytes) == held
        assert "parameters on each device of a rank" in str(step.report)
