"""Figures from the paper, the guide to schedules and public threads, by simulating tables."""

import re
from pathlib import Path

import numpy as np
import pytest

from octojax.ir import Kind, Machine, Schedule
from octojax.ir.verify import verify
from octojax.passes import SplitBackward
from octojax.schedules import generate
from octojax.simulate import StageCosts, simulate

GOLDENS = Path(__file__).parents[1] / "goldens"


def costs(*forward: float) -> StageCosts:
    """F = I = W in every stage, and B = 2 F."""
    f = np.array(forward, dtype=np.float64)
    seconds = np.stack([f, 2 * f, f, f, f], axis=1)
    return StageCosts(seconds, np.zeros_like(seconds), np.zeros(len(f), dtype=np.bool_))


def fig3(heading: str) -> tuple[Schedule, int]:
    """The solver's table under a heading, and its makespan. `0F0@3` is 0F0, started at 3."""
    text = (GOLDENS / "extra" / "octopipe_fig3_z3.txt").read_text()
    lines = text[text.index(heading) :].split("\n")
    makespan = re.search(r"optimal makespan (\d+)", lines[0])
    assert makespan is not None
    rows = [line.split()[2:] for line in lines[1:3]]
    return (
        Schedule.parse("\n".join(" ".join(x.split("@")[0] for x in row) for row in rows)),
        int(makespan[1]),
    )


@pytest.mark.parametrize(
    ("heading", "forward", "makespan"),
    [
        ("schedule only", (2, 4), 26),
        ("partition only", (3, 3), 21),
        ("4 virtual", (1, 2, 1, 2), 25),
        ("interleave 6", (1,) * 6, 19),
        ("V 6", (1,) * 6, 19),
    ],
)
def test_fig3_solver_tables(heading, forward, makespan):
    schedule, stated = fig3(heading)
    verify(schedule, 2, len(forward))
    if heading == "4 virtual":  # the six unit layers lie as 1, 2, 1, 2
        assert sum(forward) == 6
    assert simulate(schedule, costs(*forward)).makespan_s == makespan == stated


def test_fig3_1f1b():
    rows = generate("1f1b", 2, 2)
    assert simulate(rows, costs(2, 4)).makespan_s == 30
    assert simulate(rows, costs(3, 3)).makespan_s == 27


@pytest.mark.parametrize(("m", "makespan"), [(2, 15), (1, 12)])
def test_fewer_microbatches_than_ranks(m, makespan):
    """pytorch/torchtitan#775: 1F1B with m < p."""
    result = simulate(generate("1f1b", 4, m), StageCosts.unit(4))
    assert result.makespan_s == makespan
    assert {r.bubble_s for r in result.ranks} == {9}
    assert [r.peak_microbatches for r in result.ranks] == [min(m, 4 - r) for r in range(4)]


@pytest.mark.parametrize(
    ("sizes", "makespan"),
    [
        ((8, 8, 7, 7), 252),  # NVIDIA/Megatron-LM#1304: 30 layers on 4 ranks
        ((7, 7, 8, 8), 258),
        ((2, 1, 1, 1), 51),  # deepspeedai/DeepSpeed#5078: 5 layers on 4 ranks
        ((1, 1, 1, 2), 57),
        ((1, 1, 2, 1), 55),
        ((1, 2, 3, 4), 114),
    ],
)
def test_uneven_stages_of_1f1b(sizes, makespan):
    assert simulate(generate("1f1b", 4, 8), costs(*sizes)).makespan_s == makespan


def test_heavy_ends():
    """DeepSpeed#1378: costs [2, 1 x 8, 5]. sum + (m-1) max is 50 and an upper bound."""
    stages = np.array([5, 4, 1, 5]) / 3  # F, I, W a third of a layer's cost each
    even = np.array([4, 3, 2, 6]) / 3
    schedule = generate("1f1b", 4, 8)
    best = simulate(schedule, costs(*stages)).makespan_s
    assert best <= 50 + 1e-9
    assert best < simulate(schedule, costs(*even)).makespan_s


def test_zero_bubble_keeps_activations_until_w():
    """pytorch/pytorch#136766: both peaks are told, freed at the input and weight gradient."""
    result = simulate(generate("zb-h1", 8, 64), StageCosts.unit(8))
    assert max(r.peak_microbatches for r in result.ranks) == 8
    assert max(r.peak_microbatches_until_weight for r in result.ranks) == 8
    assert (
        simulate(generate("zb-h1", 8, 64), StageCosts.unit(8), free="weight")
        .ranks[7]
        .peak_microbatches
        == 8
    )


def test_gpipe_is_as_long_as_1f1b():
    """Megatron-LM#691 and others: drawings with unit steps suggest otherwise."""
    for name in ("gpipe", "1f1b"):
        fused = simulate(generate(name, 4, 8), StageCosts.unit(4))
        assert (fused.makespan_s, round(fused.bubble_ratio, 4)) == (33, 0.2727)
        even = simulate(generate(name, 4, 8), StageCosts.unit(4, 1, 0.5, 0.5, 1))
        assert (even.makespan_s, round(even.bubble_ratio, 4)) == (22, 0.2727)


@pytest.mark.parametrize(
    ("m", "plain", "interleaved"),
    [(8, 0.467, 0.304), (16, 0.304, 0.179), (32, 0.179, 0.099), (64, 0.099, 0.052)],
)
def test_guide_to_schedules(m, plain, interleaved):
    """The guide's table for p = 8."""
    for name in ("gpipe", "1f1b"):
        result = simulate(generate(name, 8, m), StageCosts.unit(8))
        assert round(result.bubble_ratio, 3) == plain
        assert max(r.peak_microbatches for r in result.ranks) == (m if name == "gpipe" else 8)
    result = simulate(generate("interleaved", 8, m, chunks=2), StageCosts.unit(16))
    assert round(result.bubble_ratio, 3) == interleaved


def test_table_iii_counts():
    """Transfers of Nemotron-H (Small), 4 ranks, 8 microbatches: 48, and 880 with 56 stages.

    #Overlap is 24 of 48 in the paper. With equal stages, a fused backward and any latency, 24
    senders go on computing while their value is under way.
    """
    machine = Machine(latency_s=0.01)
    plain = simulate(generate("1f1b", 4, 8), StageCosts.unit(4), machine)
    assert (len(plain.transfers), plain.sender_overlapped) == (48, 24)
    fine = simulate(
        SplitBackward()(generate("interleaved", 4, 8, chunks=14)), StageCosts.unit(56), machine
    )
    assert len(fine.transfers) == 880
    assert fine.overlapped < fine.sender_overlapped < 880
    v = simulate(generate("zb-v", 4, 8), StageCosts.unit(8), machine)
    assert len(v.transfers) == 96


def test_recompute_adds_a_forward():
    """Without R, I pays for it; with R, R does, and may run while the gradient is awaited."""
    plain = Schedule.parse("0F0 0I0 0W0\n1F0 1I0 1W0")
    explicit = Schedule.parse("0F0 0R0 0I0 0W0\n1F0 1R0 1I0 1W0")
    base = costs(1, 1)
    again = StageCosts(base.seconds, base.nbytes, np.array([True, True]))
    assert simulate(plain, base).makespan_s == 5
    assert simulate(plain, again).makespan_s == 7  # 2 F, 2 I of two each, W
    assert simulate(explicit, again).makespan_s == 6  # 0R0 runs while 1R0 and 1I0 do
    assert Kind.RECOMPUTE in {a.kind for _, _, a in explicit.actions()}
