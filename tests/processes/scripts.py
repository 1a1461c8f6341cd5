# ruff: noqa: E402  (processes join before JAX touches a device)
"""What the processes of `tests/processes` run. Each prints a line that the test looks for."""

import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from octojax.processes import initialize

initialize()

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import octojax as octopipe
from octojax.executor.permute import PairPermute
from octojax.executor.stop import Stop
from octojax.ir import Action, Cargo, Kind, Schedule, Transfer
from octojax.ir.lowering import transfers_of
from octojax.mesh import pipeline_mesh
from octojax.processes import everyone
from octojax.schedules import generate

WIDTH, ROWS, LAYERS = 8, 6, 10


def model(layers: int = LAYERS, tied: bool = False):
    keys = jax.random.split(jax.random.key(0), layers)
    params = {f"w{i}": jax.random.normal(k, (WIDTH, WIDTH)) / 3 for i, k in enumerate(keys)}

    def loss(params, batch):
        h = batch["x"]
        for i in range(layers):
            h = jnp.tanh(h @ params[f"w{0 if tied and i == layers - 1 else i}"])
        return jnp.mean((h - batch["y"]) ** 2), {"largest": jnp.max(jnp.abs(h))}

    shape = (ROWS, WIDTH)
    batch = {
        "x": jax.random.normal(jax.random.key(1), shape),
        "y": jax.random.normal(jax.random.key(2), shape),
    }
    if tied:
        del params[f"w{layers - 1}"]
    return params, loss, batch


def worst(found, wanted) -> float:
    errors = jax.tree.map(
        lambda a, b: float(jnp.max(jnp.abs(a - b)) / (jnp.max(jnp.abs(b)) + 1e-30)), found, wanted
    )
    return max(jax.tree.leaves(errors))


def check(
    schedule, microbatches: int, optimizer=None, tied: bool = False, steps: int = 0, mesh=None
) -> None:
    """Loss, gradients and, after some steps, parameters equal the unpipelined model's."""
    params, loss, batch = model(tied=tied)
    optimizer = optimizer or optax.sgd(0.1)
    step = octopipe.compile(
        params,
        loss,
        optimizer,
        batch,
        schedule=schedule,
        microbatches=microbatches,
        mesh=mesh,
        progress=False,
        timeout_s=30.0,
    )
    state = step.init()
    value, _, grads = step.value_and_grad(state, batch)
    (wanted, _), wanted_grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
    assert abs(float(value) - float(wanted)) <= 1e-5 * abs(float(wanted)), (value, wanted)
    assert worst(grads, wanted_grads) <= 1e-5, worst(grads, wanted_grads)
    opt_state = optimizer.init(params)
    for _ in range(steps):
        state, metrics = step(state, batch)
        assert jnp.isfinite(metrics["aux"]["largest"])
        grads = jax.grad(lambda p: loss(p, batch)[0])(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    assert worst(step.params(state), params) <= 1e-5
    assert jnp.isfinite(step.evaluate(state, batch)["loss"])


def random_table(seed: int, ranks: int) -> Schedule:
    """Any valid table: 3 to 10 stages anywhere, backward whole or split, any order."""
    rng = random.Random(seed)
    stages, microbatches = rng.randint(max(3, ranks), 10), rng.choice((1, 2, 3, 6))
    homes = [*range(ranks), *(rng.randrange(ranks) for _ in range(stages - ranks))]
    rng.shuffle(homes)
    done: set[tuple] = set()
    split = {(s, m): rng.random() < 0.6 for s in range(stages) for m in range(microbatches)}
    waiting = {(s, "F", m) for s, m in split} | {(s, "D", m) for s, m in split}
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    late = []
    while waiting or late:
        able = [
            (s, k, m)
            for s, k, m in sorted(waiting)
            if (k == "F" and (s == 0 or (s - 1, "F", m) in done))
            or (k == "D" and (s, "F", m) in done and (s == stages - 1 or (s + 1, "D", m) in done))
        ]
        stage, kind, mb = rng.choice(able + late)
        if kind == "W":
            late.remove((stage, kind, mb))
            rows[homes[stage]].append(Action(stage, Kind.WEIGHT_GRAD, mb))
            continue
        waiting.remove((stage, kind, mb))
        done.add((stage, kind, mb))
        backward = Kind.INPUT_GRAD if split[stage, mb] else Kind.BACKWARD
        rows[homes[stage]].append(Action(stage, Kind.FORWARD if kind == "F" else backward, mb))
        if kind == "D" and split[stage, mb]:
            late.append((stage, "W", mb))
    return Schedule(tuple(map(tuple, rows)))


def irregular(first: str, count: str) -> None:
    ranks = jax.device_count()
    for seed in range(int(first), int(first) + int(count)):
        table = random_table(seed, ranks)
        check(table, table.num_microbatches)
    print("all equal")


def named(*names: str) -> None:
    ranks = jax.device_count()
    for name in names:
        family, _, chunks = name.partition(":")
        table = generate(family, ranks, 2 * ranks, int(chunks) if chunks else None)
        check(table, 2 * ranks) if ROWS % (2 * ranks) == 0 else check_unequal(table, 2 * ranks)
    print("all equal")


def check_unequal(table: Schedule, microbatches: int) -> None:
    global ROWS
    before, ROWS = ROWS, 2 * microbatches
    check(table, microbatches)
    ROWS = before


def update() -> None:
    """Tied weights, clipping over all ranks, three optimizer steps."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2))
    check("1f1b", 3, optimizer, tied=True, steps=3)
    print("all equal")


def recorded() -> None:
    """Every process gets the whole timeline of a step, the same."""
    params, loss, batch = model()
    step = octopipe.compile(
        params,
        loss,
        optax.adam(1e-2),
        batch,
        schedule="zb-h1",
        microbatches=3,
        progress=False,
        timeout_s=30.0,
    )
    state = step.init()
    _, metrics = step(state, batch)
    again, same, timeline = step(step.init(), batch, record=True)
    assert float(metrics["loss"]) == float(same["loss"]), (metrics, same)
    for rank, row in enumerate(step.plan.schedule.ranks):
        own = [span for span in timeline.actions if span.rank == rank]
        assert [span.item for span in own] == list(row), (rank, own)
    assert len(timeline.transfers) == len(transfers_of(step.plan.schedule))
    assert all(rank.peak_bytes > 0 for rank in timeline.ranks)
    assert len(set(everyone(str(timeline)))) == 1
    assert again.step == 1
    rehearsal = step.rehearse(again, batch, rounds=2)
    rounds = [sorted((r, str(a), t) for (r, a), t in x.items()) for x in rehearsal.rounds]
    assert len(set(everyone(str(rounds)))) == 1
    timed = {(rank, a) for rank, _, a in step.plan.schedule.actions()}
    assert [set(times) for times in rehearsal.rounds] == [timed, timed]
    machine = rehearsal.profile.machine
    assert machine.host_cost_s > 0
    assert 0 < machine.latency_s + 1e6 / machine.bandwidth_bytes_per_s < 1
    print("all equal")


def auto() -> None:
    """Every process runs the plan that the first one found."""
    params, loss, batch = model()
    step = octopipe.compile(
        params,
        loss,
        optax.sgd(0.1),
        batch,
        schedule="auto",
        tune_seconds=1.0,
        microbatches=3,
        progress=False,
        timeout_s=30.0,
    )
    value, _, grads = step.value_and_grad(step.init(), batch)
    wanted, wanted_grads = jax.value_and_grad(lambda p: loss(p, batch)[0])(params)
    assert abs(float(value) - float(wanted)) <= 1e-5 * abs(float(wanted))
    assert worst(grads, wanted_grads) <= 1e-5
    assert len(set(everyone(str(step.plan)))) == 1
    print("all equal")


def sharded(*names: str) -> None:
    """Every process is one rank of several devices, over which a microbatch's rows are spread."""
    devices = np.array(jax.devices()).reshape(jax.process_count(), -1)
    for name in names:
        family, _, chunks = name.partition(":")
        table = generate(family, len(devices), 3, int(chunks) if chunks else None)
        check(table, 3, steps=1, mesh=Mesh(devices, ("pipe", "data")))
    print("all equal")


def directions() -> None:
    """A value arrives although one before it in the order, the other way, is made only after."""
    mesh = pipeline_mesh()
    there = Transfer(0, 1, Cargo.OUTPUT, 0, 0)
    back = Transfer(1, 0, Cargo.GRADIENT, 1, 0)
    values = [
        [jax.ShapeDtypeStruct((3,), np.float32, sharding=mesh.ranks[t.target].replicated)]
        for t in (there, back)
    ]
    moves = PairPermute([there, back], values, mesh, timeout_s=10.0)
    moves.begin((0, 1), Stop())
    mine = jax.device_put(np.arange(3, dtype=np.float32), jax.local_devices()[0])
    if jax.process_index() == 0:
        (found,) = moves.receive(1)
        moves.send(0, [found + 1])
    else:
        moves.send(1, [mine])
        (found,) = moves.receive(0)
        assert jnp.array_equal(found, mine + 1), found
    moves.drain()
    moves.close()
    print("all equal")


def idle() -> None:
    """One rank, and more processes than that."""
    check(generate("1f1b", 1, 3), 3)


def spread() -> None:
    """Every rank has devices of two processes."""
    devices = np.array(jax.devices()).reshape(jax.process_count(), -1).T
    check("1f1b", 3, mesh=Mesh(devices, ("pipe", "data")))


def crowded() -> None:
    """A plan for more ranks than there are devices."""
    check(generate("1f1b", 2 * jax.device_count(), 3), 3)


def differ() -> None:
    """Process 1 asks for another schedule."""
    check("1f1b" if jax.process_index() == 0 else "gpipe", 3)


def break_program(step, how: str, slow_s: float) -> None:
    """Replaces the fourth program of this process's first rank by one that kills or stops the
    process, raises, or is slow."""
    part = step.loss.trainer.engine.parts[0]
    function, *rest = part.bound[3]

    def broken(*values):
        if how == "raise":
            raise ZeroDivisionError("broken on purpose")
        if how == "slow":
            time.sleep(slow_s)
        else:
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        return function(*values)

    part.bound[3] = (broken, *rest)


def fail(how: str, who: str = "last") -> None:
    """A process is killed, stopped, slowed, or raises in the middle of a step."""
    params, loss, batch = model()
    step = octopipe.compile(
        params, loss, optax.sgd(0.1), batch, microbatches=3, progress=False, timeout_s=3.0
    )
    state, _ = step(step.init(), batch)
    if jax.process_index() == (jax.process_count() - 1 if who == "last" else 0):
        break_program(step, how, 8)
    state, metrics = step(state, batch)
    print("loss", float(metrics["loss"]))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
