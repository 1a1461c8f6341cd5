"""Real processes that talk through gloo on 127.0.0.1; see `scripts.py` for what they run."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octojax.errors import ExecutionError
from octojax.ir import LayerCost, Partition, Plan, Profile
from octojax.ir.lowering import transfers_of
from octojax.launch import Exit, launch
from octojax.processes import initialize
from octojax.report import load_timeline
from octojax.schedules import generate

SCRIPT = str(Path(__file__).parent / "scripts.py")
ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(
    processes: int,
    *arguments: str,
    devices: int = 1,
    timeout_s: float = 30.0,
    script: str = SCRIPT,
):
    lines: list[tuple[int, str]] = []
    exits = launch(
        [script, *arguments],
        processes,
        devices_per_process=devices,
        timeout_s=timeout_s,
        echo=lambda process, line: lines.append((process, line)),
    )
    return exits, lines


def said(lines, process: int) -> str:
    return "\n".join(line for p, line in lines if p == process)


def assert_all_equal(exits: tuple[Exit, ...], lines) -> None:
    assert [e.code for e in exits] == [0] * len(exits), "\n".join(f"[{p}] {x}" for p, x in lines)
    assert all("all equal" in said(lines, e.process_id) for e in exits)


def test_random_irregular_plans():
    assert_all_equal(*run(2, "irregular", "0", "3"))


@pytest.mark.slow
def test_random_irregular_plans_with_two_ranks_in_each_process():
    assert_all_equal(*run(2, "irregular", "0", "4", devices=2))


@pytest.mark.slow
def test_named_schedules():
    names = ("gpipe", "interleaved:2", "zb-h1", "zb-v", "dualpipe-v", "chimera")
    assert_all_equal(*run(2, "named", *names))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 40, 8))
def test_many_random_irregular_plans(first):
    assert_all_equal(*run(2 + first // 8 % 3, "irregular", str(first), "8"))


@pytest.mark.slow
def test_receive_early_tables_that_hang_elsewhere():
    """pytorch/pytorch#172668: the same five tables, in our order of transfers."""
    assert_all_equal(*run(2, "named", "interleaved:2"))
    names = ("interleaved:2", "zb-v", "dualpipe-v", "looped-bfs:2")
    assert_all_equal(*run(4, "named", *names))


def test_ranks_of_several_devices():
    assert_all_equal(*run(2, "sharded", "zb-h1", devices=2))


@pytest.mark.slow
def test_more_ranks_of_several_devices():
    assert_all_equal(*run(3, "sharded", "zb-h1", "interleaved:2", devices=2))


def test_a_value_does_not_wait_for_one_that_goes_the_other_way():
    assert_all_equal(*run(2, "directions"))


def test_updates_are_those_of_one_process():
    assert_all_equal(*run(2, "update"))


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices"), [(3, 1), (2, 2)])
def test_an_update_goes_by_way_of_one_rank(processes, devices):
    assert_all_equal(*run(processes, "update", devices=devices, timeout_s=60.0))


def test_every_process_gets_the_timeline_of_all_ranks():
    assert_all_equal(*run(2, "recorded"))


@pytest.mark.slow
def test_all_processes_run_the_plan_that_the_first_has_tuned():
    assert_all_equal(*run(2, "auto", timeout_s=60.0))


@pytest.mark.slow
def test_more_ranks_than_devices_are_refused():
    exits, lines = run(2, "crowded")
    assert [e.code for e in exits] == [1, 1]
    assert "the plan has 4 ranks, but there are only 2 device(s)" in said(lines, 0)


def test_a_process_without_a_rank_is_refused():
    exits, lines = run(2, "idle")
    assert [e.code for e in exits] == [1, 1]
    for process in (0, 1):
        assert "none of the mesh's 1 rank(s) is on process 1" in said(lines, process)


@pytest.mark.slow
def test_a_rank_spread_over_processes_is_refused():
    exits, lines = run(2, "spread", devices=2)
    assert [e.code for e in exits] == [1, 1]
    for process in (0, 1):
        assert "process 0 has parts of ranks 0, 1, and not all of each" in said(lines, process)


def test_processes_with_different_plans_refuse_to_start():
    exits, lines = run(2, "differ")
    assert [e.code for e in exits] == [1, 1]
    for process in (0, 1):
        text = said(lines, process)
        assert "the processes are not about to run the same thing" in text
        assert "plan: process 0 has" in text


@pytest.mark.parametrize(
    "how",
    [
        "raise",
        pytest.param("kill", marks=pytest.mark.slow),
        pytest.param("stop", marks=pytest.mark.slow),
        pytest.param("slow", marks=pytest.mark.slow),
    ],
)
def test_a_lost_peer_is_an_error_in_time(how):
    begin = time.monotonic()
    exits, lines = run(2, "fail", how, timeout_s=8.0)
    assert time.monotonic() - begin < 60
    assert exits[0].code == 1, lines
    assert exits[1].code != 0
    text = said(lines, 0)
    if how == "raise":
        assert "broken on purpose" in said(lines, 1)
        assert "process 1, in 'step 1', failed: " in text
        assert "broken on purpose" in text
    elif how == "kill":
        assert "process 1 was killed by SIGKILL" in text
    else:
        assert "rank 0 waited 3 s for 1SEND_B" in text
        assert "process 1: it was" in text


@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_lost_first_process_is_an_error_in_time(how):
    """The coordinator is not in it, without which JAX would abort the others."""
    begin = time.monotonic()
    exits, lines = run(2, "fail", how, "first", timeout_s=8.0)
    assert time.monotonic() - begin < 60
    assert [e.code for e in exits] == [-signal.SIGKILL if how == "kill" else None, 1], lines
    text = said(lines, 1)
    if how == "kill":
        assert "process 0 was killed by SIGKILL" in text
    else:
        assert "rank 1 waited 3 s for 0SEND_F" in text


def test_without_our_launcher_the_first_process_is_the_last_to_end():
    """It holds the coordinator there: the others must hear of its error before they miss it."""
    address = f"127.0.0.1:{free_port()}"
    script = (
        "import sys, time, jax; from octojax.processes import initialize\n"
        f"initialize(8, coordinator_address={address!r}, num_processes=2, "
        "process_id=int(sys.argv[1]))\n"
        "assert jax.process_count() == 2\n"
        "if sys.argv[1] == '0': raise ValueError('broken on purpose')\n"
        "time.sleep(30)"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(i)], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    try:
        said = [process.communicate(timeout=60)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [1, 1], said
    assert "process 1 ends: process 0 failed: ValueError: broken on purpose" in said[1]


def test_a_coordinator_that_fails_is_an_error_at_once(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr("octojax.launch.start._free_port", lambda _: taken.getsockname()[1])
        begin = time.monotonic()
        with pytest.raises(ExecutionError, match="the coordinator of the processes ended with"):
            launch(["-c", "import time; time.sleep(40)"], 2)
        assert time.monotonic() - begin < 30


def test_the_coordinator_ends_with_its_parent():
    file = ROOT / "octojax" / "coordinator.py"
    arguments = [f"127.0.0.1:{free_port()}", 2, 20, 5, 1]  # process 1 is not its parent
    subprocess.run([sys.executable, "-P", file, *map(str, arguments)], timeout=30, check=True)


def test_all_know_how_long_the_coordinator_waits_for_a_silent_process(monkeypatch):
    told = {}
    monkeypatch.setattr("jax.distributed.initialize", lambda **facts: told.update(facts))
    monkeypatch.setattr("octojax.processes.join.watch_the_end", lambda: None)
    for name, value in {
        "OCTOPIPE_COORDINATOR": "127.0.0.1:1",
        "OCTOPIPE_NUM_PROCESSES": "2",
        "OCTOPIPE_PROCESS_ID": "1",
        "OCTOPIPE_TIMEOUT_S": "60",
        "OCTOPIPE_HEARTBEAT_S": "130",
    }.items():
        monkeypatch.setenv(name, value)
    initialize(timeout=500)
    assert told["heartbeat_timeout_seconds"] == 130
    initialize(timeout=500, coordinator_address="127.0.0.1:2")
    assert told["heartbeat_timeout_seconds"] == 1010


def test_a_peer_that_never_starts_is_an_error_in_time():
    script = "import os; os.environ['OCTOPIPE_NUM_PROCESSES'] = '2'\n"
    script += "from octojax.processes import initialize; initialize()"
    lines: list[str] = []
    begin = time.monotonic()
    exits = launch(["-c", script], 1, timeout_s=3.0, echo=lambda _, line: lines.append(line))
    assert time.monotonic() - begin < 60
    assert exits[0].code != 0


def test_a_port_in_use_is_refused_before_anything_starts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} on 127.0.0.1 cannot be used"):
            launch([SCRIPT, "update"], 2, port=port)


def test_an_emulated_plan_runs_every_action_and_transfer(tmp_path):
    layer = LayerCost("layer", 1e-3, 1e-3, 5e-4, output_bytes=4096)
    profile = Profile("four layers", (layer,) * 4)
    table = generate("zb-h1", 2, 3)
    plan = Plan(Partition((2, 2)), table.placement, table)
    profile.save(tmp_path / "profile.json")
    plan.save(tmp_path / "plan.json")
    lines: list[str] = []
    files = [str(tmp_path / name) for name in ("plan.json", "profile.json", "")]
    exits = launch(
        ["-m", "octojax.cli.emulate_process", *files, "1.0", "1"],
        2,
        timeout_s=30.0,
        echo=lambda _, line: lines.append(line),
    )
    assert [e.code for e in exits] == [0, 0], lines
    timeline = load_timeline(tmp_path / "step0000.json")
    for rank, row in enumerate(table.ranks):
        assert [s.item for s in timeline.actions if s.rank == rank] == list(row)
    assert len(timeline.transfers) == len(transfers_of(table))
    assert {t.nbytes for t in timeline.transfers} == {4096.0}
    assert all(s.end_s - s.start_s >= 0.99e-3 for s in timeline.actions)


def test_a_program_started_by_itself_stays_alone():
    script = "import octojax, jax\noctojax.initialize()\nprint(jax.process_count())"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "1"
