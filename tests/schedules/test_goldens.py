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
}
"""Start of a golden's file name -> our name of the schedule."""


def tables(names):
    files = sorted(f.name for f in GOLDENS.glob("*.csv") if ".comms." not in f.name)
    return [(f, name) for f in files for start, name in names.items() if f.startswith(start)]


def sizes(file):
    """Returns (ranks, microbatches, chunks or None) as a golden's file name says them."""
    p, m, v = re.search(r"_p(\d+)_m(\d+)(?:_v(\d+))?", file).groups()
    return int(p), int(m), int(v) if v else None


def options(file):
    found = {}
    if group := re.search(r"_g(\d+)", file):
        found["group_size"] = int(group[1])
    if "MoE" in file:
        found["moe_overlap"] = True
    return found


@pytest.mark.parametrize(("file", "name"), tables(NAMES))
def test_equals_the_published_table(file, name):
    made = generate(name, *sizes(file), **options(file))
    assert str(made) == str(Schedule.load(GOLDENS / file))


def test_every_start_of_a_name_is_used():
    assert {name for _, name in tables(NAMES)} == set(NAMES.values())
