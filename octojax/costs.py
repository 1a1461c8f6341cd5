"""The cost model: what a program should take on a described machine, as a roofline.

Contractions take the longer of their operations at the machine's rate and their bytes at its
memory's. Everything between them is fused: of elementwise work only the values count that enter
or leave a fusion, each written once and read once. A scan takes its length times its body, a
cond its dearest branch.

Source of the roofline model: Williams, Waterman, Patterson, CACM 52(4), 2009.
"""

import json
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal

from octojax import compat
from octojax.errors import FormatError, ProfileError
from octojax.ir import Machine
from octojax.jaxprs.count import operations, sub_jaxprs
from octojax.jaxprs.inline_calls import inline_calls

_CONTRACTIONS = ("dot_general", "conv_general_dilated", "ragged_dot", "scatter")


@dataclass(frozen=True)
class Device:
    """The rates of one rank: operations in contractions that it really reaches, and memory."""

    flops_per_s: float
    memory_bytes_per_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ProfileError(
                    f"a described machine needs {field.name} > 0, found {getattr(self, field.name)}"
                )


def read_machine(path: str | Path) -> tuple[Machine, Device | None]:
    """Returns the machine described in a JSON file, and its rates if it gives them.

    The file holds the fields of `octojax.ir.Machine` and, for the cost model, `flops_per_s` and
    `memory_bytes_per_s`. A profile will do: its machine is taken. Raises `FormatError`.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise FormatError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise FormatError(f"{path}: a machine is a JSON object, found {type(data).__name__}")
    given = dict(data.get("machine", data))
    rates = {f.name: given.pop(f.name) for f in fields(Device) if f.name in given}
    unknown = sorted(set(given) - set(Machine.__dataclass_fields__))
    if unknown:
        known = [*Machine.__dataclass_fields__, *(f.name for f in fields(Device))]
        raise FormatError(f"{path}: unknown {unknown}; fields are {', '.join(known)}")
    try:
        machine = Machine(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
        device = Device(**rates) if len(rates) == len(fields(Device)) else None
    except TypeError as error:
        raise FormatError(f"{path}: {error}") from None
    return machine, device


def seconds(program: ClosedJaxpr, device: Device) -> float:
    """Returns the estimated time of one run of `program`."""
    return _seconds(compat.split_consts(inline_calls(program))[0], device)


def _seconds(jaxpr: Any, device: Device) -> float:
    inner = {id(eqn): list(sub_jaxprs(eqn)) for eqn in jaxpr.eqns}
    heavy = [eqn for eqn in jaxpr.eqns if inner[id(eqn)] or _is_contraction(eqn)]
    light = [eqn for eqn in jaxpr.eqns if not (inner[id(eqn)] or _is_contraction(eqn))]
    total = _fused_bytes(jaxpr, heavy, light) / device.memory_bytes_per_s
    for eqn in heavy:
        bodies = inner[id(eqn)]
        if bodies:
            turns = eqn.params.get("length", 1)
            total += turns * max(_seconds(body, device) for body in bodies)
        else:
            compute_s = operations(eqn) / device.flops_per_s
            moved = sum(map(_bytes, (*eqn.invars, *eqn.outvars)))
            total += max(compute_s, moved / device.memory_bytes_per_s)
    return total


def _is_contraction(eqn: Any) -> bool:
    return eqn.primitive.name.startswith(_CONTRACTIONS)


def _bytes(atom: Any) -> int:
    return compat.num_bytes(atom.aval)


def _fused_bytes(jaxpr: Any, heavy: list[Any], light: list[Any]) -> int:
    """Bytes that elementwise work reads and writes if all of it between contractions is fused.

    A value that lives inside a fusion costs nothing; one that comes from outside is read once,
    one that is needed outside is written once.
    """
    made = {v for eqn in light for v in eqn.outvars}
    outside = Counter(v for eqn in heavy for v in eqn.invars if not isinstance(v, Literal))
    outside.update(v for v in jaxpr.outvars if not isinstance(v, Literal))
    read = {v for eqn in light for v in eqn.invars if not isinstance(v, Literal) and v not in made}
    return sum(map(_bytes, read)) + sum(_bytes(v) for v in made if outside[v])
