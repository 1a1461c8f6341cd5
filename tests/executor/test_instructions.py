"""From tables to instruction lists: fusing, transfers, lifetimes, order. Nothing is compiled."""

import random
from functools import cache
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax.errors import ScheduleError
from octojax.executor.instructions import Do, StepProgram
from octojax.executor.lower import Lowered, lower
from octojax.executor.wiring import wiring_of
from octojax.ir import Cargo, LoweredPlan, Partition, Run, Schedule
from octojax.layers.cut import cut_stages
from octojax.layers.find import find_layers
from octojax.passes import lowered as passes_run
from octojax.programs.recipe import Layout
from octojax.schedules import generate
from octojax.simulate import StageCosts
from octojax.stages.differentiate import differentiate
from octojax.stages.fingerprint import fingerprint
from octojax.trace import trace_loss
from tests.pipelines import FIG3, case_of


@cache
def stages_of(name: str, stages: int, recompute: bool = False) -> tuple[Any, int, int]:
    """Stages of a zoo case cut evenly, its number of units, of batch leaves."""
    case = case_of(name)
    pure = case.pure()
    layered = find_layers(trace_loss(pure.fn, pure.params, case.batch(2), pure.state), stages)
    each, more = divmod(layered.graph.num_layers, stages)
    staged = cut_stages(layered, Partition(tuple(each + (s < more) for s in range(stages))))
    found = differentiate(staged.forwards, None, (recompute,) * stages)
    return found, len(staged.units), len(jax.tree.leaves(case.batch(2)))


def table_of(name: str, schedule: Schedule, passes: str | None = None, **more: Any) -> LoweredPlan:
    stages, units, _ = stages_of(name, schedule.num_stages)
    return passes_run(schedule, passes, wiring=wiring_of([stages], units), **more)


def lowered(
    name: str, schedule: Schedule, passes: str | None = None, seconds: Any = None, **more: Any
) -> Lowered:
    stages, _, leaves = stages_of(name, schedule.num_stages)
    each = [stages] * schedule.num_microbatches
    table = table_of(name, schedule, passes, **more)
    return lower(table, each, fingerprint, [Layout.ROWS] * leaves, seconds)


def test_1f1b_on_two_ranks():
    step = lowered("toy", generate("1f1b", 2, 2)).step
    assert str(step) == (
        "rank 0: run 0F0, send 0SEND_F0, run 0F1, send 0SEND_F1, post 0RECV_B0, "
        "post 0RECV_B1, receive 0RECV_B0, run 0B0, receive 0RECV_B1, run 0B1\n"
        "rank 1: post 1RECV_F0, post 1RECV_F1, receive 1RECV_F0, run 1F0+1B0, send 1SEND_B0, "
        "receive 1RECV_F1, run 1F1+1B1, send 1SEND_B1"
    )
    assert [step.transfers[k].name for k in step.order] == [
        "0SEND_F0", "0SEND_F1", "1SEND_B0", "1SEND_B1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("forward_s", "order"),
    [
        (1.0, ["0SEND_F0", "0SEND_F1", "1SEND_B0", "1SEND_B1"]),
        (10.0, ["0SEND_F0", "1SEND_B0", "0SEND_F1", "1SEND_B1"]),
    ],
)
def test_transfers_are_issued_as_their_values_are_made(forward_s: float, order: list[str]):
    """Rank 1 has made the first gradient before a slow rank 0 its second output."""
    costs = StageCosts.unit(2)
    costs.seconds[0, 0] = forward_s
    step = lowered("toy", generate("1f1b", 2, 2), costs=costs).step
    assert [step.transfers[k].name for k in step.order] == order


def test_equal_stages_share_their_jaxprs_and_microbatches_their_recipes():
    found = lowered("toy", generate("1f1b", 4, 8))
    # Of each kind: the first stage's, the inner ones', the last one's; the first F is like them.
    assert len(found.jaxprs) <= 6
    per_rank = [sum(rank == r for rank, _ in found.step.recipes) for r in range(4)]
    assert per_rank == [2, 2, 2, 1]


def test_stages_on_one_rank_need_no_transfer():
    step = lowered("toy", generate("zb-v", 2, 4)).step
    stages = {t.stage for t in step.transfers if t.kind == "F"}
    assert stages == {0, 2}  # stages 1 and 2 are both on rank 1


def test_a_tied_weight_has_one_owner_and_returns_its_gradient():
    step = lowered("tied-lm", generate("1f1b", 2, 2)).step
    shared = [u for u, ranks in enumerate(step.holders) if len(ranks) > 1]
    assert len(shared) == 1
    assert step.owners[shared[0]] == 0
    kinds = [(t.kind, t.source, t.target) for t in step.transfers if t.kind in "GP"]
    assert kinds == [("G", 1, 0), ("P", 0, 1)]


def test_integer_values_are_sent_forward_and_get_no_gradient():
    found = lowered("mixed-dtypes", generate("1f1b", 4, 2))
    pairs = zip(found.step.transfers, found.step.values, strict=True)
    kinds = {(t.kind, str(found.avals[v].dtype)) for t, values in pairs for v in values}
    assert {d for k, d in kinds if k == "F"} > {d for k, d in kinds if k == "B"}
    assert not any(d.startswith(("int", "bool")) for k, d in kinds if k == "B")


def test_a_residual_never_travels():
    table = Schedule.parse("0F0 0F1 0B1 1F0 1B0\n1F1 1B1 0B0")
    with pytest.raises(ScheduleError, match=r"0B0 is misplaced: rank 1 runs it, but rank 0 runs"):
        lowered("toy", table)


def test_carried_state_needs_microbatch_order():
    table = Schedule.parse("0F1 0F0 0B1 0B0\n1F1 1F0 1B1 1B0")
    with pytest.raises(ScheduleError, match="microbatch order"):
        lowered("state", table)


def test_a_cycle_is_refused():
    table = Schedule.parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    with pytest.raises(ScheduleError, match=r"deadlocks in a cycle: rank 0 \(0B0\)"):
        lowered("toy", table)


def replay(step: StepProgram) -> None:
    """Runs the instructions on names instead of arrays: every slot is written before it is
    read, freed once, and what arrives is what was sent."""
    slots = []
    for rank in step.ranks:
        first = rank.first_total + len(rank.totals)
        slots.append({i: f"initial {i}" for i in range(first)})
    boxes: dict[int, list[str]] = {}
    position = [0] * len(step.ranks)
    while any(p < len(r.body) for p, r in zip(position, step.ranks, strict=True)):
        before = list(position)
        for r, rank in enumerate(step.ranks):
            while position[r] < len(rank.body):
                instruction = rank.body[position[r]]
                if instruction.do is Do.RECEIVE and instruction.target not in boxes:
                    break
                read = [slots[r][s] for s in instruction.reads]  # KeyError: never written, or freed
                if instruction.do is Do.SEND:
                    assert instruction.target not in boxes
                    boxes[instruction.target] = read
                if instruction.do is Do.RECEIVE:
                    assert len(boxes[instruction.target]) == len(instruction.writes)
                for s in instruction.writes:
                    slots[r][s] = str(instruction)
                for s in instruction.frees:
                    del slots[r][s]
                position[r] += 1
        assert position != before
    for rank, left in zip(step.ranks, slots, strict=True):
        results = {s for _, s in (*rank.results, *rank.extra_totals)}
        permanent = set(range(len(rank.params) + len(rank.constants)))
        totals = set(range(rank.first_total, rank.first_total + len(rank.totals)))
        # What no instruction touches (the sums of a parameter read for nothing) may stay.
        assert set(left) >= results | permanent | totals
        assert set(left) <= results | permanent | totals | set(range(rank.first_total))
    sent = [k for k, t in enumerate(step.transfers) if t.kind != "P"]
    assert sorted(boxes) == sorted(sent)


@given(
    name=st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-h2", "dynapipe"]),
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 6),
    model=st.sampled_from(["toy", "unet", "tied-lm"]),
    passes=st.sampled_from([None, "transfers,reorder(mode=blocking),ownership"]),
)
@settings(max_examples=30, deadline=None)
def test_slots_are_written_read_and_freed_in_order(name, ranks, microbatches, model, passes):
    found = lowered(model, generate(name, ranks, microbatches), passes)
    replay(found.step)
    assert_carried_out(found)


@pytest.mark.parametrize(
    "table", [FIG3, generate("dualpipe", 2, 4), generate("interleaved", 2, 4, 2)]
)
def test_slots_of_irregular_tables(table):
    found = lowered("unet", table)
    replay(found.step)
    assert_carried_out(found)


def assert_carried_out(found: Lowered) -> None:
    """The operations are the rows of the plan, but for new parameters, which an update makes."""
    for program, row in zip(found.step.ranks, found.plan.ranks, strict=True):
        in_step = [x for x in row if isinstance(x, Run) or x.transfer.kind is not Cargo.PARAMETERS]
        assert list(program.row) == in_step


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_order_of_ready_actions_is_run(data):
    """A random valid table over a random placement: whatever is ready, in any order."""
    stages, microbatches = 4, data.draw(st.integers(1, 3))
    placement = [data.draw(st.integers(0, 2)) for _ in range(stages)]
    done: set[tuple[int, str, int]] = set()
    rows: list[list[str]] = [[] for _ in range(3)]
    open_ = {(s, k, m) for s in range(stages) for k in "FIW" for m in range(microbatches)}
    while open_:
        ready = sorted(a for a in open_ if _needs(a, stages) <= done)
        action = data.draw(st.sampled_from(ready))
        rows[placement[action[0]]].append("{}{}{}".format(*action))
        done.add(action)
        open_.remove(action)
    used = [row for row in rows if row]
    schedule = Schedule.parse("\n".join(" ".join(row) for row in used))
    times = random.Random(data.draw(st.integers(0, 99)))
    taken = {str(a): times.choice([0.0, 0.5, 1.0, 7.0]) for _, _, a in schedule.actions()}
    found = lowered("toy", schedule, seconds=lambda rank, action: taken[str(action)])
    replay(found.step)
    assert_carried_out(found)
    place = {transfer: at for at, transfer in enumerate(found.step.order)}
    for program in found.step.ranks:  # every row is a part of the one order
        turns = [place[x.target] for x in program.body if x.do in (Do.SEND, Do.POST)]
        assert turns == sorted(turns)


def _needs(action: tuple[int, str, int], stages: int) -> set[tuple[int, str, int]]:
    s, kind, m = action
    if kind == "F":
        return {(s - 1, "F", m)} if s else set()
    if kind == "W":
        return {(s, "I", m)}
    return {(s, "F", m)} | ({(s + 1, "I", m)} if s + 1 < stages else set())
