"""`explain`: every saving is what two simulations differ by, redone here."""

import json
import math
from dataclasses import replace

import pytest

import octojax
from octojax.diagnosis import explain
from octojax.errors import PlanError, ScheduleError
from octojax.ir import (
    LayerCost,
    Machine,
    Partition,
    Placement,
    Plan,
    Profile,
    Schedule,
    uniform_partition,
)
from octojax.schedules import generate
from octojax.simulate import simulate

MIB = 1 << 20
MACHINE = Machine(
    "m", capacity_bytes=64 * MIB, latency_s=0.02, bandwidth_bytes_per_s=20e6, host_cost_s=0.01
)
LAYERS = (
    LayerCost("embed", 0.1, 0.1, 0.1, state_bytes=MIB, residual_bytes=MIB, output_bytes=MIB),
    *(
        LayerCost(
            "mamba" if i % 3 else "attention",
            0.4 + 0.2 * (i % 3),
            0.5,
            0.3,
            state_bytes=MIB,
            residual_bytes=2 * MIB,
            weight_residual_bytes=MIB,
            output_bytes=MIB,
        )
        for i in range(9)
    ),
    LayerCost("head", 1.6, 1.2, 1.0, state_bytes=MIB, residual_bytes=MIB),
)
PROFILE = Profile("hybrid", LAYERS, MACHINE, ranks=4, microbatches=6)


def plan_of(name: str, chunks: int | None = None, recompute: bool = False) -> Plan:
    table = generate(name, 4, 6, chunks)
    cut = uniform_partition(PROFILE.kinds, table.num_stages)
    flags = tuple(recompute and s % 2 == 0 for s in range(table.num_stages))
    return Plan(cut, table.placement, table, flags if recompute else (), name=name)


PLANS = [plan_of("1f1b"), plan_of("zb-h1", recompute=True), plan_of("zb-v", 2), plan_of("chimera")]


@pytest.fixture(scope="module")
def explained():
    return {plan.name: explain(plan, PROFILE) for plan in PLANS}


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.name)
def test_every_saving_is_the_difference_of_two_simulations(explained, plan):
    explanation = explained[plan.name]
    makespan_s = simulate(plan, PROFILE).makespan_s
    assert explanation.makespan_s == makespan_s
    for change in explanation.changes:
        again_s = simulate(change.plan, change.profile).makespan_s
        share = change.plan.num_microbatches / plan.num_microbatches
        assert change.makespan_s == again_s, change.what
        assert change.saved_s == makespan_s * share - again_s, change.what
        if change.method == "same plan" and change.sort != "recompute":
            assert change.plan == plan
            assert change.saved_s >= -1e-9 or change.sort in ("link", "host"), change.what


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.name)
def test_what_is_changed_can_be_redone_from_the_json(explained, plan):
    """Without the records: the edits that the JSON names, made by hand."""
    told = json.loads(json.dumps(explained[plan.name].to_json()))
    for change in told["changes"]:
        edit, profile, other = change["edit"], PROFILE, plan
        if "layers" in edit:
            layers = list(PROFILE.layers)
            for i in edit["layers"]:
                x, f = layers[i], edit["factor"]
                layers[i] = replace(
                    x,
                    forward_s=x.forward_s * f,
                    input_grad_s=x.input_grad_s * f,
                    weight_grad_s=x.weight_grad_s * f,
                )
            profile = replace(PROFILE, layers=tuple(layers))
        if "machine" in edit:
            fields = {k: tuple(v) if isinstance(v, list) else v for k, v in edit["machine"].items()}
            profile = PROFILE.on(replace(MACHINE, **fields))
        if "recompute" in edit:
            other = replace(plan, recompute=())
        if "plan" in change:
            other = Plan.from_json(change["plan"])
        again_s = simulate(other, profile).makespan_s
        assert again_s == pytest.approx(change["makespan_s"], rel=1e-12)
        assert change["saved_s"] == pytest.approx(change["base_s"] - again_s, abs=1e-9)


def test_all_sorts_are_tried(explained):
    sorts = {c.sort for c in explained["zb-h1"].changes}
    assert sorts == {
        "layer", "kind", "rank", "link", "host", "recompute", "order", "microbatch", "memory",
    }  # fmt: skip
    assert {c.sort for c in explained["chimera"].changes} == {
        "layer", "kind", "rank", "link", "host"
    }  # fmt: skip
    (more,) = (c for c in explained["1f1b"].changes if c.sort == "microbatch")
    assert more.plan.num_microbatches == 7
    assert more.saved_s > 0  # 1F1B's bubble is shared by more microbatches


def test_the_bound_is_below_what_the_plan_takes_and_names_what_binds(explained):
    for explanation in explained.values():
        assert explanation.bound.seconds <= explanation.makespan_s
        assert explanation.bound.gap >= 0
    assert explained["1f1b"].bound.binding in dict(explained["1f1b"].bound.parts)
    assert explained["chimera"].bound.binding == "work shared by two holders"


def test_searched_plans_are_simulated_too():
    plan = plan_of("1f1b")
    explanation = explain(plan, PROFILE, seconds=0.05)
    searched = {c.sort: c for c in explanation.changes if c.method == "searched plan"}
    assert set(searched) == {"search", "ranks", "memory"}
    wider = searched["ranks"]
    assert wider.plan.num_ranks == 5
    for change in searched.values():
        assert change.makespan_s == simulate(change.plan, change.profile).makespan_s
        assert change.bound_s <= change.makespan_s
    assert "at most" in str(explanation)


def test_the_text_says_where_and_what(explained):
    text = str(explained["1f1b"])
    assert text.splitlines()[0].startswith("1f1b, simulated with profile hybrid: ")
    for words in (
        "Where the step goes",
        "rank 3 works longest",
        "What binds",
        "layers 8-10 (mamba, mamba, head)",
        "The bound: no plan of these layers on 4 ranks takes less than",
        "rank 3 10% quicker",
        "layer 10 (head) 10% quicker",
        "one more microbatch a step (7)",
        "with --seconds",
    ):
        assert words in text, words
    assert max(map(len, text.splitlines())) < 220


def test_a_bare_table_is_explained_in_units():
    explanation = explain(generate("zb-v", 4, 8))
    assert (explanation.unit, explanation.makespan_s) == ("units", 51)
    assert "51 units a step" in str(explanation)
    assert "takes no longer" in str(explanation)
    plan = Plan(Partition((2, 3)), Placement.sequential(2), Schedule.parse("0F0 0B0\n1F0 1B0"))
    assert explain(plan).makespan_s == 6
    assert explain(plan).bound is None


def test_a_table_with_transfers_is_explained_without_them():
    table = Schedule.parse("0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0")
    assert explain(table).makespan_s == 6


def test_a_prompt_shows_one_line_and_a_notebook_the_text(explained):
    record = explained["1f1b"]
    assert repr(record).startswith("<Explanation '1f1b': ")
    assert "\n" not in repr(record)
    assert len(repr(record)) < 300
    page = replace(record, name="<script>")._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_what_has_no_tuner_is_explained_without_it():
    """A layer that costs nothing can be simulated, and not placed by the tuner."""
    layers = (*LAYERS[:-1], LayerCost("loss", 0.0, 0.0, 0.0))
    explanation = explain(plan_of("1f1b"), Profile("free", layers, MACHINE))
    assert explanation.bound is None
    assert {c.sort for c in explanation.changes} == {"layer", "kind", "rank", "link", "host"}
    assert "No lower bound" in str(explanation)


def test_stages_measured_whole_are_explained():
    plan = plan_of("1f1b")
    layers = tuple(LayerCost("x", 1.0, 1.0, 1.0) for _ in range(4))
    whole = Profile("w", layers, extra=(("stages_of", plan.partition.sizes),))
    assert explain(plan, whole).makespan_s == simulate(plan, whole).makespan_s


def test_what_cannot_be_explained_is_refused():
    with pytest.raises(PlanError, match="11 layers, the profile 2"):
        explain(plan_of("1f1b"), Profile("p", LAYERS[:2], MACHINE))
    with pytest.raises(ValueError, match="seconds = -1"):
        explain(plan_of("1f1b"), PROFILE, seconds=-1)
    with pytest.raises(ValueError, match="seconds = inf"):
        explain(plan_of("1f1b"), PROFILE, seconds=math.inf)
    with pytest.raises(ScheduleError, match="0B0"):
        explain(Schedule.parse("0F0\n1F0 1B0"))


def test_it_is_public():
    assert octojax.explain is explain
