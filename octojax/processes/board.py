"""The board on which every process posts where it is, and the thread that reads it.

    with call("step 3"):                   one of the calls that all processes make alike
        with wait(text, 60, wake): ...     woken with an error if a peer will not come
    with busy("compiling"): ...            peers wait for as long as this process lives

A look (every quarter of a second, less often in large companies) posts this process's place and
reads all others: two messages to the coordinator, whatever the number of steps meanwhile. What it
finds wrong becomes an error in every wait and in every later call.
"""

import contextlib
import contextvars
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from octojax import compat
from octojax.errors import PeerError
from octojax.launch_environment import FOLDER
from octojax.processes.places import DONE, INSIDE, Log, Place, differs, left_alone, missing
from octojax.processes.settings import several, timeout_s

ROOT = "octopipe/at"
_LOOK_S = 0.25
_PATIENCE_S = 2.0  # for an error of one's own, which says more than that a peer has ended
_LASTING_S = 0.8
_TO_NAME_S = 1.5  # how long an error waits for the board to name its cause


_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("octopipe call", default=False)
"""Whether there is a call around; also in the threads that work for it."""


class _Late(PeerError):
    """A peer did not come in time; says where it was."""


_Late.__qualname__, _Late.__module__ = PeerError.__qualname__, PeerError.__module__


@dataclass
class _Wait:
    text: str
    timeout_s: float
    wake: Callable[[Exception], None]
    since: float


@dataclass
class _Peer:
    place: Place
    seen_s: float  # when it last showed a sign of life
    noted: bool = False  # the launcher says that it has ended: its last post may be older


class Board:
    """This process's part of it. One for the whole program: see `board`."""

    def __init__(self, client: Any, me: int, number: int) -> None:
        self.client, self.me = client, me
        self.log = Log()
        self.trouble: PeerError | None = None
        self.fatal_s: float | None = None  # when it turned out that a peer has failed
        self.raised = False  # the trouble has become an error of this process
        self._busy: list[str] = []
        self._remark = self._end = ""
        self._well, self._follows, self._beat = True, False, 0
        now = time.monotonic()
        self.peers = {p: _Peer(Place(), now) for p in range(number) if p != me}
        self._looked_s = now
        self._left_s: dict[str, float] = {}
        self._waits: dict[int, _Wait] = {}
        self._lock = threading.RLock()
        self._one_at_a_time = threading.Lock()
        self.ending = threading.Event()
        self._period_s = _LOOK_S * max(1.0, number / 32)
        folder = os.environ.get(FOLDER)
        self._notes = {p: Path(folder) / f"ended.{p}" for p in self.peers} if folder else {}
        self.watcher = threading.Thread(target=self._watch, name="octopipe watcher", daemon=True)

    # ------------------------------------------------------------------ calls

    @contextlib.contextmanager
    def call(self, topic: str) -> Iterator[None]:
        with self._one_at_a_time:
            self.check()
            with self._lock:
                self.log.enter(topic)
            token = _inside.set(True)
            try:
                yield
            except BaseException as error:
                text = f"{type(error).__name__}: {_brief(error)}"
                with self._lock:
                    self.log.leave(text, follows=isinstance(error, PeerError))
                self._raise_cause(error)
                raise
            else:
                with self._lock:
                    self.log.leave()
            finally:
                _inside.reset(token)

    def check(self) -> None:
        """Raises the trouble there is, if any."""
        if self.trouble is not None:
            self.raised = True
            raise PeerError(str(self.trouble))

    def _raise_cause(self, error: BaseException) -> None:
        """Raises what the board knows to be behind a broken transfer, in place of that error."""
        if isinstance(error, _Late):
            return
        if not (isinstance(error, PeerError) or isinstance(error.__cause__, PeerError)):
            return
        self.post()
        limit = time.monotonic() + _TO_NAME_S
        while self.trouble is None and time.monotonic() < limit:
            time.sleep(0.02)
            self.look()
        if self.trouble is None:
            return
        self.raised = True
        if str(self.trouble) in str(error):
            raise PeerError(str(self.trouble)) from None
        raise PeerError(f"{self.trouble}. ({error})") from error

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        with self._lock:
            self._busy.append(what)
        try:
            yield
        finally:
            with self._lock:
                self._busy.remove(what)

    @contextlib.contextmanager
    def wait(self, text: str, seconds: float, wake: Callable[[Exception], None]) -> Iterator[None]:
        key = id(wake_key := _Wait(text, seconds, wake, time.monotonic()))
        with self._lock:
            self._waits[key] = wake_key
            trouble = self.trouble
        if trouble is not None:
            wake(trouble)
        try:
            yield
        finally:
            with self._lock:
                del self._waits[key]

    # ------------------------------------------------------------------ posting and reading

    def post(self) -> None:
        """Tells the others where this process is."""
        with self._lock:
            self._beat += 1
            place = replace(
                self.log.last,
                busy=self._busy[-1] if self._busy else "",
                remark=self._remark,
                end=self._end,
                well=self._well,
                follows=self._follows,
                beat=self._beat,
            )
            with contextlib.suppress(Exception):  # the coordinator may have gone
                self.client.key_value_set(f"{ROOT}/{self.me}", place.to_text(), True)

    def remark(self, text: str) -> None:
        """Says something of this process that may explain why others wait for it."""
        self._remark = text
        self.post()

    def end(self, how: str, *, well: bool) -> None:
        """Says how this program ends. What was said first counts."""
        if not self._end:
            self._end, self._well = how, well
            self._follows = not well and self.trouble is not None
        self.post()

    def look(self) -> None:
        """Reads all posts, and finds out whether something is wrong."""
        now, before = time.monotonic(), self._looked_s
        self._looked_s = now
        if now - before > 1 + 2 * self._period_s:  # this process itself was stopped
            for peer in self.peers.values():
                peer.seen_s = now
        with contextlib.suppress(Exception):  # nothing there, or the coordinator has gone
            for key, text in self.client.key_value_dir_get(f"{ROOT}/"):
                process, place = int(key.rsplit("/", 1)[1]), Place.from_text(text)
                if process != self.me and place.beat > self.peers[process].place.beat:
                    self.peers[process] = _Peer(place, now)
        for process, note in self._notes.items():
            peer = self.peers[process]
            if not peer.place.end and note.exists():
                how = note.read_text(encoding="utf-8")
                well = how == "exited with code 0"
                peer.place, peer.noted = replace(peer.place, end=how, well=well), True
        self._judge()

    def _judge(self) -> None:
        with self._lock:
            cause = self.failure()
            if cause and self.fatal_s is None:
                self.fatal_s = time.monotonic()
            if self.trouble is not None:
                return
            named = [(f"process {p}", x.place) for p, x in self.peers.items()]
            inside = bool(self._waits) and self.log.last.outcome == INSIDE
            other = [differs(self.log.places, place, name) for name, place in named]
            if not any(other):
                other = [] if cause else [self._left(named, inside)]
            if any(other):
                self._fail(_same_calls("; ".join(filter(None, other))))
            elif cause:
                self._fail(cause)
            elif inside and any(texts := [missing(self.log.last, x, name) for name, x in named]):
                self._fail("; ".join(filter(None, texts)))

    def _left(self, named: list[tuple[str, Place]], inside: bool) -> str:
        """Says which call one process has left by an error and the other not, once it has lasted:
        the program of that one may end for it, which says more."""
        for name, place in named:
            if text := left_alone(self.log.places, place, name, waits=inside):
                first_s = self._left_s.setdefault(text, time.monotonic())
                if time.monotonic() - first_s > _LASTING_S:
                    return text
        return ""

    def met_elsewhere(self, text: str) -> PeerError:
        """Returns the trouble of processes that have met in different calls."""
        beats = {p: x.place.beat for p, x in self.peers.items()}
        limit = time.monotonic() + _LASTING_S
        self.post()
        while time.monotonic() < limit and any(
            x.place.beat == beats[p] for p, x in self.peers.items()
        ):
            time.sleep(0.02)
            self.look()
        with self._lock:
            errors = {f"process {p}": x.place.error for p, x in self.peers.items()}
            errors["this process"] = self.log.last.error
            more = (f"; in {name} {e}" for name, e in sorted(errors.items()) if e and text not in e)
            trouble = self._fail(_same_calls(text + "".join(more)))
        return PeerError(str(trouble))

    def failure(self) -> str:
        """Returns which peer has failed first and how, or gives no sign of life; "" if none.

        The waits of a step or meeting say more, and end before."""
        failed = [(p, x) for p, x in self.peers.items() if x.place.end and not x.place.well]
        for process, peer in sorted(failed, key=lambda pair: pair[1].place.follows):
            where = _where(peer.place)
            if peer.noted:
                return f"process {process} {peer.place.end}{where and f', last heard of {where}'}"
            return f"process {process}{where and f', {where},'} {peer.place.end}"
        limit_s = 1.25 * timeout_s() + 2
        silent = [
            p for p, x in self.peers.items() if not x.place.end and self._silent_s(x) > limit_s
        ]
        if not silent:
            return ""
        names = ", ".join(f"process {p} ({self.peers[p].place})" for p in silent)
        return f"no sign of life for {limit_s:.0f} s from {names}: stopped, or its machine has gone"

    def _silent_s(self, peer: _Peer) -> float:
        return self._looked_s - peer.seen_s

    def _fail(self, text: str) -> PeerError:
        self.trouble = trouble = PeerError(text)
        for wait in list(self._waits.values()):
            wait.wake(trouble)
        return trouble

    # ------------------------------------------------------------------ waits

    def _expire(self) -> None:
        """Wakes those who have waited too long. Who waits for one that is busy and shows signs of
        life has patience."""
        now = time.monotonic()
        with self._lock:
            patient = any(
                x.place.busy and self._silent_s(x) < timeout_s() for x in self.peers.values()
            )
            for wait in list(self._waits.values()):
                if patient:
                    wait.since = now
                elif now - wait.since > wait.timeout_s:
                    wait.since = float("inf")
                    wait.wake(_Late(f"{wait.text}. When last heard of, {self.whereabouts()}"))

    def whereabouts(self) -> str:
        """Returns where each other process was when last heard of."""
        texts = []
        for process, peer in self.peers.items():
            text = f"process {process}: {peer.place}"
            if peer.place.busy:
                text += f", {peer.place.busy}"
            if peer.place.remark:
                text += f" ({peer.place.remark})"
            if not peer.place.end and self._silent_s(peer) > 2 + 4 * self._period_s:
                text += f"; no sign of life for {self._silent_s(peer):.0f} s, it is stopped"
            texts.append(text)
        return "; ".join(texts)

    # ------------------------------------------------------------------ the watcher

    def _watch(self) -> None:
        while not self.ending.wait(self._period_s):
            self.post()
            self.look()
            self._expire()
            if self.fatal_s is not None:
                patience_s = timeout_s() if self.raised else _PATIENCE_S
                if time.monotonic() - self.fatal_s > patience_s and not self.ending.is_set():
                    self.depart(f"process {self.me} ends: {self.trouble}")

    def depart(self, why: str = "", code: int = 1) -> None:
        """Ends this process at once, telling the others."""
        from octojax.processes.leave import depart

        if why:
            print(f"octojax: {why}", file=sys.stderr)
        self.end(f"failed: {why}", well=False)
        depart(self.client, code)


def _same_calls(text: str) -> str:
    return (
        f"the processes are out of step: {text}. Every process must make the same calls in the "
        f"same order: the same number of batches, and steps, evaluations and saves not in one "
        f"process alone"
    )


def _where(place: Place) -> str:
    if not place.number:
        return ""
    return f"{'after' if place.outcome == DONE else 'in'} {place.topic!r}"


def _brief(error: BaseException) -> str:
    text = str(error).strip()
    return text if len(text) <= 300 else text[:300] + " ..."


_setting_up = threading.Lock()


@cache
def _board() -> Board:
    place = Board(compat.distributed_client(), *compat.distributed_place())
    place.watcher.start()
    return place


def board() -> Board:
    """Returns the board of this program of several processes; the first call sets it up."""
    with _setting_up:
        return _board()


@contextlib.contextmanager
def call(topic: str) -> Iterator[None]:
    """Meanwhile this process is in a call that all processes make alike, such as "step 3".

    Calls inside a call are part of it. Where it fails because of another process, the error names
    that one and its call (`PeerError`): it is out of step, has failed, or has ended.
    """
    if not several() or _inside.get():
        yield
        return
    with board().call(topic):
        yield


def out_of_step(text: str) -> PeerError:
    """Returns the error of processes that have met in different calls; all come here together.

    It tells which of them has left an earlier call by an error.
    """
    return board().met_elsewhere(text)


def place() -> tuple[int, str, str]:
    """Returns number, trail and topic of the call that this process is in; see `Place`."""
    last = board().log.last
    return last.number, last.trail, last.topic


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    """Meanwhile peers wait for this process beyond their timeouts, as long as it lives: it does
    `what`, which may take long ("compiling", "writing the checkpoint")."""
    with board().busy(what) if several() else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def wait(text: str, seconds: float, wake: Callable[[Exception], None]) -> Iterator[None]:
    """Meanwhile this thread waits for other processes: `wake` is called with an error if a peer
    will not come, and after `seconds` with a `PeerError` that begins with `text` and says
    where each peer is. It must make the wait end; it comes from another thread.
    """
    with board().wait(text, seconds, wake):
        yield
