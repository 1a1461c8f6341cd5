"""What a machine's options add to a step: by hand, in both simulators, and in the tuner's path."""

import itertools
import json
import math
from dataclasses import replace

import pytest

from octojax.errors import ProfileError
from octojax.ir import LayerCost, LoweredPlan, Machine, Partition, Plan, Profile, Schedule, Update
from octojax.ir.collectives import Group
from octojax.ir.instruction import Instruction
from octojax.schedules import generate
from octojax.simulate import Links, StageCosts, Table, evaluate, simulate
from octojax.tune.baselines import published
from octojax.tune.bound import lower_bound
from octojax.tune.measure import measure
from octojax.tune.problem import Problem

LAYER = LayerCost("mlp", 1.0, 1.0, 1.0, param_bytes=100, state_bytes=900, output_bytes=10)
EXPERTS = replace(LAYER, kind="attention+moe", backward_s=3.0)
LINK = {"latency_s": 0.5, "bandwidth_bytes_per_s": 100.0}
TABLE = Schedule.parse("0F0 0I0 0W0\n1F0 1I0 1W0")
PLAN = Plan(Partition((1, 1)), TABLE.placement, TABLE)


def profile_of(layer: LayerCost = LAYER, **options: object) -> Profile:
    return Profile("two", (layer, layer), Machine(**{**LINK, **options}), 2, 1)  # type: ignore[arg-type]


def step_s(profile: Profile, compiled: bool = False) -> float:
    """The step, which everything that simulates agrees on."""
    timeline = simulate(PLAN, profile, compiled=compiled)
    other = simulate(PLAN, profile, compiled=not compiled)
    assert (other.makespan_s, other.ranks) == (timeline.makespan_s, timeline.ranks)
    problem = Problem.of(profile, 2, 1)
    assert measure(PLAN, problem).makespan_s == timeline.makespan_s
    assert timeline.makespan_s >= lower_bound(problem).seconds
    for rank in timeline.ranks:
        assert rank.busy_s + rank.bubble_s == pytest.approx(timeline.makespan_s)
        gaps = sum(
            g.end_s - g.start_s for g in timeline.gaps if g.rank == timeline.ranks.index(rank)
        )
        assert gaps == pytest.approx(rank.bubble_s)
    idle = [0.0, 0.0]
    for gap in timeline.gaps:
        idle[gap.rank] += gap.end_s - gap.start_s
    assert idle == pytest.approx([rank.bubble_s for rank in timeline.ranks])
    return timeline.makespan_s


HOP = 0.5 + 10 / 100
PLAIN = 5 + 2 * HOP  # 0F0 -> 1F0 1I0 -> 0I0 0W0
PAIR = Group(2, 0.5, 100.0)


def test_without_options_nothing_ends_the_step() -> None:
    assert step_s(profile_of()) == pytest.approx(PLAIN)
    assert StageCosts.of(profile_of(), PLAN.partition).ends_s is None


@pytest.mark.parametrize(
    ("zero", "added"),
    [
        (0, PAIR.all_reduce_s(100)),
        (1, PAIR.reduce_scatter_s(100) + PAIR.all_gather_s(100)),
        (3, PAIR.all_gather_s(100) + PAIR.reduce_scatter_s(100)),
    ],
)
def test_replicas_reduce_gradients_and_gather_parameters(zero: int, added: float) -> None:
    assert step_s(profile_of(replicas=2, zero=zero)) == pytest.approx(PLAIN + added)


def test_reductions_hide_behind_the_drain_of_others() -> None:
    heavy = replace(LAYER, param_bytes=0)
    profile = replace(profile_of(replicas=2), layers=(heavy, replace(LAYER, param_bytes=10)))
    # rank 1 ends at 4.6 and reduces for 1.1, while rank 0 ends at 6.2 and has latencies alone
    assert step_s(profile) == pytest.approx(PLAIN + PAIR.all_reduce_s(0))
    late = simulate(PLAN, profile).ranks[1]
    assert late.after_s == pytest.approx(PAIR.all_reduce_s(10))
    assert late.busy_s == pytest.approx(3 + late.after_s)


def test_replicas_are_on_the_link_between_nodes_and_gradients_have_their_own_size() -> None:
    far = Group(4, 2.0, 10.0)
    options = {"replicas": 4, "ranks_per_node": 2, "inter_latency_s": 2.0}
    profile = profile_of(**options, inter_bandwidth_bytes_per_s=10.0)
    assert step_s(profile) == pytest.approx(PLAIN + far.all_reduce_s(100))
    wide = replace(profile, extra=(("gradient_ratio", 2.0),))
    assert step_s(wide) == pytest.approx(PLAIN + far.all_reduce_s(200))


def test_an_update_goes_through_the_state_of_a_rank() -> None:
    assert step_s(profile_of(update_bytes_per_s=300.0)) == pytest.approx(PLAIN + 3)
    shared = profile_of(update_bytes_per_s=300.0, replicas=2, zero=1)
    reduce_s = PAIR.reduce_scatter_s(100) + PAIR.all_gather_s(100)
    assert step_s(shared) == pytest.approx(PLAIN + reduce_s + 1.5)


def test_the_update_of_a_lowered_plan_takes_that_time_once() -> None:
    def with_updates(row: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
        return (*row, Update(0), Update(1))

    profile = replace(profile_of(update_bytes_per_s=300.0), ranks=1)
    table = Schedule.parse("0F0 0I0 0W0")
    lowered = LoweredPlan.of(Plan(Partition((2,)), table.placement, table))
    updated = replace(lowered, ranks=tuple(map(with_updates, lowered.ranks)))
    for plan in (lowered, updated):
        timeline = simulate(plan, profile)
        assert timeline.ranks[0].after_s == 6
        assert timeline.makespan_s == 6 + 6


def test_experts_over_replicas_travel_there_and_back_in_f_and_i() -> None:
    exchange = 2 * PAIR.all_to_all_s(10 * 4)
    found = replace(
        profile_of(EXPERTS, replicas=2, expert_parallel=True), extra=(("experts_per_token", 4),)
    )
    first = found.priced_layers[0]
    assert (first.forward_s, first.input_grad_s, first.weight_grad_s, first.backward_s) == (
        1 + exchange, 1 + exchange, 1.0, 3 + exchange,
    )  # fmt: skip
    assert step_s(found) == pytest.approx(PLAIN + 4 * exchange + PAIR.all_reduce_s(100))
    assert Problem.of(found, 2, 1).forward_s.tolist() == [1 + exchange] * 2
    assert profile_of(replicas=2, expert_parallel=True).priced_layers[0] == LAYER  # no experts
    assert profile_of(EXPERTS, expert_parallel=True).priced_layers == (EXPERTS,) * 2  # no replicas


@pytest.mark.parametrize("compiled", [False, True])
def test_a_pair_saves_a_share_of_its_shorter_half(compiled: bool) -> None:
    table = Schedule.parse("0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    costs = StageCosts.unit(1, 2.0, 1.0, 2.0)
    machine = Machine(overlap_discount=0.25, speeds=(2.0,))
    found = simulate(table, costs, machine, compiled=compiled)
    assert [x.end_s - x.start_s for x in found.actions] == [1.0, (2 + 3 - 0.25 * 2) / 2, 1.5]
    light = evaluate(Table.of(table), costs, Links.of(machine, 1))
    assert light.makespan_s == found.makespan_s == 1 + 2.25 + 1.5


def test_dualpipe_gains_and_no_baseline_beats_the_bound_of_the_discount() -> None:
    layers = (replace(LAYER, backward_s=None),) * 4
    plain = Profile("four", layers, Machine(), 4, 8)
    paired = plain.on(Machine(overlap_discount=0.9))
    table = generate("dualpipe", 4, 8)
    plan = Plan(Partition((1,) * table.num_stages), table.placement, table)
    first, second = (simulate(plan, p).makespan_s for p in (plain, paired))
    assert second < first
    problem = Problem.of(paired, 4, 8)
    bound = lower_bound(problem)
    assert bound.seconds < lower_bound(Problem.of(plain, 4, 8)).seconds
    for _, plan, found in itertools.islice(published(problem), 12):
        limit = bound.replicated_s if plan.placement.replicated else bound.seconds
        assert found.makespan_s >= limit


def test_options_are_kept_in_files_and_told_by_the_fingerprint_only_where_used() -> None:
    plain = profile_of()
    assert plain.to_json()["machine"] == {"name": "unnamed", "host_cost_s": 0.0, **LINK}
    used = profile_of(
        overlap_discount=0.5, replicas=2, zero=3, expert_parallel=True, update_bytes_per_s=1e9
    )
    again = Profile.from_json(json.loads(json.dumps(used.to_json())))
    assert again == used
    assert used.fingerprint != plain.fingerprint
    assert plain.on(replace(plain.machine, zero=0)).fingerprint == plain.fingerprint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap_discount": 1.0}, "overlap_discount = 1.0, expected a number >= 0 and < 1"),
        ({"replicas": 0}, "replicas = 0, expected a whole number >= 1"),
        ({"zero": 2}, "zero = 2, expected 0, 1 or 3"),
        ({"expert_parallel": 1}, "expert_parallel = 1, expected true or false"),
        ({"update_bytes_per_s": -math.inf}, "update_bytes_per_s = -inf, expected a number > 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ProfileError, match=message.replace("(", r"\(")):
        Machine(**options)  # type: ignore[arg-type]


def test_ends_have_two_times_for_every_stage() -> None:
    unit = StageCosts.unit(2)
    with pytest.raises(ProfileError, match=r"ends_s is .* two finite numbers >= 0 for each of 2"):
        replace(unit, ends_s=unit.seconds)
