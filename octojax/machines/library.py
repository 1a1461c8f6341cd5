"""From a name or a file to a machine."""

import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

from octojax.errors import FormatError, OctoPipeError
from octojax.ir.files import read_json
from octojax.ir.profile import Machine
from octojax.machines.device import Device
from octojax.machines.fields import check

_SUFFIX = ".toml"


@dataclass(frozen=True)
class Hardware:
    """A machine's links and memory, and what one of its devices computes (None: not said).

    `machine.ranks_per_node` counts devices here; profiles of ranks of several devices count ranks.
    """

    machine: Machine
    device: Device | None


def names() -> tuple[str, ...]:
    """Returns the names of the machines that come with the package."""
    files = resources.files("octojax.machines").iterdir()
    return tuple(sorted(f.name.removesuffix(_SUFFIX) for f in files if f.name.endswith(_SUFFIX)))


def load(source: str | Path) -> Hardware:
    """Returns the machine of that name, or that of a TOML or JSON file.

    JSON holds the fields of `Machine`, and under "device" those of `Device`; a profile will do.
    Raises `FormatError` listing everything that is wrong, or suggesting a name.
    """
    text = str(source)
    if text in names():
        file = resources.files("octojax.machines").joinpath(text + _SUFFIX)
        return _of_toml(file.read_bytes(), text)
    path = Path(source)
    if not path.exists() and path.suffix.lower() not in (_SUFFIX, ".json"):
        near = get_close_matches(text.lower(), names(), 1, 0.4)
        raise FormatError(
            f"no machine {text!r}{f', did you mean {near[0]}?' if near else '.'} Known are "
            f"{', '.join(names())}; your own is a file, such as my{_SUFFIX}"
        )
    if path.suffix.lower() == _SUFFIX:
        return _of_toml(path.read_bytes(), text)
    return _of_json(read_json(path), text)


def _of_toml(data: bytes, where: str) -> Hardware:
    try:
        parsed = tomllib.loads(data.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{where}: no TOML ({error})") from None
    check(parsed, where)
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in parsed.items()
        if name not in ("device", "achieved", "devices_per_node")
    }
    achieved = parsed.get("achieved", {})
    for link in ("bandwidth_bytes_per_s", "inter_bandwidth_bytes_per_s"):
        if link in fields:
            fields[link] = fields[link] * achieved.get("links", 1.0)
    shares = {
        "efficiency": achieved.get("contraction", Device.efficiency),
        "attention_efficiency": achieved.get("attention"),
        "recurrence_efficiency": achieved.get("recurrence"),
        "bandwidth_efficiency": achieved.get("memory", Device.bandwidth_efficiency),
    }
    return _hardware(
        {**fields, "ranks_per_node": parsed.get("devices_per_node")},
        {**parsed["device"], **shares},
        where,
    )


def _of_json(data: Any, where: str) -> Hardware:
    if not isinstance(data, dict):
        raise FormatError(f"{where}: a machine is a JSON object, found {type(data).__name__}")
    fields = dict(data.get("machine", data))
    rates = fields.pop("device", None)
    for record, values in ((Machine, fields), (Device, rates or {})):
        known = record.__dataclass_fields__
        unknown = [key for key in values if key not in known]
        if unknown:
            raise FormatError(
                f"{where}: unknown {unknown} in {record.__name__.lower()}; fields are "
                f"{', '.join(known)}"
            )
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return _hardware(fields, rates, where)


def _hardware(fields: dict[str, Any], rates: dict[str, Any] | None, where: str) -> Hardware:
    try:
        return Hardware(Machine(**fields), None if rates is None else Device(**rates))
    except (TypeError, ValueError, OctoPipeError) as error:
        raise FormatError(f"{where}: {error}") from None


def describe(name: str, hardware: Hardware) -> str:
    """Returns one line: rate, memory, links."""
    machine, device = hardware.machine, hardware.device
    rate = ""
    if device is not None:
        flops, memory = device.flops_per_s / 1e12, device.bandwidth_bytes_per_s / 1e9
        rate = f"{flops:6.4g} Tflop/s {memory:5.4g} GB/s"
    far = machine.inter_bandwidth_bytes_per_s
    node = "" if machine.ranks_per_node is None else f" in {machine.ranks_per_node}"
    between = "" if far is None else f", {far / 1e9:.4g} between"
    return (
        f"{name:8s} {rate:25s} {machine.capacity_bytes / 1e9:6.4g} GB  links "
        f"{machine.bandwidth_bytes_per_s / 1e9:.4g} GB/s{node}{between}  {machine.name}"
    )
