"""Equal layers that do not divide: the best order of stage sizes everywhere, not just the least
maximum (cases 19 and 22 of public bug reports).

    layers  ranks  microbatches   best      worst of the same maximum
    5       4      8              51        57   [1 1 1 2]
    30      4      8              252       258  [7 7 8 8]
    7       3      6              60
"""

import json

import pytest

from octojax.api.options import Options
from octojax.api.planning import make_plan
from octojax.cli import main
from octojax.ir import Layer, LayerCost, LayerGraph, Machine, Profile
from octojax.schedules import generate
from octojax.simulate import simulate
from octojax.tune import tune

CASES = [(5, 4, 8, 51), (30, 4, 8, 252), (7, 3, 6, 60)]


def equal(layers: int) -> Profile:
    cost = LayerCost("layer", 1.0, 1.0, 1.0)
    return Profile("equal", (cost,) * layers, Machine())


@pytest.mark.parametrize(("layers", "ranks", "microbatches", "best"), CASES)
def test_a_compiled_step(layers, ranks, microbatches, best):
    graph = LayerGraph(tuple(Layer(str(n), "layer", 100.0, 0, 0) for n in range(layers)))
    table = generate("1f1b", ranks, microbatches)
    for partition in (None, "uniform", "balanced"):
        plan = make_plan(Options(microbatches, partition=partition), table, graph)
        assert simulate(plan, equal(layers)).makespan_s == best


@pytest.mark.parametrize(("layers", "ranks", "microbatches", "best"), CASES)
def test_what_the_tuner_compares_with(layers, ranks, microbatches, best):
    result = tune(equal(layers), ranks, microbatches, iterations=0)
    assert result.baselines["1f1b"] == best
    assert result.makespan_s <= best


@pytest.mark.parametrize(("layers", "ranks", "microbatches", "best"), CASES)
def test_the_command(capsys, tmp_path, layers, ranks, microbatches, best):
    table, profile = tmp_path / "1f1b.csv", tmp_path / "profile.json"
    generate("1f1b", ranks, microbatches).save(table)
    profile.write_text(json.dumps(equal(layers).to_json()))
    with pytest.raises(SystemExit) as stop:
        main(["simulate", str(table), "--profile", str(profile), "--json"])
    assert stop.value.code == 0
    assert json.loads(capsys.readouterr().out)["makespan_s"] == best
