"""What a transfer between two devices costs: latency, bandwidth, and time on the host."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from octojax import compat
from octojax.compat import Device
from octojax.profiling.timing import Job, median_times

SIZES_BYTES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)


@dataclass(frozen=True)
class Link:
    """A transfer takes `latency_s + bytes / bandwidth_bytes_per_s` and occupies the host of
    each of its two ranks for `host_cost_s`. `samples` are the measured `(bytes, seconds)`."""

    latency_s: float
    bandwidth_bytes_per_s: float
    host_cost_s: float
    samples: tuple[tuple[int, float], ...]


def measure_link(
    source: Device,
    target: Device,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    transport: str = "device_put",
    rounds: int = 9,
) -> Link:
    """Returns the fitted costs of sending from `source` to `target`.

    `transport` is "device_put" or "ppermute", as the executor's. Raises `ValueError` for equal
    devices, fewer than two sizes, or another transport.
    """
    if source == target or len(set(sizes_bytes)) < 2:
        raise ValueError(
            f"a link is measured between two devices with at least two sizes; found {source} to "
            f"{target}, sizes {tuple(sizes_bytes)}"
        )
    makers = {"device_put": _copy, "ppermute": _permute}
    if transport not in makers:
        raise ValueError(f"unknown transport {transport!r}; known are {', '.join(makers)}")
    sends = {size: makers[transport](source, target, size) for size in sizes_bytes}
    times = median_times({n: _job(send) for n, send in sends.items()}, rounds, target_s=2e-3)
    smallest = min(sizes_bytes)
    samples = tuple((n, times[n]) for n in sorted(times))
    latency_s, bandwidth = fit_line(samples)
    return Link(latency_s, bandwidth, _host_cost(sends[smallest]), samples)


def fit_line(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Returns `(latency_s, bandwidth_bytes_per_s)` of the line through `(bytes, seconds)`.

    Least squares of the relative error, so that small transfers count as much as large ones;
    neither figure is negative.
    """
    sizes, times = (np.array(column, dtype=float) for column in zip(*samples, strict=True))
    columns = np.stack([np.ones_like(sizes), sizes], axis=1) / times[:, None]
    (latency_s, per_byte), *_ = np.linalg.lstsq(columns, np.ones_like(sizes), rcond=None)
    if latency_s < 0:
        latency_s, per_byte = 0.0, _slope(sizes / times)
    if per_byte <= 0:
        return 1.0 / float(np.mean(1.0 / times)), float("inf")
    return float(latency_s), 1.0 / float(per_byte)


def _slope(column: np.ndarray) -> float:
    return float(column.sum() / (column**2).sum())


def _job(send: Any) -> Job:
    def job(times: int) -> None:
        for _ in range(times):  # one after the other: a link carries one transfer at a time
            jax.block_until_ready(send())

    return job


def _host_cost(send: Any, calls: int = 50) -> float:
    """Seconds that dispatching a small transfer keeps the host busy, both sides together halved."""
    spans = []
    for _ in range(calls):
        start = time.perf_counter()
        moved = send()
        spans.append(time.perf_counter() - start)
        jax.block_until_ready(moved)
    return float(np.median(spans)) / 2


def _copy(source: Device, target: Device, nbytes: int) -> Any:
    value = jax.device_put(jnp.zeros(nbytes, jnp.uint8), source)
    return partial(compat.copy_to((SingleDeviceSharding(target),)), [value])


def _permute(source: Device, target: Device, nbytes: int) -> Any:
    mesh = Mesh(np.array([source, target]), ("pair",))
    spec = PartitionSpec("pair")

    def move(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, "pair", [(0, 1)])

    moved = jax.jit(jax.shard_map(move, mesh=mesh, in_specs=spec, out_specs=spec))
    value = jax.device_put(np.zeros((2, nbytes), np.uint8), NamedSharding(mesh, spec))
    return partial(moved.lower(value).compile(), value)
