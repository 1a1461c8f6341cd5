"""Starts one training script as N processes of this machine, and ends them all together.

The script calls `octopipe.initialize()` before it touches a device. Under a cluster launcher
that `jax.distributed.initialize` knows (Slurm, Open MPI, GKE, ...) the same script runs there
without this module.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from octojax.errors import ExecutionError
from octojax.launch_environment import (
    COORDINATOR,
    HEARTBEAT,
    NUM_PROCESSES,
    PROCESS_ID,
    TIMEOUT,
    heartbeat_s,
)

_COUNT = "--xla_force_host_platform_device_count"


@dataclass(frozen=True)
class Exit:
    """How one process ended. `code` is negative for a signal, None if it had to be ended."""

    process_id: int
    code: int | None

    def __str__(self) -> str:
        if self.code is None:
            return f"process {self.process_id} was ended by the launcher"
        if self.code < 0:
            return f"process {self.process_id} was killed by {signal.Signals(-self.code).name}"
        return f"process {self.process_id} exited with code {self.code}"


@dataclass
class _Child:
    process_id: int
    popen: subprocess.Popen[bytes]
    reader: threading.Thread
    ended: bool = field(default=False)


def launch(
    arguments: Sequence[str],
    num_processes: int,
    *,
    devices_per_process: int = 1,
    port: int | None = None,
    timeout_s: float = 60.0,
    pin: bool = False,
    echo: Callable[[int, str], None] | None = None,
) -> tuple[Exit, ...]:
    """Returns how each of `num_processes` copies of `python *arguments` ended.

    Each copy sees `devices_per_process` CPU devices and finds its peers through the
    environment. Output is passed on line by line with the
    process id in front. Once a process fails, the others get `timeout_s` seconds to end with
    an error of their own; then they are ended. Ctrl-C ends them all. With `pin`, process i is
    bound to core i modulo the number of cores. `echo(process_id, line)` takes the output in
    place of standard output; calls come one at a time.

    Raises `ValueError` for fewer than one process and for a port that is in use,
    `ExecutionError` if the processes' coordinator fails.
    """
    if num_processes < 1:
        raise ValueError(f"launch needs at least 1 process, asked for {num_processes}")
    address = f"127.0.0.1:{_free_port(port)}"
    told = _serialised(echo or _print)
    children: list[_Child] = []
    with _Coordinator(address, num_processes, timeout_s) as coordinator:
        try:
            for process_id in range(num_processes):
                env = _environment(
                    address, num_processes, process_id, devices_per_process, timeout_s
                )
                env.update(coordinator.told)
                children.append(_start(arguments, env, process_id, told, pin))
            return _wait(children, timeout_s, coordinator)
        finally:
            _end(children)


class _Coordinator:
    """Runs the coordinator of several processes meanwhile."""

    def __init__(self, address: str, num_processes: int, timeout_s: float) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.told: dict[str, str] = {}  # what the processes must know of it
        self.said = tempfile.TemporaryFile()  # noqa: SIM115  (closed on exit)
        if num_processes == 1:
            return
        self.told[HEARTBEAT] = str(heartbeat_s(timeout_s))
        file = Path(__file__).with_name("coordinator.py")
        wanted = address, num_processes, heartbeat_s(timeout_s), round(timeout_s) or 1, os.getpid()
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(file), *map(str, wanted)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.said,  # shown only if it fails: else it repeats what the processes say
            start_new_session=True,
        )

    def __enter__(self) -> "_Coordinator":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.said.close()

    def check(self) -> None:
        """Raises `ExecutionError` if it has ended by itself."""
        if self.process is None or self.process.poll() is None:
            return
        self.said.seek(0)
        lines = self.said.read().decode(errors="replace").strip().splitlines()
        raise ExecutionError(
            f"the coordinator of the processes ended with code {self.process.returncode}, "
            f"without which they cannot go on: {' '.join(lines[-3:]) or 'it said nothing'}"
        )


def _free_port(port: int | None) -> int:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port or 0))
        except OSError as error:
            raise ValueError(
                f"port {port} on 127.0.0.1 cannot be used ({error.strerror}); "
                f"end what listens there, name another one, or leave the port out"
            ) from None
        return probe.getsockname()[1]


def _environment(
    address: str, num_processes: int, process_id: int, devices: int, timeout_s: float
) -> dict[str, str]:
    env = dict(os.environ)
    kept = [flag for flag in env.get("XLA_FLAGS", "").split() if not flag.startswith(_COUNT)]
    env["XLA_FLAGS"] = " ".join([*kept, f"{_COUNT}={devices}"])
    env[COORDINATOR] = address
    env[NUM_PROCESSES] = str(num_processes)
    env[PROCESS_ID] = str(process_id)
    env[TIMEOUT] = str(timeout_s)
    env["PYTHONUNBUFFERED"] = "1"
    return env


def _start(
    arguments: Sequence[str],
    env: dict[str, str],
    process_id: int,
    echo: Callable[[int, str], None],
    pin: bool,
) -> _Child:
    popen = subprocess.Popen(
        [sys.executable, *arguments],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # so that its own children end with it
    )
    if pin and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(popen.pid, {cores[process_id % len(cores)]})
    assert popen.stdout is not None
    reader = threading.Thread(target=_pass_on, args=(popen.stdout, process_id, echo), daemon=True)
    reader.start()
    return _Child(process_id, popen, reader)


def _pass_on(stream: IO[bytes], process_id: int, echo: Callable[[int, str], None]) -> None:
    with stream:
        for line in stream:
            echo(process_id, line.decode(errors="replace").rstrip("\n"))


def _serialised(echo: Callable[[int, str], None]) -> Callable[[int, str], None]:
    lock = threading.Lock()

    def one_at_a_time(process_id: int, line: str) -> None:
        with lock:
            echo(process_id, line)

    return one_at_a_time


def _print(process_id: int, line: str) -> None:
    print(f"[{process_id}] {line}", flush=True)


def _wait(children: list[_Child], timeout_s: float, coordinator: _Coordinator) -> tuple[Exit, ...]:
    deadline: float | None = None
    while any(child.popen.poll() is None for child in children):
        coordinator.check()
        failed = any(child.popen.poll() not in (None, 0) for child in children)
        if failed and deadline is None:
            deadline = time.monotonic() + timeout_s
        if deadline is not None and time.monotonic() > deadline:
            for child in children:
                child.ended = child.popen.poll() is None
            _end(children)
            break
        time.sleep(0.05)
    for child in children:
        child.reader.join(timeout=5)
    return tuple(
        Exit(child.process_id, None if child.ended else child.popen.returncode)
        for child in children
    )


def _end(children: list[_Child]) -> None:
    """Ends every process group that is still there: first politely, after 3 s by force."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        alive = [child for child in children if child.popen.poll() is None]
        for child in alive:
            try:
                os.killpg(child.popen.pid, signal.SIGCONT)
                os.killpg(child.popen.pid, sign)
            except ProcessLookupError:
                pass
        limit = time.monotonic() + 3
        while time.monotonic() < limit and any(c.popen.poll() is None for c in alive):
            time.sleep(0.02)
