"""Every figure of the golden tables' index, from both implementations of the simulator."""

import csv
import re
from pathlib import Path

import pytest

from octojax.ir import Machine, Schedule
from octojax.ir.verify import naive_deadlock, verify
from octojax.simulate import StageCosts, simulate

GOLDENS = Path(__file__).parents[1] / "goldens"
INDEX = list(csv.DictReader((GOLDENS / "INDEX.csv").read_text().splitlines()))
FILES = [row["file"] for row in INDEX]
ROW = {row["file"]: row for row in INDEX}

both = pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
every = pytest.mark.parametrize("file", FILES)


def load(file: str) -> Schedule:
    return Schedule.load(GOLDENS / file)


def numbers(text: str) -> list[float]:
    return [float(word) for word in text.split()]


def test_the_index_names_every_table():
    tables = {p.name for p in GOLDENS.glob("*.csv") if not p.name.endswith(".comms.csv")}
    assert tables - {"INDEX.csv"} == set(FILES)


@every
def test_is_valid(file):
    row = ROW[file]
    verify(load(file), int(row["microbatches"]), int(row["stages"]))


@every
@both
def test_unit_costs(file, compiled):
    row, schedule = ROW[file], load(file)
    result = simulate(schedule, StageCosts.unit(schedule.num_stages), compiled=compiled)
    assert result.makespan_s == float(row["makespan_F1_I1_W1_B2"])
    assert [r.bubble_s for r in result.ranks] == numbers(row["bubble_per_rank"])
    assert [r.residual_bubble_s for r in result.ranks] == numbers(row["inner_bubble_per_rank"])
    most = max(r.bubble_s for r in result.ranks) / result.makespan_s
    assert round(most, 6) == float(row["bubble_ratio_max"])
    live = numbers(row["peak_chunks_free_at_B_or_I"])
    kept = numbers(row["peak_chunks_free_at_W"])
    assert [r.peak_microbatches for r in result.ranks] == live
    assert [r.peak_microbatches_until_weight for r in result.ranks] == kept


@every
@both
def test_full_backward_of_one(file, compiled):
    schedule = load(file)
    costs = StageCosts.unit(schedule.num_stages, 1, 1, 1, 1)
    expected = float(ROW[file]["makespan_if_B_full_costs_1"])
    assert simulate(schedule, costs, compiled=compiled).makespan_s == expected


@every
@both
def test_latency_of_one(file, compiled):
    schedule = load(file)
    costs, machine = StageCosts.unit(schedule.num_stages), Machine(latency_s=1.0)
    expected = float(ROW[file]["makespan_comm1"])
    assert simulate(schedule, costs, machine, compiled=compiled).makespan_s == expected


@pytest.mark.parametrize("file", [f for f in FILES if ROW[f]["makespan_at_costs_in_name"]])
@both
def test_costs_in_the_name(file, compiled):
    named = re.search(r"F(\d+)B(\d+)W(\d+)c(\d+)", file)
    assert named is not None
    forward, input_grad, weight_grad, latency = map(float, named.groups())
    schedule = load(file)
    costs = StageCosts.unit(schedule.num_stages, forward, input_grad, weight_grad)
    result = simulate(schedule, costs, Machine(latency_s=latency), compiled=compiled)
    assert result.makespan_s == float(ROW[file]["makespan_at_costs_in_name"])


def as_indexed(text: str) -> set[tuple[str, str, int, int]]:
    """The stuck operations of an index entry: `SEND('f', 1, 3)<->r1` names the receiving stage."""
    found = re.findall(r"(SEND|RECV)\('(\w)', (\d+), (\d+)\)", text)
    return {(verb, way, int(stage), int(microbatch)) for verb, way, stage, microbatch in found}


@every
def test_naive_blocking(file):
    stuck = naive_deadlock(load(file))
    expected = ROW[file]["naive_blocking_p2p"]
    assert (not stuck) == (expected == "ok")
    found = set()
    for one in stuck:
        verb, way = str(one.item.kind).split("_")
        step = (1 if way == "F" else -1) if verb == "SEND" else 0
        found.add((verb, way.lower(), one.item.stage + step, one.item.microbatch))
    assert found == as_indexed(expected)


@pytest.mark.parametrize("file", sorted(p.name for p in GOLDENS.glob("*.comms.csv")))
def test_lowered_tables(file):
    """As PyTorch lowers them they are deliverable, and without latency take the same time."""
    lowered, bare = load(file), load(file.replace(".comms", ""))
    verify(lowered)
    costs = StageCosts.unit(bare.num_stages)
    assert simulate(lowered, costs).makespan_s == simulate(bare, costs).makespan_s
    blocking = simulate(lowered, costs, mode="blocking")
    assert blocking.makespan_s >= simulate(bare, costs).makespan_s
    assert len(blocking.transfers) == len(simulate(bare, costs).transfers)
