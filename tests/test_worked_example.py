"""The worked example of docs/architecture.md is what the code does, line by line."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import octojax as octopipe
from octojax.executor.lower import lower
from octojax.ir.exchange import with_update
from octojax.ir.verify import naive_deadlock
from octojax.passes import (
    JoinActions,
    PlaceExchanges,
    PlaceTransfers,
    ReorderComm,
    SplitBackward,
)
from octojax.schedules import generate
from octojax.stages.fingerprint import fingerprint

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"


def blocks(language: str) -> list[str]:
    """The example's code blocks of one language, in their order."""
    text = PAGE.read_text(encoding="utf-8").partition("### Worked example")[2]
    return re.findall(rf"```{language}\n(.*?)\n```", text, re.DOTALL)


@pytest.fixture(scope="module")
def step() -> Any:
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "optax": optax, "octopipe": octopipe}
    (code,) = blocks("python")
    exec(code, names)
    return names["step"]


def test_every_table_and_the_run(step):
    schedule, wiring = generate("1f1b", 3, 2), step.lowered.wiring
    split = SplitBackward()(schedule)
    assert step.plan.schedule == split
    naive = PlaceTransfers(wiring=wiring)(split)
    assert naive_deadlock(split) != ()
    joined = JoinActions()(naive)
    reordered = ReorderComm()(joined)
    final = PlaceExchanges()(reordered)
    layouts = step.loss.batch.layouts
    ran = lower(final, step.loss.stages, fingerprint, layouts).step.ranks[2].body
    assert blocks("text") == [
        str(schedule),
        str(split),
        *("\n".join(plan.lines) for plan in (naive, joined, reordered, final)),
        "\n".join(with_update(final, step.update_plan.update.outline).lines),
        ", ".join(map(str, ran)),
    ]


def test_the_step_is_that_table_but_for_where_receives_are_posted(step):
    rows = [[x for x in line.split() if "RECV_F" not in x and "RECV_B" not in x] for line in
            blocks("text")[-2].split("\n")]  # fmt: skip
    assert [
        [x for x in line.split() if "RECV_F" not in x and "RECV_B" not in x]
        for line in step.lowered.lines
    ] == rows
    state = step.init()
    _, _, timeline = step(state, jnp.ones((4, 4)), record=True)
    ran = [str(s.item) for s in timeline.actions if s.rank == 2]
    assert ran == ["2F0", "2I0", "2W0", "2F1", "2I1", "2W1"]
