"""A table with transfers that cannot be delivered is refused before anything is compiled."""

import jax
import jax.numpy as jnp
import optax
import pytest

import octojax as octopipe
from octojax.errors import ScheduleError
from octojax.ir import Schedule
from octojax.ir.naive import lower_naively
from octojax.schedules import generate


def compiled(rows):
    params = {f"w{i}": jnp.eye(4) for i in range(2)}

    def loss(params, batch):
        return jnp.mean(jnp.tanh(jnp.tanh(batch @ params["w0"]) @ params["w1"]) ** 2)

    mesh = jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2])
    table = Schedule(tuple(map(tuple, rows)))
    batch = jnp.ones((4, 4))
    return octopipe.compile(
        params,
        loss,
        optax.sgd(0.1),
        batch,
        mesh=mesh,
        schedule=table,
        microbatches=2,
        progress=False,
    )


def lowered(name: str) -> list[list]:
    """Receive just before use, send right after."""
    return [list(row) for row in lower_naively(generate(name, 2, 2)).ranks]


def test_a_dropped_transfer_is_named_with_its_other_side():
    rows = lowered("gpipe")
    rows[0] = [a for a in rows[0] if str(a) != "0SEND_F0"]
    with pytest.raises(
        ScheduleError, match="0SEND_F0 is missing on rank 0, the other side of 1RECV_F0"
    ):
        compiled(rows)


def test_a_doubled_transfer_is_named_with_its_places():
    rows = lowered("gpipe")
    rows[0].insert(1, rows[0][1])
    with pytest.raises(ScheduleError, match="0SEND_F0 is doubled: rank 0 has it at position 1"):
        compiled(rows)


def test_orders_that_wait_for_each_other_are_refused_with_both_waits():
    with pytest.raises(ScheduleError, match="deadlocks under blocking rendezvous") as caught:
        compiled(lowered("1f1b"))
    assert "rank 0 waits at 0SEND_F1" in str(caught.value)
    assert "rank 1 waits at 1SEND_B0" in str(caught.value)
