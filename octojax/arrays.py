"""Arrays on the devices of a rank, some of which may be another process's.

    put(value, where)      each process places the parts for its own devices; nobody communicates
    local(value)           what every device has alike, on a device of this process
    pieces(value)          this process's parts, by device        joined(...)    and back

`jax.device_put` to devices of several processes has all processes of the program compare the value,
those of other ranks included, which do not come.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from octojax.compat import is_key, key_impl


def put(value: Any, where: Sharding) -> jax.Array:
    """Returns `value` on the devices of `where`.

    Where these are of several processes, all of them call this alike: with the whole value, or
    with one that lies on the same devices already.
    """
    if where.is_fully_addressable:
        return jax.device_put(local(value), where)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return _moves_to(where)(value)
    if hasattr(value, "dtype") and is_key(value):
        data = put(jax.random.key_data(value), where)
        return jax.random.wrap_key_data(data, impl=key_impl(value))
    whole = value if hasattr(value, "dtype") else np.asarray(value)
    indices = where.addressable_devices_indices_map(whole.shape)
    parts = [jax.device_put(_part(whole, index), device) for device, index in indices.items()]
    return jax.make_array_from_single_device_arrays(whole.shape, where, parts)


def put_all(values: Iterable[Any], where: Sharding) -> list[jax.Array]:
    """Returns `put` of each; in one go where this process has all devices."""
    if where.is_fully_addressable:
        return jax.device_put([local(value) for value in values], where)
    return [put(value, where) for value in values]


def local(value: Any) -> Any:
    """Returns a value that is the same on all its devices as this process can read it; others, and
    those whose devices are all of this process, as they are."""
    if not isinstance(value, jax.Array) or value.is_fully_addressable:
        return value
    return value.addressable_data(0) if value.is_fully_replicated else value


def pieces(value: jax.Array) -> dict[Any, jax.Array]:
    """Returns what this process has of a value, by device."""
    if len(value.sharding.device_set) == 1:
        return {next(iter(value.sharding.device_set)): value}
    return {s.device: s.data for s in value.addressable_shards}


def joined(shape: tuple[int, ...], where: Sharding, parts: Iterable[jax.Array]) -> jax.Array:
    """Returns the value of which `parts` are what this process has."""
    mine = list(parts)
    if len(where.device_set) == 1:
        return mine[0]
    return jax.make_array_from_single_device_arrays(shape, where, mine)


def _part(whole: Any, index: Any) -> Any:
    return whole if all(s == slice(None) for s in index) else whole[index]


@cache
def _moves_to(where: Sharding) -> Any:
    return jax.jit(_same, out_shardings=where)


def _same(value: jax.Array) -> jax.Array:
    return value
