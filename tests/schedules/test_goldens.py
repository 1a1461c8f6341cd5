"""Every table of a deterministic family comes out op for op."""

import re
from pathlib import Path

import pytest

from octojax.ir.schedule import Schedule
from octojax.schedules import generate

GOLDENS = Path(__file__).parent.parent / "goldens"

NAMES = {
    "torch_GPipe": "gpipe",
    "alpa_gpipe": "gpipe",
    "sail_1F1B_": "1f1b",
    "deepspeed_1F1B": "1f1b",
    "alpa_1f1b_p": "1f1b",
    "alpa_1f1b_overlap": "1f1b-overlap",
    "torch_Interleaved1F1B": "interleaved",
    "sail_VPP": "interleaved",
    "megatron_Interleaved": "interleaved",
    "torch_InterleavedZeroBubble": "zb-h1",
    "torch_LoopedBFS": "looped-bfs",
    "torch_ZBVZeroBubble": "zb-v",
    "deepseek_DualPipe_": "dualpipe",
    "deepseek_DualPipeV": "dualpipe-v",
    "torch_DualPipeV": "dualpipe-v",
    "sail_Vhalf": "v-half",
    "sail_Vmin": "v-min",
    "sail_1F1BV": "1f1b-v",
    "chimera": "chimera",
    "dynapipe": "dynapipe",
}
"""Start of a golden's file name -> our name of the schedule."""


def tables(names):
    files = sorted(f.name for f in GOLDENS.glob("*.csv") if ".comms." not in f.name)
    return [(f, name) for f in files for start, name in names.items() if f.startswith(start)]


def sizes(file):
    """Returns (ranks, microbatches, chunks or None) as a golden's file name says them."""
    found = re.search(r"_p(\d+)_m(\d+)(?:_v(\d+))?", file)
    assert found
    p, m, v = found.groups()
    return int(p), int(m), int(v) if v else None


def options(file):
    found = {}
    if group := re.search(r"_g(\d+)", file):
        found["group_size"] = int(group[1])
    if "MoE" in file:
        found["moe_overlap"] = True
    if "dynapipe" in file:
        found |= dynapipe_options(file)
    return found


def dynapipe_options(file):
    found = {}
    if memory := re.search(r"_mem(\d+)", file):
        found["memory"] = memory[1]
    if "zigzag" in file:
        found["placement"] = "0 1 0"
    if "het" in file and "mem" in file:  # microbatches of unequal length hold unequal memory
        found["activations"] = [1.0, 0.8, 1.2, 0.9, 1.1, 0.7, 1.3, 1.0]
    return found


@pytest.mark.parametrize(("file", "name"), tables(NAMES))
def test_equals_the_published_table(file, name):
    made = generate(name, *sizes(file), **options(file))
    assert str(made) == str(Schedule.load(GOLDENS / file))


def test_every_start_of_a_name_is_used():
    assert {name for _, name in tables(NAMES)} == set(NAMES.values())
