"""Starts the processes of a launch: their environment, their output."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from octojax.launch.attendants import Coordinator, Guard
from octojax.launch.company import Child, Company, Exit
from octojax.launch.signals import Signals
from octojax.launch_environment import (
    COORDINATOR,
    FOLDER,
    NUM_PROCESSES,
    PROCESS_ID,
    TIMEOUT,
    with_huge_pages,
)

_COUNT = "--xla_force_host_platform_device_count"


def launch(
    arguments: Sequence[str],
    num_processes: int,
    *,
    devices_per_process: int = 1,
    port: int | None = None,
    timeout_s: float = 60.0,
    grace_s: float = 10.0,
    pin: bool = False,
    echo: Callable[[int, str], None] | None = None,
    notice: Callable[[str], None] | None = None,
) -> tuple[Exit, ...]:
    """Returns how each of `num_processes` copies of `python *arguments` ended.

    Each copy sees `devices_per_process` CPU devices and finds its peers through the
    environment. Output is passed on line by line with the
    process id in front. Once a process fails, the others get `timeout_s` seconds to end with
    an error of their own; then they are ended. With `pin`, process i is bound to core i modulo
    the number of cores. `echo(process_id, line)` takes the output in place of standard output,
    `notice(line)` what the launcher has to say in place of standard error; calls come one at a
    time.

    SIGINT, SIGTERM and SIGHUP are passed on to all processes; those left after `grace_s` seconds,
    or at a second signal, are killed, and then the signal takes its course here
    (`KeyboardInterrupt` for SIGINT). No process outlives the launcher, nor do their children,
    even if it is killed.

    Raises `ValueError` for fewer than one process and for a port that is in use,
    `ExecutionError` if the processes' coordinator fails.
    """
    if num_processes < 1:
        raise ValueError(f"launch needs at least 1 process, asked for {num_processes}")
    address = f"127.0.0.1:{_free_port(port)}"
    write_line = _serialised(echo or _print)
    with (
        Signals() as signals,
        tempfile.TemporaryDirectory(prefix="octopipe-") as folder,
        Guard() as guard,
        Coordinator(address, num_processes, timeout_s) as coordinator,
    ):
        company = Company(Path(folder), guard, timeout_s, grace_s, notice or _notice)
        try:
            for process_id in range(num_processes):
                env = _environment(
                    address, num_processes, process_id, devices_per_process, timeout_s
                )
                env.update(coordinator.environment, **{FOLDER: folder})
                company.add(_start(arguments, env, process_id, write_line, pin))
            return company.wait(coordinator, signals)
        finally:
            company.end()


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
    env = with_huge_pages(os.environ)
    flags = [flag for flag in env.get("XLA_FLAGS", "").split() if not flag.startswith(_COUNT)]
    env["XLA_FLAGS"] = " ".join([*flags, f"{_COUNT}={devices}"])
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
) -> Child:
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
    return Child(process_id, popen, reader)


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


def _notice(line: str) -> None:
    print(f"octopipe launch: {line}", file=sys.stderr, flush=True)
