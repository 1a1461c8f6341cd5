"""`--dry-run`: plan and memory of a published model on many devices, on this machine, unmade."""

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
    machine: str
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
    from octojax.machines import load

    start = time.perf_counter()
    hardware = load(settings.machine)
    if hardware.device is None:
        raise ValueError(f"{settings.machine} does not say what a device computes (device)")
    tokens = jax.ShapeDtypeStruct((settings.batch, settings.length + 1), jnp.int32)
    dry = octopipe.dry_run(
        published.make,
        published.loss,
        optax.adamw(1e-3),
        {"tokens": tokens},
        machine=hardware.machine,
        device=hardware.device,
        devices=settings.devices,
        kinds=published.kinds,
        max_tensor=settings.max_tensor,
        tune_seconds=settings.tune_seconds,
    )
    print(
        f"{settings.preset}: {settings.batch} sequences of {settings.length} tokens a step, "
        f"{hardware.machine.name}"
    )
    print(dry)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"dry run took {time.perf_counter() - start:.0f} s and {peak:.2f} GiB of this host")
    if settings.out is not None:
        settings.out.mkdir(parents=True, exist_ok=True)
        dry.plan.save(settings.out / "plan.json")
        dry.profile.save(settings.out / "stages.json")
        print(f"plan and profile of its stages in {settings.out}")
