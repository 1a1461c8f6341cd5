"""Waits of a rank that several processes run together.

process 0   0F0 .. 0F1 .. 0B0        one row, one thread, one order of launches in both;
process 1   0F0 .. 0F1 ..            a program over both waits, wherever it is called, for
                                     the later of them
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import jax

from octojax.errors import PeerError
from octojax.executor.stop import Stop
from octojax.mesh import Rank
from octojax.processes import wait

_OF_COMPANY = re.compile("gloo|nccl|connection|heartbeat|coordination", re.IGNORECASE)
"""In what XLA says where the process at the other end of a collective has gone."""


@dataclass
class SharedWait:
    """Bounds how long the thread of a shared rank stays at one instruction.

    `look` is called now and then, and raises the `PeerError` that there is: a process of the
    company has failed, or no instruction has begun for `timeout_s`, in which no process was busy
    with what it has announced.
    """

    text: str
    timeout_s: float
    stop: Stop
    errors: list[Exception] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator["SharedWait"]:
        with ExitStack() as self._waits:
            self._begin()
            yield self

    def _begin(self) -> None:
        self._count = self.stop.instructions
        self._waits.enter_context(wait(self.text, self.timeout_s, self._wake))

    def _wake(self, error: Exception) -> None:
        self.errors.append(error)
        self.stop.set(error)

    def look(self) -> None:
        if self.errors:
            raise self.errors[0]
        if self.stop.instructions != self._count:
            self._waits.close()
            self._begin()


def waiting(rank: Rank, timeout_s: float, stop: Stop) -> SharedWait:
    """Returns the wait of the processes of a rank for each other in one step."""
    text = (
        f"rank {rank.index} waited {timeout_s:g} s for the other processes of its devices "
        f"({_others(rank)}), with which it runs every program. One has stopped, or is slower than "
        f"that. Raise timeout_s if a step may take so long"
    )
    return SharedWait(text, timeout_s, stop)


def broken_off(rank: Rank, where: str, error: BaseException) -> PeerError | None:
    """Returns what to raise for an error of XLA in a program of a shared rank, if it comes of a
    process that has gone; else None."""
    said = str(error).splitlines()[:1]
    if not said or not _OF_COMPANY.search(said[0]):
        return None
    return PeerError(
        f"rank {rank.index} broke off in {where}. It runs its programs together with "
        f"{_others(rank)}: a process has probably ended, see what it printed last. ({said[0]})"
    )


def _others(rank: Rank) -> str:
    return ", ".join(f"process {p}" for p in rank.processes if p != jax.process_index())
