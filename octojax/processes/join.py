"""How the processes of one program find each other."""

import contextlib
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

import jax

from octojax import compat
from octojax.errors import PeerError
from octojax.launch_environment import (
    COORDINATOR,
    FOLDER,
    HEARTBEAT,
    NUM_PROCESSES,
    PROCESS_ID,
    TIMEOUT,
    heartbeat_s,
)
from octojax.processes.leave import watch_the_end
from octojax.processes.settings import timeout_s

_FOR_EVER_S = 10**6  # JAX aborts the process when its own patience ends: ours ends before


def initialize(timeout: float | None = None, **cluster: Any) -> None:
    """Joins this process to its peers; does nothing in a program started by itself.

    Under `octopipe launch` the peers come from the environment. Otherwise `cluster` goes to
    `jax.distributed.initialize` (coordinator_address, num_processes, process_id, ...), which
    also knows the common cluster launchers. CPU processes talk through gloo.

    Call it before anything touches a device. Raises `PeerError` if a peer does not come
    within the timeout (seconds), or has ended before.
    """
    if timeout is not None:
        os.environ[TIMEOUT] = str(timeout)
    outside = HEARTBEAT in os.environ and "coordinator_address" not in cluster
    company = _Company()
    if COORDINATOR in os.environ:
        company.announce()
        cluster = {
            "coordinator_address": os.environ[COORDINATOR],
            "num_processes": int(os.environ[NUM_PROCESSES]),
            "process_id": int(os.environ[PROCESS_ID]),
            **cluster,
        }
    if cluster.get("num_processes") == 1:
        return
    seconds = max(1, round(timeout_s()))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if outside:  # JAX would take SIGTERM for itself, and nobody could end the process by it
        compat.without_preemption_service()
    heartbeat = int(os.environ[HEARTBEAT]) if outside else heartbeat_s(seconds)
    try:
        with compat.coordinator_elsewhere() if outside else contextlib.nullcontext():
            company.join(
                cluster,
                initialization_timeout=_FOR_EVER_S,
                heartbeat_timeout_seconds=heartbeat,
                shutdown_timeout_seconds=seconds,
            )
    except (RuntimeError, ValueError) as error:
        if not cluster and isinstance(error, ValueError):
            return  # no launcher that it knows: a program of one process
        if isinstance(error, PeerError):
            raise
        raise PeerError(_no_company(cluster, str(error))) from error
    watch_the_end()


def _no_company(cluster: dict[str, Any], why: str) -> str:
    place = cluster.get("coordinator_address", "the coordinator of the cluster launcher")
    return (
        f"process {cluster.get('process_id', '?')} of {cluster.get('num_processes', '?')} could "
        f"not join its peers at {place}: {why}. Check that every process was started, that none "
        f"ended early, and that the port is free"
    )


class _Company:
    """The peers as the launcher sees them: who has come, and who has ended."""

    def __init__(self) -> None:
        folder = os.environ.get(FOLDER)
        self.folder = None if folder is None else Path(folder)

    def announce(self) -> None:
        if self.folder is not None:
            (self.folder / f"joined.{os.environ[PROCESS_ID]}").touch()

    def join(self, cluster: dict[str, Any], **options: Any) -> None:
        """Initializes `jax.distributed`, which does not return before all have come. Raises
        `PeerError` naming those who do not."""
        answer: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def attempt() -> None:
            try:
                jax.distributed.initialize(**cluster, **options)
                answer.put(None)
            except BaseException as error:
                answer.put(error)

        threading.Thread(target=attempt, name="octopipe join", daemon=True).start()
        limit = time.monotonic() + timeout_s()
        while True:
            with contextlib.suppress(queue.Empty):
                error = answer.get(timeout=0.1)
                if error is not None:
                    raise error
                return
            why = self._ended() or (self._late() if time.monotonic() > limit else "")
            if why:
                compat.forget_distributed()
                raise PeerError(_no_company(cluster, why))

    def _ended(self) -> str:
        notes = [] if self.folder is None else sorted(self.folder.glob("ended.*"))
        return "; ".join(f"process {x.suffix[1:]} {x.read_text('utf-8')}" for x in notes)

    def _late(self) -> str:
        if self.folder is None:
            return f"not all of them came within {timeout_s():g} s"
        everyone = range(int(os.environ[NUM_PROCESSES]))
        absent = [str(p) for p in everyone if not (self.folder / f"joined.{p}").exists()]
        return (
            f"process {', '.join(absent)} has not called octopipe.initialize() within "
            f"{timeout_s():g} s"
            if absent
            else f"the coordinator did not let all of them in within {timeout_s():g} s"
        )
