"""Several processes of one program: how they find each other, agree, and never wait for ever.

    octopipe.initialize()       before the first use of a device, in every process
    agree({...})                compares what every process is about to run
    fail_fast()                 after an error: end this process though peers may hang

`jax.distributed` does the rest: it gives every process the devices of all.
"""

import atexit
import contextlib
import hashlib
import json
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

import jax

from octojax import compat
from octojax.errors import ExecutionError, MeshError
from octojax.launch_environment import (
    COORDINATOR,
    HEARTBEAT,
    NUM_PROCESSES,
    PROCESS_ID,
    TIMEOUT,
    heartbeat_s,
)

DEFAULT_TIMEOUT_S = 60.0
DEFAULT_STEP_TIMEOUT_S = 600.0


def timeout_s() -> float:
    """How long any process waits for another before it gives up, in seconds.

    Set by `octopipe launch --timeout` or the argument of `initialize`; 60 by default.
    """
    return float(os.environ.get(TIMEOUT, DEFAULT_TIMEOUT_S))


def step_timeout_s() -> float:
    """How long a wait in a step lasts where nobody said otherwise, in seconds: what the processes
    were started with (`octopipe launch --timeout`, `initialize`), else 600."""
    return float(os.environ.get(TIMEOUT, DEFAULT_STEP_TIMEOUT_S))


def initialize(timeout: float | None = None, **cluster: Any) -> None:
    """Joins this process to its peers; does nothing in a program started by itself.

    Under `octopipe launch` the peers come from the environment. Otherwise `cluster` goes to
    `jax.distributed.initialize` (coordinator_address, num_processes, process_id, ...), which
    also knows the common cluster launchers. CPU processes talk through gloo.

    Call it before anything touches a device. Raises `ExecutionError` if a peer does not come
    within the timeout (seconds).
    """
    if timeout is not None:
        os.environ[TIMEOUT] = str(timeout)
    global _outside
    _outside = HEARTBEAT in os.environ and "coordinator_address" not in cluster
    if COORDINATOR in os.environ:
        cluster = {
            "coordinator_address": os.environ[COORDINATOR],
            "num_processes": int(os.environ[NUM_PROCESSES]),
            "process_id": int(os.environ[PROCESS_ID]),
            **cluster,
        }
    if cluster.get("num_processes") == 1:
        return
    alone = not cluster  # unless jax.distributed knows the launcher
    seconds = max(1, round(timeout_s()))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        with compat.coordinator_elsewhere() if _outside else contextlib.nullcontext():
            jax.distributed.initialize(
                **cluster,
                initialization_timeout=seconds,
                heartbeat_timeout_seconds=int(os.environ[HEARTBEAT])
                if _outside
                else heartbeat_s(seconds),
                shutdown_timeout_seconds=seconds,
            )
    except (RuntimeError, ValueError) as error:
        if alone and isinstance(error, ValueError):
            return  # no launcher that it knows: a program of one process
        place = cluster.get("coordinator_address", "the coordinator of the cluster launcher")
        raise ExecutionError(
            f"process {cluster.get('process_id', '?')} of {cluster.get('num_processes', '?')} "
            f"could not join its peers at {place} within {seconds} s: {error}. Check that every "
            f"process was started, that none ended early, and that the port is free"
        ) from error
    _end_with_the_first_error()


def several() -> bool:
    """Whether this program runs as more than one process."""
    return jax.process_count() > 1


def everyone(text: str, topic: str = "step", patience_s: float = 0.0) -> list[str]:
    """Returns what each process has brought to this meeting, by process number.

    All processes call this in the same order. Raises `ExecutionError` if one does not answer
    within the timeout and `patience_s` beyond it, for what may take one of them long.
    """
    if not several():
        return [text]
    client = compat.distributed_client()
    key = f"octopipe/{_next_number()}/{topic}"
    client.key_value_set(f"{key}/{jax.process_index()}", text)
    limit_s = timeout_s() + patience_s
    return [_get(client, f"{key}/{p}", p, topic, limit_s) for p in range(jax.process_count())]


def agree(facts: Mapping[str, str], topic: str = "step") -> None:
    """Returns when every process has brought the same `facts` (name to text).

    Raises `MeshError` naming each fact that differs, and between which processes;
    `ExecutionError` if a process does not answer in time.
    """
    brief = {name: _short(text) for name, text in facts.items()}
    theirs = [json.loads(found) for found in everyone(json.dumps(brief), topic)]
    first = theirs[0]
    different = [
        f"{name}: process 0 has {first.get(name)}, process {p} has {found.get(name)}"
        for p, found in enumerate(theirs)
        for name in sorted({*first, *found})
        if found.get(name) != first.get(name)
    ]
    if different:
        with contextlib.suppress(ExecutionError):
            everyone("", f"{topic}, refused")  # nobody leaves before all have read
        raise MeshError(
            "the processes are not about to run the same thing: "
            + "; ".join(different)
            + ". Start every process with the same script, arguments, seed and versions"
        )


def barrier(topic: str) -> None:
    """Returns when every process has come here. Raises `ExecutionError` if one does not."""
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
    try:
        return client.blocking_key_value_get(key, round(1000 * limit_s))
    except Exception as error:
        raise ExecutionError(
            f"process {jax.process_index()} waited {limit_s:g} s for process {process} at "
            f"{topic!r}, and it did not come: it ended, hangs, or is slower than that "
            f"(octopipe launch --timeout)"
        ) from error


_count = 0


def _next_number() -> int:
    """Numbers the meetings of this program, which every process holds in the same order."""
    global _count
    _count += 1
    return _count


def _short(text: str) -> str:
    """The text itself if it is short, else its digest: enough to compare and to name."""
    return text if len(text) <= 80 else hashlib.sha256(text.encode()).hexdigest()[:16]


# ---------------------------------------------------------------------- ending

FAILED = "octopipe/failed"
_LOOK_S = 0.5  # how often a process looks whether another has failed
_GRACE_S = 2.0  # what a process then has to raise an error of its own, which says more
_FAREWELL_S = 6.0  # how long a process 0 that holds the coordinator stays for the others

_failed = False
_outside = False  # the launcher runs the coordinator, and not process 0
_ending = threading.Event()


def fail_fast(reason: str = "") -> None:
    """Marks this program as failed: it will end at once, without an orderly farewell.

    Threads may sit in transfers that no one will ever complete, and the farewell of
    `jax.distributed` waits for every process. The others are told the reason.
    """
    global _failed
    _failed = True
    if reason and several():
        with contextlib.suppress(Exception):  # another process may have failed first
            text = f"process {jax.process_index()} failed: {reason}"
            compat.distributed_client().key_value_set(FAILED, text)


def _end_with_the_first_error() -> None:
    before = sys.excepthook

    def ended(kind: Any, error: Any, trace: Any) -> None:
        before(kind, error, trace)
        fail_fast("".join(traceback.format_exception_only(kind, error)).strip())

    sys.excepthook = ended
    watcher = threading.Thread(target=_watch, name="octopipe watcher", daemon=True)
    watcher.start()
    atexit.register(_leave, watcher)


def _watch() -> None:
    """Ends this process when another one has failed and this one does not notice."""
    client = compat.distributed_client()
    while not _ending.wait(_LOOK_S):
        try:
            reason = client.key_value_try_get(FAILED)
        except Exception:  # nothing there, or the coordinator has gone
            continue
        if _ending.wait(_GRACE_S):
            return
        print(f"octojax: process {jax.process_index()} ends: {reason}", file=sys.stderr)
        _depart(client)


def _leave(watcher: threading.Thread) -> None:
    _ending.set()
    watcher.join()
    if _failed:
        _depart(compat.distributed_client())


def _depart(client: Any) -> NoReturn:
    """Ends this process with code 1; the one that holds the coordinator as the last."""
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(Exception):
        client.key_value_set(f"octopipe/left/{jax.process_index()}", "")
        if jax.process_index() == 0 and not _outside:
            limit = time.monotonic() + _FAREWELL_S
            for process in range(1, jax.process_count()):
                left = max(1, round(1000 * (limit - time.monotonic())))
                client.blocking_key_value_get(f"octopipe/left/{process}", left)
            time.sleep(0.2)  # from their last word to their end
    os._exit(1)
