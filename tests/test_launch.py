import os
import signal
import socket
import time

import pytest

from octojax.launch import launch

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
