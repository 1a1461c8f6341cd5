"""`--mesh`: a run's devices as pipeline x data x tensor (or expert) axes.

2,2,2                  pipe 2 x data 2 x tensor 2
pipe=2,tensor=2        by name, in any order; an axis that is not named is 1
"""

import math
from collections.abc import Mapping
from typing import Any

AXES = ("pipe", "data", "tensor", "expert")


def parsed(text: str) -> dict[str, int]:
    """Returns the size of every axis. Raises `ValueError` listing all that is wrong."""
    words = [word.strip() for word in text.split(",")]
    pairs = [
        word.split("=", 1) if "=" in word else [axis, word]
        for axis, word in zip([*AXES, *[""] * len(words)], words, strict=False)
    ]
    sizes: dict[str, int] = {}
    faults = []
    for axis, number in ((axis.strip(), number.strip()) for axis, number in pairs):
        if axis not in AXES:
            faults.append(f"{axis or number!r} is none of {', '.join(AXES)}")
        elif axis in sizes:
            faults.append(f"{axis} is there twice")
        elif not number.isdigit() or int(number) < 1:
            faults.append(f"{axis} is {number or 'empty'}, expected a whole number from 1")
        else:
            sizes[axis] = int(number)
    if faults:
        raise ValueError(
            f"--mesh {text!r}: {'; '.join(faults)}. Write the sizes of {', '.join(AXES[:3])}, such "
            f"as 2,2,2, or names, such as pipe=2,tensor=2"
        )
    return {axis: sizes.get(axis, 1) for axis in AXES if axis == "pipe" or sizes.get(axis, 1) > 1}


def check(mesh: Mapping[str, int], batch: int, microbatches: int, model: Any) -> None:
    """Raises `ValueError` listing every size of batch and model that an axis does not divide."""
    from octojax.profiling.presets import Preset

    data, tensor, expert = (mesh.get(axis, 1) for axis in AXES[1:])
    faults = []
    if batch % (microbatches * data):
        faults.append(
            f"{batch} samples are not {microbatches} microbatches of as many on each of {data} "
            f"devices of the data axis"
        )
    if tensor > 1:
        try:
            preset = Preset(type(model).__name__, model.config, type(model), None)
            preset.expect_divisible(tensor, whole=("groups",))
        except ValueError as error:
            faults.append(str(error))
    experts = getattr(getattr(model.config, "moe", None), "experts", 0)
    if expert > 1 and (experts == 0 or experts % expert):
        faults.append(f"an expert axis of {expert} does not divide {experts} experts")
    if faults:
        raise ValueError(f"--mesh {shape(mesh)}: {'; '.join(faults)}")


def param_specs(mesh: Mapping[str, int]) -> Any:
    """Returns what `octopipe.compile` wants to know of the model's parameters; None: nothing."""
    from octojax.models.sharding import partition_specs

    named = {axis: axis if axis in mesh else None for axis in ("tensor", "expert")}
    return partition_specs(**named, sizes=dict(mesh)) if any(named.values()) else None


def devices(mesh: Mapping[str, int]) -> int:
    return math.prod(mesh.values())


def shape(mesh: Mapping[str, int]) -> str:
    """Such as pipe 2 x tensor 2."""
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items())
