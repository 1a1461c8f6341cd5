"""Two processes that a launch has next to those of the script: its coordinator and its guard."""

import contextlib
import os
import subprocess
import sys
import tempfile

from octojax import coordinator, guard
from octojax.errors import ExecutionError
from octojax.launch_environment import HEARTBEAT, heartbeat_s


class Coordinator:
    """Runs the coordinator of several processes meanwhile."""

    def __init__(self, address: str, num_processes: int, timeout_s: float) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.environment: dict[str, str] = {}  # what the processes must know of it
        self.said = tempfile.TemporaryFile()  # noqa: SIM115  (closed on exit)
        if num_processes == 1:
            return
        self.environment[HEARTBEAT] = str(heartbeat_s(timeout_s))
        file = coordinator.__file__
        arguments = (
            address,
            num_processes,
            heartbeat_s(timeout_s),
            round(timeout_s) or 1,
            os.getpid(),
        )
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(file), *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.said,  # shown only if it fails: else it repeats what the processes say
            start_new_session=True,
        )

    def __enter__(self) -> "Coordinator":
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


class Guard:
    """Kills what is left of the processes if this one ends without doing so; see `guard.py`."""

    def __enter__(self) -> "Guard":
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def tell(self, change: str, group: int) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it was killed: nothing to be done
            self.process.stdin.write(f"{change}{group}\n".encode())
            self.process.stdin.flush()

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.wait()
