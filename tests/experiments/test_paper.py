"""The paper's tables and figures: names, marks, exact figures, and the page that shows them."""

import dataclasses
import io
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from octojax.ir import LayerCost, Machine, Placement, Profile
from octojax.simulate import simulate
from octojax.tune import tune

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ROOT / "experiments"
if str(EXPERIMENTS) not in sys.path:
    sys.path.insert(0, str(EXPERIMENTS))

import paper  # noqa: E402
import tuner_common  # noqa: E402
from paper_pieces import fig9, methods, races, scaling, table2, table8  # noqa: E402
from paper_pieces.ceiling import balanced_load_s, ceiling  # noqa: E402
from paper_pieces.cells import Cell, read_cells, write_cells  # noqa: E402
from paper_pieces.page import page, shown  # noqa: E402
from paper_pieces.registry import PIECES, chosen  # noqa: E402
from paper_pieces.study import Settings, Study  # noqa: E402

STORED = ROOT / "docs" / "results" / "paper"


def test_names_are_taken_once_and_in_the_page_order():
    assert [p.name for p in chosen(["table4", "fig3", "table4"])] == ["fig3", "table4"]
    assert [p.name for p in chosen(["fig3", "all"])] == list(PIECES)


def test_unknown_names_are_all_listed_with_the_nearest():
    with pytest.raises(ValueError, match=r"'tabel4' \(did you mean 'table4'\?\), 'x'; choose of"):
        chosen(["tabel4", "fig3", "x"])


def test_an_unknown_name_ends_the_command_with_a_message():
    done = subprocess.run(
        [sys.executable, str(EXPERIMENTS / "paper.py"), "fig33"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "unknown table or figure 'fig33' (did you mean 'fig3'?)" in done.stderr
    assert "Traceback" not in done.stderr


def test_quick_pieces_print_and_store_ours_beside_the_papers(tmp_path, capsys):
    out = tmp_path / "paper"
    paper.run(chosen(["fig3", "table4"]), Settings(quick=True, out=out))
    printed = capsys.readouterr().out
    assert "30 / 30" in printed
    assert "19 / 20" in printed
    joint = read_cells(out / "fig3.csv")[-1]
    assert (joint.method, joint.ours, joint.bound, joint.mark) == ("all three", 19, 19, "")
    cells = read_cells(out / "table4.csv")
    for cell in cells:
        assert cell.ours is not None
        assert cell.bound is None or cell.ours <= cell.bound
    assert {c.method for c in cells} == {*methods.METHODS}
    for name in ("fig3", "table4"):
        assert (out / f"{name}.svg").read_text(encoding="utf-8").startswith("<?xml")
    text = (tmp_path / "paper.md").read_text(encoding="utf-8")
    assert "## TABLE IV: sequence lengths" in text
    assert "Not run yet: `table2`" in text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_piece_runs_quickly(tmp_path):
    out = tmp_path / "paper"
    command = [sys.executable, str(EXPERIMENTS / "paper.py"), "all", "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "left)" in done.stdout
    for name, piece in PIECES.items():
        assert read_cells(out / f"{name}.csv"), name
        assert piece.draw is None or (out / f"{name}.svg").exists()
    assert "Not run yet" not in (tmp_path / "paper.md").read_text(encoding="utf-8")


def test_the_page_is_that_of_the_stored_cells():
    text = page(PIECES.values(), STORED)
    assert (STORED.parent / "paper.md").read_text(encoding="utf-8") == text, (
        "run `python experiments/paper.py page`"
    )


def test_all_pieces_fit_into_three_quarters_of_an_hour():
    expected_s = [piece.estimate_s(Settings()) for piece in PIECES.values()]
    assert sum(expected_s) <= 45 * 60
    assert max(expected_s) <= 6 * 60


@pytest.mark.parametrize(
    ("cell", "mark", "text"),
    [
        ({"ours": 1.3, "paper": "1.26", "aim": "more"}, "", "1.3 / 1.26"),
        ({"ours": 1.256, "paper": "1.26", "aim": "more"}, "", "1.256 / 1.26"),
        (
            {"ours": 1.2, "paper": "1.23-1.33", "aim": "more", "ceiling": 1.4},
            "below",
            "1.2 / 1.23-1.33 ▼",
        ),
        (
            {"ours": 1.2, "paper": "1.33", "aim": "more", "ceiling": 1.3},
            "ceiling",
            "1.2 / 1.33 (c)",
        ),
        (
            {"ours": 1.2, "paper": "1.33", "aim": "more", "ceiling": 1.4, "bound": 1.32},
            "ceiling",
            "1.2 / 1.33 (c)",
        ),
        ({"ours": 1.2, "paper": "1.33"}, "", "1.2 / 1.33"),
        ({"ours": 6.0, "paper": "5.06", "aim": "less"}, "below", "6 / 5.06 ▼"),
        ({"ours": 881.0, "paper": "880", "aim": "equal"}, "differs", "881 / 880 ≠"),
        ({"ours": None, "paper": "880", "aim": "equal"}, "", "none / 880"),
        ({"ours": 131072.0}, "", "131,072"),
        ({"ours": 51.2, "paper": "51.7%"}, "", "51.2 / 51.7%"),
    ],
)
def test_marks(cell, mark, text):
    made = Cell("case", "method", "quantity", "simulated", **cell)
    assert (made.mark, shown(made)) == (mark, text)


numbers = st.none() | st.floats(1e-6, 1e9).map(lambda x: float(f"{x:.5g}"))
texts = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=8)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.builds(Cell, **{
    field.name: numbers if "float" in str(field.type) else texts
    for field in dataclasses.fields(Cell)
})))  # fmt: skip
def test_cells_come_back_from_their_file(tmp_path_factory, cells):
    path = tmp_path_factory.mktemp("cells") / "cells.csv"
    write_cells(path, cells)
    assert read_cells(path) == cells


def test_a_file_of_another_form_is_refused(tmp_path):
    (tmp_path / "x.csv").write_text("case,ours\n")
    with pytest.raises(ValueError, match=r"expected the columns case, .* found case, ours"):
        read_cells(tmp_path / "x.csv")


def test_table_iii_counts_are_the_papers():
    """48 = 3 boundaries x 16, 880 = 55 x 16, 96 = 6 x 16: 8 stages as a V, one boundary local."""
    found = methods.baselines(tuner_common.load("nemotron-h-s"), quick=True)
    counts = {n: (m.plan.num_stages, len(m.timeline.transfers)) for n, m in found.items()}
    assert counts == {
        "1F1B": (4, 48), "Interleaved": (56, 880), "Tessel": (8, 96), "Mist": (4, 48),
    }  # fmt: skip


def test_table_iii_overlap_with_the_papers_stages_is_no_less_than_the_papers():
    """56 stages dealt to four ranks, partition and schedule tuned: 91.3 % and more of 880."""
    profile = tuner_common.load("nemotron-h-s")
    options = {"start": Placement.loop(4, 14), "phases": ("partition", "schedule")}
    found = tune(profile, iterations=12, replicated=False, baselines=("1f1b",), **options)
    transfers = simulate(found.plan, profile)
    assert (found.plan.num_stages, len(transfers.transfers)) == (56, 880)
    assert transfers.sender_overlapped / 880 >= 0.913


def test_a_study_that_takes_too_long_is_ended_and_named():
    with pytest.raises(ValueError, match=r"fidelity_emulated.py was not done after 0 s"):
        races.started("fidelity_emulated.py", 0.05)


def test_a_study_that_fails_says_why():
    with pytest.raises(ValueError, match=r"(?s)fidelity_emulated.py failed:.*unrecognized"):
        races.started("fidelity_emulated.py", 120, "--nonsense")


def test_bubbles_at_the_ends_and_between_are_all_bubbles():
    timeline = simulate(*_one_f_one_b("jamba-s"))
    found = fig9.shares(timeline)
    assert found["at the ends, %"] + found["between, %"] == pytest.approx(found["bubbles, %"])
    assert found["bubbles, %"] == pytest.approx(100 * timeline.bubble_ratio)


def _one_f_one_b(name):
    profile = tuner_common.load(name)
    (plan,) = methods.one_f_one_b(profile)
    return plan, profile


def test_progress_counts_shared_work_once_and_ends_at_the_total():
    study = Study(Settings(), Console(file=io.StringIO()), total_s=100.0)
    assert study.left() == "about 1:40 left"
    assert [study.once("key", lambda: 1), study.once("key", lambda: 2)] == [1, 1]
    with study.job("half of it", 20.0):
        pass
    assert study.left() == "about 1:20 left"
    study.finish(100.0)
    assert study.left() == "about 0:00 left"


def test_table_ii_parameters_are_those_of_the_models():
    stored = {
        (c.case, c.method): c.ours
        for c in read_cells(STORED / "table2.csv")
        if c.quantity == "parameters"
    }
    assert len(stored) == 9
    for model in table2.TABLE_2:
        assert stored[model, "S"] == table2.preset(model, "S")[1]


@pytest.mark.parametrize(
    ("configuration", "costs"),
    [(c, k) for c in tuner_common.CONFIGURATIONS if c[-1] != "l" for k in tuner_common.ATOMIC],
)
def test_the_ceiling_is_no_lower_than_the_one_known(configuration, costs):
    profile = tuner_common.load(configuration, costs)
    (plan,) = methods.one_f_one_b(profile)
    base = simulate(plan, profile).makespan_s
    assert ceiling(profile, base) >= tuner_common.ATOMIC[costs][configuration] - 0.006


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=3, max_size=7), st.integers(2, 3))
def test_balance_of_few_layers_is_the_best_one(costs, ranks):
    profile = Profile("p", tuple(LayerCost("x", c, c, c) for c in costs), Machine(), ranks, 1)
    least = min(
        max(sum(3 * c for c, r in zip(costs, where, strict=True) if r == rank)
            for rank in range(ranks))
        for where in itertools.product(range(ranks), repeat=len(costs))
    )  # fmt: skip
    assert balanced_load_s(profile) == least


def test_recomputed_costs_are_those_of_recomputed_stages():
    profile = tuner_common.load("jamba-s")
    for plan in (*methods.one_f_one_b(profile), *methods.interleaved(profile)):
        again = dataclasses.replace(plan, recompute=(True,) * plan.num_stages)
        assert simulate(plan, table8.recomputed(profile)).makespan_s == pytest.approx(
            simulate(again, profile).makespan_s, rel=1e-12
        )


def test_data_parallel_steps_end_with_the_last_sum_of_gradients():
    profile = tuner_common.load("nemotron-h-s")
    (plan,) = methods.one_f_one_b(profile)
    timeline = simulate(plan, profile)
    assert scaling.step_s(plan, timeline, profile, 1) == timeline.makespan_s
    two, four = (scaling.step_s(plan, timeline, profile, data) for data in (2, 4))
    first = sum(profile.layers[at].param_bytes for at in plan.partition.layers(0))
    link = profile.machine
    # rank 0 ends last: a ring of two moves half of the float32 gradients twice
    ring = 2 * (link.latency_s + 2 * first / 2 / link.bandwidth_bytes_per_s)
    assert two == pytest.approx(timeline.makespan_s + ring, rel=1e-12)
    assert four > two
