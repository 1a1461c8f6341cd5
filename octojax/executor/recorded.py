"""A step as it really happened: clock readings and live bytes of every instruction.

    recorder = Recorder()
    engine.run(..., record=recorder)
    timeline_of(recorder, engine, schedule)     the same in every process

A recorded step runs the same compiled programs in the same order as any other; it only waits
for the results of each before the next, and reads the clock. Where one program runs several
actions (`0F3+0B3`), its time is divided among them in proportion to their operations.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from time import monotonic
from typing import Any, NamedTuple

import jax

from octojax.executor.instructions import Do, Instruction, RankProgram
from octojax.executor.lower import Lowered
from octojax.executor.record import Span, TransferClock, measured
from octojax.executor.run import Bound
from octojax.ir import Action, ActionSpan, Kind, Schedule, Timeline, parse_item
from octojax.jaxprs.count import operations
from octojax.processes import clock_offset_s, everyone

Trace = list[tuple[float, float]]


class Tick(NamedTuple):
    """One instruction: when it ran, and by how much the bytes in its rank's slots then changed."""

    start_s: float
    end_s: float
    made_bytes: int
    freed_bytes: int


@dataclass
class Recorder:
    """What the local ranks of one step did. `first_bytes[r]` filled rank r's slots at first."""

    clock: TransferClock = field(default_factory=TransferClock)
    ticks: dict[int, list[Tick]] = field(default_factory=dict)
    first_bytes: dict[int, int] = field(default_factory=dict)

    def loop(self, rank: int) -> Callable[[Sequence[Bound], list[Any]], None]:
        """Returns a `run_rank` that notes what rank `rank` does."""

        def run(bound: Sequence[Bound], slots: list[Any]) -> None:
            sizes = [0 if value is None else value.nbytes for value in slots]
            self.first_bytes[rank] = sum(sizes)
            ticks: list[Tick] = []
            self.ticks[rank] = ticks
            for function, read, writes, frees in bound:
                start = monotonic()
                results = jax.block_until_ready(function(*read(slots)))
                end = monotonic()
                made = freed = 0
                for slot, value in zip(writes, results, strict=False):
                    made += value.nbytes - sizes[slot]  # sums are added to in place
                    slots[slot], sizes[slot] = value, value.nbytes
                for slot in frees:
                    freed += sizes[slot]
                    slots[slot], sizes[slot] = None, 0
                ticks.append(Tick(start, end, made, freed))

        return run


def timeline_of(
    recorder: Recorder,
    lowered: Lowered,
    schedule: Schedule,
    held_bytes: Mapping[int, int] | None = None,
) -> Timeline:
    """Returns the timeline of the recorded step, of the ranks of all processes.

    Every process calls this. `held_bytes[r]` is what local rank r keeps beside its slots
    (optimizer state); it counts into its peak. Peaks are live buffers between programs, as the
    simulator counts them, and the batch; of what XLA allocates inside a program, only the
    residuals where it runs several actions. Clocks of other machines are aligned by their
    difference at a barrier.
    """
    offset = clock_offset_s()
    spans = {k: (a - offset, b - offset) for k, (a, b) in recorder.clock.spans.items()}
    held = held_bytes or {}
    mine = {
        "actions": [
            (span.rank, str(span.item), span.start_s - offset, span.end_s - offset)
            for rank, ticks in recorder.ticks.items()
            for span in _actions(lowered, lowered.step.ranks[rank], ticks)
        ],
        "transfers": [(k, *span) for k, span in spans.items()],
        "memory": {
            rank: _memory(recorder, lowered, rank, held.get(rank, 0), offset)
            for rank in recorder.ticks
        },
    }
    actions, moves, memory = _joined(everyone(json.dumps(mine), "recorded step"))
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
        [max(size for _, size in trace) for trace in traces],
        traces,
    )


def transfer_bytes(lowered: Lowered, number: int) -> float:
    """Returns the bytes of one transfer between pipeline stages, per data shard."""
    transfer = lowered.step.transfers[number]
    if transfer.kind not in "FB":
        return 0.0
    avals = [lowered.avals[value] for value in transfer.values]
    return float(sum(a.size * a.dtype.itemsize for a in avals))


def _joined(
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


def _actions(lowered: Lowered, program: RankProgram, ticks: Sequence[Tick]) -> list[ActionSpan]:
    found: list[ActionSpan] = []
    for instruction, tick in zip(program.body, ticks, strict=True):
        if instruction.do is not Do.RUN:
            continue
        names = instruction.name.split("+")
        parts = [0.0, *accumulate(_shares(lowered, instruction, len(names)))]
        long = tick.end_s - tick.start_s
        found += [
            ActionSpan(
                program.rank,
                parse_item(name),
                tick.start_s + long * parts[i],
                tick.start_s + long * parts[i + 1],
            )
            for i, name in enumerate(names)
        ]
    return found


def _shares(lowered: Lowered, instruction: Instruction, count: int) -> list[float]:
    """How the time of a program divides among its actions: by operations, which add up to 1."""
    if count == 1:
        return [1.0]
    calls = lowered.step.recipes[instruction.target][1].calls
    work = [1.0 + sum(map(operations, lowered.jaxprs[call.program].jaxpr.eqns)) for call in calls]
    return [w / sum(work) for w in work]


def _memory(recorder: Recorder, lowered: Lowered, rank: int, held: int, offset: float) -> Trace:
    """Returns `(time, bytes)` between programs. What a send frees stays until the transfer has
    ended; residuals that a forward hands on inside its program are there while that runs."""
    changes = []
    body = lowered.step.ranks[rank].body
    for instruction, tick in zip(body, recorder.ticks[rank], strict=True):
        start, end = tick.start_s - offset, tick.end_s - offset
        if instruction.do is Do.SEND:
            moved = recorder.clock.spans.get(instruction.target)
            end = end if moved is None else max(end, moved[1] - offset)
        if instruction.do is Do.RUN and (within := _inside_bytes(lowered, instruction)):
            changes += [(start, within), (end, -within)]
        changes.append((end, tick.made_bytes - tick.freed_bytes))
    level = float(recorder.first_bytes[rank] + held)
    trace = [(recorder.ticks[rank][0].start_s - offset if changes else 0.0, level)]
    for time, change in sorted(changes):
        if change:
            level += change
            trace.append((time, level))
    return trace


def _inside_bytes(lowered: Lowered, instruction: Instruction) -> int:
    """The bytes that a forward hands to the next action in the same program."""
    recipe = lowered.step.recipes[instruction.target][1]
    first = parse_item(instruction.name.split("+")[0])
    if len(recipe.calls) == 1 or not isinstance(first, Action) or first.kind is not Kind.FORWARD:
        return 0
    call = recipe.calls[0]
    return sum(
        aval.size * aval.dtype.itemsize
        for value, aval in zip(call.writes, lowered.jaxprs[call.program].out_avals, strict=True)
        if value >= 0 and value not in recipe.outputs
    )
