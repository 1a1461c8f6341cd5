"""What a model says of how its parameters lie on a mesh, in the ways in which JAX users say it.

nnx.with_partitioning(init, (None, "tensor"))          metadata of a variable; logical names
                                                       go by `sharding_rules` and the rules
                                                       in force (flax.core.spmd)
nn.with_partitioning(init, (None, "tensor"))           a linen box
nn.with_logical_partitioning(init, ("embed", "mlp"))   the same, by its rules or those in force
jax.device_put(x, NamedSharding(mesh, P("tensor")))    an array of the mesh
"""

from typing import Any

import jax.tree_util as tree
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def partition_specs(values: Any, mesh: Mesh) -> list[PartitionSpec | None]:
    """Returns what the model says of every flat leaf of `values`; None where it says nothing.

    Metadata goes before the sharding of the array itself, which counts if it is of the devices
    and axes of `mesh`.
    """
    from flax import nnx
    from flax.core import meta

    def is_box(value: Any) -> bool:
        return isinstance(value, nnx.Variable | meta.AxisMetadata)

    specs: list[PartitionSpec | None] = []
    for node in tree.tree_leaves(values, is_leaf=is_box):
        said = _of_box(node) if is_box(node) else None
        leaves = tree.tree_leaves(node)
        specs += [_of_array(leaf, mesh) if said is None else said for leaf in leaves]
    return specs


def _of_box(box: Any) -> PartitionSpec | None:
    """What the metadata of an nnx variable or a linen box says."""
    from flax import nnx
    from flax.linen.spmd import LogicallyPartitioned, logical_to_mesh_axes

    if isinstance(box, nnx.Variable):
        said = box.get_metadata().get("out_sharding")
        if isinstance(said, NamedSharding):
            return said.spec
        return nnx.get_partition_spec(box).get_value() if said else None
    names = getattr(box, "get_partition_spec", lambda: None)()
    if isinstance(box, LogicallyPartitioned):
        return logical_to_mesh_axes(names, box.rules)
    return names


def _of_array(leaf: Any, mesh: Mesh) -> PartitionSpec | None:
    """What the sharding of an array, or of a shape, says of this mesh."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not any(sharding.spec):
        return None
    same = dict(sharding.mesh.shape) == dict(mesh.shape)
    if isinstance(sharding.mesh, Mesh):
        same &= set(sharding.mesh.devices.flat) == set(mesh.devices.flat)
    return sharding.spec if same else None
