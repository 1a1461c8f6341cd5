"""`--dry-run`: plan and memory of a published model on many devices, on this machine, unmade."""

import json
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

H100 = {
    "name": "nodes of 8 H100 SXM (80 GB), NVLink inside, 400 Gb/s a GPU between",
    "capacity_bytes": 80e9,
    "latency_s": 5e-6,
    "bandwidth_bytes_per_s": 450e9,
    "ranks_per_node": 8,
    "inter_latency_s": 1e-5,
    "inter_bandwidth_bytes_per_s": 50e9,
    "device": {"flops_per_s": 989e12, "bandwidth_bytes_per_s": 3.35e12},
}
"""Figures of NVIDIA's data sheet; `--machine FILE` takes others, in this form."""


@dataclass(frozen=True)
class Published:
    """A published model: what makes it, its loss, and the kinds of its layers, for the cost model:
    embedding first, head last."""

    make: Callable[[], Any]
    loss: Callable[[Any, Any], Any]
    kinds: Sequence[str]


@dataclass(frozen=True)
class DrySettings:
    """What a dry run is asked for."""

    preset: str
    devices: int
    batch: int
    length: int
    max_tensor: int | None
    machine: Path | None
    tune_seconds: float
    out: Path | None


def chosen(presets: Mapping[str, Any], name: str) -> Any:
    """Returns the preset of that name. Raises `ValueError` naming all of them."""
    if name not in presets:
        raise ValueError(f"--preset {name!r}: expected one of {', '.join(presets)}")
    return presets[name]


def run(settings: DrySettings, published: Published) -> None:
    """Prints the plan, the sizes that were weighed and the memory of every rank's devices.

    Call it after the devices have been emulated: it imports JAX.
    """
    import jax
    import jax.numpy as jnp
    import optax

    import octojax as octopipe
    from octojax.costs import Device
    from octojax.ir import Machine

    start = time.perf_counter()
    text = H100 if settings.machine is None else json.loads(settings.machine.read_text("utf-8"))
    given = dict(text)
    device = Device(**given.pop("device"))
    tokens = jax.ShapeDtypeStruct((settings.batch, settings.length + 1), jnp.int32)
    found = octopipe.dry_run(
        published.make,
        published.loss,
        optax.adamw(1e-3),
        {"tokens": tokens},
        machine=Machine(**given),
        device=device,
        devices=settings.devices,
        kinds=published.kinds,
        max_tensor=settings.max_tensor,
        tune_seconds=settings.tune_seconds,
    )
    print(f"{settings.preset}: {settings.batch} sequences of {settings.length} tokens a step")
    print(found)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"dry run took {time.perf_counter() - start:.0f} s and {peak:.2f} GiB of this host")
    if settings.out is not None:
        settings.out.mkdir(parents=True, exist_ok=True)
        found.plan.save(settings.out / "plan.json")
        found.profile.save(settings.out / "stages.json")
        print(f"plan and profile of its stages in {settings.out}")
