"""Values that every process needs, though one rank makes them: results, parameters.

One program over the whole pipeline mesh gathers equally long vectors of all ranks (or of all
devices, which processes of one rank do not have alike), once the pipeline has drained. There is no
other collective over the full axis.
"""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from octojax.arrays import joined, pieces, put
from octojax.compat import num_bytes
from octojax.errors import PeerError
from octojax.mesh import PipelineMesh
from octojax.processes import wait

_SMALL_BYTES = 4096
_LINE = "line"  # of all devices


class Share:
    """Gathers vectors over the ranks of `mesh`. Every process calls it alike, in one order."""

    def __init__(self, mesh: PipelineMesh, timeout_s: float = 600.0) -> None:
        self.mesh, self.timeout_s = mesh, timeout_s
        self.spread = NamedSharding(mesh.mesh, PartitionSpec(mesh.axis))
        devices = [d for r in mesh.ranks for d in r.devices]
        self.line = NamedSharding(Mesh(np.array(devices), (_LINE,)), PartitionSpec(_LINE))
        self.processes = [d.process_index for d in devices]  # of each device of the line
        sizes = [len(r.devices) for r in mesh.ranks]
        self.firsts = [0, *accumulate(sizes[:-1])]  # where each rank's devices begin on it
        self._program = cache(self._compile)
        self._joining_program = cache(self._compile_joining)

    def gather(
        self, vectors: Mapping[int, jax.Array | np.ndarray], width: int, dtype: Any
    ) -> dict[int, list[jax.Array]]:
        """Returns, for every local rank, the vectors of all ranks on its devices.

        `vectors[r]` is what local rank r brings, `dtype[width]`, replicated over its devices;
        a rank that brings none counts as zeros.
        """
        mesh = self.mesh
        parts = [
            piece
            for rank in mesh.local_ranks
            for piece in pieces(self._brought(vectors.get(rank), rank, width, dtype)).values()
        ]
        whole = joined((mesh.num_ranks * width,), self.spread, parts)
        rows = self._run(self._program(width, jnp.dtype(dtype)), whole)
        return {rank: [self._local(row, rank) for row in rows] for rank in self.mesh.local_ranks}

    def whole(self, values: Sequence[Any]) -> list[Any]:
        """Returns arrays that are spread over devices of all processes as this process can read
        them, on one device of it; other values as they are. All processes have the same list."""
        everyone = set(self.processes)

        def is_spread(x: Any) -> bool:
            return (
                isinstance(x, jax.Array)
                and not (x.is_fully_addressable or x.is_fully_replicated)
                and isinstance(x.sharding, NamedSharding)
                and {device.process_index for device in x.sharding.device_set} == everyone
            )

        def gathered() -> list[Any]:
            alike = [NamedSharding(x.sharding.mesh, PartitionSpec()) for x in spread]
            return jax.block_until_ready([*map(put, spread, alike)])

        spread = [x for x in values if is_spread(x)]
        if not spread:
            return list(values)
        parts = iter(self._bounded(gathered, "for the other processes' parts of arrays"))
        return [next(parts).addressable_data(0) if is_spread(x) else x for x in values]

    def _run(self, program: Any, whole: jax.Array) -> Any:
        return self._bounded(
            lambda: jax.block_until_ready(program(whole)),
            "at the end of the step for the other ranks' results",
        )

    def from_owner(self, value: jax.Array | None, owner: int, aval: Any) -> jax.Array:
        """Returns rank `owner`'s value on the first local rank, exact to the bit.

        `value` is that array in the processes of the owner, None elsewhere.
        """
        size = int(np.prod(aval.shape, dtype=np.int64))
        brought = {} if value is None else {owner: value.reshape(-1)}
        rows = self.gather(brought, size, aval.dtype)
        return rows[self.mesh.local_ranks[0]][owner].reshape(aval.shape)

    def with_headers(
        self,
        header: bytes,
        values: Mapping[int, jax.Array],
        described: Mapping[int, tuple[int, Any]],
    ) -> tuple[dict[int, bytes], dict[int, jax.Array]]:
        """Returns every process's header, and in every process the values by number.

        `described[k]` are the rank that has value k and its type. All headers are equally
        long. What is small travels with them in one gathering, on the host's account: a scalar's
        way through compiled programs takes longer.
        """
        small: dict[int, slice] = {}
        ends = dict.fromkeys(range(self.mesh.num_ranks), len(header))
        for number, (owner, aval) in sorted(described.items()):
            nbytes = num_bytes(aval)
            if nbytes <= _SMALL_BYTES:
                small[number] = slice(ends[owner], ends[owner] + nbytes)
                ends[owner] += nbytes
        width = max(ends.values())
        vectors = {rank: np.zeros(width, np.uint8) for rank in self.mesh.local_ranks}
        for rank, vector in vectors.items():
            vector[: len(header)] = np.frombuffer(header, np.uint8)
            for number, place in small.items():
                if described[number][0] == rank:
                    raw = np.asarray(values[number]).reshape(-1)
                    vector[place] = np.ascontiguousarray(raw).view(np.uint8)
        mine = [
            jax.device_put(vectors[rank.index], device)
            for rank in (self.mesh.ranks[r] for r in self.mesh.local_ranks)
            for device in rank.local_devices
        ]
        whole = joined((len(self.processes) * width,), self.line, mine)
        whole = self._run(self._joining_program(width), whole)
        rows = np.asarray(whole.addressable_data(0)).reshape(-1, width)
        arrays = {}
        for number, (owner, aval) in sorted(described.items()):
            if number in small:
                value = rows[self.firsts[owner]][small[number]].view(aval.dtype).reshape(aval.shape)
                arrays[number] = jax.device_put(value, self.mesh.home)
            else:
                arrays[number] = self.from_owner(values.get(number), owner, aval)
        heads = zip(self.processes, rows, strict=True)
        return {process: row[: len(header)].tobytes() for process, row in heads}, arrays

    def _bounded(self, work: Callable[[], Any], awaited: str) -> Any:
        """Returns what `work` returns; a peer that never joins it is an error in time, which says
        what was awaited and when."""
        answer: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        woken: list[Exception] = []

        def attempt() -> None:
            try:
                answer.put((work(), None))
            except Exception as error:
                answer.put((None, error))

        def wake(error: Exception) -> None:
            answer.put((None, error))
            woken.append(error)

        mine = ", ".join(map(str, self.mesh.local_ranks))
        text = (
            f"rank {mine} waited {self.timeout_s:g} s {awaited}: a process has stopped, or is "
            f"slower than that. Raise timeout_s if a step may take so long"
        )
        with wait(text, self.timeout_s, wake):
            threading.Thread(target=attempt, name="octopipe gather", daemon=True).start()
            result, error = answer.get()
        if error is not None and error in woken:
            raise error
        if error is not None:
            raise PeerError(
                f"rank {mine}: gathering the step's results broke off; the process of another "
                f"rank has probably ended: see what it printed last. "
                f"({str(error).splitlines()[0]})"
            ) from error
        return result

    def _brought(self, vector: Any, rank: int, width: int, dtype: Any) -> jax.Array:
        where = self.mesh.ranks[rank].replicated
        return put(np.zeros(width, dtype) if vector is None else vector, where)

    def _compile(self, width: int, dtype: Any) -> Any:
        """One result for every rank's vector, so that each can be had without a copy."""
        ranks = range(self.mesh.num_ranks)
        return _gathering(lambda every: [every[r] for r in ranks], self.spread, width, dtype)

    def _compile_joining(self, width: int) -> Any:
        """One result, the rows of all devices, for the host."""
        return _gathering(lambda every: every, self.line, width, np.uint8)

    def _local(self, row: jax.Array, rank: int) -> jax.Array:
        """A result on this process's devices of a rank; on one, where the others are elsewhere."""
        own = self.mesh.ranks[rank]
        parts = [x for device, x in pieces(row).items() if device in own.local_devices]
        return parts[0] if len(own.processes) > 1 else joined(row.shape, own.replicated, parts)


def _gathering(
    form: Callable[[jax.Array], Any], where: NamedSharding, width: int, dtype: Any
) -> Any:
    """The compiled program that gathers the vectors along the one axis of `where`."""
    (axis,) = where.spec
    function = jax.shard_map(
        lambda vector: form(jax.lax.all_gather(vector, axis)),
        mesh=where.mesh,
        in_specs=where.spec,
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    total = jax.ShapeDtypeStruct((where.mesh.shape[axis] * width,), dtype, sharding=where)
    return jax.jit(function).lower(total).compile()
