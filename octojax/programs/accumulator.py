"""The one rule by which values of microbatches, data shards and ranks are added up.

float32 and wider, complex      in their own type
floats of 16, 8 and fewer bits  in float32
int8, int16, bool               in int32;  uint8, uint16 in uint32
wider integers                  in their own type
"""

from typing import Any

import jax.numpy as jnp


def accumulator_dtype(dtype: Any) -> Any:
    """Returns in which type values of `dtype` are added up.

    Floats of 8 bits have no place in JAX's promotion of types.
    """
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.dtype(jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype)
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        return jnp.dtype(jnp.uint32 if jnp.iinfo(dtype).bits < 32 else dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.dtype(jnp.int32 if jnp.iinfo(dtype).bits < 32 else dtype)
    return jnp.dtype(jnp.int32 if jnp.issubdtype(dtype, jnp.bool_) else dtype)


def widened(value: Any) -> Any:
    """Returns a value as the first term of its sum."""
    return value.astype(accumulator_dtype(value.dtype))


def add_term(total: Any, value: Any) -> Any:
    """Returns a sum with one more term, in the sum's type."""
    return total + value.astype(total.dtype)
