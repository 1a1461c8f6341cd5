"""Short names for actions, and the two row shapes that most schedules share."""

from collections.abc import Iterable, Sequence

from octojax.ir.action import Action, Item, Kind
from octojax.ir.schedule import Schedule


def forward(stage: int, microbatch: int) -> Action:
    return Action(stage, Kind.FORWARD, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    return Action(stage, Kind.BACKWARD, microbatch)


def input_grad(stage: int, microbatch: int) -> Action:
    return Action(stage, Kind.INPUT_GRAD, microbatch)


def weight_grad(stage: int, microbatch: int) -> Action:
    return Action(stage, Kind.WEIGHT_GRAD, microbatch)


def schedule(rows: Iterable[Iterable[Item]]) -> Schedule:
    return Schedule(tuple(tuple(row) for row in rows))


def warm_steady_cool(
    forwards: Sequence[Action], backwards: Sequence[Action], warmup: int
) -> list[Action]:
    """Returns `warmup` forwards, then forward-backward pairs, then the backwards left over.

    F F | F B F B F B | B B     (warmup 2)
    """
    warmup = min(warmup, len(forwards))
    row = list(forwards[:warmup])
    for f, b in zip(forwards[warmup:], backwards, strict=False):
        row += [f, b]
    return row + list(backwards[len(forwards) - warmup :])


def with_deferred_weights(row: Iterable[Action], delay: int) -> list[Action]:
    """Returns `row` with each full backward split: W(j) right after I(j + delay), the rest last.

    before   F0 B0 B1 B2
    after    F0 I0 I1 W0 I2 W1 W2     (delay 1)
    """
    split: list[Action] = []
    waiting: list[Action] = []
    for action in row:
        if action.kind is not Kind.BACKWARD:
            split.append(action)
            continue
        split.append(input_grad(action.stage, action.microbatch))
        waiting.append(weight_grad(action.stage, action.microbatch))
        if len(waiting) > delay:
            split.append(waiting.pop(0))
    return split + waiting
