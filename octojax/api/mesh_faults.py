"""What JAX says where a model and the mesh do not fit, as an error that says what to do."""

import contextlib
import re
from collections.abc import Iterator, Sequence

from octojax.errors import MeshError

_SAYINGS = (
    (
        r"should match the mesh passed to shard_map",
        "the model calls jax.shard_map with a mesh of its own. Leave mesh= out: the mesh in force "
        "is then taken, which is the one of a rank",
    ),
    (
        r"non-empty mesh in context|context mesh cannot be empty",
        "the model names mesh axes, but no mesh is in force. Compile under "
        "`with jax.set_mesh(mesh):`, or name a NamedSharding of the mesh in the model",
    ),
    (
        r"not found in mesh|subset of mesh\.axis_names|unbound axis name",
        "the model names an axis that the mesh does not have. Name one of this mesh, or compile "
        "with a mesh that has it",
    ),
    (
        r"only refer to Auto axes|of type Auto|should match the aval mesh|[Ee]xplicit",
        "the model uses explicit sharding (reshard, out_sharding=, or arrays and shardings of a "
        "mesh with explicit axes), which a pipeline does not follow. Make the mesh with "
        "axis_types=(jax.sharding.AxisType.Auto,) * n, and constrain values by "
        "jax.lax.with_sharding_constraint",
    ),
)


@contextlib.contextmanager
def explained(axes: Sequence[str]) -> Iterator[None]:
    """Within it an error of JAX about meshes becomes a `MeshError` that says what to do."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError, NameError, AssertionError) as error:
        text = str(error)
        remedy = next((does for says, does in _SAYINGS if re.search(says, text)), None)
        if remedy is None or isinstance(error, MeshError):
            raise
        raise MeshError(
            f"the loss cannot be traced for the mesh with axes {tuple(axes)}: {remedy}. "
            f"({type(error).__name__}: {text.splitlines()[0]})"
        ) from error
