"""Meetings of all processes: each brings a text, and learns those of the others."""

import contextlib
import hashlib
import json
import platform
import time
from collections.abc import Mapping
from typing import Any

import jax

from octojax import compat
from octojax.errors import MeshError, PeerError
from octojax.processes.board import board, call
from octojax.processes.settings import several, timeout_s

_SLICE_S = 0.25  # between looks at the board


def everyone(text: str, topic: str = "step", patience_s: float = 0.0) -> list[str]:
    """Returns what each process has brought to this meeting, by process number.

    All processes call this in the same order. Raises `PeerError` if one does not answer
    within the timeout and `patience_s` beyond it, for what may take one of them long, and as soon
    as one turns out to be at something else.
    """
    if not several():
        return [text]
    with call(topic):
        client = compat.distributed_client()
        key = f"octopipe/{_next_number()}/{topic}"
        client.key_value_set(f"{key}/{jax.process_index()}", text)
        limit_s = timeout_s() + patience_s
        return [_get(client, f"{key}/{p}", p, topic, limit_s) for p in range(jax.process_count())]


SAME_SCRIPT = "Start every process with the same script, arguments, seed and versions"


def agree(facts: Mapping[str, str], topic: str = "step", remedy: str = SAME_SCRIPT) -> None:
    """Returns when every process has brought the same `facts` (name to text).

    Raises `MeshError` naming each fact that differs, and between which processes, and then the
    `remedy`; `PeerError` if a process does not answer in time.
    """
    brief = json.dumps({name: _short(text) for name, text in facts.items()}, sort_keys=True)
    with call(topic):
        if len(set(everyone(_short(brief), topic))) == 1:
            return
        different = differences([json.loads(x) for x in everyone(brief, f"{topic}, at length")])
        with contextlib.suppress(PeerError):
            everyone("", f"{topic}, refused")  # nobody leaves before all have read
        raise MeshError(
            f"the processes are not about to run the same thing, they differ in {topic}: "
            + "; ".join(different[:_SHOWN])
            + (f"; and {len(different) - _SHOWN} more" if len(different) > _SHOWN else "")
            + f". {remedy}"
        )


_SHOWN = 12


def differences(theirs: list[dict[str, str]]) -> list[str]:
    """Returns a text for each fact that is not the same in all processes."""
    different = []
    for name in sorted(set().union(*theirs)):
        groups: dict[str, list[int]] = {}
        for process, facts in enumerate(theirs):
            groups.setdefault(facts.get(name, "nothing"), []).append(process)
        if len(groups) > 1:
            said = (f"{_processes(who)} {text}" for text, who in groups.items())
            different.append(f"{name}: {', '.join(said)}")
    return different


def _processes(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"process {numbers[0]} has"
    return f"processes {', '.join(map(str, numbers))} have"


def barrier(topic: str) -> None:
    """Returns when every process has come here. Raises `PeerError` if one does not."""
    agree({}, topic)


def clock_offset_s() -> float:
    """Returns how far this process's `time.monotonic` is ahead of process 0's, in seconds.

    Zero on one machine, whose processes share that clock. Between machines it is estimated where
    all leave a barrier, good to about the time of a message. All processes call this.
    """
    barrier("clock")
    now, machine = time.monotonic(), _machine()
    first = json.loads(everyone(json.dumps([now, machine]), "clock")[0])
    return 0.0 if machine == first[1] else now - first[0]


def _machine() -> str:
    """Names this machine and its last start."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return platform.node()


def _get(client: Any, key: str, process: int, topic: str, limit_s: float) -> str:
    text = (
        f"process {jax.process_index()} waited {limit_s:g} s for process {process} at "
        f"{topic!r}, and it did not come: it ended, hangs, or is slower than that "
        f"(octopipe launch --timeout). Every process must make this call"
    )
    errors: list[Exception] = []
    with board().wait(text, limit_s, errors.append):
        while True:
            try:
                return client.blocking_key_value_get(key, round(1000 * _SLICE_S))
            except Exception as error:
                if errors:
                    raise errors[0] from None
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise PeerError(f"{text}. ({str(error).splitlines()[0]})") from error


_count = 0


def _next_number() -> int:
    """Numbers the meetings of this program, which every process holds in the same order."""
    global _count
    _count += 1
    return _count


def _short(text: str) -> str:
    """The text itself if it is short, else its digest: enough to compare and to name."""
    return text if len(text) <= 80 else hashlib.sha256(text.encode()).hexdigest()[:16]
