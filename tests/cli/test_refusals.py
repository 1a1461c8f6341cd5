"""What commands refuse before any work: one line on standard error, exit code 2, no traceback."""

import json

import pytest
import typer

import octojax
from octojax.cli import COMMANDS, build, main
from octojax.ir import LayerCost, Partition, Placement, Plan, Prediction, Profile, Schedule
from octojax.passes import lowered

FILES = {
    "hello.json": '{"hello": 1}',
    "empty.json": "{}",
    "trace.json": '{"traceEvents": []}',
    "timeline.json": '{"version": 1, "makespan_s": 1, "ranks": [], "actions": []}',
}


@pytest.fixture
def octopipe(command, tmp_path, monkeypatch):
    """Runs a command line in a folder with a table, a plan and profiles of two sizes."""
    monkeypatch.chdir(tmp_path)
    schedule = Schedule.parse("0F0 0B0\n1F0 1B0")
    schedule.save("table.csv")
    Plan(Partition((1, 1)), Placement.sequential(2), schedule).save("plan.json")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    tuned = Prediction("q", Profile("q", (LayerCost("y", 1.0, 1.0, 1.0),) * 3).fingerprint, 1.0)
    Plan(Partition((1, 2)), Placement.sequential(2), schedule, prediction=tuned).save("tuned.json")
    (tmp_path / "lowered.json").write_text(json.dumps(lowered(schedule).to_json()))
    for layers in (2, 3):
        Profile("p", (LayerCost("x", 1.0, 1.0, 1.0),) * layers).save(f"profile{layers}.json")

    return command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("emulate plan.json --profile none.json", "none.json does not exist"),
        ("emulate plan.json --profile profile3.json", "[1 1] has 2 layers, the profile 3"),
        ("emulate plan.json --profile profile2.json -n 0", "--processes"),
        ("emulate plan.json --profile profile2.json --scale 0", "--scale 0.0: expected a number"),
        ("emulate plan.json --profile profile2.json --scale nan", "--scale nan: expected a number"),
        ("emulate plan.json --profile profile2.json --steps 0", "--steps"),
        ("emulate plan.json --profile profile2.json -o none/x.json", "there is no folder none"),
        ("run json:loads -n 0", "--processes"),
        ("run json:loads --timeout 0", "--timeout"),
        (
            "profile json:loads --transport foo",
            "--transport 'foo': expected device_put or",
        ),
        ("schedules --names gpipe", "--names: only for a comparison; add --compare"),
        ("schedules --ranks 4 --microbatches 8", "--ranks, --microbatches: only for a comparison"),
        ("schedule zb-v --ranks 10000 --microbatches 1", "on 10000 ranks the order of 19999"),
        ("show -", "- would be standard input, which is not read here; name a file"),
        ("simulate table.csv --profile -", "- would be standard input"),
        ("show hello.json", "is no file of octopipe's (it has 'hello'); expected a plan"),
        ("check profile2.json", "profile2.json is a profile; expected a plan"),
        ("simulate empty.json", "(it has nothing); expected a plan"),
        ("emulate trace.json --profile profile2.json", "trace.json is a trace; expected a plan"),
        ("tune hello.json", "hello.json is no file of octopipe's (it has 'hello'), and lacks"),
        ("tune timeline.json", "timeline.json is a timeline, and lacks its list of 'layers'"),
        ("run json:loads --plan tuned.json --profile profile3.json", "is of another model"),
        ("simulate tuned.json --profile profile3.json", "is of another model"),
        ("lower tuned.json --profile profile3.json", "is of another model"),
        ("check tuned.json --profile profile3.json", "is of another model"),
        ("emulate tuned.json --profile profile3.json", "is of another model"),
        ("launch none.py", "none.py does not exist; expected a Python script"),
        ("launch .", ". is a folder; expected a Python script"),
        ("launch table.csv -n 0", "--processes"),
        ("launch table.csv --devices 0", "--devices"),
        ("launch table.csv --port 99999999", "--port"),
        ("profile json:loads", "'json:loads' cannot be called without arguments"),
        ("profile json:loads -o none/x.json", "there is no folder none"),
        ("simulate table.csv --latency inf", "latency_s = inf"),
        ("simulate table.csv --latency 1e308", "the makespan is too large"),
        ("tune profile2.json --seed -1", "--seed"),
        ("tune profile2.json --offer-microbatches 4 --microbatches 4", "not both"),
        ("tune profile2.json -o none/x.json", "there is no folder none"),
        ("tune plan.json", "plan.json is a plan, and lacks its list of 'layers'"),
        ("simulat table.csv", "No such command 'simulat'"),
        ("show table.csv table.csv --json t.json", "--json writes one timeline, and 2 are drawn"),
        ("show 1f1b", "1f1b: how many ranks and microbatches? Give --ranks and --microbatches"),
        ("show 1f1b:chunks=x table.csv", "1f1b:chunks=x: chunks=x, expected a whole number"),
        ("show 1f1b:chunks table.csv", "1f1b:chunks: 'chunks' is no option. A name may have"),
        ("compare 1fb1 table.csv", "or the name of a schedule; did you mean the schedule 1f1b?"),
        ("compare none.csv", "none.csv does not exist; expected a file"),
        ("compare tuned.json --profile profile3.json", "is of another model"),
        (
            "compare table.csv lowered.json",
            "is a lowered plan or a timeline; expected plans",
        ),
        ("explain tuned.json --profile profile3.json", "is of another model"),
        ("explain plan.json --profile profile3.json", "[1 1] has 2 layers, the profile 3"),
        ("explain lowered.json", "lowered.json is a lowered plan; expected the plan or schedule"),
        ("explain timeline.json", "timeline.json is a timeline; expected the plan or schedule"),
        ("explain profile2.json", "profile2.json is a profile; expected a plan"),
        ("explain table.csv --seconds -1", "--seconds"),
        ("tune profile2.json --html none/x.html", "there is no folder none"),
        ("run json:loads --html none/x.html", "there is no folder none"),
    ],
)
def test_refusals(octopipe, arguments, message):
    code, out, err = octopipe(*arguments.split())
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_version(octopipe):
    assert octopipe("--version") == (0, f"octopipe {octojax.__version__}\n", "")


def test_help_lists_every_command(octopipe):
    code, out, _ = octopipe("--help")
    assert code == 0
    assert all(f" {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_the_usual_short_options(octopipe, name):
    code, out, _ = octopipe(name, "-h")
    assert code == 0
    assert "Usage:" in out
    assert ("-o" in out.split()) == ("--output" in out)


def test_a_platform_that_is_not_there_is_named(octopipe, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("Unable to initialize backend 'foo': Unknown backend\nmore")

    monkeypatch.setenv("JAX_PLATFORMS", "foo")
    monkeypatch.setattr("octojax.report.text.render", fail)
    code, out, err = octopipe("show", "table.csv")
    assert (code, out) == (2, "")
    assert "JAX_PLATFORMS=foo asks for a platform that JAX cannot start here" in err
    assert "more" not in err.replace("Set JAX", "")

    monkeypatch.setattr("octojax.report.text.render", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["show", "table.csv"])


def test_a_large_page_says_so(octopipe, monkeypatch):
    monkeypatch.setattr("octojax.report.html.MOST_ACTIONS", 3)
    code, _, err = octopipe("show", "table.csv", "--html", "x.html")
    assert code == 0
    assert "table: simulating 4 actions, which takes a while" in err
    assert "with 4 actions, over which a browser takes its time" in " ".join(err.split())


def test_every_option_says_what_holds_without_it():
    """A default in its help; but for flags, and files that are written only if named."""
    written = {"--output", "--html", "--svg", "--trace", "--csv", "--json", "--dump"}
    group = typer.main.get_command(build())
    silent = [
        f"{name} {option.opts[0]}"
        for name, command in group.commands.items()
        for option in command.params
        if option.param_type_name == "option"
        and not (option.required or option.is_flag or option.default is not None)
        and not {*option.opts} & written
        and "default" not in option.help.lower()
    ]
    assert silent == []


def test_the_shell_completes_commands_options_and_schedules(octopipe, monkeypatch, capsys):
    for words, expected in (
        ("octopipe ex", {"explain"}),
        ("octopipe explain --pro", {"--profile"}),
        ("octopipe schedule zb-h", {"zb-h1", "zb-h2"}),
        ("octopipe compare zb-h1 zb-h", {"zb-h1", "zb-h2"}),
    ):
        monkeypatch.setenv("_OCTOPIPE_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        code, out, _ = octopipe()
        assert (code, set(out.split())) == (0, expected)
