# ruff: noqa: E402  (processes join before JAX touches a device)
"""Processes that differ, fall out of step, or end: what `test_falls.py` and `test_kills.py` run."""

import os
import sys
import threading

from scripts import ROWS, WIDTH, model  # joins

print(f"pid {os.getpid()}", flush=True)

import jax
import jax.numpy as jnp
import numpy as np
import optax

import octojax as octopipe
from octojax.errors import MeshError

ODD = jax.process_index() == jax.process_count() - 1
"""This process is the one that differs."""


def compiled(loss=None, optimizer=None, batch=None, params=None, **options):
    own_params, own_loss, own_batch = model(4)
    return octopipe.compile(
        own_params if params is None else params,
        loss or own_loss,
        optimizer or optax.adam(1e-3),
        own_batch if batch is None else batch,
        microbatches=3,
        progress=False,
        **options,
    )


def refused(what, *names: str) -> None:
    """Every process gets a MeshError that names the offenders and both processes."""
    try:
        what()
    except MeshError as error:
        text = str(error)
        assert all(name in text for name in (*names, "process 0 has", "process 1 has")), text
        return
    raise AssertionError(f"nothing was said of {names}")


def values(folder: str) -> None:
    """Differences of values are named; every process goes on after the refusal."""
    own_params, own_loss, batch = model(4)
    factor = jnp.full((1, WIDTH), 2.0 if ODD else 1.0)
    slope = 0.5 if ODD else 0.25

    def closing_over_an_array(params, batch):
        return own_loss(params, {**batch, "x": batch["x"] * factor})

    def closing_over_a_number(params, batch):
        return own_loss(params, {**batch, "x": batch["x"] * slope})

    def clipped(bound: float):
        return optax.chain(optax.clip_by_global_norm(bound), optax.adam(1e-3))

    refused(lambda: compiled(closing_over_an_array), "closed-over constant 0: ")
    refused(lambda: compiled(closing_over_a_number), "model, stage 0: ")
    refused(lambda: compiled(optimizer=clipped(2.0 if ODD else 1.0)), "the numbers in its update")
    longer = {name: jnp.concatenate([x, x]) for name, x in batch.items()}
    refused(lambda: compiled(batch=longer if ODD else batch), "batch: ")

    step = compiled()
    other = {**own_params, "w2": own_params["w2"].at[3, 1].add(1e-6)}
    refused(lambda: step.init(other if ODD else None), "w2: ", "the first parameters")
    broken = {**own_params, "w0": own_params["w0"].at[0, 0].set(jnp.nan)}
    copies = jax.tree.map(np.array, broken) if ODD else broken
    assert jnp.isnan(step(step.init(copies), batch)[1]["loss"])  # NaNs are equal
    state = step.init()
    state, metrics = step(state, jax.tree.map(np.array, batch) if ODD else batch)
    shuffled = {name: 2 * x[::-1] for name, x in batch.items()}
    refused(lambda: step(state, shuffled if ODD else batch), "x: ", "y: ", "the batch")
    state, again = step(state, batch)  # the refused step has changed nothing
    assert state.step == 2
    assert again["loss"] < metrics["loss"]

    for name, rows in (("a", batch), ("b", shuffled)):
        step.save(f"{folder}/{name}", step(step.init(), rows)[0])
    other_file = f"{folder}/{'b' if ODD else 'a'}"
    refused(lambda: step.restore(other_file), "different checkpoints")
    assert step.restore(f"{folder}/a").step == 1

    rare = compiled(compare_values=10**6)
    state = rare.init()
    for _ in range(2):  # the first batch is compared whatever the interval
        state, _ = rare(state, batch)
    state, _ = rare(state, shuffled if ODD else batch)
    blind = compiled(compare_values=0)
    blind(blind.init(other if ODD else None), shuffled if ODD else batch)
    print("all equal")


def fall(how: str, folder: str = "") -> None:
    """One process leaves the others after three steps."""
    step, (_, _, batch) = compiled(), model(4)
    state = step.init()
    for number in range(6):
        if number == 3 and ODD:
            if how == "skip":
                try:
                    step(state, {name: x[: ROWS - 1] for name, x in batch.items()})
                except ValueError:
                    continue
            elif how == "return":
                return
            elif how == "exit":
                sys.exit(3)
            elif how == "raw exit":
                raise SystemExit(5)
            elif how == "hard exit":
                os._exit(7)
            elif how == "evaluate":
                step.evaluate(state, batch)
            elif how == "parameters":
                step.params(state)
            elif how == "save":
                step.save(folder, state)
            elif how == "thread":
                thread = threading.Thread(target=lambda: 1 / 0, name="loader")
                thread.start()
                threading.Event().wait()
        state, _ = step(state, batch)


def train(folder: str) -> None:
    """Steps and saves for long, saying what comes next: somebody is going to be hit."""
    print("now compiling", flush=True)
    step, (_, _, batch) = compiled(), model(4)
    state = step.init()
    for number in range(10**6):
        print("now saving" if number % 5 == 4 else "now stepping", flush=True)
        if number % 5 == 4:
            step.save(folder, state, overwrite=True)
        state, _ = step(state, batch)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
