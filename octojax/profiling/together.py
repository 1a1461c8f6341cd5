"""A profile measured by all processes of a run at the same time, the same in each of them.

layers    every process times all of them, while the others do; the mean counts, and how far
          a process is from it becomes the speed of its ranks
links     messages to and fro between two processes, through the executor's own transport
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import jax
import numpy as np
import optax

from octojax.executor.instructions import Transfer
from octojax.executor.permute import PairPermute
from octojax.executor.values import Place, Value
from octojax.frontends import PureLoss
from octojax.ir import LayerCost, Machine, Partition, Profile
from octojax.layers import find_layers
from octojax.mesh import PipelineMesh
from octojax.processes import barrier, everyone, several, timeout_s
from octojax.profiling.layers import shapes_of, stages_of
from octojax.profiling.links import fit_line
from octojax.profiling.measure import LayerTimer, measure
from octojax.trace import trace_loss

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
    """A profile that several processes measure together, as often as wanted.

    Of every layer, or of the stages of a `partition` (see `measure`); links are measured at the
    beginning, unless a `machine` has them.
    """

    def __init__(
        self,
        loss: PureLoss,
        batch: Any,
        mesh: PipelineMesh,
        optimizer: optax.GradientTransformation | None = None,
        min_layers: int = 1,
        partition: Partition | None = None,
        machine: Machine | None = None,
    ) -> None:
        self.mesh, self.partition = mesh, partition
        layered = find_layers(
            trace_loss(loss.fn, loss.params, shapes_of(batch), loss.state),
            max(min_layers, mesh.num_ranks),
        )
        sizes = sorted({x.output_bytes for x in layered.graph.layers if x.output_bytes})
        device = mesh.ranks[mesh.local_ranks[0]].devices[0]
        self.timer = LayerTimer(layered, loss, batch, device, optimizer, partition)
        self.machine = machine or measure_links(
            mesh, typical_bytes=sizes[len(sizes) // 2] if sizes else 1 << 12
        )

    def profile(
        self,
        rounds: int = 5,
        name: str = "measured",
        microbatches: int | None = None,
        target_s: float = 0.01,
    ) -> Profile:
        """Returns what the layers cost now; every process calls this.

        A layer is repeated for `target_s` seconds at a time; with 0 it runs once in each turn, so
        that it finds the caches as a step leaves them: full of the others' values.
        """
        barrier("profile")
        mine = self.timer.costs(rounds, target_s)
        theirs = [
            tuple(LayerCost(**layer) for layer in json.loads(text))
            for text in everyone(json.dumps([asdict(layer) for layer in mine]), "profile")
        ]
        layers = _mean(theirs)
        whole = sum(layer.compute_s for layer in layers)
        speeds = [whole / sum(layer.compute_s for layer in own) for own in theirs]
        home = [rank.devices[0].process_index for rank in self.mesh.ranks]
        machine = replace(self.machine, speeds=tuple(round(speeds[p], 4) for p in home))
        extra = (
            (
                "costs",
                f"measured, mean of {len(theirs)} processes at the same time, each the median of "
                f"{rounds} rounds",
            ),
            ("names", self.timer.names),
            *stages_of(self.partition),
        )
        return Profile(name, layers, machine, self.mesh.num_ranks, microbatches, extra)


def measure_links(
    mesh: PipelineMesh,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    rounds: int = 25,
    typical_bytes: int = 1 << 15,
) -> Machine:
    """Returns the machine as transfers between two processes see it; all processes call this.

    Latency and bandwidth are fitted to half the times of messages to and fro between a rank of
    process 0 and one of another, from handing a value over to holding it. `host_cost_s` is the
    processor time of one process for one message of `typical_bytes`: time that its computation
    lacks if it has a single core.
    """
    homes = [rank.devices[0].process_index for rank in mesh.ranks]
    first = homes.index(0)
    other = next((r for r, home in enumerate(homes) if home), None)
    if other is None:
        raise ValueError("links between processes are measured where ranks lie in two at least")
    sizes = sorted({*sizes_bytes, typical_bytes})
    transfers = [
        Transfer(*ends, "F", size, back, (Value(Place.FORWARD, size, back, 0),))
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
    payloads = [
        [jax.device_put(np.zeros(v[0].shape, np.float32), mesh.ranks[here].replicated)]
        if here is not None
        else []
        for v in values
    ]
    times: dict[int, tuple[float, float]] = {}
    barrier("links")
    try:
        for number, size in enumerate(sizes):
            wall, work = [], []
            for _ in range(rounds):
                spent = (
                    _to_and_fro(moves, number, payloads, here == first)
                    if here is not None
                    else (0, 0)
                )
                wall.append(spent[0])
                work.append(spent[1])
            times[size] = float(np.median(wall)) / 2, float(np.mean(work)) / 2
    finally:
        moves.close()
    told = json.loads(everyone(json.dumps([times[s] for s in sizes]), "links")[0])
    found = dict(zip(sizes, told, strict=True))
    latency_s, bandwidth = fit_line([(s, found[s][0]) for s in sizes])
    return Machine(
        name=f"{jax.process_count()} processes, {mesh.ranks[0].devices[0].device_kind}, measured",
        latency_s=latency_s,
        bandwidth_bytes_per_s=bandwidth,
        host_cost_s=found[typical_bytes][1],
    )


def _to_and_fro(
    moves: PairPermute, number: int, payloads: Sequence[Any], leads: bool
) -> tuple[float, float]:
    """Sends a message and waits for it to come back: seconds, and seconds of this process."""
    there, back = 2 * number, 2 * number + 1
    moves.begin((there, back))
    begin, busy = time.monotonic(), time.process_time()
    if leads:
        moves.send(there, payloads[there])
        jax.block_until_ready(moves.receive(back))
    else:
        jax.block_until_ready(moves.receive(there))
        moves.send(back, payloads[back])
        moves.busy.wait_for_none()
    return time.monotonic() - begin, time.process_time() - busy


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
