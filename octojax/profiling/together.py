"""A profile measured by all processes of a run at the same time, the same in each of them.

layers    every process times all of them, while the others do; the mean counts, and how far
          a process is from it becomes the speed of its ranks
links     messages to and fro between two processes, through the executor's own transport
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

from octojax import compat
from octojax.arrays import put
from octojax.executor.permute import PairPermute
from octojax.executor.stop import Stop
from octojax.frontends import PureLoss
from octojax.ir import Cargo, LayerCost, LayerGraph, Machine, Profile, Transfer
from octojax.layers import find_layers
from octojax.mesh import PipelineMesh
from octojax.processes import barrier, clock_offset_s, everyone, several, timeout_s
from octojax.profiling.layers import shapes_of
from octojax.profiling.links import fit_line
from octojax.profiling.measure import LayerTimer, measure
from octojax.profiling.timing import median_times
from octojax.rows.whole import separated
from octojax.trace import trace_loss

WORK_S = 5e-3
"""For so long a sender computes while its message is under way, longer than that takes."""
SIZES_BYTES = (1 << 8, 1 << 12, 1 << 15, 1 << 17, 1 << 19, 1 << 21)


def measure_together(
    loss: PureLoss,
    batch: Any,
    mesh: PipelineMesh,
    *,
    optimizer: optax.GradientTransformation | None = None,
    min_layers: int = 1,
    rounds: int = 5,
    name: str = "measured",
    microbatches: int | None = None,
) -> Profile:
    """Returns the profile of `loss` on the ranks of `mesh` for `batch`, one microbatch.

    All processes call this. In a program of one it is `measure`, with the ranks' first devices.
    """
    if not several():
        return measure(
            loss,
            batch,
            optimizer=optimizer,
            devices=[rank.devices[0] for rank in mesh.ranks],
            min_layers=max(min_layers, mesh.num_ranks),
            rounds=rounds,
            name=name,
            ranks=mesh.num_ranks,
            microbatches=microbatches,
        )
    return Together(loss, batch, mesh, optimizer, min_layers).profile(rounds, name, microbatches)


class Together:
    """A profile that several processes measure together, as often as wanted; links once."""

    def __init__(
        self,
        loss: PureLoss,
        batch: Any,
        mesh: PipelineMesh,
        optimizer: optax.GradientTransformation | None = None,
        min_layers: int = 1,
    ) -> None:
        self.mesh = mesh
        layered = find_layers(
            separated(trace_loss(loss.fn, loss.params, shapes_of(batch), loss.state)),
            max(min_layers, mesh.num_ranks),
        )
        device = mesh.ranks[mesh.local_ranks[0]].local_devices[0]
        self.timer = LayerTimer(layered, loss, batch, device, optimizer)
        with compat.without_mesh():  # of the model's trace
            self.machine = measure_links(mesh, typical_bytes=typical_bytes(layered.graph))

    def profile(
        self,
        rounds: int = 5,
        name: str = "measured",
        microbatches: int | None = None,
        target_s: float = 0.01,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Profile:
        """Returns what the layers cost now; every process calls this.

        A layer is repeated for `target_s` seconds at a time; with 0 it runs once in each turn, so
        that it finds the caches as a step leaves them: full of the others' values.
        """
        barrier("profile")
        mine = self.timer.costs(rounds, target_s, clock)
        theirs = [
            tuple(LayerCost(**layer) for layer in json.loads(text))
            for text in everyone(json.dumps([asdict(layer) for layer in mine]), "profile")
        ]
        layers = _mean(theirs)
        whole = sum(layer.compute_s for layer in layers)
        speeds = [whole / sum(layer.compute_s for layer in own) for own in theirs]
        home = [rank.leader for rank in self.mesh.ranks]
        machine = replace(self.machine, speeds=tuple(round(speeds[p], 4) for p in home))
        extra = (
            (
                "costs",
                f"measured, mean of {len(theirs)} processes at the same time, each the median of "
                f"{rounds} rounds",
            ),
            ("names", self.timer.names),
        )
        return Profile(name, layers, machine, self.mesh.num_ranks, microbatches, extra)


def typical_bytes(graph: LayerGraph) -> int:
    """Returns the size of the message for which a model's links are asked their host cost: the
    median of the sizes that its layers send."""
    sizes = sorted({layer.output_bytes for layer in graph.layers if layer.output_bytes})
    return sizes[len(sizes) // 2] if sizes else 1 << 12


def measure_links(
    mesh: PipelineMesh,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    rounds: int = 15,
    typical_bytes: int = 1 << 15,
    *,
    computing: bool = True,
) -> Machine:
    """Returns the machine as transfers between two processes see it; all processes call this.

    Latency and bandwidth are fitted to the times of messages between a rank of process 0 and one
    of another, from handing a value over to holding it, the mean of both directions. On CPU the
    sender computes meanwhile, as in a step, which delays messages since they share its
    processor; not so with `computing=False`. `host_cost_s` is the processor time of one process
    for one message of `typical_bytes`.
    """
    first = next(r.index for r in mesh.ranks if 0 in r.processes)
    other = next((r.index for r in mesh.ranks if 0 not in r.processes), None)
    if other is None:
        raise ValueError("links between processes are measured where ranks lie in two at least")
    sizes = sorted({*sizes_bytes, typical_bytes})
    transfers = [
        Transfer(*ends, Cargo.OUTPUT, size, back)
        for size in range(len(sizes))
        for back, ends in enumerate(((first, other), (other, first)))
    ]
    values = [
        [jax.ShapeDtypeStruct((max(1, sizes[t.stage] // 4),), np.float32,
                              sharding=mesh.ranks[t.target].replicated)]
        for t in transfers
    ]  # fmt: skip
    moves = PairPermute(transfers, values, mesh, timeout_s())
    here = next((r for r in (first, other) if r in mesh.local_ranks), None)
    computing = computing and jax.default_backend() == "cpu" and here is not None
    work = None if here is None or not computing else _work(mesh.ranks[here].local_devices[0])
    offset = clock_offset_s()
    told: list[tuple[int, int, float]] = []  # transfer, turn, -(when sent) or when it had come
    costs: list[float] = []
    try:
        for number, size in enumerate(sizes if here is not None else ()):
            where = mesh.ranks[here or 0].replicated
            shape = values[2 * number][0].shape
            payload = [put(np.zeros(shape, np.float32), where)]
            back = here != first
            exchange = partial(_to_and_fro, moves, number, payload, not back)
            exchange(None)
            for turn in range(rounds):
                sent, had = exchange(work)
                told += [
                    (2 * number + back, turn, offset - sent),
                    (2 * number + 1 - back, turn, had - offset),
                ]
            if size == typical_bytes:
                begin = time.process_time()
                for _ in range(rounds):
                    exchange(None)
                costs.append((time.process_time() - begin) / (2 * rounds))
    finally:
        moves.close()
    if here not in mesh.led_ranks:
        told = []  # another process speaks for the rank
    every = [json.loads(text) for text in everyone(json.dumps([told, costs]), "links")]
    took = np.zeros((len(transfers), rounds))
    for k, turn, tick in (note for theirs, _ in every for note in theirs):
        took[k, turn] += tick
    medians = np.median(took, axis=1)
    samples = [(n, float(medians[2 * i : 2 * i + 2].mean())) for i, n in enumerate(sizes)]
    latency_s, bandwidth = fit_line(samples)
    return Machine(
        name=f"{jax.process_count()} processes, {mesh.ranks[0].devices[0].device_kind}, measured",
        latency_s=latency_s,
        bandwidth_bytes_per_s=bandwidth,
        host_cost_s=float(np.mean([cost for _, own in every for cost in own])),
    )


def _to_and_fro(
    moves: PairPermute,
    number: int,
    payload: Sequence[Any],
    leads: bool,
    work: Callable[[], None] | None,
) -> tuple[float, float]:
    """Exchanges a message each way; returns when this side sent its own and had the other.

    Who has sent works; who gets a message replies only when the other has surely done that, and
    waits for the reply.
    """
    there, back = 2 * number, 2 * number + 1
    mine, theirs = (there, back) if leads else (back, there)

    def receive() -> float:
        jax.block_until_ready(moves.receive(theirs))
        now = time.monotonic()
        if work is not None:
            work()
            time.sleep(WORK_S)
        return now

    moves.begin((there, back), Stop())
    had = 0.0 if leads else receive()
    sent = time.monotonic()
    moves.send(mine, payload)
    if work is not None:
        work()
    had = receive() if leads else had
    moves.drain()
    return sent, had


def _work(device: Any) -> Callable[[], None]:
    """Returns a function that keeps the device computing for about `WORK_S`."""
    matrix = jax.device_put(np.ones((512, 512), np.float32), device)
    product = jax.jit(lambda x: x @ x).lower(matrix).compile()

    def work(times: int) -> None:
        for _ in range(times):
            jax.block_until_ready(product(matrix))

    return partial(work, max(1, round(WORK_S / median_times({0: work})[0])))


def _mean(theirs: Sequence[Sequence[LayerCost]]) -> tuple[LayerCost, ...]:
    """The layers with the mean of every process's times."""
    names = ("forward_s", "input_grad_s", "weight_grad_s", "backward_s")
    return tuple(
        replace(
            same[0],
            **{n: float(np.mean([getattr(x, n) for x in same])) for n in names},
        )
        for same in zip(*theirs, strict=True)
    )
