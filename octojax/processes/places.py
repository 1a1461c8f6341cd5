"""Where each process is in the program that all run, and whether two of them still run the same.

Every process makes the same calls (`step 3`, `evaluate`, `save`, ...) in the same order. It numbers
them, and posts where it is. Whoever reads a peer's post compares it with its own log: plain data,
no clocks, so that a difference is a difference however late it is read.

    process 0    1 init    2 step 0    3 step 1 ...    waits
    process 1    1 init    2 step 0    3 save          <- the same number, another topic
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

INSIDE, DONE, ERROR = "inside", "done", "error"


@dataclass(frozen=True)
class Place:
    """What a process posts.

    `number` counts its calls, the last being `topic`; `trail` is a digest of those before and how
    they were left. `outcome` is how this one was: INSIDE, DONE or ERROR. `error` is the last error
    that left a call, wherever. `busy` names work for which peers should wait as long as this
    process shows signs of life (`beat` changes). `end` says how the program ended, if it has;
    `well` whether that was its own regular end, `follows` whether it was for another's end.
    """

    number: int = 0
    topic: str = ""
    trail: str = ""
    outcome: str = DONE
    error: str = ""
    remark: str = ""
    busy: str = ""
    end: str = ""
    well: bool = True
    follows: bool = False
    beat: int = 0

    def __str__(self) -> str:
        where = f"call {self.number}, {self.topic!r}"
        if self.end:
            return f"it {self.end}, {f'after {where}' if self.number else 'before any call'}"
        if not self.number:
            return "it had made no call yet"
        return (
            f"it was in {where}" if self.outcome == INSIDE else f"it was on its own after {where}"
        )

    def to_text(self) -> str:
        return json.dumps({k: v for k, v in asdict(self).items() if v != _DEFAULTS[k]})

    @classmethod
    def from_text(cls, text: str) -> "Place":
        return cls(**json.loads(text))


_DEFAULTS = asdict(Place())


@dataclass
class Log:
    """The calls of this process, by number; old ones are forgotten."""

    kept: int = 4096
    places: dict[int, Place] = field(default_factory=dict)
    last: Place = field(default_factory=Place)

    def enter(self, topic: str) -> Place:
        before = self.last
        told = f"{before.trail} {before.topic} {before.outcome}"
        trail = hashlib.blake2b(told.encode(), digest_size=8).hexdigest() if before.number else ""
        return self._keep(Place(before.number + 1, topic, trail, INSIDE, before.error))

    def leave(self, error: str = "", *, follows: bool = False) -> Place:
        """Notes how the call was left. An error that `follows` from another process explains
        nothing: one from before is kept."""
        last = self.last
        told = f"{last.topic!r} {_call(last)} failed: {error}"
        told = last.error if not error or (follows and last.error) else told
        return self._keep(
            Place(last.number, last.topic, last.trail, ERROR if error else DONE, told)
        )

    def _keep(self, place: Place) -> Place:
        self.places[place.number] = self.last = place
        self.places.pop(place.number - self.kept, None)
        return place


def _call(place: Place) -> str:
    return f"(call {place.number})"


def differs(own: Mapping[int, Place], peer: Place, name: str) -> str:
    """Returns how a peer's call of a number differs from one's own of that number; "" if not.

    `own` are this process's calls by number, `name` is the peer's.
    """
    mine = own.get(peer.number)
    if mine is None or (mine.topic, mine.trail) == (peer.topic, peer.trail):
        return ""
    before = ((name, peer), ("this process", mine))
    errors = [f"in {who} {x.error}" for who, x in before if x.error and _call(x) not in x.error]
    more = f" ({'; '.join(errors)})" if errors else ""
    if mine.topic != peer.topic:
        return (
            f"call {peer.number} is {peer.topic!r} in {name} and {mine.topic!r} in this "
            f"process{more}"
        )
    return (
        f"{name} and this process have taken different ways to call {peer.number}, "
        f"{peer.topic!r}{more}"
    )


def left_alone(own: Mapping[int, Place], peer: Place, name: str, *, waits: bool) -> str:
    """Returns which call one process has left by an error and the other not; "" if none.

    `waits` says that this process waits for others in its last call: then a peer that has left the
    same call by an error will not come. (One that does not wait yet may be about to fail alike.)
    """
    mine = own.get(peer.number)
    if mine is None or (mine.topic, mine.trail) != (peer.topic, peer.trail):
        return ""
    if peer.outcome == ERROR and (mine.outcome == DONE or (mine.outcome == INSIDE and waits)):
        done = "completed it" if mine.outcome == DONE else "is in it"
        return f"in {name} {peer.error}; this process {done}"
    if mine.outcome == ERROR and peer.outcome == DONE:
        return f"in this process {mine.error}; {name} completed it"
    return ""


def missing(own: Place, peer: Place, name: str) -> str:
    """Returns why a process that waits in its call `own` waits for ever: the peer has ended."""
    came = peer.number > own.number or (peer.number == own.number and peer.outcome == DONE)
    if came or not peer.end:
        return ""
    after = f"after call {peer.number}, {peer.topic!r}" if peer.number else "before its first call"
    return (
        f"{name} {peer.end} {after}, while this process is in call {own.number}, {own.topic!r}, "
        f"for which all must come: did it have fewer batches, or return early?"
    )
