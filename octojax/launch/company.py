"""The processes of one launch and how they end."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from octojax.launch.attendants import Coordinator, Guard
from octojax.launch.signals import Signals


@dataclass(frozen=True)
class Exit:
    """How one process ended. `code` is negative for a signal, None if it had to be ended.

    `joined` says whether it called `octopipe.initialize`, `at_s` when it ended, from the start.
    """

    process_id: int
    code: int | None
    joined: bool = True
    at_s: float = 0.0

    def __str__(self) -> str:
        return f"process {self.process_id} {self.how}"

    @property
    def how(self) -> str:
        if self.code is None:
            return "was ended by the launcher"
        if self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"exited with code {self.code}"


def exit_code(exits: Sequence[Exit]) -> int:
    """Returns one code for all: 0 if every process ended well, else that of the one to blame.

    The others end with 1 because of it, so that the first other code counts; a signal n is
    128 + n, as shells have it.
    """
    codes = [
        128 - e.code if e.code < 0 else e.code
        for e in sorted(exits, key=lambda e: e.at_s)
        if e.code is not None
    ]
    own = [code for code in codes if code > 1]
    return own[0] if own else int(any(e.code != 0 for e in exits))


@dataclass
class Child:
    process_id: int
    popen: subprocess.Popen[bytes]
    reader: threading.Thread
    ended: bool = field(default=False)  # by the launcher
    at_s: float | None = None


class Company:
    """The processes of one launch: waits for them, tells each of the others' ends, ends them."""

    def __init__(
        self,
        folder: Path,
        guard: Guard,
        timeout_s: float,
        grace_s: float,
        notice: Callable[[str], None],
    ) -> None:
        self.folder, self.guard, self.notice = folder, guard, notice
        self.timeout_s, self.grace_s = timeout_s, grace_s
        self.children: list[Child] = []
        self.begin = time.monotonic()

    def add(self, child: Child) -> None:
        self.guard.tell("+", child.popen.pid)
        self.children.append(child)

    def wait(self, coordinator: Coordinator, signals: Signals) -> tuple[Exit, ...]:
        """Returns how the processes ended; after a signal, once they have."""
        failed_at: float | None = None
        reminded = False
        while alive := self._alive():
            coordinator.check()
            now = time.monotonic()
            if signals.noted:
                self.end(signals.noted[0], lambda: len(signals.noted) > 1)
                break
            if failed_at is None and any(c.popen.returncode for c in self.children):
                failed_at = now
            if failed_at is not None and now > failed_at + self.timeout_s:
                for child in alive:
                    child.ended = True
                self.end()
                break
            if not reminded and now > self.begin + self.timeout_s:
                reminded = True
                self._remind([c.process_id for c in alive], " yet")
            time.sleep(0.05)
        for child in self.children:
            child.reader.join(timeout=5)
        exits = tuple(map(self._exit, self.children))
        if not signals.noted:
            self._remind([e.process_id for e in exits if e.code == 0])
        return exits

    def _has_joined(self, process_id: int) -> bool:
        return (self.folder / f"joined.{process_id}").exists()

    def _remind(self, ids: Sequence[int], yet: str = "") -> None:
        """Says which of the processes run by themselves."""
        alone = [str(i) for i in ids if not self._has_joined(i)]
        if alone and len(self.children) > 1:
            many = f"processes {', '.join(alone)} have"
            who = f"process {alone[0]} has" if len(alone) == 1 else many
            self.notice(
                f"warning: {who} not{yet} called octopipe.initialize(), and so runs the whole "
                f"script by itself. Call it as the first thing in the script, before anything "
                f"touches a device"
            )

    def _exit(self, child: Child) -> Exit:
        code = None if child.ended else child.popen.returncode
        return Exit(child.process_id, code, self._has_joined(child.process_id), child.at_s or 0.0)

    def _alive(self) -> list[Child]:
        """Returns who still runs. Of one that has just ended, the others are told, and what it
        has left of children is killed."""
        alive = []
        for child in self.children:
            if child.popen.poll() is None:
                alive.append(child)
            elif child.at_s is None:
                child.at_s = time.monotonic() - self.begin
                _signal(child, signal.SIGKILL)
                self.guard.tell("-", child.popen.pid)
                self._note_end(child)
        return alive

    def _note_end(self, child: Child) -> None:
        """Writes the note whole or not at all."""
        draft = self.folder / "draft"
        draft.write_text(self._exit(child).how, encoding="utf-8")
        draft.replace(self.folder / f"ended.{child.process_id}")

    def end(self, number: int = signal.SIGTERM, hurry: Callable[[], bool] = lambda: False) -> None:
        """Ends every process that is still there: by the signal, after the grace by force."""
        for sign in (number, signal.SIGKILL):
            for child in self._alive():
                _signal(child, sign)
                _signal(child, signal.SIGCONT)  # a stopped one gets the other then
            limit = time.monotonic() + self.grace_s
            while time.monotonic() < limit and self._alive() and not hurry():
                time.sleep(0.02)
            if not self._alive():
                return


def _signal(child: Child, number: int) -> None:
    """Sends a signal to the process and its children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.popen.pid, number)
