"""The mark by which a user says where a layer ends."""

from typing import TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

MARK = "octopipe.boundary"
T = TypeVar("T")


def boundary(x: T) -> T:
    """Returns `x` (any pytree of arrays) and ends a layer here.

        h = octopipe.boundary(jnp.tanh(h))     # the next layer begins after this line

    Elsewhere it is the identity: under jit, grad, vmap, scan, and without a pipeline. A mark
    inside the body of a scan over stacked layers ends one layer per iteration. Marks before the
    first use of a parameter and right behind another mark end nothing.
    """
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, MARK), x)
