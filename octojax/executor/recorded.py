"""A step as it really happened: clock readings and live bytes of every instruction.

    ledger = Ledger()                           one per compiled step
    recorder = Recorder(ledger)                 one per recorded step
    engine.run(..., record=recorder)
    timeline_of(recorder, engine, schedule)     the same in every process

A recorded step runs the same compiled programs in the same order as any other; it only waits
for the results of each before the next, and reads the clock. Where one program runs several
actions (`0F3+0B3`), its time is divided among them in proportion to their operations. All else
(sizes, proportions, names) is the same in every step: the first one writes it into the ledger.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from time import monotonic
from typing import Any, NamedTuple

import jax

from octojax.executor.instructions import Do, Operation, RankProgram
from octojax.executor.lower import Lowered
from octojax.executor.record import Span, TransferClock, measured
from octojax.executor.run import Bound, run_recorded
from octojax.ir import (
    Action,
    ActionSpan,
    Instruction,
    Item,
    Kind,
    Run,
    Schedule,
    Timeline,
    parse_item,
)
from octojax.jaxprs.count import operations
from octojax.processes import clock_offset_s, everyone

Trace = list[tuple[float, float]]
CLOCKS_EVERY = 50
"""The clocks of several machines are compared again after so many recorded steps."""


class Part(NamedTuple):
    """One action of a program, and which part of the program's time it has."""

    action: Action
    begin: float
    end: float


@dataclass
class Ledger:
    """What every recorded step of one compiled step has in common, by local rank.

    `first_bytes[r]` fill the rank's slots at first; `changes[r][i]` is by how much instruction i
    changes the bytes in them; `parts[r][i]` are the actions that it runs; `within[r][i]` the
    bytes that exist only inside it. `extra_bytes` is what the caller keeps next to the slots.
    """

    first_bytes: dict[int, int] = field(default_factory=dict)
    changes: dict[int, list[int]] = field(default_factory=dict)
    parts: dict[int, list[list[Part]]] = field(default_factory=dict)
    within: dict[int, list[int]] = field(default_factory=dict)
    extra_bytes: dict[int, int] | None = None
    steps: int = 0
    offset_s: float = 0.0

    def clock_offset(self) -> float:
        """Returns how far this clock is ahead of process 0's. Every process calls this."""
        if self.steps % CLOCKS_EVERY == 0:
            self.offset_s = clock_offset_s()
        self.steps += 1
        return self.offset_s

    def describe(self, lowered: Lowered, rank: int) -> None:
        """Notes how the programs of a rank divide into actions, once."""
        if rank in self.parts:
            return
        body = lowered.step.ranks[rank].body
        self.parts[rank] = [_parts(lowered, x, x.of) if isinstance(x.of, Run) else [] for x in body]
        self.within[rank] = [
            _inside_bytes(lowered, x, x.of) if isinstance(x.of, Run) else 0 for x in body
        ]


@dataclass
class Recorder:
    """What the local ranks of one step did: start and end of every instruction."""

    ledger: Ledger = field(default_factory=Ledger)
    clock: TransferClock = field(default_factory=TransferClock)
    ticks: dict[int, list[Span]] = field(default_factory=dict)
    ends: dict[int, tuple[Instruction, ...]] = field(default_factory=dict)
    """What each local rank did in the update, as instructions of the lowered plan."""

    def loop(self, rank: int) -> Callable[[Iterable[Bound], list[Any]], None]:
        """Returns a `run_rank` that notes what rank `rank` does."""
        return self.timed(rank) if rank in self.ledger.changes else self._weighed(rank)

    def timed(self, rank: int) -> Callable[[Iterable[Bound], list[Any]], None]:
        """Returns a `run_rank` that reads the clock around every operation of rank `rank`."""

        def run(bound: Iterable[Bound], slots: list[Any]) -> None:
            self.ticks[rank] = run_recorded(bound, slots, monotonic, jax.block_until_ready)

        return run

    def end(
        self, rank: int, body: Sequence[Operation]
    ) -> Callable[[Iterable[Bound], list[Any]], None]:
        """Returns a `run_rank` for the end of a step, which waits for each operation's results."""

        def run(bound: Iterable[Bound], slots: list[Any]) -> None:
            spans = run_recorded(bound, slots, monotonic, jax.block_until_ready)
            pairs = zip(body, spans, strict=True)
            self.ends[rank] = tuple(operation.of for operation, _ in pairs if not operation.tail)

        return run

    def _weighed(self, rank: int) -> Callable[[Iterable[Bound], list[Any]], None]:
        """Like `timed`, and writes the sizes into the ledger."""

        def run(bound: Iterable[Bound], slots: list[Any]) -> None:
            sizes = [0 if value is None else value.nbytes for value in slots]
            changes: list[int] = []

            def weigh(writes: Sequence[int], results: Sequence[Any], frees: Sequence[int]) -> None:
                change = 0
                for slot, value in zip(writes, results, strict=False):
                    change += value.nbytes - sizes[slot]  # sums are added to in place
                    sizes[slot] = value.nbytes
                for slot in frees:
                    change -= sizes[slot]
                    sizes[slot] = 0
                changes.append(change)

            self.ledger.first_bytes[rank] = sum(sizes)
            self.ticks[rank] = run_recorded(bound, slots, monotonic, jax.block_until_ready, weigh)
            self.ledger.changes[rank] = changes

        return run


def action_times(recorder: Recorder, lowered: Lowered) -> list[tuple[int, Action, float]]:
    """Returns rank, action and seconds of all that the local ranks ran in a rehearsed step.

    An action lasts from the end of the one before it: what the executor does in between is part
    of it. The time of a program of several actions is divided among them.
    """
    ledger, times = recorder.ledger, []
    for rank, ticks in recorder.ticks.items():
        ledger.describe(lowered, rank)
        start = ticks[0][0] if ticks else 0.0
        for (_, end), parts in zip(ticks, ledger.parts[rank], strict=True):
            if parts:
                took = end - start
                times += [(rank, p.action, took * (p.end - p.begin)) for p in parts]
                start = end
    return times


def timeline_of(
    recorder: Recorder,
    lowered: Lowered,
    schedule: Schedule,
    led: Collection[int],
) -> Timeline:
    """Returns the timeline of the recorded step, of the ranks of all processes.

    Every process calls this, and speaks for the ranks in `led`. What a rank keeps next to its slots
    (`Ledger.extra_bytes`: optimizer state) counts into its peak. Peaks are live buffers between
    programs, as the simulator counts them, and the batch; of what XLA allocates inside a program,
    only the residuals where it runs several actions. Clocks of other machines are aligned by
    their difference at a barrier.
    """
    ledger = recorder.ledger
    offset = ledger.clock_offset()
    for rank in recorder.ticks:
        ledger.describe(lowered, rank)
    spans = {k: (a - offset, b - offset) for k, (a, b) in recorder.clock.spans.items()}
    mine = {
        "actions": [
            (rank, str(item), start - offset, end - offset)
            for rank, ticks in recorder.ticks.items()
            if rank in led
            for operation, tick, parts in zip(
                lowered.step.ranks[rank].body, ticks, ledger.parts[rank], strict=True
            )
            for item, start, end in _items(operation.of, tick, parts)
        ],
        "transfers": [(k, *span) for k, span in spans.items()],
        "memory": {
            rank: _memory(recorder, lowered.step.ranks[rank], offset)
            for rank in recorder.ticks
            if rank in led
        },
    }
    actions, moves, memory = _union(everyone(json.dumps(mine), f"recorded step {ledger.steps}"))
    zero = min((a.start_s for a in actions), default=0.0)
    traces = tuple(
        tuple((max(0.0, time - zero), size) for time, size in memory[r])
        for r in range(schedule.num_ranks)
    )
    step = lowered.step
    return measured(
        schedule,
        actions,
        step.transfers,
        moves,
        [transfer_bytes(lowered, k) for k in range(len(step.transfers))],
        traces,
    )


def transfer_bytes(lowered: Lowered, number: int) -> float:
    """Returns the bytes of one transfer between pipeline stages, per data shard."""
    if not lowered.step.transfers[number].kind.crosses_stages:
        return 0.0
    avals = [lowered.avals[value] for value in lowered.step.values[number]]
    return float(sum(a.size * a.dtype.itemsize for a in avals))


def _union(
    texts: Sequence[str],
) -> tuple[list[ActionSpan], Mapping[int, Span], dict[int, Trace]]:
    """What all processes recorded, as one."""
    actions: list[ActionSpan] = []
    moves = TransferClock()
    memory: dict[int, Trace] = {}
    for theirs in map(json.loads, texts):
        actions += [ActionSpan(r, parse_item(i), a, b) for r, i, a, b in theirs["actions"]]
        for number, start, end in theirs["transfers"]:
            moves.note(number, start, end)
        memory.update({int(r): [tuple(x) for x in t] for r, t in theirs["memory"].items()})
    return actions, moves.spans, memory


def executed(recorder: Recorder, lowered: Lowered, rank: int) -> tuple[Instruction, ...]:
    """Returns what a local rank did in the recorded step, as instructions of the lowered plan."""
    ran = zip(lowered.step.ranks[rank].body, recorder.ticks[rank], strict=True)
    row = (operation.of for operation, _ in ran if not operation.tail)
    return (*row, *recorder.ends.get(rank, ()))


def _items(
    of: Instruction, tick: Span, parts: Sequence[Part]
) -> Iterator[tuple[Item, float, float]]:
    """Yields what a program ran, with start and end: a pair as a whole, joined actions each."""
    start, end = tick
    if isinstance(of, Run) and of.pair:
        yield of.items[0], start, end
        return
    for part in parts:
        took = end - start
        yield part.action, start + took * part.begin, start + took * part.end


def _parts(lowered: Lowered, operation: Operation, run: Run) -> list[Part]:
    """The actions of one program, in order."""
    borders = [0.0, *accumulate(_shares(lowered, operation, len(run.actions)))]
    return [Part(a, *pair) for a, pair in zip(run.actions, pairwise(borders), strict=True)]


def _shares(lowered: Lowered, operation: Operation, count: int) -> list[float]:
    """How the time of a program divides among its actions: by operations, which add up to 1."""
    if count == 1:
        return [1.0]
    calls = lowered.step.recipes[operation.target][1].calls
    work = [1.0 + sum(map(operations, lowered.jaxprs[call.program].jaxpr.eqns)) for call in calls]
    return [w / sum(work) for w in work]


def _memory(recorder: Recorder, program: RankProgram, offset: float) -> Trace:
    """Returns `(time, bytes)` between programs. What a send frees stays until the transfer has
    ended; residuals that a forward hands on inside its program are there while that runs."""
    ledger, rank = recorder.ledger, program.rank
    ticks, changes = recorder.ticks[rank], []
    for operation, (start, end), change, within in zip(
        program.body, ticks, ledger.changes[rank], ledger.within[rank], strict=True
    ):
        if change and operation.do is Do.SEND:
            span = recorder.clock.spans.get(operation.target)
            end = end if span is None else max(end, span[1])
        if within:
            changes += [(start, within), (end, -within)]
        if change:
            changes.append((end, change))
    level = float(ledger.first_bytes[rank] + (ledger.extra_bytes or {}).get(rank, 0))
    trace = [(ticks[0][0] - offset if changes else 0.0, level)]
    for time, change in sorted(changes):
        level += change
        trace.append((time - offset, level))
    return trace


def _inside_bytes(lowered: Lowered, operation: Operation, run: Run) -> int:
    """The bytes that a forward hands to the next action in the same program."""
    recipe = lowered.step.recipes[operation.target][1]
    if len(recipe.calls) == 1 or run.actions[0].kind is not Kind.FORWARD:
        return 0
    call = recipe.calls[0]
    return sum(
        aval.size * aval.dtype.itemsize
        for value, aval in zip(call.writes, lowered.jaxprs[call.program].out_avals, strict=True)
        if value >= 0 and value not in recipe.outputs
    )
