"""Short sums of arrays, by which processes find out whether they have the same.

Of a large array 64 evenly spaced blocks are summed, so that the time is bounded: other seeds,
batches or orders of rows differ nearly everywhere. All NaNs count as one.
"""

import zlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from octojax.compat import is_key

WHOLE_BYTES = 1 << 24
"""Of parameters and the first batch: up to 16 MiB of each leaf, 10 ms."""
TOTAL_BYTES = 1 << 30
"""Of all parameters together: 1.6 s, however large the model."""
STEP_BYTES = 1 << 16
"""Of later batches: 64 KiB of each leaf, 40 microseconds."""
_BLOCKS = 64


def describe(leaf: Any, limit_bytes: int = WHOLE_BYTES) -> str:
    """Returns type, shape and sum of an array, such as `float32[8,16] 1b2c3d4e`.

    An array of which other processes have parts is one array of all; its layout is in the place
    of the sum.
    """
    dtype = leaf.dtype if _keys(leaf) else jax.numpy.result_type(leaf)
    shape = ",".join(map(str, np.shape(leaf)))
    if not _readable(leaf):
        return f"{dtype}[{shape}] {getattr(leaf.sharding, 'spec', leaf.sharding)}"
    return f"{dtype}[{shape}] {checksum([leaf], limit_bytes):08x}"


def checksum(leaves: Iterable[Any], limit_bytes: int = WHOLE_BYTES) -> int:
    """Returns 32 bits that are the same for equal leaves, on whatever device.

    Equal are values, in the types that JAX gives them; a NaN equals any NaN. Arrays of which other
    processes have parts do not count.
    """
    total = 0
    for leaf in filter(_readable, leaves):
        total = zlib.crc32(_bytes(_sample(leaf, limit_bytes)), total)
    return total


def _readable(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated


def _keys(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and is_key(leaf)


def _sample(leaf: Any, limit_bytes: int) -> np.ndarray:
    """The flat values that count, on the host."""
    if _keys(leaf):
        leaf = jax.random.key_data(leaf)
    if not hasattr(leaf, "reshape"):
        leaf = np.asarray(leaf)
    size, block = leaf.size, limit_bytes // _BLOCKS // max(1, leaf.dtype.itemsize)
    if size > _BLOCKS * block:
        on_device = isinstance(leaf, jax.Array) and leaf.devices() != {_host()}
        flat = leaf.reshape(-1) if on_device else np.asarray(leaf).reshape(-1)
        row = size // _BLOCKS
        leaf = flat[: _BLOCKS * row].reshape(_BLOCKS, row)[:, :block]
    values = np.asarray(leaf).reshape(-1)
    values = values.astype(jax.dtypes.canonicalize_dtype(values.dtype), copy=False)
    if jax.numpy.issubdtype(values.dtype, np.inexact):
        absent = np.isnan(values)
        if absent.any():
            values = np.where(absent, np.asarray(np.nan, values.dtype), values)
    return values


def _host() -> Any:
    """The device whose arrays NumPy reads where they are; the first of a CPU process."""
    return jax.local_devices()[0] if jax.default_backend() == "cpu" else None


def _bytes(values: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(values).view(np.uint8))  # type: ignore[arg-type]
