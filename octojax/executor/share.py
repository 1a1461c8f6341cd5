"""Values that every process needs, though one rank makes them: results, parameters.

One program over the whole pipeline mesh gathers equally long vectors of all ranks, once the
pipeline has drained. It is the only collective over the full axis.
"""

import queue
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from octojax.compat import num_bytes
from octojax.errors import PeerError
from octojax.mesh import PipelineMesh
from octojax.processes import wait

_SMALL_BYTES = 4096


class Share:
    """Gathers vectors over the ranks of `mesh`. Every process calls it alike, in one order."""

    def __init__(self, mesh: PipelineMesh, timeout_s: float = 600.0) -> None:
        self.mesh, self.timeout_s = mesh, timeout_s
        self.spread = NamedSharding(mesh.mesh, PartitionSpec(mesh.axis))
        self._program = cache(self._compile)
        self._joining_program = cache(self._compile_joining)

    def gather(
        self, vectors: Mapping[int, jax.Array | np.ndarray], width: int, dtype: Any
    ) -> dict[int, list[jax.Array]]:
        """Returns, for every local rank, the vectors of all ranks on its devices.

        `vectors[r]` is what local rank r brings, `dtype[width]`, replicated over its devices;
        a rank that brings none counts as zeros.
        """
        rows = self._run(self._program(width, jnp.dtype(dtype)), vectors, width, dtype)
        return {rank: [self._local(row, rank) for row in rows] for rank in self.mesh.local_ranks}

    def _run(self, program: Any, vectors: Mapping[int, Any], width: int, dtype: Any) -> Any:
        mesh = self.mesh
        pieces = [
            piece
            for rank in mesh.local_ranks
            for piece in _pieces(self._brought(vectors.get(rank), rank, width, dtype))
        ]
        joined = jax.make_array_from_single_device_arrays(
            (mesh.num_ranks * width,), self.spread, pieces
        )
        return self._bounded(lambda: jax.block_until_ready(program(joined)))

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
    ) -> tuple[list[bytes], dict[int, jax.Array]]:
        """Returns every rank's header, and in every process the values by number.

        `described[k]` are the rank that has value k and its type. All ranks' headers are equally
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
        first = self.mesh.local_ranks[0]
        whole = self._run(self._joining_program(width), vectors, width, np.uint8)
        rows = np.asarray(whole.addressable_data(0))
        where, arrays = self.mesh.ranks[first].replicated, {}
        for number, (owner, aval) in sorted(described.items()):
            if number in small:
                value = rows[owner][small[number]].view(aval.dtype).reshape(aval.shape)
                arrays[number] = jax.device_put(value, where)
            else:
                arrays[number] = self.from_owner(values.get(number), owner, aval)
        return [row[: len(header)].tobytes() for row in rows], arrays

    def _bounded(self, work: Callable[[], Any]) -> Any:
        """Returns what `work` returns; a peer that never joins it is an error in time."""
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
            f"rank {mine} waited {self.timeout_s:g} s at the end of the step for the other ranks' "
            f"results: a process has stopped, or is slower than that. Raise timeout_s if a step "
            f"may take so long"
        )
        with wait(text, self.timeout_s, wake):
            threading.Thread(target=attempt, name="octopipe gather", daemon=True).start()
            found, error = answer.get()
        if error is not None and error in woken:
            raise error
        if error is not None:
            raise PeerError(
                f"rank {mine}: gathering the step's results broke off; the process of another "
                f"rank has probably ended: see what it printed last. "
                f"({str(error).splitlines()[0]})"
            ) from error
        return found

    def _brought(self, vector: Any, rank: int, width: int, dtype: Any) -> jax.Array:
        where = self.mesh.ranks[rank].replicated
        return jax.device_put(np.zeros(width, dtype) if vector is None else vector, where)

    def _compile(self, width: int, dtype: Any) -> Any:
        """One result for every rank's vector, so that each can be had without a copy."""
        ranks = range(self.mesh.num_ranks)
        return self._gathering(lambda every: [every[rank] for rank in ranks], width, dtype)

    def _compile_joining(self, width: int) -> Any:
        """One result, the rows of all ranks, for the host."""
        return self._gathering(lambda every: every, width, np.uint8)

    def _gathering(self, form: Callable[[jax.Array], Any], width: int, dtype: Any) -> Any:
        mesh = self.mesh
        function = jax.shard_map(
            lambda vector: form(jax.lax.all_gather(vector, mesh.axis)),
            mesh=mesh.mesh,
            in_specs=PartitionSpec(mesh.axis),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        total = jax.ShapeDtypeStruct((mesh.num_ranks * width,), dtype, sharding=self.spread)
        return jax.jit(function).lower(total).compile()

    def _local(self, row: jax.Array, rank: int) -> jax.Array:
        where = self.mesh.ranks[rank].replicated
        pieces = [s.data for s in row.addressable_shards if s.device in where.device_set]
        if len(pieces) == 1:
            return pieces[0]
        return jax.make_array_from_single_device_arrays(row.shape, where, pieces)


def _pieces(value: jax.Array) -> list[jax.Array]:
    if len(value.sharding.device_set) == 1:
        return [value]
    return [s.data for s in value.addressable_shards]
