# ruff: noqa: E402  (processes join before JAX touches a device)
"""Ranks of several processes: what `test_wide_ranks.py` runs."""

import os
import sys

from scripts import break_program, model, worst  # joins

print(f"pid {os.getpid()}", flush=True)

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import octojax as octopipe
from octojax.errors import MeshError
from octojax.ir.lowering import transfers_of
from octojax.processes import everyone

LAYERS = 8
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def mesh_of(shape: str) -> Mesh:
    """Such as 2x2x1: pipe x data x tensor, over the devices of one process after another."""
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    sizes = tuple(map(int, shape.split("x")))
    return Mesh(np.array(devices[: int(np.prod(sizes))]).reshape(sizes), ("pipe", "data", "tensor"))


def specs(path: str, shape: tuple[int, ...]) -> P:
    """Every second matrix by columns, the others by rows."""
    return P(None, "tensor") if int(path.strip("['w]")) % 2 == 0 else P("tensor", None)


def compiled(shape: str, schedule: str = "1f1b", zero: int = 0, **options):
    params, loss, batch = model(LAYERS)
    make = options.pop("make", False)
    mesh = mesh_of(shape)
    table = "auto" if schedule == "tuned" else schedule
    step = octopipe.compile(
        (lambda: model(LAYERS)[0]) if make else params,
        loss,
        CLIPPED,
        batch,
        mesh=mesh,
        param_specs=specs if mesh.shape["tensor"] > 1 else None,
        schedule=table,
        chunks=2 if schedule == "interleaved" else None,
        tune_seconds=1.0,
        microbatches=3 if schedule != "interleaved" else 2,
        zero=zero,
        progress=False,
        **options,
    )
    return step, params, loss, batch


def trains(shape: str, *cases: str) -> None:
    """Gradients, and three steps of an optimizer that clips, are those of the plain model; what a
    step returns is the same in every process."""
    for case in cases:
        schedule, zero, *transport = case.split(":")
        step, params, loss, batch = compiled(
            shape, schedule, int(zero), transport=transport[0] if transport else "auto"
        )
        state, opt_state = step.init(), CLIPPED.init(params)
        for _ in range(3):
            value, aux, found = step.value_and_grad(state, batch)
            (wanted, more), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
            assert worst(found, grads) <= 1e-5, worst(found, grads)
            evaluated = step.evaluate(state, batch)
            state, metrics = step(state, batch)
            for a in (value, evaluated["loss"], metrics["loss"]):
                np.testing.assert_allclose(a, wanted, rtol=1e-5)
            for a in (aux, evaluated["aux"], metrics["aux"]):
                np.testing.assert_allclose(a["largest"], more["largest"], rtol=1e-5)
            norm = optax.global_norm(grads)
            np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
            updates, opt_state = CLIPPED.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
            assert worst(step.params(state), params) <= 1e-5
            assert worst(step.opt_state(state), opt_state) <= 1e-5
            everything = jax.tree.map(np.asarray, (metrics, step.params(state)))
            assert (
                len(set(everyone(str(jax.tree.map(lambda x: x.tobytes().hex(), everything))))) == 1
            )
        step.close()
        print(case, "exact", flush=True)
    print("all equal")


def spread() -> None:
    """Batches of which every process has its rows, parameters that lie over all devices: loss,
    gradients where the parameters lie, and a step, are the plain model's. What lies over some of
    the processes alone is refused."""
    params, loss, batch = model(LAYERS)
    mesh = mesh_of("2x2x1")
    (wanted, _), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)

    def over(value, *axes):
        whole, where = np.asarray(value), NamedSharding(mesh, P(*axes))
        mine = [whole[i] for i in where.addressable_devices_indices_map(whole.shape).values()]
        return jax.make_array_from_process_local_data(where, mine[0], whole.shape)

    rows = jax.tree.map(lambda x: over(x, "data"), batch)
    lying = jax.tree.map(lambda x: over(x, ("pipe", "data")), params)
    assert not any(x.is_fully_addressable for x in jax.tree.leaves((rows, lying)))
    with octopipe.value_and_grad(
        loss, params, batch, has_aux=True, mesh=mesh, microbatches=3, progress=False
    ) as f:
        for given, seen in ((params, batch), (lying, rows)):
            (value, _), found = f(given, seen)
            np.testing.assert_allclose(value, wanted, rtol=1e-5)
            for own, param, plain in zip(*map(jax.tree.leaves, (found, given, grads)), strict=True):
                assert own.sharding == getattr(param, "sharding", own.sharding)
                for part in own.addressable_shards:
                    np.testing.assert_allclose(part.data, plain[part.index], rtol=1e-5, atol=1e-7)
    step, *_ = compiled("2x2x1", zero=1)
    state, metrics = step(step.init(lying), rows)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    updates, _ = CLIPPED.update(grads, CLIPPED.init(params), params)
    assert worst(step.params(state), optax.apply_updates(params, updates)) <= 1e-5
    alone = Mesh(np.array([jax.devices()[k] for k in (0, 1)]), ("some",))
    here = NamedSharding(alone, P("some"))
    if jax.process_index() in (0, 1):
        part = np.asarray(jax.tree.leaves(batch)[0])
        some = jax.make_array_from_callback(part.shape, here, lambda index: part[index])
        leaves, form = jax.tree.flatten(batch)
        with pytest.raises(ValueError, match="NamedSharding over devices of all processes"):
            step.loss.batch_leaves(form.unflatten([some, *leaves[1:]]))
    print("all equal")


def briefly() -> None:
    """One step, of a tied weight, with gradients and metrics of the plain model."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1))
    params, loss, batch = model(4, tied=True)
    with octopipe.compile(
        params,
        loss,
        optimizer,
        batch,
        mesh=mesh_of("2x2x1"),
        microbatches=3,
        zero=1,
        progress=False,
    ) as step:
        state, metrics = step(step.init(), batch)
        (wanted, _), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
        np.testing.assert_allclose(metrics["grad_norm"], optax.global_norm(grads), rtol=1e-5)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        assert worst(step.params(state), optax.apply_updates(params, updates)) <= 1e-5
        assert step.loss.mesh.led_ranks == {0: (0,), 2: (1,)}.get(jax.process_index(), ())
    print("all equal")


def layouts(folder: str) -> None:
    """Every process makes and writes its parts; a whole program reads them, and what it wrote."""
    step, *_, batch = compiled("2x1x2", make=True)
    state, _ = step(step.init(), batch)
    mine = [x for x in state.model.units if x is not None]
    assert mine
    assert all(2 * x.addressable_data(0).size == x.size for x in mine)
    whole = jax.jit(lambda: model(LAYERS)[0])()
    made = step.params(step.init())
    assert worst(made, whole) == 0
    step.save(f"{folder}/wide", state)
    again = step.restore(f"{folder}/wide")
    same = jax.tree.map(
        np.array_equal, *((step.params(s), step.opt_state(s)) for s in (state, again))
    )
    assert all(jax.tree.leaves(same)), same
    other, *_ = compiled("2x2x1", zero=3)
    moved = other.restore(f"{folder}/wide")
    _, metrics = step(again, batch)
    _, as_well = other(moved, batch)
    np.testing.assert_allclose(as_well["loss"], metrics["loss"], rtol=1e-6)
    print("loss", float(metrics["loss"]).hex())
    print("all equal")


def recorded() -> None:
    """The timeline has every action once, and is the same in every process; so is a rehearsal."""
    step, *_, batch = compiled("2x2x1", "zb-h1")
    state, _, timeline = step(step.init(), batch, record=True)
    for rank, row in enumerate(step.plan.schedule.ranks):
        assert [x.item for x in timeline.actions if x.rank == rank] == list(row)
    assert len(timeline.transfers) == len(transfers_of(step.plan.schedule))
    assert all(rank.peak_bytes > 0 for rank in timeline.ranks)
    assert len(set(everyone(str(timeline)))) == 1
    rehearsal = step.rehearse(state, batch, rounds=1)
    assert len(set(everyone(str(rehearsal.profile)))) == 1
    assert rehearsal.profile.machine.latency_s >= 0
    print("all equal")


def differ() -> None:
    """One process has another batch; all hear of it, those of other columns too."""
    step, *_, batch = compiled("2x2x1")
    state = step.init()
    odd = jax.process_index() == 3
    with pytest.raises(MeshError, match=r"(?s)x: .*process 3 has"):
        step(state, {name: 2 * x for name, x in batch.items()} if odd else batch)
    spread = {
        **batch,
        "y": jax.make_array_from_callback(
            batch["y"].shape, NamedSharding(mesh_of("2x2x1"), P("data")), lambda i: batch["y"][i]
        ),
    }
    values = [float(step.evaluate(state, seen)["loss"]) for seen in (batch, spread)]
    assert values[0] == values[1]
    everywhere = NamedSharding(mesh_of("2x2x1"), P())
    same = jax.make_array_from_callback(batch["x"].shape, everywhere, lambda i: batch["x"][i])
    step(state, {**batch, "x": same})
    print("all equal")


def fail(how: str, victim: str) -> None:
    """A process is killed, stopped, slowed, or raises in the middle of a step."""
    step, _, _, batch = compiled("2x2x1", timeout_s=3.0)
    state, _ = step(step.init(), batch)
    if jax.process_index() == int(victim):
        break_program(step, how, 12)
    state, metrics = step(state, batch)
    print("loss", float(metrics["loss"]))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
