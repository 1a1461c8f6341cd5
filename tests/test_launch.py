import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octojax.launch import Exit, exit_code, launch

SHOW = "import os; print(os.environ['OCTOPIPE_PROCESS_ID'], os.environ['OCTOPIPE_NUM_PROCESSES'])"


def test_every_process_is_told_its_place(capfd):
    exits = launch(["-c", SHOW], 3)
    assert [(e.process_id, e.code) for e in exits] == [(0, 0), (1, 0), (2, 0)]
    lines = sorted(capfd.readouterr().out.split("\n"))
    assert lines[1:] == ["[0] 0 3", "[1] 1 3", "[2] 2 3"]


def test_survivors_of_a_failure_are_ended_in_time():
    script = (
        "import os, time; time.sleep(60 if os.environ['OCTOPIPE_PROCESS_ID'] == '0' else 0); 1/0"
    )
    begin = time.monotonic()
    exits = launch(["-c", script], 2, timeout_s=0.5)
    assert time.monotonic() - begin < 20
    assert [e.code for e in exits] == [None, 1]
    assert "was ended by the launcher" in str(exits[0])


def test_a_killed_process_is_named():
    script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    (only,) = launch(["-c", script], 1)
    assert only.code == -signal.SIGKILL
    assert "SIGKILL" in str(only)


def test_a_stopped_process_is_ended_too(tmp_path):
    pid_file = tmp_path / "pid"
    script = (
        "import os, signal\n"
        "if os.environ['OCTOPIPE_PROCESS_ID'] == '0': raise SystemExit(3)\n"
        f"open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n"
        "os.kill(os.getpid(), signal.SIGSTOP)"
    )
    exits = launch(["-c", script], 2, timeout_s=2)
    assert [e.code for e in exits] == [3, None]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_a_port_in_use_is_refused():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"port {port} .* cannot be used"):
            launch(["-c", SHOW], 2, port=port)


def test_no_process_at_all_is_refused():
    with pytest.raises(ValueError, match="at least 1 process, asked for 0"):
        launch(["-c", SHOW], 0)


NAP = """
import os, signal, subprocess, sys, time
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
open(sys.argv[2] + os.environ["OCTOPIPE_PROCESS_ID"], "w").write(f"{os.getpid()} {worker.pid}")
time.sleep(120)
"""


HEARING = """
import os, signal, sys
for number in (signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Signals that whoever runs the tests ignores (nohup, a shell's background job) would stay so."""


def started(folder: Path, how: str, processes: int, *options: str):
    """A launcher on the command line, and the processes of its script and their children."""
    script = folder / "nap.py"
    script.write_text(NAP)
    launcher = subprocess.Popen(
        [sys.executable, "-c", HEARING, "-m", "octojax", "launch", "-n", str(processes), *options]
        + [str(script), how, str(folder / "pid")],
        cwd=Path(__file__).parents[1],
        stderr=subprocess.PIPE,
        text=True,
    )
    files = [folder / f"pid{p}" for p in range(processes)]
    limit = time.monotonic() + 100
    while not all(f.exists() and f.read_text().count(" ") for f in files):
        assert time.monotonic() < limit
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.05)
    return launcher, [int(pid) for f in files for pid in f.read_text().split()]


def gone(pids: list[int]) -> bool:
    """Whether all end soon. (A zombie whose parent is not us counts as ended.)"""
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        if not any(map(alive, pids)):
            return True
        time.sleep(0.05)
    return False


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] == "Z")


@pytest.mark.parametrize(
    ("number", "how", "processes"),
    [
        (signal.SIGTERM, "plain", 2),
        (signal.SIGTERM, "deaf", 1),
        (signal.SIGHUP, "plain", 1),
        (signal.SIGINT, "plain", 1),
        (signal.SIGKILL, "deaf", 1),
    ],
)
def test_no_process_outlives_the_launcher(number, how, processes, tmp_path):
    launcher, pids = started(tmp_path, how, processes, "--grace", "1")
    try:
        launcher.send_signal(number)
        said = launcher.communicate(timeout=60)[1]
        assert gone(pids), said
    finally:
        launcher.kill()
        launcher.communicate()
    expected = 130 if number == signal.SIGINT else -number
    assert launcher.returncode == expected, said


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, 0], 0),
        ([1, 3], 3),
        ([1, -9], 137),
        ([1, -15, 4], 143),
        ([1, None], 1),
        ([0, None], 1),
        ([1, 1], 1),
    ],
)
def test_one_code_for_all(codes, expected):
    exits = [Exit(p, code, at_s=float(p)) for p, code in enumerate(codes)]
    assert exit_code(exits) == expected


def test_processes_that_never_join_are_named():
    notices: list[str] = []
    launch(["-c", "pass"], 2, notice=notices.append)
    (text,) = notices
    assert "processes 0, 1 have not called octopipe.initialize()" in text
    launch(["-c", "pass"], 1, notice=notices.append)  # alone anyway
    assert len(notices) == 1


def test_what_a_process_leaves_behind_is_ended(tmp_path):
    leaves = "import subprocess, sys; w = subprocess.Popen(['sleep', '100']); print(w.pid)"
    lines: list[str] = []
    launch(["-c", leaves], 1, echo=lambda _, line: lines.append(line))
    assert gone([int(lines[0])])
