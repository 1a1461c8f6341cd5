"""Machines by name and from files: what they say, and what is wrong with them."""

import json
import re
from importlib import resources
from pathlib import Path

import pytest

from octojax import machines
from octojax.errors import FormatError
from octojax.machines import Device

OWN = """
name = "mine"
capacity_bytes = 8e9
latency_s = 1e-6
bandwidth_bytes_per_s = 100e9
devices_per_node = 4
inter_bandwidth_bytes_per_s = 10e9

[device]
flops_per_s = 1e14
bandwidth_bytes_per_s = 1e12

[achieved]
contraction = 0.5
attention = 0.25
links = 0.5
"""


def test_the_names_are_those_that_are_published() -> None:
    assert machines.names() == ("a100", "b200", "cpu", "h100", "h200", "h800", "tpu-v5p")


@pytest.mark.parametrize("name", machines.names())
def test_a_machine_is_complete_and_says_where_every_constant_is_from(name: str) -> None:
    hardware = machines.load(name)
    assert hardware.device is not None
    assert hardware.device.efficiency <= 1
    assert hardware.machine.capacity_bytes < 1e12
    text = resources.files("octojax.machines").joinpath(f"{name}.toml").read_text("utf-8")
    assert "assumption" in text
    if name != "cpu":
        assert re.search(r"[Ss]ource|data sheet", text)
    shares = text.partition("[achieved]")[2].split("\n")
    for line in text.partition("[achieved]")[0].split("\n"):
        if " = " in line and not line.startswith(("name", "devices_per_node", "#")):
            assert "#" in line, line
    assert [x.split()[0] for x in shares if x] == [
        "contraction", "attention", "recurrence", "memory", "links",
    ]  # fmt: skip
    assert name in machines.describe(name, hardware)


def test_a_file_has_the_same_form_and_links_reach_their_share(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(OWN)
    hardware = machines.load(tmp_path / "own.toml")
    machine = hardware.machine
    assert (machine.name, machine.ranks_per_node) == ("mine", 4)
    assert machine.link(0, 3) == (1e-6, 50e9)
    assert machine.link(0, 4) == (1e-6, 5e9)
    assert hardware.device == Device(1e14, 1e12, 0.5, attention_efficiency=0.25)


def test_everything_that_is_wrong_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(
        OWN.replace("latency_s = 1e-6\n", "latency = 1e-6\nflops_per_s = 1.0\n", 1)
        .replace("8e9", "'much'")
        .replace("devices_per_node = 4", "devices_per_node = 4.5")
        .replace("contraction = 0.5", "contraction = 1.5\ncolour = 'blue'")
    )
    with pytest.raises(FormatError) as error:
        machines.load(path)
    lines = str(error.value).split("\n  ")
    assert lines[0] == f"{path}:"
    assert set(lines[1:-1]) == {
        "unknown latency (did you mean latency_s?)",
        "unknown flops_per_s (it belongs to [device])",
        "missing latency_s, a number >= 0",
        "capacity_bytes = 'much', expected a number > 0",
        "devices_per_node = 4.5, expected a whole number >= 1",
        "achieved.contraction = 1.5, expected a share, more than 0 and at most 1",
        "unknown achieved.colour",
    }
    assert lines[-1].startswith("fields are name, capacity_bytes")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "no TOML"),
        ("", "missing device.flops_per_s"),
        ("device = 3", "device = 3, expected a table"),
    ],
)
def test_files_that_are_no_machines_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(FormatError, match=re.escape(message)):
        machines.load(tmp_path / "x.toml")


def test_an_unknown_name_suggests_one() -> None:
    with pytest.raises(FormatError, match="no machine 'H80', did you mean h800"):
        machines.load("H80")
    with pytest.raises(FormatError, match=r"no machine 'zzz'\. Known are a100"):
        machines.load("zzz")


def test_json_machines_and_profiles_still_read(tmp_path: Path) -> None:
    machine = {"name": "j", "latency_s": 1e-6, "ranks_per_node": 2}
    device = {"flops_per_s": 1e12, "bandwidth_bytes_per_s": 1e11}
    (tmp_path / "m.json").write_text(json.dumps({**machine, "device": device}))
    found = machines.load(tmp_path / "m.json")
    assert (found.machine.ranks_per_node, found.device) == (2, Device(1e12, 1e11))
    (tmp_path / "p.json").write_text(json.dumps({"machine": machine, "layers": []}))
    assert machines.load(tmp_path / "p.json").device is None
    (tmp_path / "bad.json").write_text(json.dumps({**machine, "latency_s": "slow"}))
    with pytest.raises(FormatError, match="latency_s = 'slow', expected a finite number >= 0"):
        machines.load(tmp_path / "bad.json")


def test_each_kind_of_work_reaches_its_share() -> None:
    device = Device(100.0, 10.0, 0.5, attention_efficiency=0.25, recurrence_efficiency=0.1)
    assert device.time_s(100, 0) == 2
    assert device.time_s(100, 0, 100) == 2 + 4
    assert device.time_s(100, 0, 100, recurrent=True) == 2 + 10
    assert device.time_s(100, 50) == 5
    assert Device(100.0, 10.0, bandwidth_efficiency=0.5).time_s(1, 50) == 10
    with pytest.raises(ValueError, match="flops_per_s = 0, expected > 0; launch_s = -1"):
        Device(0, 1.0, launch_s=-1)
