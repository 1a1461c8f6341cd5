"""Every record's text and file form gives the record back, and bad input says what is wrong."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax.errors import FormatError, PlanError, ProfileError
from octojax.ir import (
    Action,
    Kind,
    LayerCost,
    Machine,
    Overlap,
    Partition,
    Placement,
    Plan,
    Profile,
    Schedule,
    parse_action,
    parse_item,
)
from tests.simulate.random_tables import SETTINGS, tables

counts = st.integers(0, 10**6)
bare = (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD)
actions = st.one_of(
    st.builds(Action, counts, st.sampled_from([k for k in Kind if k not in bare]), counts),
    st.builds(Action, counts, st.sampled_from(bare)),
)
items = st.one_of(
    actions,
    st.builds(
        Overlap,
        st.builds(Action, counts, st.just(Kind.FORWARD), counts),
        st.builds(Action, counts, st.just(Kind.BACKWARD), counts),
    ),
)
schedules = st.lists(st.lists(items, max_size=8).map(tuple), min_size=1, max_size=5).map(
    lambda rows: Schedule(tuple(rows))
)
seconds = st.floats(0, 1e6)
sizes = st.integers(0, 2**50)


@given(items)
def test_items(item):
    assert parse_item(str(item)) == item


@given(schedules)
def test_schedules_as_text(schedule):
    assert Schedule.parse(str(schedule)) == schedule
    assert Schedule.parse(str(schedule) + "\n") == schedule


@given(schedules)
def test_schedules_as_csv(schedule):
    assert Schedule.from_csv(schedule.to_csv()) == schedule


@given(st.lists(st.integers(1, 99), min_size=1, max_size=9).map(tuple).map(Partition))
def test_partitions(partition):
    assert Partition.parse(str(partition)) == partition
    assert [len(partition.layers(s)) for s in range(partition.num_stages)] == list(partition.sizes)
    assert partition.bounds[-1] == partition.num_layers


@st.composite
def placements(draw):
    ranks = draw(st.integers(1, 6))
    holders = st.lists(st.integers(0, ranks - 1), min_size=1, max_size=2, unique=True).map(tuple)
    return Placement(tuple(draw(st.lists(holders, min_size=1, max_size=9))), ranks)


@given(placements())
def test_placements(placement):
    assert Placement.parse(str(placement), placement.num_ranks) == placement
    held = placement.ranks
    for stage, ranks in enumerate(placement.stages):
        assert [r for r in range(placement.num_ranks) if stage in held[r]] == sorted(ranks)


@st.composite
def plans(draw):
    schedule = draw(tables())
    stages = schedule.num_stages
    sizes_ = draw(st.lists(st.integers(1, 9), min_size=stages, max_size=stages))
    flags = draw(st.one_of(st.just(()), st.lists(st.booleans(), min_size=stages, max_size=stages)))
    name = draw(st.text("abc -_0", max_size=9)).strip()
    flags = tuple(flags) if any(flags) else ()
    return Plan(Partition(tuple(sizes_)), schedule.placement, schedule, flags, name)


@settings(**SETTINGS)
@given(plans())
def test_plans(plan):
    assert Plan.parse(str(plan)) == plan
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_plan_file(tmp_path):
    plan = Plan(Partition((2, 1)), Placement.sequential(2), Schedule.parse("0F0 0B0\n1F0 1B0"))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    idle = Plan(Partition((3,)), Placement.of((0,), 2), Schedule.parse("0F0 0B0\n-"))
    idle.save(tmp_path / "idle.json")
    assert Plan.load(tmp_path / "idle.json") == idle


layers = st.builds(
    LayerCost,
    st.text("abc+", min_size=1, max_size=5),
    seconds, seconds, seconds, sizes, sizes, sizes, sizes, sizes, st.none() | seconds,
)  # fmt: skip
positive = st.floats(1e-9, 1e12)
machines = st.builds(
    Machine,
    name=st.text("abc ", max_size=5),
    capacity_bytes=st.just(math.inf) | positive,
    latency_s=seconds,
    bandwidth_bytes_per_s=st.just(math.inf) | positive,
    host_cost_s=seconds,
    speeds=st.lists(positive, max_size=3).map(tuple),
    ranks_per_node=st.none() | st.integers(1, 8),
    inter_latency_s=st.none() | seconds,
    inter_bandwidth_bytes_per_s=st.none() | positive,
)


@given(
    st.builds(Profile, st.text("ab"), st.lists(layers, min_size=1, max_size=4).map(tuple), machines)
)
def test_profiles(profile):
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


def test_profile_keeps_what_it_does_not_know(tmp_path):
    data = {
        "name": "x", "pattern": "M-", "ranks": 2, "microbatches": 4,
        "layers": [{"kind": "a", "forward_s": 1, "input_grad_s": 1, "weight_grad_s": 1}],
    }  # fmt: skip
    profile = Profile.from_json(data)
    assert (profile.ranks, profile.microbatches, dict(profile.extra)) == (2, 4, {"pattern": "M-"})
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F3", "cannot read 'F3' as an action"),
        ("3F", "F takes a microbatch number"),
        ("3UNSHARD2", "UNSHARD takes no microbatch"),
        ("3X2", "expected <stage><kind><microbatch>"),
        ("-1F2", "cannot read"),
        ("\u0663F\u0662", "cannot read"),  # digits, but not ours
        ("0F" + "9" * 5000, "cannot read"),
    ],
)
def test_bad_actions(text, message):
    with pytest.raises(FormatError, match=message):
        parse_action(text)


def test_bad_pairs():
    with pytest.raises(FormatError, match="forward;full backward"):
        parse_item("(0B3;3F5)OVERLAP_F_B")


def test_bad_csv_names_file_row_and_cell():
    with pytest.raises(FormatError, match=r"t\.csv: row 1 \(rank 1\), cell 2: cannot read '1Q0'"):
        Schedule.from_csv("0F0,0B0\n1F0,1B0,1Q0\n", "t.csv")
    with pytest.raises(FormatError, match=r"t\.csv: empty table"):
        Schedule.from_csv("", "t.csv")
    for text in ('"0F0","0B0\n', "0F0\r0B0", "0" * 200_000):
        with pytest.raises(FormatError, match=r"t\.csv: not a CSV table: "):
            Schedule.from_csv(text, "t.csv")


GOOD = {"version": 1, "partition": [1], "placement": [[0]], "schedule": ["0F0 0B0"], "ranks": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 9}, "plan of version 9, written by a newer octojax; .*: upgrade it with"),
        ({"version": "x"}, "plan version 'x', this octojax reads 1"),
        ({"partition": "1"}, "'partition' must be a list of layers per stage"),
        ({"partition": [1.5]}, "'partition' must be"),
        ({"placement": [0]}, "'placement' must be a list of lists of ranks"),
        ({"schedule": "0F0"}, "'schedule' must be a list of text"),
        ({"schedule": [1]}, "'schedule' must be"),
        ({"recompute": [1]}, "'recompute' must be"),
        ({"ranks": "2"}, "'ranks' must be a whole number"),
        ({"ranks": 0}, "'ranks' must be a whole number >= 1"),
        ({"recomputes": [True]}, "unknown 'recomputes'; fields of a plan are version, name"),
        ({"name": 3}, "'name' must be text"),
        ({"schedule": ["0F0 zero"]}, r"p\.json: schedule: row 0 \(rank 0\), cell 1"),
    ],
)
def test_bad_plan_files(change, message):
    with pytest.raises(FormatError, match=message):
        Plan.from_json(GOOD | change, "p.json")


def test_plans_that_do_not_fit_together():
    Plan.from_json(GOOD)
    with pytest.raises(PlanError, match="partition has 2 stages"):
        Plan.from_json(GOOD | {"partition": [1, 1]})
    with pytest.raises(PlanError, match="rank 3, but there are only 1 ranks"):
        Plan.from_json(GOOD | {"placement": [[3]]})
    with pytest.raises(PlanError, match="the schedule has 1 rows, the placement 2 ranks"):
        Plan.from_json(GOOD | {"ranks": 2})
    with pytest.raises(PlanError, match="recompute has 2 entries for 1 stages"):
        Plan.from_json(GOOD | {"recompute": [True, False]})
    with pytest.raises(PlanError, match="leaves stage"):
        Plan.from_json(GOOD | {"partition": [0]})
    with pytest.raises(PlanError, match="stage 0 is placed on no rank"):
        Plan.from_json(GOOD | {"placement": [[]]})
    blank = GOOD | {"ranks": 2, "schedule": ["0F0 0B0", " "]}
    assert Plan.from_json(blank).schedule.ranks[1] == ()
    for broken in ([], {"version": 1}):
        with pytest.raises(FormatError):
            Plan.from_json(broken)


LAYER = {"kind": "a", "forward_s": 1, "input_grad_s": 1, "weight_grad_s": 1}


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([], FormatError, "a profile is a JSON object, found list"),
        ({"layers": 3}, FormatError, "lacks its list of 'layers'"),
        ({"layers": []}, ProfileError, "has no layers"),
        ({"layers": [3]}, FormatError, "layer 0: expected an object, found int"),
        ({"layers": [{"kind": "a"}]}, FormatError, r"layer 0: missing \['forward_s'"),
        ({"layers": [LAYER | {"x": 1}]}, FormatError, r"unknown \['x'\]"),
        (
            {"layers": [LAYER | {"forward_s": -1}]},
            ProfileError,
            "forward_s = -1, expected a finite",
        ),
        ({"layers": [LAYER | {"forward_s": "1"}]}, ProfileError, "forward_s = '1'"),
        ({"layers": [LAYER], "machine": 3}, FormatError, "machine: expected an object"),
        ({"layers": [LAYER], "machine": {"x": 1}}, FormatError, r"machine: unknown \['x'\]"),
        ({"layers": [LAYER], "machine": {"latency_s": "1"}}, ProfileError, "latency_s = '1'"),
        (
            {"layers": [LAYER], "machine": {"latency_s": -1}},
            ProfileError,
            "latency_s = -1, expected",
        ),
        ({"layers": [LAYER], "machine": {"speeds": [0]}}, ProfileError, r"speeds = \(0,\)"),
        ({"layers": [LAYER], "machine": {"speeds": 1}}, ProfileError, "speeds = 1, expected"),
        ({"layers": [LAYER], "machine": {"speeds": [math.inf]}}, ProfileError, r"speeds = \(inf"),
        ({"layers": [LAYER], "machine": {"latency_s": None}}, ProfileError, "latency_s = None"),
        ({"layers": [LAYER], "machine": {"latency_s": math.inf}}, ProfileError, "latency_s = inf"),
        ({"layers": [LAYER], "machine": {"host_cost_s": math.nan}}, ProfileError, "host_cost_s"),
        ({"layers": [LAYER], "machine": {"capacities_bytes": [-1]}}, ProfileError, r"\(-1,\)"),
        ({"layers": [LAYER], "machine": {"ranks_per_node": 1.5}}, ProfileError, "a whole number"),
        ({"layers": [LAYER], "machine": {"name": 5}}, ProfileError, "name = 5, expected text"),
        ({"layers": [LAYER | {"forward_s": 10**400}]}, ProfileError, "forward_s = 1000"),
        ({"layers": [LAYER | {"forward_s": None}]}, ProfileError, "forward_s = None"),
        ({"layers": [LAYER | {"kind": 3}]}, ProfileError, "layer 0: a layer's kind is text"),
        ({"layers": [LAYER], "name": 5}, ProfileError, "profile: a profile's name is text"),
        ({"layers": [LAYER], "ranks": "4"}, ProfileError, "ranks = '4', expected a whole"),
        ({"layers": [LAYER], "ranks": 0}, ProfileError, "ranks = 0, expected a whole number >= 1"),
        ({"layers": [LAYER], "stages_of": "all"}, ProfileError, "stages_of = 'all', expected the"),
        ({"layers": [LAYER], "stages_of": [2, 1]}, ProfileError, "each of its 1 stages"),
        ({"layers": [LAYER], "stages_of": [0]}, ProfileError, "whole numbers >= 1"),
        ({"layers": [LAYER], "microbatches": 1.5}, ProfileError, "microbatches = 1.5"),
        (
            {"layers": [LAYER], "version": 2},
            FormatError,
            "profile of version 2, written by a newer",
        ),
    ],
)
def test_bad_profiles(data, error, message):
    with pytest.raises(error, match=message):
        Profile.from_json(data)


def test_files_that_are_not_json(tmp_path):
    for text, message in (
        ("", r"x\.json is empty; expected a JSON file"),
        (' {"name": "a", \n', r"x\.json ends in the middle \(line 2\): writing or copying it was"),
        ('{"name": "a', r"x\.json ends in the middle \(line 1\)"),
        ("0F0,0F1", r"x\.json: not JSON"),
        ("[" * 100_000, r"x\.json: not JSON"),
        ("1" * 5000, r"x\.json: not JSON"),
    ):
        (tmp_path / "x.json").write_text(text)
        for record in (Plan, Profile):
            with pytest.raises(FormatError, match=message):
                record.load(tmp_path / "x.json")
    (tmp_path / "x.json").write_bytes(b"\xff\x00")
    for record in (Plan, Profile, Schedule):
        with pytest.raises(FormatError, match=r"x\.json is not UTF-8 text"):
            record.load(tmp_path / "x.json")


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    """Spreadsheets write one."""
    mark = b"\xef\xbb\xbf"
    (tmp_path / "t.csv").write_bytes(mark + b"0F0,0B0\r\n1F0,1B0\r\n")
    assert Schedule.load(tmp_path / "t.csv") == Schedule.parse("0F0 0B0\n1F0 1B0")
    (tmp_path / "p.json").write_bytes(mark + json.dumps(GOOD).encode())
    assert Plan.load(tmp_path / "p.json") == Plan.from_json(GOOD)


def test_numbers_of_numpy_are_written_as_json(tmp_path):
    layer = LayerCost("a", np.float32(0.5), np.float64(1), 1, np.int64(3))
    machine = Machine(capacity_bytes=np.int64(9), speeds=(np.float32(2),))
    profile = Profile("x", (layer,), machine, ranks=np.int32(1))
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile
