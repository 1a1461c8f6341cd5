"""The checker: what it refuses, in which words, and that it misses nothing."""

import csv
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from octojax.errors import ScheduleError
from octojax.ir import Action, Kind, Overlap, Partition, Placement, Plan, Schedule
from octojax.ir.lowering import without_transfers
from octojax.ir.marked import mark
from octojax.ir.naive import lower_naively
from octojax.ir.verify import deliverable, naive_deadlock, verify
from tests.simulate.random_tables import SETTINGS, tables

NEGATIVE = Path(__file__).parents[1] / "goldens" / "negative"
VERDICTS = {
    row["file"]: row["expected verdict"]
    for row in csv.DictReader((NEGATIVE / "INDEX.csv").read_text().splitlines())
}


def refusal(schedule: Schedule | Plan, *sizes) -> str:
    with pytest.raises(ScheduleError) as error:
        verify(schedule, *sizes)
    return str(error.value)


@pytest.mark.parametrize("file", [f for f in VERDICTS if "SEND" in VERDICTS[f]])
def test_rendezvous_deadlocks_are_found_where_they_are(file):
    stuck = VERDICTS[file].partition("stuck at ")[2]
    assert f"deadlocks under blocking rendezvous, stuck at {stuck}" in refusal(
        Schedule.load(NEGATIVE / file)
    )


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("bad_missing_W_p2_m2.csv", "0W1 is missing: 0I1 makes only the input gradient"),
        ("bad_B_before_F_p2_m2.csv", "rank 1 runs 1B1 at position 2, but 1F1, which it needs"),
        ("bad_cross_rank_cycle_p2_m2.csv", "in a cycle: rank 0 (0B0) -> rank 1 (1F1) -> rank 0"),
        ("bad_stage_on_two_ranks_p2_m2.csv", "0B1 is doubled: it stands at position 3 of rank 0"),
        ("bad_W_before_I_p2_m1.csv", "rank 0 runs 0W0 at position 1, but 0I0, which it needs"),
        ("torch_1F1B_p2_m4_v1.csv", "1F0 is missing"),
        ("torch_1F1B_p4_m4_v1.csv", "3F0 is missing"),
        ("torch_1F1B_p4_m8_v1.csv", "3F0 is missing"),
        ("torch_1F1B_p8_m32_v1.csv", "7F0 is missing"),
        ("torch_1F1B_p8_m8_v1.csv", "7F0 is missing"),
    ],
)
def test_wrong_tables_are_refused_for_the_right_reason(file, reason):
    assert reason in refusal(Schedule.load(NEGATIVE / file))


def test_dropped_microbatches_are_missed_if_asked_for():
    schedule = Schedule.load(NEGATIVE / "NEGATIVE_chimera_p2_m4_drops.csv")
    verify(schedule)
    assert "4 microbatches were asked for, but the table runs only 2" in refusal(schedule, 4)


def test_every_negative_table_is_tested():
    named = {file for file in VERDICTS if "SEND" in VERDICTS[file]}
    assert len(named) == 5
    assert len(VERDICTS) == 16
    assert {p.name for p in NEGATIVE.glob("*.csv")} - {"INDEX.csv"} == set(VERDICTS)


def test_the_message_draws_the_table():
    schedule = Schedule.parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    assert refusal(schedule) == (
        "the order of computation deadlocks in a cycle: "
        "rank 0 (0B0) -> rank 1 (1F1) -> rank 0 (0B0)\n"
        "rank 0 waits at 0B0 (position 1) for 1B0, which rank 1 has at position 2\n"
        "rank 1 waits at 1F1 (position 1) for 0F1, which rank 0 has at position 2\n"
        "        rank 0  rank 1\n"
        "     0  0F0     1F0\n"
        "     1  0B0     1F1       <-- rank 0, 1\n"
        "     2  0F1     1B0\n"
        "     3  0B1     1B1\n"
        "Each of these ranks waits for an action that stands behind another's wait. "
        "Move one of the marked actions behind what it waits for."
    )


def test_all_offenders_are_listed():
    message = refusal(Schedule.parse("0F0 0F0 0F1 0I1\n1F0 1B0 1F1"))
    for part in ("0F0 is doubled", "0B0 is missing", "0W1 is missing", "1B1 is missing"):
        assert part in message
    long = Schedule.parse(" ".join(f"0F{m}" for m in range(30)))
    assert "... and 18 more" in refusal(long)


def test_fused_and_split_backward_exclude_each_other():
    assert "0I0 repeats what 0B0 already does" in refusal(Schedule.parse("0F0 0B0 0I0 0W0"))
    assert "0I0 is missing: 0W0 needs what it keeps" in refusal(Schedule.parse("0F0 0W0"))


def test_more_than_asked_for():
    schedule = Schedule.parse("0F0 0B0 0F1 0B1")
    assert "0F1: microbatch 1 is beyond the 1 asked for (0 to 0)" in refusal(schedule, 1)
    assert "1F0 and 1B0 are missing: there is nothing of stage 1" in refusal(schedule, 2, 2)
    two = Schedule.parse("0F0 1F0 1B0 0B0")
    assert "1F0: stage 1 is beyond the 1 stages asked for" in refusal(two, 1, 1)


def test_misplaced_by_the_plan():
    schedule = Schedule.parse("0F0 0B0\n1F0 1B0")
    swapped = Plan(Partition((1, 1)), Placement.of((1, 0)), schedule)
    assert "0F0 is misplaced: rank 0 runs it, but stage 0 is placed on rank 1" in refusal(swapped)


def test_misplaced_by_its_own_forward():
    schedule = Schedule.parse("0F0 0F1 0B0\n0B1")
    assert "0B1 is misplaced: rank 1 runs it, but rank 0 runs 0F1" in refusal(schedule)


def test_pair_that_needs_itself():
    assert "0F0, which it needs, in the same cell" in refusal(
        Schedule.parse("(0F0;0B0)OVERLAP_F_B")
    )


def test_recompute_after_its_use():
    assert "rank 0 runs 0R0 at position 2, after 0B0 at position 1" in refusal(
        Schedule.parse("0F0 0B0 0R0")
    )
    verify(Schedule.parse("0F0 0R0 0B0"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0F0 0SEND_F0 0RECV_B0 0B0\n1F0 1B0 1SEND_B0", "1RECV_F0 is missing on rank 1"),
        ("0F0 0SEND_F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0", "0SEND_F0 is doubled"),
        ("0F0 1F0 1SEND_B0 1B0 0B0\n2F0", "2B0 is missing"),
        ("0F0 0SEND_F0 1F0 1B0 0B0", "0SEND_F0 moves a value that does not cross ranks"),
        ("0SEND_F0 0F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0", "stuck at 0SEND_F0 1RECV_F0"),
        ("0F0 0SEND_F0 0RECV_B0 0B0\n1F0 1RECV_F0 1B0 1SEND_B0", "rank 1 waits at 1F0"),
        (
            "0F0 0SEND_F0 0B0 0RECV_B0\n1RECV_F0 1F0 1B0 1SEND_B0",
            "rank 0 waits at 0B0 (position 2) for 0RECV_B0, which rank 0 has at position 3",
        ),
    ],
)
def test_wrong_transfers(text, reason):
    assert reason in refusal(Schedule.parse(text))


def test_fsdp_actions_are_passed_over():
    verify(Schedule.parse("0UNSHARD 0F0 0B0 0REDUCE_GRAD 0RESHARD"))


def test_naive_rule():
    gpipe = Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1")
    assert naive_deadlock(gpipe) == ()
    deliverable(lower_naively(gpipe))
    one = Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    assert [str(x.item) for x in naive_deadlock(one)] == ["0SEND_F1", "1SEND_B0"]


@settings(**SETTINGS)
@given(tables(recompute=True))
def test_lowering_and_back(schedule):
    assert without_transfers(lower_naively(schedule)) == schedule


@settings(**SETTINGS)
@given(tables(), st.randoms(use_true_random=False))
def test_a_dropped_action_is_missed(schedule, random):
    cells = [(r, p) for r, row in enumerate(schedule.ranks) for p in range(len(row))]
    rank, position = random.choice(cells)
    row = schedule.ranks[rank]
    if isinstance(row[position], Action) and row[position].kind is Kind.RECOMPUTE:
        return
    rows = list(schedule.ranks)
    rows[rank] = (*row[:position], *row[position + 1 :])
    sizes = (schedule.num_microbatches, schedule.num_stages)
    assert "missing" in refusal(Schedule(tuple(rows)), *sizes) or "asked for" in refusal(
        Schedule(tuple(rows)), *sizes
    )


@settings(**SETTINGS)
@given(tables(), st.randoms(use_true_random=False))
def test_a_doubled_action_is_seen(schedule, random):
    rank = random.choice([r for r, row in enumerate(schedule.ranks) if row])
    row = schedule.ranks[rank]
    item = random.choice(row)
    at = random.randrange(len(row) + 1)
    rows = list(schedule.ranks)
    rows[rank] = (*row[:at], item, *row[at:])
    assert "is doubled" in refusal(Schedule(tuple(rows)))


@settings(**SETTINGS)
@given(tables(), st.randoms(use_true_random=False))
def test_a_moved_action_is_seen(schedule, random):
    """An action on a rank other than the one with its residuals."""
    assume(schedule.num_ranks > 1)
    singles = [
        (r, p)
        for r, row in enumerate(schedule.ranks)
        for p, x in enumerate(row)
        if not isinstance(x, Overlap)
    ]
    assume(singles)
    rank, position = random.choice(singles)
    target = random.choice([r for r in range(schedule.num_ranks) if r != rank])
    rows = [list(row) for row in schedule.ranks]
    rows[target].insert(random.randrange(len(rows[target]) + 1), rows[rank].pop(position))
    message = refusal(Schedule(tuple(map(tuple, rows))))
    assert "misplaced" in message or "needs" in message


def test_marks_in_a_long_wide_table():
    schedule = Schedule.parse("\n".join(" ".join(f"{r}F{m}" for m in range(40)) for r in range(12)))
    drawn = mark(schedule.ranks, [(10, 20)])
    lines = drawn.split("\n")
    assert "rank 10" in lines[0]
    assert lines[0].count("rank") == 8
    assert [line for line in lines if "<--" in line] == [line for line in lines if "10F20" in line]
    assert lines[1].strip() == "..."
    assert lines[-1].strip() == "..."
    assert len(lines) == 1 + 2 + 7
